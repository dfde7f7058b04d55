"""Benchmarks: speed, memory and accuracy, behind `hf-fp8kv bench`."""
