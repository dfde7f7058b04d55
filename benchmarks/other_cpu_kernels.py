"""Make steps of vLLM's and OpenVINO's attention on a CPU, over paged caches of one layer.

`make rivals` installs both. A step stores the new tokens of each sequence, and attends to all
tokens. Block tables and work plans, which a server makes once for all layers, are not in a step.
"""

from collections.abc import Callable
from importlib.util import find_spec

import torch

Attend = Callable[[], torch.Tensor]  # returns [B, Hq, T, D]

_VLLM_PAGE = 128  # vLLM's default on CPUs
_OPENVINO = {"OpenVINO u8": "f32", "OpenVINO u8, bf16 products": "bf16"}


def make_other_steps(
    query: torch.Tensor, states: torch.Tensor, history: torch.Tensor
) -> dict[str, Attend]:
    """Return a step of each installed kernel.

    Args:
        query: Queries of the new tokens, `[B, Hq, T, D]`, bfloat16.
        states: Keys and values of the new tokens, `[2, B, Hkv, T, D]`, bfloat16.
        history: Keys and values of the stored tokens, `[2, B, Hkv, N, D]`, bfloat16.
    """
    steps: dict[str, Attend] = {}
    if find_spec("vllm"):
        for name, dtype in {"vLLM bf16": "auto", "vLLM fp8": "fp8"}.items():
            steps[name] = _make_vllm_step(dtype, query, states, history)
    if find_spec("openvino"):
        for name, precision in _OPENVINO.items():
            steps[name] = _make_openvino_step(precision, query, states, history)
    return steps


def _flatten(states: torch.Tensor) -> torch.Tensor:
    """Return states `[B, H, T, D]` as `[B * T, H, D]`."""
    return states.transpose(1, 2).flatten(0, 1).contiguous()


