"""Captured steps: `generate()` records a decode step as a CUDA graph once, and then replays it.

    prompt | step 1      step 2    | step 3   | step 4, 5, ...
    eager  | eager, described      | captured | replayed

A graph repeats operations on the same addresses with the same numbers. It is only made if two eager
steps consist of equal operations (`StepDescription`). The inputs of a step are copied to buffers
with constant addresses. A growing cache reserves pages for the next steps (`PagedLayers.reserve`).

A graph belongs to one call of `generate()`, which alone refers to its `CapturedStep`. Calls in
other threads, and later calls (with different adapters, weights, attention, dtype, batch or mode, or
after an exception in a processor) have their own. Within a call, a graph is replayed only if the
inputs have equal shapes, dtypes, devices and constants, and if every layer still has the same
length, block table and pages. `crop`, `reset`, `fork`, a change of the batch and every error in a
step replace them.
"""

import operator
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol

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
# Properties of an operation that a graph cannot repeat, by torch's tag.
_TAGS = {
    torch.Tag.data_dependent_output: "reads a value on the host",
    torch.Tag.dynamic_output_shape: "has a result whose shape depends on values",
    torch.Tag.nondeterministic_seeded: "draws random numbers",
}
_INDEX_OPERATIONS = ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_")
# Methods that read the memory of a tensor on a CPU without an operation.
_HOST_READS = ("tolist", "numpy", "__array__", "__dlpack__", "data_ptr")


class Graph(Protocol):
    """A recorded sequence of operations."""

    def capture(self, run: Callable[[], Any]) -> Any:
        """Record and execute the operations of `run()`, and return its result."""

    def replay(self) -> None:
        """Execute the operations again, at the same addresses."""


class CudaGraph:
    """A CUDA graph with its own memory pool, which is freed with this object."""

    def capture(self, run: Callable[[], Any]) -> Any:
        """Record and execute the operations of `run()`, and return its result."""
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
            except BaseException:
                # An invalid capture can only be ended. The generator would stay in the state of a
                # capture.
                with suppress(RuntimeError):
                    graph.capture_end()
                generator.graphsafe_set_state(old_state)
                raise
        current.wait_stream(stream)
        self.replay()
        return result

    def replay(self) -> None:
        """Execute the operations again, at the same addresses."""
        self._graph.replay()


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


