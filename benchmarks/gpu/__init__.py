"""GPU suite: speed and memory, by `hf-fp8kv bench --suite gpu` and `make gpu`.

Every contender is first compared with the reference on the bytes that it reads. Then it is replayed
from a CUDA graph, over so many buffers in turns that none of them is in a cache. Ceilings are
measured in the same run. docs/performance.md says what each number means.
"""

from .results import line
from .roofline import plot
from .suite import SECTIONS, run_gpu_suite
from .table import format_table

__all__ = ["SECTIONS", "format_table", "line", "plot", "run_gpu_suite"]
