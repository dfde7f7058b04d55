"""Recording and replay of kernel launches with new addresses.

A launch needs codecs, launch parameters and about forty arguments, which Triton inspects to find
the compiled kernel. While a model decodes, only addresses of tensors and a few integers change. The
first call of a function with the decorator `replayed` is therefore recorded: the tensors that it
allocated, the kernels that it launched, and the positions of its addresses and integers among their
arguments. A later call runs a Python function generated from the recording, which allocates the
same tensors and launches the kernels.

A recording holds no tensors of the call, so all layers and caches share it. Its key has everything
that it depends on:

    * the operation, the device and the `Target`
    * `layout`: arguments that are neither tensors nor such integers, and all shapes and strides
      that the operation reads
    * for each tensor: whether it is None, its dtype, and its alignment to 16 bytes, because Triton
      compiles kernels for these properties, and on AMD for sizes over 2 GiB

The recordings and addresses of the tensors of pages (`SharedTensors`) are cached in the pages.
This is safe because these tensors never change their memory.

A call is not recorded if a kernel receives a tensor that torch computed, or two tensors at the same
address. Nothing is replayed in the interpreter, within `recording`, while hooks observe launches,
with unusual settings of Triton, or with versions of Triton whose launches may differ.
"""

import collections
import functools
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from typing import Any, TypeAlias, TypeVar, cast

import torch
import triton
from triton import knobs

from ..pages import Pages
from .target import LaunchRecord, Target, assumption, get_target, recorder, recording

# Triton launches kernels in the same way from `_FIRST_VERSION` on, and before `_END_VERSION`.
_FIRST_VERSION, _END_VERSION = (3, 6), (3, 10)
_version = tuple(int(part) for part in triton.__version__.split(".")[:2])
_CAN_REPLAY = _FIRST_VERSION <= _version < _END_VERSION and not knobs.runtime.interpret

# Settings that only some of these versions have.
_HAS_CASTS = hasattr(knobs.compilation, "fpsan_homomorphic_casts")
_HAS_STAGES_HOOK = hasattr(knobs.runtime, "add_stages_inspection_hook")

# Maximum number of recordings for one kind of pages.
_MAX_RECORDINGS = 256
_MAX_INT32 = 2**31 - 1
# Result of a replay whose recording needs aligned addresses, if an address is not aligned.
_MISALIGNED = object()
_Operation = TypeVar("_Operation", bound=Callable[..., Any])

# Results of `_compile_replay` by key. None means that the call cannot be recorded.
Recordings: TypeAlias = dict[tuple[Any, ...], Callable[..., Any] | None]
# Recordings by the kind of pages.
recordings: collections.defaultdict[Hashable, Recordings] = collections.defaultdict(dict)


# Recordings of calls with tensors that calls share, such as the tensors of pages, and the addresses
# of these tensors.
SharedTensors: TypeAlias = tuple[Recordings, list[int | None]]


def describe_tensors(
    tensors: Sequence[torch.Tensor | None], *, sizes: bool = True
) -> tuple[Hashable, list[int | None]]:
    """Return the properties of tensors that recordings depend on, and the tensors' addresses.

    `sizes` includes whether a tensor exceeds 2 GiB.
    """
    addresses = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
    properties = (
        tuple([None if tensor is None else tensor.dtype for tensor in tensors]),
        tuple([address and address & 15 for address in addresses]),
        sizes
        and tuple(
            [
                tensor is None or tensor.untyped_storage().nbytes() <= _MAX_INT32
                for tensor in tensors
            ]
        ),
    )
    return properties, addresses


NO_SHARED_TENSORS: SharedTensors = {}, []


def describe_pages(pages: Pages) -> SharedTensors:
    """Return the recordings for such pages, and the addresses of their tensors, cached in them."""
    shared_tensors: SharedTensors | None = pages.launch_properties
    if shared_tensors is None:
        k, v = pages.k, pages.v
        regions = pages.regions
        tensors = (
            regions["k"], k.static_scale, k.center, regions["v"], v.static_scale, v.center,
            regions.get("token_scales"), pages.table, pages.offsets,
        )  # fmt: skip
        properties, addresses = describe_tensors(tensors)
        # Format, head size and rotation of each side, without its tensors.
        sizes = k[2:], v[2:], pages.num_heads, pages.page_size
        shared_tensors = pages.launch_properties = recordings[properties, sizes], addresses
    return shared_tensors


