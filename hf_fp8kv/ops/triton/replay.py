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
    the `Target`, and those settings of Triton that are part of its own key.

What there is to know of tensors that come again and again, those of pages and plans, is found out
once (`Described`), and kept with what holds them: such tensors are never given other memory.

Calls that hand a kernel a tensor that torch computed are not recorded. Each call goes the long way
in the interpreter, inside of `recording`, where hooks want to see each launch as Triton makes it,
and with versions of Triton whose launches are not known to be alike.
"""

import itertools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
from triton import knobs

from .target import Launched, is_recording, recording, target_of

# Triton's launches are the same in these versions, from the first to before the last.
_ALIKE = ((3, 6), (3, 10))
_version = tuple(int(part) for part in triton.__version__.split(".")[:2])
_REPLAYS = _ALIKE[0] <= _version < _ALIKE[1] and not knobs.runtime.interpret

_MOST_RECORDINGS = 256
# Two tensors at one address, of which a recording cannot tell which one a kernel took, are rare.
_ATTEMPTS = 3
_2_GIB = 2**31 - 1

# By key, functions of addresses and numbers. An integer: how often a call could not be recorded.
_recordings: dict[tuple[Any, ...], Callable[..., torch.Tensor | None] | int] = {}


class Described(NamedTuple):
    """Some of a call's tensors, as far as recordings look at them.

    Attributes:
        kind: all that a recording depends on.
        addresses: of each tensor.
    """

    kind: Hashable
    addresses: list[int | None]


def describe(tensors: Sequence[torch.Tensor | None], *, sizes: bool = True) -> Described:
    """Return what recordings have to know of tensors; `sizes`: also whether they have 2 GiB."""
    addresses: list[int | None] = []
    dtypes: list[torch.dtype | None] = []
    together = 0
    for x in tensors:
        if x is None:
            addresses.append(None)
            dtypes.append(None)
        else:
            address = x.data_ptr()
            together |= address
            addresses.append(address)
            dtypes.append(x.dtype)
    kind = (
        tuple(dtypes),
        together & 15 and tuple([(address or 0) & 15 == 0 for address in addresses]),
        sizes and tuple([x is None or x.untyped_storage().nbytes() <= _2_GIB for x in tensors]),
    )
    return Described(kind, addresses)


# Equal kinds have the same number, which is compared at once.
_kinds: dict[Hashable, int] = {}
_numbers = itertools.count()


def number_of(kind: Hashable) -> int:
    """Return the number of a kind."""
    return _kinds.setdefault(kind, next(_numbers))


def run_or_replay(
    operation: Callable[..., Any],
    args: tuple[Any, ...],
    layout: tuple[Any, ...],
    tensors: Sequence[torch.Tensor | None],
    others: Sequence[Described],
    **numbers: int,
) -> Any:
    """Return `operation(*args)`, by what an equal call did if there was one.

    Args:
        operation: returns None, or a tensor of `allocate`.
        args: of the operation.
        layout: all that it depends on, besides what follows.
        tensors: those that differ in each call; the first one says the device.
        others: all other tensors among its arguments.
        numbers: integers that differ in each call. It hands them to kernels by these names, which
            no kernel is specialized for, or not at all.
    """
    if not _REPLAYS or is_recording() or _is_watched():
        return operation(*args)
    first = tensors[0]
    assert first is not None
    device = first.device
    target = target_of(device)
    kind, addresses = describe(tensors, sizes=not target.is_nvidia)
    for described in others:
        addresses += described.addresses
    key = (
        operation, layout, device, kind, *[described.kind for described in others], id(target),
        _settings(),
    )  # fmt: skip
    known = _recordings.get(key, 0)
    if isinstance(known, int):
        if known >= _ATTEMPTS:
            return operation(*args)
        with recording() as recorded:
            result = operation(*args)
        if len(_recordings) >= _MOST_RECORDINGS:
            _recordings.clear()
        # Its `id` is in the key.
        source = _Source(device, addresses, numbers, recorded.allocations, {"kept": target})
        try:
            _recordings[key] = source.compile(recorded.launches, result)
        except _UnknownOriginError:
            _recordings[key] = known + 1
        return result
    if device.index is not None and first.is_cuda and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return known(addresses, **numbers)
    return known(addresses, **numbers)


def _is_watched() -> bool:
    """Return whether hooks are set that are told of each launch."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def _settings() -> tuple[Any, ...]:
    """Return the settings that Triton compiles for, and can be changed while a process runs."""
    compilation = knobs.compilation
    return (
        knobs.runtime.debug,
        compilation.instrumentation_mode,
        getattr(compilation, "fpsan_homomorphic_casts", None),
        getattr(knobs.runtime, "add_stages_inspection_hook", None),
    )


