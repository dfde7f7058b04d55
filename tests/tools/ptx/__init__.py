"""Execution of kernels on the CPU, from the PTX that Triton's compiler generates."""
