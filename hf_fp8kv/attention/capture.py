"""Captured steps: `generate()` records a decode step as a CUDA graph once, and then replays it.

    prompt | step 1      step 2    | step 3   | step 4, 5, ...
    eager  | eager, described      | captured | replayed

A graph repeats operations on the same addresses with the same numbers. It is only made if two eager
steps consist of equal operations (`StepDescription`). The inputs of a step are copied to buffers
with constant addresses. A growing cache reserves pages for the next steps (`PagedLayers.reserve`).

A graph never meets a model or a cache that it was not captured for. It belongs to one call of
`generate()`, whose frame alone refers to its `CapturedStep`. So other threads have other graphs and
buffers, and so do later calls, after a change of adapters, weights, attention, dtype, batch or
training mode, or after an exception in a processor. Within a call, a graph is replayed only if the
inputs have equal shapes, dtypes, devices and constants, and if every layer has the same length,
block table and pages. `crop`, `reset`, `fork`, a change of the batch and an error replace these
objects. Weights that are written in place are read by the next replay. A processor that replaces
weights or switches adapters in the middle of a call is not noticed.
"""

import itertools
import operator
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from transformers import EncoderDecoderCache

from ..cache.cache import FP8PagedCache
from ..errors import OutOfPagesError
from ..modeling.methods import ModelMethod
from ..modeling.model_support import CACHE
from ..utils.warn_once import warn_once

Tensor = torch.Tensor
# Environment variable that turns captured steps off if it is "0".
ENVIRONMENT_VARIABLE = "HF_FP8KV_CAPTURE"
# Minimum number of new tokens that `generate()` must allow. The first tokens are not replayed.
MIN_NEW_TOKENS = 16
# Minimum number of tokens per sequence, and share of the tokens, to reserve pages for.
MIN_RESERVED_TOKENS = 1024
RESERVED_DIVISOR = 8
# Maximum number of times that the inputs of a call may change their shapes.
MAX_KEY_CHANGES = 4
# Properties of an operation that a graph cannot repeat, by torch's tag.
_TAGS = {
    torch.Tag.data_dependent_output: "reads a value on the host",
    torch.Tag.dynamic_output_shape: "has a result whose shape depends on values",
    torch.Tag.nondeterministic_seeded: "draws random numbers",
}
# Operations whose results only have a shape that depends on values if an index is a mask.
_INDEX_OPERATIONS = ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_")
_MASK_DTYPES = (torch.bool, torch.uint8)
# Methods that read the memory of a tensor on a CPU without an operation.
_HOST_READS = ("tolist", "numpy", "__array__", "__dlpack__", "data_ptr")


class CaptureError(Exception):
    """A graph could not be captured. No operation was executed."""


class Graph(Protocol):
    """A recorded sequence of operations."""

    def capture(self, run: Callable[[], Any]) -> Any:
        """Record and execute the operations of `run()`, and return its result."""

    def replay(self) -> None:
        """Execute the operations again, at the same addresses."""


class CudaGraph:
    """A CUDA graph with its own memory pool, which is freed with this object."""

    def capture(self, run: Callable[[], Any]) -> Any:
        """Record and execute the operations of `run()`, and return its result.

        After CaptureError, no operation was executed.
        """
        self._graph = graph = torch.cuda.CUDAGraph()
        stream, current = torch.cuda.Stream(), torch.cuda.current_stream()
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        old_state = generator.clone_state()
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            # Other threads may call functions that a graph cannot capture.
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                result = run()
                graph.capture_end()
            except Exception as error:
                # A capture that fails has to be ended, and its generator would refuse to continue.
                with suppress(RuntimeError):
                    graph.capture_end()
                generator.graphsafe_set_state(old_state)
                raise CaptureError(f"{type(error).__name__}: {error}") from error
        current.wait_stream(stream)
        self.replay()
        return result

    def replay(self) -> None:
        """Execute the operations again, at the same addresses."""
        self._graph.replay()


_LOG_MESSAGE = "capture: the steps of {} run eagerly, because {}"
# Class of graphs by type of device. Tests add a class for CPUs.
GRAPHS: dict[str, Callable[[], Graph]] = {"cuda": CudaGraph}


class _HostReads(TorchFunctionMode):
    """A mode that calls `report` with the name of each method in `_HOST_READS`."""

    def __init__(self, report: Callable[[str], None]) -> None:
        super().__init__()
        self.report = report

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in _HOST_READS:
            self.report(f"Tensor.{name} reads a value on the host")
        return func(*args, **(kwargs or {}))


