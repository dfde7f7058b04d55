"""Make steps of vLLM's and OpenVINO's attention on a CPU, over paged caches of one layer.

`make rivals` installs both. A step stores the new tokens of each sequence, and attends to all
tokens. Block tables and schedules, which a server makes once for all layers, are not in a step.
"""

from collections.abc import Callable
from importlib.util import find_spec

import torch

Attend = Callable[[], torch.Tensor]  # returns [B, Hq, T, D]

_VLLM_PAGE_TOKENS = 128  # vLLM's default on CPUs


def make_rival_steps(
    query: torch.Tensor, states: torch.Tensor, history: torch.Tensor
) -> dict[str, Attend]:
    """Return a step of each installed kernel.

    Args:
        query: Queries of the new tokens, `[B, Hq, T, D]`, bfloat16.
        states: Keys and values of the new tokens, `[2, B, Hkv, T, D]`, bfloat16.
        history: Keys and values of the stored tokens, `[2, B, Hkv, N, D]`, bfloat16.
    """
    # The package, the function and its first argument, by the name of the contender.
    contenders = {
        "vLLM bf16": ("vllm", _make_vllm_step, "auto"),
        "vLLM fp8": ("vllm", _make_vllm_step, "fp8"),
        "OpenVINO u8": ("openvino", _make_openvino_step, "f32"),
        "OpenVINO u8, bf16 products": ("openvino", _make_openvino_step, "bf16"),
    }
    return {
        name: make_step(variant, query, states, history)
        for name, (package, make_step, variant) in contenders.items()
        if find_spec(package)
    }


def _flatten(states: torch.Tensor) -> torch.Tensor:
    """Return states `[B, H, T, D]` as `[B * T, H, D]`."""
    return states.transpose(1, 2).flatten(0, 1).contiguous()