class _UnknownOriginError(Exception):
    """An argument or a result that no later call could be given."""


@dataclass
class _Source:
    """The source of a function that does the same as a recorded call.

    Attributes:
        device: of the call's tensors.
        addresses: of these. The function gets others in the same order, as `a`.
        numbers: the function gets others by the same names.
        made: what the call allocated.
        objects: what the function may name.
    """

    device: torch.device
    addresses: list[int | None]
    numbers: dict[str, int]
    made: list[torch.Tensor]
    objects: dict[str, Any]

    def compile(self, launches: list[Launched], result: Any) -> Callable[..., torch.Tensor | None]:
        """Return the function. Raise _UnknownOriginError if a call cannot be repeated."""
        # (`torch.empty` takes nearly twice as long.)
        self.objects |= {"empty": torch.empty_strided, "driver": triton.runtime.driver}
        lines = [f"def replay({', '.join(['a', *self.numbers])}):"]
        for i, x in enumerate(self.made):
            memory = [self.name(y) for y in (tuple(x.shape), x.stride(), x.dtype, self.device)]
            lines += [
                f"m{i} = empty({memory[0]}, {memory[1]}, dtype={memory[2]}, device={memory[3]})",
                f"p{i} = m{i}.data_ptr()",
            ]
        lines.append(f"stream = driver.active.get_current_stream({self.device.index or 0})")
        for kernel, grid, args, constants, compiled in launches:
            if compiled is None:
                raise _UnknownOriginError
            held = compiled.function, compiled.packed_metadata
            # No metadata and no hooks: see `_is_watched`.
            parts = [*map(str, (*grid, 1, 1)[:3]), "stream", *map(self.name, held), *["None"] * 3]
            for i, parameter in enumerate(kernel.params):
                is_given = i < len(args)
                x = args[i] if is_given else constants[parameter.name]
                parts.append(self.express(x, parameter if is_given else None))
            lines.append(f"{self.name(compiled.run)}({', '.join(parts)})")
        returned = [i for i, x in enumerate(self.made) if x is result]
        if result is not None:
            if not returned:
                raise _UnknownOriginError
            lines.append(f"return m{returned[0]}")
        exec("\n    ".join(lines), self.objects)
        replay: Callable[..., torch.Tensor | None] = self.objects["replay"]
        return replay

    def name(self, x: Any) -> str:
        """Return a name that the function has for an object."""
        name = f"x{len(self.objects)}"
        self.objects[name] = x
        return name

    def express(self, x: Any, parameter: Any = None) -> str:
        """Return an argument as the function puts it; `parameter` is Triton's of the kernel."""
        if isinstance(x, tuple):
            parts = [self.express(element) for element in x]
            return f"({', '.join(parts)},)" if set(parts) - self.objects.keys() else self.name(x)
        if isinstance(x, torch.Tensor):
            return self.express_address(x.data_ptr())
        if parameter is not None and parameter.name in self.numbers:
            if x != self.numbers[parameter.name] or not parameter.do_not_specialize:
                raise _UnknownOriginError
            return str(parameter.name)
        return self.name(x)

    def express_address(self, address: int) -> str:
        """Return an address as the function finds it."""
        if not address:
            return "0"  # of a tensor without elements
        for i, tensor in enumerate(self.made):
            if 0 <= address - tensor.data_ptr() < tensor.nbytes:
                return f"p{i} + {address - tensor.data_ptr()}"
        if self.addresses.count(address) != 1:
            raise _UnknownOriginError
        return f"a[{self.addresses.index(address)}]"
