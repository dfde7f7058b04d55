"""Properties of transformers' configs and models."""
