"""Benchmarks for the authors of hf_fp8kv, run from a clone: `python -m benchmarks.NAME`."""
