"""The authors' benchmarks, run from a clone: `python -m benchmarks.gpu` and so on."""
