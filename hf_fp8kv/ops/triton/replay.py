"""Calls that are repeated: what an operation asked of Triton once, asked again at other addresses.

Before a kernel starts, codecs, launch parameters and some forty arguments are put together, and
Triton looks at each argument to find what it has compiled. In a model that decodes all of this is
the same in every layer and step, but for the addresses of the tensors and a few numbers. So the
first call is recorded: which tensors it allocated, which kernels it started, and where in their
arguments the addresses and numbers of the call are. A later call that differs in nothing else
allocates the same, and starts the same compiled kernels.

A recording holds no tensor: it serves all layers and caches. What it depends on is its key:

    the operation, and its arguments that are neither tensors nor in `NUMBERS`: `layout`;
    shapes and strides as far as the operation looks at them: part of `layout`, too;
    which tensors there are, of which dtype, on which device, and which are not aligned to 16 bytes:
    of pointers that is what Triton compiles a kernel for (for AMD's GPUs also whether there are
    more than 2 GiB);
    what `assuming` and `override` say, and those settings of Triton that are part of its own key.

What there is to know of tensors that come again and again, those of pages and plans, is found out
once (`Described`), and kept with what holds them: such tensors are never given other memory.

Not recorded are calls that compute something besides starting kernels. In the interpreter, while
kernels are only listed, where hooks want to see each launch as Triton makes it, and with versions
of Triton whose launches are not known to be alike, each call goes the long way.
"""

import itertools
import operator
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch.utils._python_dispatch import TorchDispatchMode
from triton import knobs

from . import target as launching
from . import tuning
from .target import target_of

# Parameters of kernels that have other values in each call, and for which no kernel is specialized.
NUMBERS = ("start", "stop", "limit", "columns", "table_b", "mask_b", "mask_h")
Numbers = tuple[int, int, int, int, int, int, int]

# Triton's launches are the same in these versions, from the first to before the last.
_ALIKE = ((3, 6), (3, 10))
_version = tuple(int(part) for part in triton.__version__.split(".")[:2])
_REPLAYS = _ALIKE[0] <= _version < _ALIKE[1] and not knobs.runtime.interpret

_MOST_RECORDINGS = 256
# A first call may compute what it remembers for later ones.
_ATTEMPTS = 3
_2_GIB = 2**31 - 1


class _Launch(NamedTuple):
    """A compiled kernel, and what to start it with.

    Attributes:
        run, function, metadata: of Triton's `CompiledKernel`.
        grid: of three axes.
        pick: takes the values of a call (`Recording.start`) and returns the arguments.
    """

    run: Callable[..., None]
    function: Any
    metadata: Any
    grid: tuple[int, int, int]
    pick: Callable[[Sequence[Any]], tuple[Any, ...]]


class Described(NamedTuple):
    """Some of a call's tensors, as far as recordings look at them.

    Attributes:
        kind: all that a recording depends on.
        addresses: of each tensor.
    """

    kind: Hashable
    addresses: list[int | None]


class Recording(NamedTuple):
    """What a call did.

    Attributes:
        device: of its tensors.
        allocations: sizes, strides and dtypes of the tensors that it allocated.
        offsets: pairs of an allocation and a number of bytes: addresses within it.
        constants: arguments that are the same in each call.
        groups: of the values, tuples among the arguments, inner ones first.
        launches: in order.
        result: which allocation it returned; None: nothing.
        kept: objects whose `id` is in the key.
    """

    device: torch.device
    allocations: tuple[tuple[tuple[int, ...], tuple[int, ...], torch.dtype], ...]
    offsets: tuple[tuple[int, int], ...]
    constants: tuple[Any, ...]
    groups: tuple[Callable[[Sequence[Any]], tuple[Any, ...]], ...]
    launches: tuple[_Launch, ...]
    result: int | None
    kept: tuple[object, ...]

    def start(self, addresses: list[int | None], numbers: Numbers) -> torch.Tensor | None:
        """Do the same at these addresses, with these numbers; `addresses` is used up."""
        # (`torch.empty` takes nearly twice as long.)
        made = [
            torch.empty_strided(shape, strides, dtype=dtype, device=self.device)
            for shape, strides, dtype in self.allocations
        ]
        values: list[Any] = addresses
        values += [made[i].data_ptr() + offset for i, offset in self.offsets]
        values += numbers
        values += self.constants
        for group in self.groups:
            values.append(group(values))
        stream = triton.runtime.driver.active.get_current_stream(self.device.index or 0)
        for run, function, metadata, grid, pick in self.launches:
            # No metadata and no hooks: see `_is_watched`.
            run(*grid, stream, function, metadata, None, None, None, *pick(values))
        return None if self.result is None else made[self.result]


