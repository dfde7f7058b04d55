"""Calls that are repeated: what an operation asked of Triton once, asked again at other addresses.

Before a kernel starts, codecs, launch parameters and some forty arguments are put together, and
Triton looks at each argument to find what it has compiled. In a model that decodes all of this is
the same in every layer and step, but for the addresses of the tensors and a few numbers. So the
first call is recorded: which tensors it allocated, which kernels it started, and where in their
arguments the addresses and numbers of the call are. A later call that differs in nothing else runs
a Python function made from the record. It allocates the same, and starts the same compiled kernels.

A recording holds no tensor: it serves all layers and caches. What it depends on is its key:

    the operation, and its arguments that are neither tensors nor numbers: `layout`;
    shapes and strides as far as the operation looks at them: part of `layout`, too;
    which tensors there are, of which dtype, on which device, and which are not aligned to 16 bytes:
    of pointers that is what Triton compiles a kernel for (for AMD's GPUs also whether there are
    more than 2 GiB);
    the `Target`.

What there is to know of the tensors of pages is found out once (`Described`), and kept with them:
such tensors are never given other memory.

Calls that hand a kernel a tensor that torch computed, or two tensors at one address, are not
recorded. Each call goes the long way in the interpreter, inside of `recording`, where hooks want to
see each launch as Triton makes it, with settings of Triton other than the usual ones, and with
versions of Triton whose launches are not known to be alike.
"""

import collections
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
import triton
from triton import knobs

from .target import Recorded, Target, is_recording, recording, target_of

# Triton's launches are the same in these versions, from the first to before the last.
_ALIKE = ((3, 6), (3, 10))
_version = tuple(int(part) for part in triton.__version__.split(".")[:2])
_REPLAYS = _ALIKE[0] <= _version < _ALIKE[1] and not knobs.runtime.interpret

# For one kind of pages.
_MOST_RECORDINGS = 256
_2_GIB = 2**31 - 1

# By key, functions of addresses and numbers. None: the call cannot be recorded.
Recordings: TypeAlias = dict[tuple[Any, ...], Callable[..., torch.Tensor | None] | None]
# By the kind of pages.
recordings: collections.defaultdict[Hashable, Recordings] = collections.defaultdict(dict)


class Described(NamedTuple):
    """The tensors that calls share, as far as recordings look at them.

    Attributes:
        recordings: of calls with such tensors.
        addresses: of each tensor.
    """

    recordings: Recordings
    addresses: list[int | None]


def describe(
    tensors: Sequence[torch.Tensor | None], *, sizes: bool = True
) -> tuple[Hashable, list[int | None]]:
    """Return what recordings depend on, and addresses; `sizes`: also whether there are 2 GiB."""
    addresses = [None if x is None else x.data_ptr() for x in tensors]
    kind = (
        tuple([None if x is None else x.dtype for x in tensors]),
        tuple([address and address & 15 for address in addresses]),
        sizes and tuple([x is None or x.untyped_storage().nbytes() <= _2_GIB for x in tensors]),
    )
    return kind, addresses


def run_or_replay(
    operation: Callable[..., Any],
    args: tuple[Any, ...],
    layout: tuple[Any, ...],
    tensors: Sequence[torch.Tensor | None],
    shared: Described,
    **numbers: int,
) -> Any:
    """Return `operation(*args)`, by what an equal call did if there was one.

    Args:
        operation: returns None, or a tensor of `allocate`.
        args: of the operation.
        layout: all that it depends on, besides what follows.
        tensors: those that differ in each call; the first one says the device.
        shared: all other tensors among its arguments.
        numbers: integers that differ in each call. It hands them to kernels by these names, which
            no kernel is specialized for, or not at all.
    """
    if not _REPLAYS or is_recording() or _is_unusual():
        return operation(*args)
    first = tensors[0]
    assert first is not None
    device = first.device
    target = target_of(device)
    kind, addresses = describe(tensors, sizes=not target.is_nvidia)
    known, more = shared
    addresses += more
    key = operation, layout, device, kind, id(target)
    if key not in known:
        with recording() as recorded:
            result = operation(*args)
        if len(known) >= _MOST_RECORDINGS:
            known.clear()
        try:
            known[key] = _compile(recorded, result, target, device, addresses, numbers)
        except LookupError:
            known[key] = None
        return result
    repeat = known[key]
    if repeat is None:
        return operation(*args)
    if device.index is not None and first.is_cuda and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return repeat(addresses, **numbers)
    return repeat(addresses, **numbers)


