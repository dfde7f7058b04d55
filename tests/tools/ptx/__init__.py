"""Kernels executed from the PTX that Triton's compiler makes of them, on the CPU."""
