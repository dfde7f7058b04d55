"""Benchmarks for a user's machine, behind `hf-fp8kv bench`: speed and memory."""
