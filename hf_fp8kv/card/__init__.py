"""Cards, which report the losses of a model with each cache (`hf-fp8kv card`)."""
