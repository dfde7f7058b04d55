"""The operations as torch.library knows them: their schemas, and the way to a backend."""

from collections.abc import Sequence
from typing import Any

import torch

from ..errors import OutOfPagesError
from . import backends, reference
from .pages import Pages

__all__ = ["attend", "gather", "make_plan", "plan_rows", "write"]


def write(
    pages: Pages,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: torch.Tensor,
    backend: str,
    limit: int | None = None,
) -> None:
    """Stores new tokens; see `reference.write`.

    Args:
        limit: the most tokens that a sequence may hold; None: as many as it has pages for. On CPU
            a call that would pass it raises OutOfPagesError and stores nothing; on other devices
            the tokens past it are not stored.
    """
    most = -1 if limit is None else limit
    _op("write", backend)(*pages[:8], key, value, lengths, *pages[8:], most, backend)


def gather(
    pages: Pages,
    lengths: torch.Tensor,
    side: str,
    start: int,
    stop: int,
    dtype: torch.dtype,
    ragged: bool,
    backend: str,
) -> torch.Tensor:
    """Returns dense keys or values; see `reference.gather`."""
    run = _op("gather", backend)
    return run(*pages[:8], lengths, *pages[8:], side, start, stop, dtype, ragged, backend)  # type: ignore[no-any-return]


def attend(
    query: torch.Tensor,
    pages: Pages,
    lengths: torch.Tensor,
    start: int,
    stop: int,
    *,
    scaling: float,
    causal: bool,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    plan: torch.Tensor | None = None,
    backend: str,
) -> torch.Tensor:
    """Returns attention over stored tokens; see `reference.attend`.

    Args:
        plan: what `make_plan` wrote for these lengths, number of query tokens, window and start;
            None: it is made here, if the backend needs one.
    """
    return _op("attend", backend)(  # type: ignore[no-any-return]
        query, *pages[:8], lengths, sinks, mask, bias, plan, *pages[8:],
        start, stop, scaling, causal, window, softcap, backend,
    )  # fmt: skip


def plan_rows(backend: str, device: torch.device, batch: int, heads: int) -> int | None:
    """Returns how many rows a plan has for `batch` sequences and `heads` KV heads.

    None: the backend works without plans.
    """
    if backend != "triton":
        return None
    rows = backends.load_backend(backend).plan_rows(device, batch, heads)
    assert isinstance(rows, int)
    return rows


def make_plan(
    plan: torch.Tensor,
    lengths: torch.Tensor,
    tokens: int,
    window: int,
    start: int,
    heads: int,
    backend: str,
) -> None:
    """Decides on the device which program reads which tokens, for all layers of a step.

    Args:
        plan: int32, `[plan_rows(...), 4]`; overwritten.
        lengths: `[B]`, int32, tokens stored, this step's among them.
        tokens: query tokens of this step, T.
        window: as in `attend`.
        start: as in `attend`.
        heads: KV heads, as in `plan_rows`.
        backend: one that has plans.
    """
    torch.ops.hf_fp8kv.plan(plan, lengths, tokens, window, start, heads, backend)


_STORED = "Tensor k, Tensor v, Tensor? k_scales, Tensor? v_scales"
_REST = "Tensor? k_scale, Tensor? v_scale, Tensor? k_center, Tensor table"
_NAMES = "str k_format, str v_format"
_MUTABLE = "Tensor(a!) k, Tensor(b!) v, Tensor(c!)? k_scales, Tensor(d!)? v_scales"


def _pages(stored: Sequence[torch.Tensor | None], names: tuple[str, str]) -> Pages:
    return Pages._make((*stored, *names))


def _write(*args: Any) -> None:
    *stored, key, value, lengths, k_format, v_format, limit, backend = args
    pages = _pages(stored, (k_format, v_format))
    if backend == "triton" and not lengths.is_cpu:
        backends.load_backend(backend).write(
            pages, key, value, lengths, None if limit < 0 else limit
        )
        return
    if limit >= 0 and lengths.is_cpu and (most := int(lengths.max())) + key.shape[2] > limit:
        raise OutOfPagesError(
            f"expected at most {limit} tokens per sequence (max_cache_len), got {most} stored and "
            f"{key.shape[2]} more; make the cache with a larger max_cache_len, or crop or reset it",
            needed=most + key.shape[2],
            available=limit,
        )
    if backend == "triton":
        # In the interpreter: what the other backends refuse is refused here too.
        reference.locate_all(pages, lengths, key.shape[2])
    backends.load_backend(backend).write(pages, key, value, lengths)


