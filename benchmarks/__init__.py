"""Benchmarks for the developers of hf_fp8kv, run from a clone: `python -m benchmarks.NAME`."""
