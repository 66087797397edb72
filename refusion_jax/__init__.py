"""ReFusion in JAX: language models that plan, infill and commit slots of text in parallel."""

from refusion_jax.config import DecodeConfig, ModelConfig
from refusion_jax.decoding.generate import Generation, Stats, Update, generate, stream
from refusion_jax.decoding.prefix import Prefix, cache_prefix, load_prefix
from refusion_jax.model import Model
from refusion_jax.model.hf import export_hf, load
from refusion_jax.sharding import make_mesh

__version__ = "0.1.0"

__all__ = [
    "DecodeConfig",
    "Generation",
    "Model",
    "ModelConfig",
    "Prefix",
    "Stats",
    "Update",
    "cache_prefix",
    "export_hf",
    "generate",
    "load",
    "load_prefix",
    "make_mesh",
    "stream",
]
