"""GPU benchmark: speed and memory, run by `python -m benchmarks.gpu` and `make gpu`.

Each contender is first compared with the reference on the bytes that it reads. Then a CUDA graph
replays it over enough buffers that no cache holds them. The ceilings are measured in the same run.
docs/performance.md explains each number.
"""
