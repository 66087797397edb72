"""ReFusion in JAX: language models that plan, infill and commit slots of text in parallel."""

__version__ = "0.1.0"