def _make_vllm_step(
    dtype: str, query: torch.Tensor, states: torch.Tensor, history: torch.Tensor
) -> Attend:
    """Return a step over pages of `dtype`: "auto" (bfloat16) or "fp8" (e4m3, scale 1.0)."""
    from vllm import _custom_ops as ops
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    batch, q_heads, num_new, dim = query.shape
    kv_heads, num_past = history.shape[2:4]
    isa = _get_attn_isa(query.dtype, _VLLM_PAGE, dim, dtype)
    num_pages = -(-(num_past + num_new) // _VLLM_PAGE)
    memory = torch.zeros(
        batch * num_pages, kv_heads, 2 * _VLLM_PAGE, dim,
        dtype=query.dtype if dtype == "auto" else torch.uint8,
    )  # fmt: skip
    k_pages, v_pages = memory.chunk(2, dim=2)
    tables = torch.arange(batch * num_pages, dtype=torch.int32).view(batch, num_pages)
    offsets = torch.arange(batch)[:, None] * num_pages * _VLLM_PAGE

    def write(keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
        ops.cpu_attn_reshape_and_cache(keys, values, k_pages, v_pages, slots, isa, 1.0, 1.0, dtype)

    write(_flatten(history[0]), _flatten(history[1]), (offsets + torch.arange(num_past)).flatten())
    lengths = torch.full((batch,), num_past + num_new, dtype=torch.int32)
    starts = torch.arange(batch + 1, dtype=torch.int32) * num_new
    plan = ops.cpu_attn_get_scheduler_metadata(
        batch,
        q_heads,
        kv_heads,
        dim,
        lengths,
        query.dtype,
        starts,
        True,
        -1,
        isa,
        True,
        None,
        dtype,
    )
    slots = (offsets + num_past + torch.arange(num_new)).flatten()
    queries, keys, values = map(_flatten, (query, *states))
    output = torch.empty_like(queries)

    def step() -> torch.Tensor:
        write(keys, values, slots)
        ops.cpu_attention_with_kv_cache(
            queries, k_pages, v_pages, output, starts, lengths, dim**-0.5, True, None, -1, tables,
            0.0, plan, None, None, 1.0, 1.0, dtype,
        )  # fmt: skip
        return output.view(batch, num_new, q_heads, dim).transpose(1, 2)

    return step


def _make_openvino_step(
    precision: str, query: torch.Tensor, states: torch.Tensor, history: torch.Tensor
) -> Attend:
    """Return a step over pages of 8-bit integers: K with scales by channel, V by token.

    Args:
        precision: Precision of OpenVINO's matrix products.
        query: As in `make_other_steps`.
        states: As in `make_other_steps`.
        history: As in `make_other_steps`.
    """
    import openvino
    from openvino import opset13
    from openvino.op import Parameter, _PagedAttentionExtension

    batch, q_heads, num_new, dim = query.shape
    kv_heads, num_past = history.shape[2:4]
    float32, int32 = openvino.Type.f32, openvino.Type.i32

    def constant(value: object, dtype: torch.dtype = torch.int32) -> openvino.Node:
        return opset13.constant(torch.tensor(value, dtype=dtype).numpy())

    tokens = [Parameter(float32, openvino.PartialShape([-1, n * dim])) for n in
              (q_heads, kv_heads, kv_heads)]  # fmt: skip
    caches = [Parameter(openvino.Type.dynamic, openvino.PartialShape([-1, kv_heads, -1, -1]))
              for _ in "kv"]  # fmt: skip
    # Stored tokens, first rows of sequences, pages, first pages of sequences, largest length.
    lists = [Parameter(int32, openvino.PartialShape([-1])) for _ in range(4)]
    max_len = Parameter(int32, openvino.PartialShape([]))
    floats = torch.float32
    options = [  # all off: windows, ALiBi, scores, rotation, sparse attention, sinks, eviction
        constant([]), constant([]), constant([[]]), constant([[]], floats), constant([], floats),
        constant(128), constant(8), constant([], floats), constant(0), constant([]), constant([]),
        constant([]), constant([]), constant([], torch.uint8), constant([]),
    ]  # fmt: skip
    inputs = [
        *tokens, *caches, *lists, constant(dim**-0.5, floats), constant(0), constant([], floats),
        max_len, *options,
    ]  # fmt: skip
    attention = _PagedAttentionExtension([node.output(0) for node in inputs])
    for side in "kv":
        attention.get_rt_info()[f"{side}_head_size"] = dim
        attention.get_rt_info()[f"num_{side}_heads"] = kv_heads
    for name, node in zip(("key_cache.0", "value_cache.0"), caches, strict=True):
        node.output(0).set_names({name})
    model = openvino.Model([attention.output(0)], [*tokens, *caches, *lists, max_len], "attention")
    settings = {
        "KV_CACHE_PRECISION": "u8", "INFERENCE_PRECISION_HINT": precision,
        "PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": str(torch.get_num_threads()),
    }  # fmt: skip
    network = openvino.Core().compile_model(model, "CPU", settings)
    shapes = [
        [n.get_length() for n in list(port.partial_shape)[1:]] for port in network.inputs[3:5]
    ]
    page_size = shapes[1][1]
    num_pages = -(-(num_past + num_new) // page_size)
    memory = [openvino.Tensor(port.element_type, openvino.Shape([batch * num_pages, *shape]))
              for port, shape in zip(network.inputs[3:5], shapes, strict=True)]  # fmt: skip
    for tensor in memory:
        tensor.data[:] = 0  # scales in unused memory could otherwise be infinite or NaN
    request = network.create_infer_request()

    def set_inputs(values: list[torch.Tensor], past: list[int], rows: list[int],
                   pages: list[int], first_pages: list[int], length: int) -> None:  # fmt: skip
        tensors = [
            *(_flatten(x).flatten(1).float() for x in values),
            *(torch.tensor(x, dtype=torch.int32) for x in (past, rows, pages, first_pages, length)),
        ]
        for index, value in zip((0, 1, 2, 5, 6, 7, 8, 9), tensors, strict=True):
            request.set_input_tensor(index, openvino.Tensor(value.numpy()))
        for index, tensor in enumerate(memory, 3):
            request.set_input_tensor(index, tensor)

    # Store each page of the history as a sequence that attends only to itself.
    parts = [min(page_size, num_past - start) for start in range(0, num_past, page_size)] * batch
    rows = torch.tensor([0, *parts]).cumsum(0).tolist()
    pages = [b * num_pages + n for b in range(batch) for n in range(-(-num_past // page_size))]
    zeros = query.new_zeros(batch, q_heads, num_past, dim)
    set_inputs(
        [zeros, *history], [0] * len(parts), rows, pages, [*range(len(parts) + 1)], page_size
    )
    request.infer()
    set_inputs(
        [query, *states], [num_past] * batch, [b * num_new for b in range(batch + 1)],
        [*range(batch * num_pages)], [b * num_pages for b in range(batch + 1)], num_past + num_new,
    )  # fmt: skip

    def step() -> torch.Tensor:
        request.infer()
        output = torch.from_numpy(request.get_output_tensor(0).data)
        return output.view(batch, num_new, q_heads, dim).transpose(1, 2)

    return step