# By key; a number: how often such a call could not be recorded.
_recordings: dict[tuple[Any, ...], Recording | int] = {}


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
    numbers: Numbers,
    others: Sequence[Described],
) -> Any:
    """Return `operation(*args)`, by what an equal call did if there was one.

    Args:
        operation: returns None, or a tensor that it allocated.
        args: of the operation.
        layout: all that it depends on, besides what follows.
        tensors: those that differ in each call; the first one says the device.
        numbers: values of `NUMBERS`, which it hands to kernels by these names, or not at all.
        others: all other tensors among its arguments.
    """
    if not _REPLAYS or launching.is_listing() or _is_watched():
        return operation(*args)
    first = tensors[0]
    assert first is not None
    device = first.device
    target, overrides = target_of(device), tuning.overrides()
    kind, addresses = describe(tensors, sizes=not target.is_nvidia)
    for described in others:
        addresses += described.addresses
    key = (
        operation, layout, device, kind, *[described.kind for described in others], id(target),
        id(overrides), _settings(),
    )  # fmt: skip
    known = _recordings.get(key, 0)
    if isinstance(known, int):
        if known >= _ATTEMPTS:
            return operation(*args)
        return _record(key, known, operation, args, addresses, numbers, (target, overrides))
    if device.index is not None and first.is_cuda and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return known.start(addresses, numbers)
    return known.start(addresses, numbers)


def _is_watched() -> bool:
    """Return whether hooks are set that are told of each launch."""
    runtime = knobs.runtime
    return _has_hooks(runtime.launch_enter_hook) or _has_hooks(runtime.launch_exit_hook)


def _has_hooks(hook: Any) -> bool:
    return bool(hook is not None and getattr(hook, "calls", True))


def _settings() -> tuple[Any, ...]:
    """Return the settings that Triton compiles for, and can be changed while a process runs."""
    compilation = knobs.compilation
    return (
        knobs.runtime.debug,
        compilation.instrumentation_mode,
        getattr(compilation, "fpsan_homomorphic_casts", None),
        getattr(knobs.runtime, "add_stages_inspection_hook", None),
    )


# -- recording -----------------------------------------------------------------------------------


