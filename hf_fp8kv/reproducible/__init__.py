"""Models that repeat their results: independent of the batch, and in training as generated."""