class StepDescription(TorchDispatchMode):
    """A mode that describes each operation of a step.

    The description has the function, the arguments that are not tensors, and the shape, layout and
    origin of each tensor. The origin is the operation of this step that made its memory, or the
    memory itself.

    Attributes:
        calls: Description of each operation.
        obstacle: Why the step cannot be repeated by a graph, or "".
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.calls: list[tuple[str, list[Any]]] = []
        self.obstacle = ""
        self._is_cpu = device.type == "cpu"
        self._host_reads = _HostReads(self._report)
        # Index of the operation that made a storage. A weak reference keeps its number in use, so
        # that no other storage gets this number during the step.
        self._makers: dict[int, tuple[int, StorageWeakRef]] = {}
        # Storages that existed before the step, which later descriptions refer to by number.
        self._old_storages: dict[int, Any] = {}

    def __enter__(self) -> "StepDescription":
        self._host_reads.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._host_reads.__exit__(*error)

    def _report(self, obstacle: str) -> None:
        self.obstacle = self.obstacle or obstacle

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves, structure = tree_flatten((args, kwargs))
        # Tensors from numbers and lists have the same values in both steps if these are equal.
        is_constant = func is torch.ops.aten.lift_fresh.default
        described = [x.tolist() if is_constant else self._describe(x) for x in leaves]
        result = func(*args, **kwargs)
        results = _find_tensors(tree_leaves(result))
        self._check(func, [x for x in leaves if isinstance(x, Tensor)], results, is_constant)
        for tensor in results:
            storage = tensor.untyped_storage()
            number = storage._cdata
            if number not in self._old_storages and number not in self._makers:
                self._makers[number] = len(self.calls), StorageWeakRef(storage)
        self.calls.append((str(func), [structure, *described]))
        return result

    def _check(self, func: Any, inputs: list[Tensor], results: list[Tensor], is_new: bool) -> None:
        """Set `obstacle` if an operation cannot be repeated by a graph."""
        has_mask = any(x.dtype in (torch.bool, torch.uint8) for x in inputs[1:])
        if func._schema.name in _INDEX_OPERATIONS:
            if has_mask:
                self._report(f"{func} has a result whose shape depends on values")
            return
        for tag, reason in _TAGS.items():
            if tag in func.tags:
                self._report(f"{func} {reason}")
        devices = {x.device.type for x in (*inputs, *results) if x.ndim}
        if len(devices) > 1:
            self._report(f"{func} copies between the host and the device")
        if not self._is_cpu and not is_new:
            old = self._old_storages
            if any(x.is_cpu and x.untyped_storage()._cdata in old for x in inputs):
                self._report(f"{func} reads a tensor in host memory")

    def _describe(self, x: Any) -> Any:
        """Return a description of an argument, which equals that of an argument with its effect."""
        if not isinstance(x, Tensor):
            return type(x), repr(x) if isinstance(x, float) else x
        if is_traceable_wrapper_subclass(x):
            names, context = x.__tensor_flatten__()
            return type(x), context, x.shape, [self._describe(getattr(x, name)) for name in names]
        storage = x.untyped_storage()
        maker = self._makers.get(storage._cdata)
        if maker is None:
            self._old_storages[storage._cdata] = storage
        origin = ("memory", storage._cdata) if maker is None else ("operation", maker[0])
        return origin, x.storage_offset(), x.shape, x.stride(), x.dtype, x.device

    def describe_result(self, result: Any) -> None:
        """Describe the result of the step, whose only new tensor may be the logits."""
        tensors = _find_tensors(tree_leaves(result))
        self.calls.append(("the result", [self._describe(x) for x in tensors]))
        logits = getattr(result, "logits", None)
        if any(x is not logits and x.untyped_storage()._cdata in self._makers for x in tensors):
            self._report("the model returns new tensors in addition to the logits")

    def find_difference(self, other: "StepDescription") -> str:
        """Return why the steps differ, or "" if they are equal."""
        for (name, mine), (other_name, others) in zip(self.calls, other.calls, strict=False):
            if name != other_name:
                return f"a step calls {name}, and the next step {other_name}"
            for x, y in zip(mine, others, strict=False):
                if x != y:
                    return f"an argument of {name} is {_shorten(x)}, and in the next step " + (
                        _shorten(y)
                    )
        numbers = len(self.calls), len(other.calls)
        return "" if numbers[0] == numbers[1] else "a step has {} operations, the next {}".format(
            *numbers
        )


def _find_tensors(leaves: list[Any]) -> list[Tensor]:
    """Return the tensors among `leaves`. Tensors inside a wrapper are listed instead of it."""
    tensors = []
    for x in leaves:
        if isinstance(x, Tensor) and is_traceable_wrapper_subclass(x):
            tensors += _find_tensors([getattr(x, name) for name in x.__tensor_flatten__()[0]])
        elif isinstance(x, Tensor):
            tensors.append(x)
    return tensors


def _shorten(x: Any) -> str:
    return str(x)[:100]


class _Inputs:
    """The inputs of a step as a list of tensors, and all other data as a comparable key."""

    def __init__(self, inputs: dict[str, Any]) -> None:
        leaves, self._structure = tree_flatten(inputs)
        self.tensors: list[Tensor] = []
        self._parts: list[Any] = []
        for x in leaves:
            if isinstance(x, Tensor) and is_traceable_wrapper_subclass(x):
                names, context = x.__tensor_flatten__()
                self.tensors += [getattr(x, name) for name in names]
                self._parts.append((type(x), names, context, x.shape, x.stride()))
            elif isinstance(x, Tensor):
                self.tensors.append(x)
                self._parts.append(Tensor)
            else:
                self._parts.append(x)
        self.key = self._structure, self._parts, [(x.shape, x.dtype, x.device) for x in self.tensors]

    def make_buffers(self) -> tuple[list[Tensor], dict[str, Any]]:
        """Return contiguous copies of the tensors, and the inputs made of these copies."""
        copies = [x.clone(memory_format=torch.contiguous_format) for x in self.tensors]
        remaining, leaves = iter(copies), []
        for part in self._parts:
            if part is Tensor:
                leaves.append(next(remaining))
            elif isinstance(part, tuple) and isinstance(part[0], type):
                wrapper, names, context, shape, stride = part
                inner = {name: next(remaining) for name in names}
                leaves.append(wrapper.__tensor_unflatten__(inner, context, shape, stride))
            else:
                leaves.append(part)
        return copies, tree_unflatten(leaves, self._structure)


class CapturedStep:
    """The forward of one `generate()`, which replays a graph after three steps.

    Attributes:
        model: The model.
        cache: Cache of the decoder's self-attention.
        max_length: Number of tokens that the call may store.
        reason: Why the steps of this call are not captured, or "".
        num_steps, num_replays: Number of calls, and of calls that replayed a graph.
    """

    def __init__(self, model: Any, cache: FP8PagedCache, max_length: int) -> None:
        self.model, self.cache, self.max_length = model, cache, max_length
        self.reason = ""
        self.num_steps = self.num_replays = 0
        self._num_left = 0  # number of tokens for which there are pages
        self._forget()

    def _forget(self) -> None:
        """Drop the graph, and all that belongs to it."""
        self._key: Any = None
        self._state: list[Any] = []
        self._descriptions: list[StepDescription] = []
        self._graph: Graph | None = None
        self._result: Any = None

    def begin(self) -> None:
        """Prepare for the steps after a prompt, if there are enough."""
        length = self.cache.host_length()
        if length + MIN_NEW_TOKENS - 1 <= self.max_length:
            self.reserve()

    def reserve(self) -> None:
        """Reserve pages for the next steps. The next steps record a new graph."""
        self._forget()
        paged, length = self.cache._paged, self.cache.host_length()
        if self.cache.options.is_preallocated:
            self._num_left = self.cache.options.max_cache_len - length
            return
        self._num_left = 0
        if length >= self.max_length:
            return
        paged.unreserve()
        if set(paged.read_lengths()) != {length} or not all(
            layer.is_compileable for layer in self.cache.stock_layers
        ):
            self.refuse("layers of transformers grow, or layers have different lengths")
            return
        # The pages of a window would all stay until the next call of this method.
        has_windows = any(window is not None for window in paged.groups)
        num_reserved = max(MIN_RESERVED_TOKENS, 0 if has_windows else length // RESERVED_DIVISOR)
        capacity = min(length + num_reserved, self.max_length)
        try:
            paged.reserve(capacity)
        except OutOfPagesError as error:
            self.refuse(str(error))
        else:
            self._num_left = capacity - length

    def refuse(self, reason: str) -> None:
        """Run all further steps of this call eagerly."""
        self.reason = reason
        self._forget()
        self.cache._paged.unreserve()
        name = type(self.model).__name__
        warn_once(f"capture: the steps of {name} run eagerly, because {reason}")

    def end(self) -> None:
        """Free the graph, and the pages that were reserved."""
        self._forget()
        self.cache._paged.unreserve()

    def __call__(self, **inputs: Any) -> Any:
        """Compute a step. The logits of a replay are overwritten by the next replay."""
        self.num_steps += 1
        can_capture = self._num_left > 0 and not self.reason
        result = self._run(inputs) if can_capture else self.model(**inputs)
        self._num_left -= 1
        is_growing = not self.cache.options.is_preallocated
        if is_growing and can_capture and not self.reason:
            if self._num_left < 1 or not self.cache._paged.is_reserved:
                self.reserve()
        return result

    def _find_state(self) -> list[Any]:
        """Return objects that are replaced when an address in the cache changes."""
        paged = self.cache._paged
        layers = [(x.length, x.length.table, x.pool.blocks.offsets) for x in paged.stores]
        return [x for layer in layers for x in layer] + [paged.stores[0].length.is_empty]

    def _run(self, inputs: dict[str, Any]) -> Any:
        if not self.cache.is_compileable:
            return self.model(**inputs)
        new = _Inputs(inputs)
        state = self._find_state()
        is_same = new.key == self._key and all(map(operator.is_, state, self._state))
        if not is_same:
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
        self._graph = GRAPHS[self.model.device.type]()
        self._result = self._graph.capture(lambda: self.model(**self._inputs))
        return self._result

    def _describe(self) -> Any:
        """Compute a step eagerly, and decide whether the next steps can be captured."""
        with StepDescription(self.model.device) as description:
            result = self.model(**self._inputs)
        description.describe_result(result)
        reason = description.obstacle
        if not reason and self._descriptions:
            reason = self._descriptions[0].find_difference(description)
        self._descriptions.append(description)
        if reason:
            self.refuse(reason)
        return result


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
    if reason := find_refusal(model):
        warn_once(f"capture: the steps of {type(model).__name__} run eagerly, because {reason}")
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
    hooks = [h for x in modules for h in (*x._forward_hooks.values(), *x._forward_pre_hooks.values())]
    if model.device.type not in GRAPHS:
        return f"a {model.device.type} device has no graphs"
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