class _TensorDescription(NamedTuple):
    """Description of an argument that is a tensor.

    Attributes:
        origin: The operation of the step that made the memory, or a number of older memory.
        layout: Offset, shape, strides, dtype and device.
    """

    origin: tuple[str, int]
    layout: tuple[Any, ...]


class StepDescription(TorchDispatchMode):
    """A mode that describes each operation of a step.

    If two steps have equal descriptions, a third step consists of the same operations on the same
    memory with the same numbers, so a graph can repeat them.

    Attributes:
        calls: Name and described arguments of each operation.
        obstacle: Why a graph cannot repeat the step, or "".
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.calls: list[tuple[str, list[Any]]] = []
        self.obstacle = ""
        self._device, self._host_reads = device, _HostReads(self.report)
        # Index of the operation that made a storage, by the storage's number. A weak reference
        # reserves the number, even if the storage is freed during the step.
        self._makers: dict[int, tuple[int, StorageWeakRef]] = {}
        # Storages that existed before the step. They are kept alive for the graph.
        self._old_storages: dict[int, Any] = {}

    def __enter__(self) -> "StepDescription":
        self._host_reads.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._host_reads.__exit__(*error)

    def report(self, obstacle: str) -> None:
        """Set `obstacle`, unless it is set."""
        self.obstacle = self.obstacle or obstacle

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves, structure = tree_flatten((args, kwargs))
        # A tensor of Python numbers is new in each step, so its values are compared.
        is_constant = func is torch.ops.aten.lift_fresh.default
        described = [x.tolist() if is_constant else self._describe(x) for x in leaves]
        result = func(*args, **kwargs)
        results = _find_tensors(tree_leaves(result))
        if not is_constant:
            self._check(func, args, _find_tensors(leaves), results)
        for tensor in results:
            storage = tensor.untyped_storage()
            if not self._is_known(storage):
                self._makers[storage._cdata] = len(self.calls), StorageWeakRef(storage)
        self.calls.append((str(func), [structure, *described]))
        return result

    def _is_known(self, storage: Any) -> bool:
        return storage._cdata in self._old_storages or storage._cdata in self._makers

    def _check(self, func: Any, args: Any, inputs: list[Tensor], results: list[Tensor]) -> None:
        """Set `obstacle` if a graph cannot repeat an operation."""
        tags = [tag for tag in _TAGS if tag in func.tags]
        if func._schema.name in _INDEX_OPERATIONS:
            has_mask = any(x.dtype in _MASK_DTYPES for x in inputs[1:])
            tags = [torch.Tag.dynamic_output_shape] if has_mask else []
        names = [argument.name for argument in func._schema.arguments]
        if "dropout_p" in names and not any(args[names.index("dropout_p") :][:1]):
            tags = []  # without dropout, attention draws no numbers
        for tag in tags:
            self.report(f"{func} {_TAGS[tag]}")
        devices = {x.device for x in (*inputs, *results) if x.ndim}
        has_old = any(x.untyped_storage()._cdata in self._old_storages for x in inputs if x.is_cpu)
        if len(devices) > 1 or (has_old and self._device.type != "cpu"):
            self.report(f"{func} reads or copies a tensor of a different device")

    def _describe(self, x: Any) -> Any:
        """Return a description of an argument. Arguments with equal descriptions are equal."""
        if not isinstance(x, Tensor):
            return type(x), repr(x) if isinstance(x, float) else x
        if is_traceable_wrapper_subclass(x):
            names, context = x.__tensor_flatten__()
            return type(x), context, x.shape, [self._describe(getattr(x, name)) for name in names]
        storage = x.untyped_storage()
        layout = x.storage_offset(), x.shape, x.stride(), x.dtype, x.device
        if (maker := self._makers.get(storage._cdata)) is not None:
            return _TensorDescription(("operation", maker[0]), layout)
        self._old_storages[storage._cdata] = storage
        return _TensorDescription(("memory", storage._cdata), layout)

    def add_result(self, result: Any) -> None:
        """Describe the result of the step. Only the logits may be a new tensor."""
        tensors = _find_tensors(tree_leaves(result))
        self.calls.append(("the result", [self._describe(x) for x in tensors]))
        logits = getattr(result, "logits", None)
        if any(x is not logits and x.untyped_storage()._cdata in self._makers for x in tensors):
            self.report("the model returns new tensors in addition to the logits")

    def find_difference(self, other: "StepDescription") -> str:
        """Return the first difference from the previous step `other`, or ""."""
        for (name, arguments), (old_name, old_arguments) in zip(
            self.calls, other.calls, strict=False
        ):
            if name != old_name:
                return f"a step calls {name} where the previous step calls {old_name}"
            for new, old in zip(arguments, old_arguments, strict=False):
                if new != old:
                    return f"{name} {_explain_difference(new, old)}"
        is_longer = len(self.calls) != len(other.calls)
        return "steps have different numbers of operations" if is_longer else ""


def _explain_difference(new: Any, old: Any) -> str:
    if isinstance(new, _TensorDescription) and isinstance(old, _TensorDescription):
        if new.layout == old.layout:
            return "reads different memory in each step"
        return "reads tensors of different sizes in each step"
    return f"gets {new!s:.80} after {old!s:.80} in the previous step"


def _find_tensors(leaves: Iterable[Any]) -> list[Tensor]:
    """Return the tensors among `leaves`, and those inside wrappers instead of the wrappers."""
    tensors = list[Tensor]()
    for x in leaves:
        if isinstance(x, Tensor) and is_traceable_wrapper_subclass(x):
            tensors += _find_tensors(getattr(x, name) for name in x.__tensor_flatten__()[0])
        elif isinstance(x, Tensor):
            tensors.append(x)
    return tensors


class _Inputs:
    """The inputs of a step.

    Attributes:
        tensors: All tensors, including those inside wrappers.
        key: Everything else, and the shapes, dtypes and devices of the tensors.
    """

    def __init__(self, inputs: dict[str, Any]) -> None:
        leaves, self._structure = tree_flatten(inputs)
        self._parts = [_split_leaf(x) for x in leaves]
        self.tensors = _find_tensors(leaves)
        layouts = [(x.shape, x.dtype, x.device) for x in self.tensors]
        self.key = self._structure, self._parts, layouts

    def make_buffers(self) -> tuple[list[Tensor], dict[str, Any]]:
        """Return contiguous copies of the tensors, and inputs that consist of these copies."""
        copies = [x.clone(memory_format=torch.contiguous_format) for x in self.tensors]
        remaining = iter(copies)
        leaves = []
        for part in self._parts:
            if not isinstance(part, _Part):
                leaves.append(part)
            elif part.wrapper is Tensor:
                leaves.append(next(remaining))
            else:
                inner = {name: next(remaining) for name in part.names}
                leaves.append(part.wrapper.__tensor_unflatten__(inner, *part.metadata))
        return copies, tree_unflatten(leaves, self._structure)


class _Part(NamedTuple):
    """A tensor among the inputs, without its values.

    Attributes:
        wrapper: Type of a wrapper, or `Tensor`.
        names: Names of the tensors inside the wrapper.
        metadata: Other arguments of its `__tensor_unflatten__`.
    """

    wrapper: Any
    names: tuple[str, ...] = ()
    metadata: tuple[Any, ...] = ()


def _split_leaf(x: Any) -> Any:
    """Return a `_Part` for a tensor, and any other object unchanged."""
    if not isinstance(x, Tensor):
        return x
    if not is_traceable_wrapper_subclass(x):
        return _Part(Tensor)
    names, context = x.__tensor_flatten__()
    return _Part(type(x), tuple(names), (context, x.shape, x.stride()))


class CapturedStep:
    """The forward of one `generate()`, which replays a graph after three steps.

    Attributes:
        model: The model.
        cache: Cache of the decoder's self-attention.
        max_length: Number of tokens per sequence that the call may store.
        reason: Why the steps of this call are not captured, or "".
        num_steps, num_replays: Number of calls, and of calls that replayed a graph.
    """

    def __init__(self, model: Any, cache: FP8PagedCache, max_length: int) -> None:
        self.model, self.cache, self.max_length = model, cache, max_length
        self.reason = ""
        self.num_steps = self.num_replays = 0
        self._num_left = 0  # number of tokens for which pages are reserved
        # A fork of the cache and the function that prepares the inputs, until a step has succeeded.
        self._backup: FP8PagedCache | None = None
        self._prepare: Callable[[], dict[str, Any]] = dict
        self._forget()

    def _forget(self) -> None:
        """Drop the graph and everything that belongs to it."""
        self._key: Any = None
        self._state: list[Any] = []
        self._descriptions: list[StepDescription] = []
        self._graph: Graph | None = None
        self._result: Any = None

    def begin(self) -> None:
        """Reserve pages after the prompt, if enough steps may follow."""
        length = self.cache.host_length()
        # Drafts and assisted decoding remove tokens after each step, so they record the past.
        records_past = any(x.record_past for x in self.cache._paged.groups.values())
        if 0 < length <= self.max_length + 1 - MIN_NEW_TOKENS and not records_past:
            if not self.cache.options.is_preallocated:
                self._backup = self.cache.fork()
            self._num_key_changes = 0
            self.reserve()

    def end(self) -> None:
        """Free the graph and reserved pages, and log why steps were not captured."""
        self._forget()
        self.cache._paged.unreserve()
        if self.reason:
            warn_once(_LOG_MESSAGE.format(type(self.model).__name__, self.reason))

    def reserve(self) -> None:
        """Reserve pages for the next steps, whose addresses are then constant."""
        self._forget()
        self._num_left = 0
        cache, paged = self.cache, self.cache._paged
        paged.unreserve()
        length = cache.host_length()
        counting_layers = [x for x in cache.stock_layers if counts_on_host(x)]
        if counting_layers or {*paged.read_lengths()} != {length}:
            name = type(counting_layers[0]).__name__ if counting_layers else "a layer without steps"
            self.refuse(f"the cache has {name}")
        elif cache.options.max_cache_len is not None:
            self._num_left = cache.options.max_cache_len - length
        elif length < self.max_length:
            # Pages of a window that no step reads any more are only freed by this method.
            has_windows = any(window is not None for window in paged.groups)
            share = 0 if has_windows else length // RESERVED_DIVISOR
            capacity = min(length + max(MIN_RESERVED_TOKENS, share), self.max_length)
            try:
                paged.reserve(capacity)
                self._num_left = capacity - length
            except OutOfPagesError as error:
                self.refuse(str(error))

    def refuse(self, reason: str) -> None:
        """Run all further steps of this call eagerly."""
        self.reason = reason
        self._backup = None
        self._forget()
        self.cache._paged.unreserve()

    def prepare(self, run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the inputs of a step, which `run()` prepares for the cache."""
        self._prepare = run
        try:
            return run()
        except Exception as error:  # models that need a growing cache raise any error
            if self._backup is None:
                raise
            self._restore(error)
            return run()

    def _restore(self, error: Exception) -> None:
        """Restore the cache as it was before a step that raised `error`."""
        vars(self.cache).update(vars(self._backup))
        message = f"{type(error).__name__}: {error}"
        self.refuse(f"it cannot use a preallocated cache ({message:.150})")

    def __call__(self, **inputs: Any) -> Any:
        """Compute a step. The next replay overwrites the logits."""
        self.num_steps += 1
        if self.reason or self._num_left < 1:
            return self.model(**inputs)
        ids = inputs.get("input_ids", inputs.get("decoder_input_ids"))
        if ids is None or ids.shape[1] != 1 or not self.cache.is_compileable:
            result = self.model(**inputs)
            self.reserve()
            return result
        result = self._run(inputs)
        self._num_left -= 1
        if not self.reason and self._num_left < 1:
            self.reserve()
        return result

    def _run(self, inputs: dict[str, Any]) -> Any:
        """Describe, capture or replay a step of one token per sequence."""
        new, state = _Inputs(inputs), self._find_state()
        if new.key != self._key or not all(map(operator.is_, state, self._state)):
            self._num_key_changes += 1
            self._forget()
            self._key, self._state = new.key, state
            self._buffers, self._inputs = new.make_buffers()
        torch._foreach_copy_(self._buffers, new.tensors)
        if self._graph is not None:
            self._graph.replay()
            self.num_replays += 1
            return self._result
        if len(self._descriptions) < 2:
            return self._describe()
        graph = GRAPHS[self.model.device.type]()
        try:
            self._result = graph.capture(lambda: self.model(**self._inputs))
        except CaptureError as error:
            result = self.model(**self._inputs)
            self.refuse(str(error))
            return result
        self._graph = graph
        return self._result

    def _find_state(self) -> list[Any]:
        """Return objects that are replaced when an address in the cache changes."""
        stores = self.cache._paged.stores
        layers = [(x.length, x.length.table, x.pool.blocks.offsets) for x in stores]
        return [stores[0].length.is_empty, *itertools.chain(*layers)]

    def _describe(self) -> Any:
        """Compute a step eagerly, and decide whether a graph can repeat it."""
        description = StepDescription(self.model.device)
        try:
            with description:
                result = self.model(**self._inputs)
        except Exception as error:  # as in `prepare`
            if self._backup is None:
                raise
            self._restore(error)
            return self.model(**self._prepare(), return_dict=True)
        self._backup = None
        description.add_result(result)
        reason = description.obstacle
        if not reason and self._descriptions:
            reason = description.find_difference(self._descriptions[0])
        elif self._num_key_changes > MAX_KEY_CHANGES:
            reason = "its inputs have different shapes or constants in each step"
        self._descriptions.append(description)
        if reason:
            self.refuse(reason)
        return result