# The arguments that differ in each call: tensors, the first of which determines the device,
# and integers, which kernels take under these names, without specialization, or not at all.
Variables: TypeAlias = tuple[Sequence[torch.Tensor | None], dict[str, int]]


def describe_shape(tensor: torch.Tensor | None) -> Hashable:
    """Return the part of a call's layout that depends on one tensor."""
    return None if tensor is None else (tensor.shape, tensor.stride())


def replayed(
    layout: Callable[..., tuple[Any, ...] | None],
    variables: Callable[..., Variables],
    pages: int | None = None,
) -> Callable[[_Operation], _Operation]:
    """Return a decorator for an operation that returns None, or a tensor from `allocate`.

    If an equal call was recorded, the operation is replayed.

    Args:
        layout: Function with the operation's parameters, which returns everything that a recording
            depends on except `variables` and pages, or None for a call that is not recorded.
        variables: Function with the operation's parameters, which returns its `Variables`.
        pages: Index of the pages among the parameters. None means no pages.

    The operation has an attribute `bind`, as in `ops.bind`.
    """

    def decorate(operation: _Operation) -> _Operation:
        def describe(args: tuple[Any, ...]) -> Any:
            call_layout = layout(*args) if _allows_replay() else None
            if call_layout is None:
                return None
            tensors, integers = variables(*args)
            device = tensors[0].device  # type: ignore[union-attr]
            target = get_target(device)
            shared = NO_SHARED_TENSORS if pages is None else describe_pages(args[pages])
            properties, addresses = describe_tensors(tensors, sizes=not target.is_nvidia)
            key = operation, call_layout, device, properties, id(target)
            return *shared, key, addresses, tensors, integers, target, device

        @functools.wraps(operation)
        def run(*args: Any) -> Any:
            if (call := describe(args)) is None:
                return operation(*args)
            replays, shared_addresses, key, addresses, tensors, integers, target, device = call
            if key not in replays:
                with recording() as recorded:
                    result = operation(*args)
                if len(replays) >= _MAX_RECORDINGS:
                    replays.clear()
                replays[key] = None
                with suppress(LookupError):
                    replays[key] = _compile_replay(
                        recorded, result, target, device, addresses, shared_addresses, integers
                    )
                return result
            if (replay := replays[key]) is None:
                return operation(*args)
            if device.type == "cuda" and device.index not in (None, torch.cuda.current_device()):
                with torch.cuda.device(device):
                    return replay(tensors, shared_addresses, **integers)
            return replay(tensors, shared_addresses, **integers)

        def bind(*args: Any) -> Callable[..., Any]:
            if (call := describe(args)) is None:
                return run
            replays, shared_addresses, key, addresses, _, _, target, device = call
            replay = replays.get(key)
            # On AMD a recording also depends on sizes.
            if replay is None or not _are_aligned(addresses) or not target.is_nvidia:
                return run
            assumed_target = assumption.target

            def run_bound(*args: Any) -> Any:
                tensors, integers = variables(*args)
                is_current = device.type != "cuda" or device.index == torch.cuda.current_device()
                if is_current and _allows_replay() and assumption.target is assumed_target:
                    result = replay(tensors, shared_addresses, **integers)
                    if result is not _MISALIGNED:
                        return result
                return run(*args)

            return run_bound

        vars(run)["bind"] = bind
        return cast(_Operation, run)

    return decorate


def _are_aligned(addresses: Sequence[int | None]) -> bool:
    return not any(address and address & 15 for address in addresses)


def _allows_replay() -> bool:
    """Return whether launches can be replayed, and no hooks or changed settings affect them."""
    runtime = knobs.runtime
    compilation = knobs.compilation
    enter_hook, leave_hook = runtime.launch_enter_hook, runtime.launch_exit_hook
    return _CAN_REPLAY and recorder.recorded is None and not (
        getattr(enter_hook, "calls", enter_hook) or getattr(leave_hook, "calls", leave_hook)
        or runtime.debug or compilation.instrumentation_mode
        or (_HAS_CASTS and compilation.fpsan_homomorphic_casts)
        or (_HAS_STAGES_HOOK and runtime.add_stages_inspection_hook)
    )  # fmt: skip


