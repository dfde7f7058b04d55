"""Cards: measured losses of a model with each cache (`hf-fp8kv card`)."""
