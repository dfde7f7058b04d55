"""Benchmarks for a user's machine: speed, memory and quality, behind `hf-fp8kv bench`."""