def _compile_replay(
    recorded: LaunchRecord,
    result: torch.Tensor | None,
    target: Target,
    device: torch.device,
    addresses: list[int | None],
    shared_addresses: list[int | None],
    integers: dict[str, int],
) -> Callable[..., Any]:
    """Generate a function that repeats a recorded call with other tensors and integers.

    Its arguments are the call's variables, with the addresses of shared tensors between them. If
    all recorded addresses were aligned to 16 bytes, it launches nothing and returns `_MISALIGNED`
    for a tensor that is not.

    Raises:
        LookupError: An argument of a launch, or the result, cannot be derived from a later call.
    """
    allocations = recorded.allocations
    # The target is kept alive, because its `id` is in the key. `torch.empty` would take nearly
    # twice as long as `torch.empty_strided`. A tensor to imitate could be in a CUDA graph's pool.
    objects: dict[str, Any] = {
        "empty": torch.empty_strided,
        "get_stream": triton.runtime.driver.active.get_current_stream,
        "misaligned": _MISALIGNED,
        "target": target,
    }
    pointers: list[tuple[int | None, str]] = [
        (tensor.data_ptr(), f"m{index}.data_ptr()") for index, tensor in enumerate(allocations)
    ]
    pointers += [(address, f"p{index}") for index, address in enumerate(addresses)]
    pointers += [(address, f"s[{index}]") for index, address in enumerate(shared_addresses)]
    counts = collections.Counter(address for address, _ in pointers)
    expressions = {address: source for address, source in pointers if counts[address] == 1}
    expressions[0] = "0"  # tensors without elements

    def name_object(x: Any) -> str:
        name = f"x{len(objects)}"
        objects[name] = x
        return name

    def express_argument(x: Any) -> str:
        if isinstance(x, tuple):
            sources = [express_argument(element) for element in x]
            return f"({', '.join(sources)},)" if set(sources) - objects.keys() else name_object(x)
        return expressions[x.data_ptr()] if isinstance(x, torch.Tensor) else name_object(x)

    source_lines = [f"def replay({', '.join(['tensors', 's', *integers])}):"]
    names = [f"p{index}" for index, address in enumerate(addresses) if address is not None]
    source_lines += [f"{name} = tensors[{name[1:]}].data_ptr()" for name in names]
    if _are_aligned(addresses):
        source_lines.append(f"if ({' | '.join(names)}) & 15: return misaligned")
    for index, tensor in enumerate(allocations):
        shape = name_object(tuple(tensor.shape))
        stride = name_object(tensor.stride())
        dtype = name_object(tensor.dtype)
        source_lines.append(
            f"m{index} = empty({shape}, {stride}, dtype={dtype}, device={name_object(device)})"
        )
    source_lines.append(f"stream = get_stream({device.index or 0})")
    for kernel, grid, args, constants, compiled in recorded.launches:
        # No metadata and no hooks, because `_allows_replay` excludes them.
        elements = [
            *map(str, (*grid, 1, 1)[:3]),
            "stream",
            *map(name_object, (compiled.function, compiled.packed_metadata)),
            *["None"] * 3,
        ]
        for parameter, argument in zip(kernel.params, args, strict=False):
            if parameter.name not in integers:
                elements.append(express_argument(argument))
            elif argument == integers[parameter.name] and parameter.do_not_specialize:
                elements.append(parameter.name)
            else:
                raise LookupError(parameter.name)
        elements += [
            name_object(constants[parameter.name]) for parameter in kernel.params[len(args) :]
        ]
        source_lines.append(f"{name_object(compiled.run)}({', '.join(elements)})")
    if result is not None:
        indices = {id(tensor): index for index, tensor in enumerate(allocations)}
        source_lines.append(f"return m{indices[id(result)]}")
    exec("\n    ".join(source_lines), objects)
    return objects["replay"]  # type: ignore[no-any-return]
