"""Compile the Triton kernels for every GPU, and check the machine code: `make kernels`."""
