"""GPU benchmark of speed and memory, which `python -m benchmarks.gpu` and `make gpu` run.

Each contender is first compared with the reference on the bytes that it reads. Then a CUDA graph
replays it over more buffers than the GPU's caches hold. The ceilings are measured in the same run.
docs/performance.md explains each number.
"""