def _is_unusual() -> bool:
    """Return whether launches are watched, or settings are changed that Triton compiles for."""
    runtime, compilation = knobs.runtime, knobs.compilation
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(
        getattr(enter, "calls", enter) or getattr(leave, "calls", leave)
        or runtime.debug or compilation.instrumentation_mode
        or getattr(compilation, "fpsan_homomorphic_casts", None)
        or getattr(runtime, "add_stages_inspection_hook", None)
    )  # fmt: skip


def _compile(
    recorded: Recorded,
    result: torch.Tensor | None,
    target: Target,
    device: torch.device,
    addresses: list[int | None],
    numbers: dict[str, int],
) -> Callable[..., torch.Tensor | None]:
    """Return a function of other addresses and numbers that does the same as a recorded call.

    Raises:
        LookupError: No later call could be given an argument of a launch, or the result.
    """
    made = recorded.allocations
    # (`torch.empty` takes nearly twice as long.) The target's `id` is in the key.
    objects: dict[str, Any] = {
        "empty": torch.empty_strided, "driver": triton.runtime.driver, "kept": target,
    }  # fmt: skip
    pointers = [(x.data_ptr(), f"m{i}.data_ptr()") for i, x in enumerate(made)]
    pointers += [(x, f"a[{i}]") for i, x in enumerate(addresses) if x is not None]
    counts = collections.Counter(address for address, _ in pointers)
    origins = {address: source for address, source in pointers if counts[address] == 1}
    origins[0] = "0"  # of tensors without elements

    def name(x: Any) -> str:
        name = f"x{len(objects)}"
        objects[name] = x
        return name

    def express(x: Any) -> str:
        if isinstance(x, tuple):
            parts = [express(element) for element in x]
            return f"({', '.join(parts)},)" if set(parts) - objects.keys() else name(x)
        return origins[x.data_ptr()] if isinstance(x, torch.Tensor) else name(x)

    lines = [f"def replay({', '.join(['a', *numbers])}):"]
    for i, x in enumerate(made):
        shape, stride, dtype = name(tuple(x.shape)), name(x.stride()), name(x.dtype)
        lines.append(f"m{i} = empty({shape}, {stride}, dtype={dtype}, device={name(device)})")
    lines.append(f"stream = driver.active.get_current_stream({device.index or 0})")
    for kernel, grid, args, constants, compiled in recorded.launches:
        held = compiled.function, compiled.packed_metadata
        # No metadata and no hooks: see `_is_unusual`.
        parts = [*map(str, (*grid, 1, 1)[:3]), "stream", *map(name, held), *["None"] * 3]
        for parameter, x in zip(kernel.params, args, strict=False):
            if parameter.name not in numbers:
                parts.append(express(x))
            elif x == numbers[parameter.name] and parameter.do_not_specialize:
                parts.append(parameter.name)
            else:
                raise LookupError(parameter.name)
        parts += [name(constants[parameter.name]) for parameter in kernel.params[len(args) :]]
        lines.append(f"{name(compiled.run)}({', '.join(parts)})")
    if result is not None:
        places = {id(x): i for i, x in enumerate(made)}
        lines.append(f"return m{places[id(result)]}")
    exec("\n    ".join(lines), objects)
    replay: Callable[..., torch.Tensor | None] = objects["replay"]
    return replay