def _make_vllm_step(
    dtype: str, query: torch.Tensor, states: torch.Tensor, history: torch.Tensor
) -> Attend:
    """Return a step over pages of `dtype`: "auto" (bfloat16) or "fp8" (e4m3, scale 1.0)."""
    from vllm import _custom_ops as ops
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    batch, num_query_heads, num_new, dim = query.shape
    num_kv_heads, num_stored = history.shape[2:4]
    isa = _get_attn_isa(query.dtype, _VLLM_PAGE_TOKENS, dim, dtype)
    num_pages = -(-(num_stored + num_new) // _VLLM_PAGE_TOKENS)
    pool = torch.zeros(
        batch * num_pages, num_kv_heads, 2 * _VLLM_PAGE_TOKENS, dim,
        dtype=query.dtype if dtype == "auto" else torch.uint8,
    )  # fmt: skip
    k_pages, v_pages = pool.chunk(2, dim=2)
    block_table = torch.arange(batch * num_pages, dtype=torch.int32).view(batch, num_pages)
    offsets = torch.arange(batch)[:, None] * num_pages * _VLLM_PAGE_TOKENS

    def write(keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
        # The scales of K and V are 1.0.
        ops.cpu_attn_reshape_and_cache(keys, values, k_pages, v_pages, slots, isa, 1.0, 1.0, dtype)

    stored_slots = (offsets + torch.arange(num_stored)).flatten()
    write(_flatten(history[0]), _flatten(history[1]), stored_slots)
    is_causal = True
    no_window = -1
    lengths = torch.full((batch,), num_stored + num_new, dtype=torch.int32)
    starts = torch.arange(batch + 1, dtype=torch.int32) * num_new
    schedule = ops.cpu_attn_get_scheduler_metadata(
        batch, num_query_heads, num_kv_heads, dim, lengths, query.dtype, starts, is_causal,
        no_window, isa, True, None, dtype,
    )  # fmt: skip
    new_slots = (offsets + num_stored + torch.arange(num_new)).flatten()
    queries, keys, values = map(_flatten, (query, *states))
    output = torch.empty_like(queries)

    def step() -> torch.Tensor:
        write(keys, values, new_slots)
        ops.cpu_attention_with_kv_cache(
            queries, k_pages, v_pages, output, starts, lengths, dim**-0.5, is_causal, None,
            no_window, block_table, 0.0, schedule, None, None, 1.0, 1.0, dtype,
        )  # fmt: skip
        return output.view(batch, num_new, num_query_heads, dim).transpose(1, 2)

    return step


def _make_openvino_step(
    precision: str, query: torch.Tensor, states: torch.Tensor, history: torch.Tensor
) -> Attend:
    """Return a step over pages of 8-bit integers: K with scales by channel, V by token.

    `precision` is the precision of OpenVINO's matrix products.
    """
    import openvino
    from openvino import opset13
    from openvino.op import Parameter, _PagedAttentionExtension

    batch, num_query_heads, num_new, dim = query.shape
    num_kv_heads, num_stored = history.shape[2:4]
    float32 = torch.float32

    def make_input(shape: list[int], dtype: openvino.Type = openvino.Type.i32) -> openvino.Node:
        return Parameter(dtype, openvino.PartialShape(shape))

    def make_constant(value: object, dtype: torch.dtype = torch.int32) -> openvino.Node:
        return opset13.constant(torch.tensor(value, dtype=dtype).numpy())

    token_inputs = [
        make_input([-1, head_count * dim], openvino.Type.f32)
        for head_count in (num_query_heads, num_kv_heads, num_kv_heads)
    ]
    page_inputs = [make_input([-1, num_kv_heads, -1, -1], openvino.Type.dynamic) for _ in "kv"]
    # Stored tokens, first rows of sequences, pages, first pages of sequences, largest length.
    index_inputs = [*(make_input([-1]) for _ in range(4)), make_input([])]
    options = [  # all off: windows, ALiBi, scores, rotation, sparse attention, sinks, eviction
        make_constant([]), make_constant([]), make_constant([[]]), make_constant([[]], float32),
        make_constant([], float32), make_constant(128), make_constant(8),
        make_constant([], float32), make_constant(0), make_constant([]), make_constant([]),
        make_constant([]), make_constant([]), make_constant([], torch.uint8), make_constant([]),
    ]  # fmt: skip
    nodes = [
        *token_inputs, *page_inputs, *index_inputs[:4], make_constant(dim**-0.5, float32),
        make_constant(0), make_constant([], float32), index_inputs[4], *options,
    ]  # fmt: skip
    attention = _PagedAttentionExtension([node.output(0) for node in nodes])
    for side in "kv":
        attention.get_rt_info()[f"{side}_head_size"] = dim
        attention.get_rt_info()[f"num_{side}_heads"] = num_kv_heads
    for name, node in zip(("key_cache.0", "value_cache.0"), page_inputs, strict=True):
        node.output(0).set_names({name})
    inputs = [*token_inputs, *page_inputs, *index_inputs]
    model = openvino.Model([attention.output(0)], inputs, "attention")
    settings = {
        "KV_CACHE_PRECISION": "u8", "INFERENCE_PRECISION_HINT": precision,
        "PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": str(torch.get_num_threads()),
    }  # fmt: skip
    compiled_model = openvino.Core().compile_model(model, "CPU", settings)
    page_ports = compiled_model.inputs[3:5]
    # V has a page of `[Hkv, page_size, bytes]`.
    page_size = list(page_ports[1].partial_shape)[2].get_length()
    num_pages = -(-(num_stored + num_new) // page_size)
    pools = []
    for port in page_ports:
        page_shape = [size.get_length() for size in list(port.partial_shape)[1:]]
        shape = openvino.Shape([batch * num_pages, *page_shape])
        pools.append(openvino.Tensor(port.element_type, shape))
        pools[-1].data[:] = 0  # scales in unused memory could otherwise be infinite or NaN
    request = compiled_model.create_infer_request()

    def set_inputs(
        tokens: list[torch.Tensor], stored_counts: list[int], first_rows: list[int],
        pages: list[int], first_pages: list[int], max_length: int,
    ) -> None:  # fmt: skip
        indices = (stored_counts, first_rows, pages, first_pages, max_length)
        tensors = [_flatten(vectors).flatten(1).float() for vectors in tokens]
        tensors += [torch.tensor(index_list, dtype=torch.int32) for index_list in indices]
        for index, tensor in zip((0, 1, 2, 5, 6, 7, 8, 9), tensors, strict=True):
            request.set_input_tensor(index, openvino.Tensor(tensor.numpy()))
        for index, pool in enumerate(pools, 3):
            request.set_input_tensor(index, pool)

    # Store each page of the history as a sequence that attends only to itself.
    starts = range(0, num_stored, page_size)
    page_lengths = [min(page_size, num_stored - start) for start in starts] * batch
    first_rows = torch.tensor([0, *page_lengths]).cumsum(0).tolist()
    page_numbers = torch.arange(batch * num_pages).view(batch, num_pages)
    pages = page_numbers[:, : len(starts)].flatten().tolist()
    zeros = query.new_zeros(batch, num_query_heads, num_stored, dim)
    set_inputs(
        [zeros, *history], stored_counts=[0] * len(pages), first_rows=first_rows, pages=pages,
        first_pages=list(range(len(pages) + 1)), max_length=page_size,
    )  # fmt: skip
    request.infer()
    set_inputs(
        [query, *states], stored_counts=[num_stored] * batch,
        first_rows=list(range(0, (batch + 1) * num_new, num_new)),
        pages=page_numbers.flatten().tolist(),
        first_pages=list(range(0, (batch + 1) * num_pages, num_pages)),
        max_length=num_stored + num_new,
    )  # fmt: skip

    def step() -> torch.Tensor:
        request.infer()
        output = torch.from_numpy(request.get_output_tensor(0).data)
        return output.view(batch, num_new, num_query_heads, dim).transpose(1, 2)

    return step
