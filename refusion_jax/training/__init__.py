"""Training: from a causal language model, or a random one, to a ReFusion model."""