def counts_on_host(layer: Any) -> bool:
    """Return whether a layer of transformers counts its tokens in Python, as a graph cannot."""
    if not layer.is_compileable:
        return True
    return getattr(layer, "keys", None) is not None and isinstance(layer.get_seq_length(), int)


class _Thread(threading.local):
    """The `CapturedStep` of the last `generate()` of this thread.

    Attributes:
        new_step: A step until `get_compiled_call` returns it.
        last_step: A weak reference to the step that it returned last.
    """

    new_step: CapturedStep | None = None
    last_step: Callable[[], CapturedStep | None] = staticmethod(lambda: None)


_thread = _Thread()


def choose_forward(method: ModelMethod, model_kwargs: dict[str, Any], config: Any) -> bool:
    """Decide whether `generate()` asks `get_compiled_call` for the forward of its steps.

    `config` is the generation config of this call.
    """
    cache = model_kwargs.get(CACHE)
    if isinstance(cache, EncoderDecoderCache):
        cache = cache.self_attention_cache
    _thread.new_step = None
    _thread.last_step = lambda: None
    is_off = os.environ.get(ENVIRONMENT_VARIABLE) == "0"
    if is_off or config.compile_config is not None or not isinstance(cache, FP8PagedCache):
        return bool(method.original_method(model_kwargs, config))
    if config.disable_compile or config.prefill_chunk_size or cache.options.offloading:
        return False
    model = method.model
    has_graphs = model.device.type in GRAPHS
    reason = find_refusal(model) if has_graphs else f"{model.device} has no graphs"
    if reason:
        warn_once(_LOG_MESSAGE.format(type(model).__name__, reason))
        return False
    embeddings = model_kwargs.get("inputs_embeds")
    num_embeddings = 0 if embeddings is None else embeddings.shape[1]
    _thread.new_step = CapturedStep(model, cache, config.max_length - 1 + num_embeddings)
    return True


