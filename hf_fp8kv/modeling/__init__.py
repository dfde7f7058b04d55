"""Modeling: what transformers' configs and models are like."""
