"""Measure the CPU time of a decode step on a GPU, with or without a GPU.

A step calls `update` of the growing cache, then the attention function "fp8_paged" with the backend
"triton", as eager `generate()` does, at shapes of an 8B model. The turns of all rows alternate. A
step of a padded batch includes its mask.

Without a GPU, Triton compiles the kernels for `GPU`, but a stand-in for the driver ignores each
launch. The times then exclude Triton's launcher in C, the driver's call, and torch's queries of
the current device and stream. Tensors and torch's allocator are on the CPU.

A separate process is measured, because Triton keeps the driver until its process ends.
"""

import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from types import SimpleNamespace

import torch
from transformers import Cache, DynamicCache
from transformers.masking_utils import create_causal_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_fp8kv.cache.cache import FP8PagedCache

from .layers import AttentionLayer, Heads, make_config
from .shared import TURNS_OPTION, Result, main, make_environment, run_process

GPU = "sm_90"
# Number of layers, which share the fixed costs of a step.
NUM_LAYERS = 32
HEADS = Heads(32, 8, 128)
STORED_TOKENS = 1000
# DynamicCache computes on the CPU. With small tensors, most of its time is spent on calls.
TINY_HEADS = Heads(4, 2, 16)
TINY_STORED_TOKENS = 64
PAGED, STOCK = "FP8PagedCache", "DynamicCache + sdpa"
PADDED_BATCH = 2
# Number of calls of layers in a turn. Turns are short, so at least one turn is undisturbed.
CALLS_PER_TURN = 32


def measure_host(*, turns: int = 200, progress: Callable[[str], None]) -> Result:
    """Return rows with `cache` and `value`, microseconds per layer and step.

    A value is the minimum of all turns, because a busy machine only adds time.

    Raises:
        RuntimeError: Triton is not installed, or does not compile here.
    """
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else GPU
    progress(f"decode steps, kernels for {gpu}")
    return {"rows": run_process("benchmarks.host:_measure_turns", turns, make_environment())}


def make_driver() -> SimpleNamespace:
    """Return a stand-in for Triton's driver that accepts launches and ignores them."""
    from triton.backends.compiler import GPUTarget

    target = GPUTarget("cuda", int(GPU.removeprefix("sm_")), 32)

    def ignore_launch(*_arguments: object) -> None:
        """Accept the arguments of a launch."""

    return SimpleNamespace(
        get_current_target=lambda: target,
        get_active_torch_device=lambda: torch.device("cpu"),
        get_current_device=lambda: 0,
        get_current_stream=lambda _device: 0,
        launcher_cls=lambda _source, _metadata: ignore_launch,
        utils=SimpleNamespace(
            get_device_properties=lambda _device: {"max_shared_mem": 1 << 20},
            # Module, function, registers, spills, and the maximum number of threads of a program.
            load_binary=lambda *_: (object(), object(), 128, 0, 1024),
        ),
    )


class LayerStack:
    """Layers of a model with stored tokens, and their decode step."""

    def __init__(
        self,
        cache: Cache,
        attention: str,
        heads: Heads,
        num_tokens: int,
        num_layers: int,
        batch: int = 1,
    ) -> None:
        self.cache = cache
        self.attention = ALL_ATTENTION_FUNCTIONS[attention]
        num_query_heads, num_kv_heads, dim = heads
        self.modules = [
            AttentionLayer(num_query_heads // num_kv_heads, index).eval()
            for index in range(num_layers)
        ]
        # The strides are the same as after a projection and RoPE.
        randn = partial(torch.randn, dtype=torch.bfloat16)
        self.query = randn(batch, 1, num_query_heads, dim).transpose(1, 2)
        self.key = randn(batch, num_kv_heads, 1, dim)
        self.value = randn(batch, 1, num_kv_heads, dim).transpose(1, 2)
        self.options = {"dropout": 0.0, "scaling": dim**-0.5, "sliding_window": None}
        self.num_steps = CALLS_PER_TURN // num_layers
        # The first token of each sequence of a batch is padding, so each step makes a mask.
        self.config = make_config(heads, num_layers)
        self.config._attn_implementation = attention
        self.is_token = torch.ones(batch, num_tokens + CALLS_PER_TURN + 1, dtype=torch.bool)
        self.is_token[:, 0] = False
        states = torch.zeros(batch, num_kv_heads, num_tokens, dim, dtype=torch.bfloat16)
        for index in range(num_layers):
            cache.update(states, states, index)

    def make_mask(self) -> torch.Tensor | None:
        """Return the mask of a step of a padded batch, or None for a single sequence."""
        if len(self.key) == 1:
            return None
        length = int(self.cache.get_seq_length())
        position = torch.tensor([[length]], device=self.key.device)
        return create_causal_mask(  # type: ignore[no-any-return]
            self.config, self.key[:, 0], self.is_token[:, : length + 1], self.cache, position
        )

    def step(self) -> None:
        mask = self.make_mask()
        for module in self.modules:
            keys, values = self.cache.update(self.key, self.value, module.layer_idx)
            self.attention(module, self.query, keys, values, mask, **self.options)

    def measure_turn(self) -> float:
        """Run one turn, and return the CPU time of this thread in µs per layer and step."""
        start = time.thread_time()
        for _ in range(self.num_steps):
            self.step()
        seconds = time.thread_time() - start
        self.cache.crop(-self.num_steps)
        return 1e6 * seconds / CALLS_PER_TURN


def make_stack(num_layers: int, batch: int = 1) -> LayerStack:
    """Return layers of the paged cache on a GPU, or on a CPU with the calls of a GPU."""
    backend = "triton" if torch.cuda.is_available() else "torch"
    cache = FP8PagedCache(make_config(HEADS, num_layers), backend=backend)
    # The last page has free slots, so that growth of the cache is not measured.
    stack = LayerStack(cache, "fp8_paged", HEADS, STORED_TOKENS, num_layers, batch)
    for layer in cache.paged_layers:
        layer.encoding.backend = "triton"
    return stack


@torch.no_grad()
def _measure_turns(turns: int) -> list[Result]:
    import triton

    from hf_fp8kv.ops.triton.target import Target, assuming

    torch.set_num_threads(1)
    with ExitStack() as contexts:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        is_tiny = device == "cpu"
        sizes = (TINY_HEADS, TINY_STORED_TOKENS) if is_tiny else (HEADS, STORED_TOKENS)
        stock_name = f"{STOCK}, tiny" if is_tiny else STOCK
        if is_tiny:
            triton.runtime.driver.set_active(make_driver())
            contexts.enter_context(assuming(Target.parse(GPU)))
        stacks: dict[str, LayerStack] = {}
        # A default device during the measurement would slow down every call of torch.
        with torch.device(device):
            for batch, label in ((1, ""), (PADDED_BATCH, ", padded")):
                stacks[PAGED + label] = make_stack(NUM_LAYERS, batch)
                cache = DynamicCache(config=make_config(sizes[0], NUM_LAYERS))
                stacks[stock_name + label] = LayerStack(cache, "sdpa", *sizes, NUM_LAYERS, batch)
        turn_us = [[stack.measure_turn() for stack in stacks.values()] for _ in range(turns + 1)]
    return [  # without the first turn, which compiles the kernels
        {"cache": name, "value": min(stack_us), "unit": "µs per layer"}
        for name, stack_us in zip(stacks, zip(*turn_us[1:], strict=True), strict=True)
    ]


if __name__ == "__main__":
    main(__doc__, measure_host, TURNS_OPTION)
