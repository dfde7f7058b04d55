"""The "numba" backend: fused loops for CPUs."""
