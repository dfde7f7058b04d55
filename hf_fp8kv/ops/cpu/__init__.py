"""The "cpu" backend: kernels in C++, compiled when the package is installed."""