def _gather(*args: Any) -> torch.Tensor:
    stored, lengths, names, rest, backend = args[:8], args[8], args[9:11], args[11:16], args[16]
    found = backends.load_backend(backend).gather(_pages(stored, names), lengths, *rest)
    assert isinstance(found, torch.Tensor)
    return found


def _gather_shape(*args: Any) -> torch.Tensor:
    k: torch.Tensor = args[0]
    v, table = args[1], args[7]
    side, start, stop, dtype = args[11:15]
    dim = k.shape[3] if side == "k" else v.shape[2]
    return k.new_empty((table.shape[0], k.shape[1], stop - start, dim), dtype=dtype)


def _attend(query: torch.Tensor, *args: Any) -> torch.Tensor:
    stored, (lengths, sinks, mask, bias, plan), names = args[:8], args[8:13], args[13:15]
    start, stop, scaling, causal, window, softcap, backend = args[15:]
    more = {"plan": plan} if backend == "triton" else {}
    found = backends.load_backend(backend).attend(
        query, _pages(stored, names), lengths, start, stop,
        scaling=scaling, causal=causal, window=window, softcap=softcap,
        sinks=sinks, mask=mask, bias=bias, **more,
    )  # fmt: skip
    assert isinstance(found, torch.Tensor)
    return found


def _attend_shape(
    query: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: object
) -> torch.Tensor:
    batch, heads, tokens, _dim = query.shape
    return query.new_empty((batch, tokens, heads, v.shape[2]))


def _plan(plan: torch.Tensor, lengths: torch.Tensor, *args: Any) -> None:
    *rest, backend = args
    backends.load_backend(backend).make_plan(plan, lengths, *rest)


# A library rather than `torch.library.custom_op`: its dispatch costs a sixth, and these run once
# per layer and token.
_LIBRARY = torch.library.Library("hf_fp8kv", "DEF")
_SCHEMAS = {
    "write": f"({_MUTABLE}, {_REST}, Tensor key, Tensor value, Tensor lengths, {_NAMES}, "
    "int limit, str backend) -> ()",
    "gather": f"({_STORED}, {_REST}, Tensor lengths, {_NAMES}, str side, SymInt start, "
    "SymInt stop, ScalarType dtype, bool ragged, str backend) -> Tensor",
    # It counts in the plan which parts are done, and leaves it as it was.
    "attend": f"(Tensor query, {_STORED}, {_REST}, Tensor lengths, Tensor? sinks, Tensor? mask, "
    f"Tensor? bias, Tensor? plan, {_NAMES}, SymInt start, SymInt stop, float scaling, "
    "bool causal, int window, float softcap, str backend) -> Tensor",
    "plan": "(Tensor(a!) plan, Tensor lengths, SymInt tokens, int window, SymInt start, "
    "int heads, str backend) -> ()",
}
# Each twice: backends other than "triton" look at values on the host, which
# a CUDA graph cannot hold, and torch asks for that to be said of an operation.
_UNSAFE = getattr(torch.Tag, "cudagraph_unsafe", None)
_BY_HOST = "_by_host"
for _name, _run, _shape in (
    ("write", _write, lambda *_: None),
    ("gather", _gather, _gather_shape),
    ("attend", _attend, _attend_shape),
    ("plan", _plan, lambda *_: None),
):
    for _suffix, _tags in (("", ()), (_BY_HOST, () if _UNSAFE is None else (_UNSAFE,))):
        _LIBRARY.define(_name + _suffix + _SCHEMAS[_name], tags=_tags)
        _LIBRARY.impl(_name + _suffix, _run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"hf_fp8kv::{_name}{_suffix}", _shape, lib=_LIBRARY)


def _op(name: str, backend: str) -> Any:
    return getattr(torch.ops.hf_fp8kv, name if backend == "triton" else name + _BY_HOST)