class _Allocations(TorchDispatchMode):
    """Take down what torch allocates, and whether it computes anything."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[torch.Tensor] = []
        self.computes = False

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if function in _ALLOCATE:
            self.made.append(result)
        elif not all(x.alias_info and not x.alias_info.is_write for x in function._schema.returns):
            self.computes = True
        return result


_ALLOCATE = (torch.ops.aten.empty.memory_format, torch.ops.aten.new_empty.default)


def _record(
    key: tuple[Any, ...],
    failures: int,
    operation: Callable[..., Any],
    args: tuple[Any, ...],
    addresses: list[int | None],
    numbers: Numbers,
    kept: tuple[object, ...],
) -> Any:
    """Return `operation(*args)`, and note under `key` what it did."""
    with launching.recording() as launches, _Allocations() as allocations:
        result = operation(*args)
    recording = None
    if not allocations.computes:
        notes = _Notes(addresses, allocations.made, numbers)
        recording = notes.finish(launches, result, key[2], kept)
    if len(_recordings) >= _MOST_RECORDINGS:
        _recordings.clear()
    _recordings[key] = failures + 1 if recording is None else recording
    return result


# Where an argument comes from: a section of the values of `Recording.start`, and a place in it.
_Place = tuple[str, int]
_SECTIONS = ("addresses", "offsets", "numbers", "constants", "groups")


class _UnknownOriginError(Exception):
    """An argument that no later call could be given."""


class _Notes:
    """Where the arguments of recorded launches come from."""

    def __init__(
        self, addresses: list[int | None], made: list[torch.Tensor], numbers: Numbers
    ) -> None:
        self.addresses, self.made = addresses, made
        self.numbers = dict(zip(NUMBERS, numbers, strict=True))
        self.offsets: list[tuple[int, int]] = []
        self.constants: list[Any] = []
        self.groups: list[list[_Place]] = []

    def locate(self, x: Any, parameter: Any = None) -> _Place:
        """Return where a later call finds an argument; `parameter` is Triton's of the kernel."""
        if isinstance(x, tuple):
            return self._locate_group([self.locate(element) for element in x], x)
        if isinstance(x, torch.Tensor):
            return self._locate_address(x.data_ptr())
        if parameter is not None and parameter.name in self.numbers:
            if x != self.numbers[parameter.name] or not parameter.do_not_specialize:
                raise _UnknownOriginError
            return "numbers", NUMBERS.index(parameter.name)
        return self._add_constant(x)

    def _add_constant(self, x: Any) -> _Place:
        self.constants.append(x)
        return "constants", len(self.constants) - 1

    def _locate_group(self, places: list[_Place], x: tuple[Any, ...]) -> _Place:
        if all(section == "constants" for section, _ in places):
            return self._add_constant(x)
        self.groups.append(places)
        return "groups", len(self.groups) - 1

    def _locate_address(self, address: int) -> _Place:
        if not address:
            return self._add_constant(0)  # of a tensor without elements
        for i, tensor in enumerate(self.made):
            offset = address - tensor.data_ptr()
            if 0 <= offset < tensor.nbytes:
                self.offsets.append((i, offset))
                return "offsets", len(self.offsets) - 1
        # Of two tensors at one address it cannot be told which one it was.
        if self.addresses.count(address) != 1:
            raise _UnknownOriginError
        return "addresses", self.addresses.index(address)

    def finish(
        self, launches: list[Any], result: Any, device: torch.device, kept: tuple[object, ...]
    ) -> Recording | None:
        """Return the recording; None: it could not be repeated."""
        results = [i for i, tensor in enumerate(self.made) if tensor is result]
        try:
            if (result is not None and not results) or any(x.compiled is None for x in launches):
                return None
            all_places = [self._places(x) for x in launches]
        except _UnknownOriginError:
            return None
        sizes = {
            "addresses": len(self.addresses), "offsets": len(self.offsets),
            "numbers": len(NUMBERS), "constants": len(self.constants), "groups": len(self.groups),
        }  # fmt: skip
        begins = {name: sum(sizes[x] for x in _SECTIONS[:i]) for i, name in enumerate(_SECTIONS)}

        def picker(places: list[_Place]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
            return _make_picker([begins[section] + i for section, i in places])

        return Recording(
            device=device,
            allocations=tuple((tuple(x.shape), x.stride(), x.dtype) for x in self.made),
            offsets=tuple(self.offsets),
            constants=tuple(self.constants),
            groups=tuple(picker(places) for places in self.groups),
            launches=tuple(
                _Launch(
                    x.compiled.run, x.compiled.function, x.compiled.packed_metadata,
                    (*x.grid, 1, 1)[:3], picker(places),
                )
                for x, places in zip(launches, all_places, strict=True)
            ),
            result=results[0] if results else None,
            kept=kept,
        )  # fmt: skip

    def _places(self, launch: Any) -> list[_Place]:
        """Return the places of all arguments of a launch, constexpr ones among them."""
        places = []
        parameters = launch.kernel.params
        for i, parameter in enumerate(parameters):
            if i < len(launch.args):
                places.append(self.locate(launch.args[i], parameter))
            else:
                places.append(self._add_constant(launch.constants[parameter.name]))
        return places


def _make_picker(indices: list[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """Return what takes these elements of a sequence."""
    if len(indices) == 1:
        return lambda values: (values[indices[0]],)
    return operator.itemgetter(*indices)