def get_forward(method: ModelMethod, compile_config: Any) -> Any:
    """Return the step that `choose_forward` has made, or a compiled forward."""
    new_step, _thread.new_step = _thread.new_step, None
    if new_step is None:
        return method.original_method(compile_config)
    _thread.last_step = weakref.ref(new_step)
    return new_step


def prepare_inputs(method: ModelMethod, *args: Any, **kwargs: Any) -> Any:
    """Prepare the inputs of a step with the function `method.arguments[0]`."""
    run = partial(method.arguments[0], method, *args, **kwargs)
    step = _thread.last_step()
    return run() if step is None or step.model is not method.model else step.prepare(run)


@contextmanager
def decode(method: ModelMethod) -> Iterator[None]:
    """Run the steps of `generate()` after the prompt."""
    step = _thread.last_step()
    with method.original_method():
        if step is not None and step.model is method.model:
            step.begin()
        try:
            yield
        finally:
            if step is not None:
                step.end()


def find_refusal(model: Any) -> str:
    """Return why no step of a model can be captured, or ""."""
    modules = list(model.modules())
    hooks = [
        h for x in modules for h in (*x._forward_hooks.values(), *x._forward_pre_hooks.values())
    ]
    if len(set(getattr(model, "hf_device_map", {}).values())) > 1:
        return "the model is on several devices"
    if any(hasattr(x, "_hf_hook") for x in modules):
        return "modules have hooks of accelerate"
    if any(x._compiled_call_impl is not None or hasattr(x, "_orig_mod") for x in modules):
        return "modules are compiled"
    packages = {getattr(hook, "__module__", "").split(".")[0] for hook in hooks}
    if packages - {"hf_fp8kv", "transformers"}:
        return "modules have forward hooks, which a graph would not call"
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is not None and not quantizer.is_compileable:
        return "its quantizer does not support it"
    return ""
