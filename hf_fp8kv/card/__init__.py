"""Cards: what a model loses with each cache, measured (`hf-fp8kv card`)."""
