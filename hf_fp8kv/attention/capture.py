"""Captured steps: `generate()` records a decode step as a CUDA graph once, and then replays it.

    prompt | step 1      step 2    | step 3   | step 4, 5, ...
    eager  | eager, described      | captured | replayed

A graph repeats operations on the same memory with the same numbers. It is only captured if two
eager steps consist of equal operations (`StepDescription`). The inputs of a step are copied to
buffers. A growing cache reserves pages for the next steps (`PagedLayers.reserve`).

A graph is only replayed for the model and the cache for which it was captured. It belongs to one
call of `generate()`, because only the frame of that call refers to the `CapturedStep`. Other
threads and later calls have separate graphs and buffers, also after an exception in a processor.
Adapters, weights, attention, dtype, batch and training mode may therefore change between calls.
Within a call, a graph is replayed only if the inputs have equal shapes, dtypes, devices and
constants, if no operation has changed the cache, and if every layer has the same pages. The next
replay reads weights that are written in place. A processor that replaces weights or switches
adapters in the middle of a call is not noticed.
"""

import operator
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    is_traceable_wrapper_subclass,
    transform_subclass,
)
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map
from transformers import EncoderDecoderCache

from ..cache.cache import FP8PagedCache
from ..cache.paged_tensor import PagedKV
from ..errors import OutOfPagesError
from ..modeling.methods import ModelMethod
from ..modeling.model_support import CACHE, with_cache
from ..utils.warn_once import warn_once

# Environment variable that turns captured steps off if it is "0".
ENVIRONMENT_VARIABLE = "HF_FP8KV_CAPTURE"
# Minimum number of new tokens that a call must allow. The first three steps are not replayed.
MIN_NEW_TOKENS = 16
# Pages are reserved for at least this number of tokens per sequence, and for at least the number of
# stored tokens divided by `RESERVED_DIVISOR`.
MIN_RESERVED_TOKENS = 1024
RESERVED_DIVISOR = 8
# Maximum number of times that the inputs of a call may change their shapes.
MAX_KEY_CHANGES = 4
# Maximum relative error of the logits of a step, from a different order of sums. In 16 bits it is
# eight roundings of bfloat16 (0.4 %), because schedules split a preallocated cache differently on
# a GPU, which was not measured. On CPUs nine 16-bit types have no error, and nllb-moe, which needs
# a growing cache, has 4.9 %. If the error is larger, the call runs eagerly.
MAX_ERROR = 0.03
PRECISE_ERRORS = {torch.float32: 1e-3, torch.float64: 1e-3}
# Reasons why a graph cannot repeat an operation, by torch's tag of the operation.
_RANDOM = "draws random numbers"
_TAGS = {
    torch.Tag.data_dependent_output: "reads a value on the host",
    torch.Tag.dynamic_output_shape: "has a result whose shape depends on values",
    torch.Tag.nondeterministic_seeded: _RANDOM,
}
# The result of these operations has a shape that depends on values only if an index is a mask.
_INDEX_OPERATIONS = ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_")
_LOG_MESSAGE = "capture: the steps of {} run eagerly, because {}"


class CaptureError(Exception):
    """A step cannot be captured. If `capture` raises it, no operation was executed."""


class CudaGraph:
    """A CUDA graph with a separate memory pool, which is freed with this object."""

    def capture(self, run: Callable[[], Any]) -> Any:
        """Record and execute the operations of `run()`, and return its result.

        Raises:
            CaptureError: The operations cannot be captured.
        """
        self._graph = graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream()
        current_stream = torch.cuda.current_stream()
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        old_state = generator.clone_state()
        stream.wait_stream(current_stream)
        with torch.cuda.stream(stream):
            try:
                # Other threads may call functions that a graph cannot capture.
                graph.capture_begin(capture_error_mode="thread_local")
                result = run()
                graph.capture_end()
            except Exception as error:
                # A failed capture must be ended, but then leaves the generator in capture mode.
                with suppress(RuntimeError):
                    graph.capture_end()
                generator.graphsafe_set_state(old_state)
                raise CaptureError(f"{type(error).__name__}: {error}") from error
        current_stream.wait_stream(stream)
        self.replay()
        return result

    def replay(self) -> None:
        """Execute the operations again, on the same memory."""
        self._graph.replay()


# Class of graphs by type of device.
GRAPHS: dict[str, Callable[[], Any]] = {"cuda": CudaGraph}


class StepDescription(TorchDispatchMode):
    """A mode that describes each operation of a step.

    If two steps have equal descriptions, the next step consists of the same operations on the same
    memory with the same numbers, so a graph can repeat it.

    Attributes:
        calls: Name and described arguments of each operation.
        obstacle: Reason why a graph cannot repeat the step, or "".

    Raises:
        CaptureError: The step reads dense keys and values of pages that are only reserved. Code
            that ignores the mask would attend to positions without tokens.
    """

    def __init__(self, device: torch.device, *, is_reserved: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[str, list[Any]]] = []
        self.obstacle = ""
        self._device = device
        self._is_reserved = is_reserved
        # Index of the operation that produced a storage, by the storage's number. A weak reference
        # reserves the number, even if the storage is freed during the step.
        self._producers: dict[int, tuple[int, StorageWeakRef]] = {}
        # Numbers of the storages that operations have changed.
        self._written: set[int] = set()
        # Storages that existed before the step. They are kept alive for the graph.
        self._old_storages: dict[int, Any] = {}

    def report(self, obstacle: str) -> None:
        """Set `obstacle`, unless it is set."""
        self.obstacle = self.obstacle or obstacle

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves, structure = tree_flatten((args, kwargs or {}))
        is_gather = func._schema.name.startswith("hf_fp8kv::gather")
        # The sixth argument of a gather is `ragged`.
        reads_dense = (is_gather and args[5]) or any(
            isinstance(leaf, PagedKV) and leaf.is_ragged for leaf in leaves
        )
        if reads_dense and self._is_reserved:
            raise CaptureError("it reads dense keys and values of reserved positions")
        # A tensor of Python numbers is new in each step, so its values are compared.
        is_constant = func is torch.ops.aten.lift_fresh.default
        descriptions = [leaf.tolist() if is_constant else self._describe(leaf) for leaf in leaves]
        result = func(*args, **(kwargs or {}))
        outputs = _find_tensors(tree_leaves(result))
        if not is_constant:
            self._check(func, args, _find_tensors(leaves), outputs)
        if func._schema.is_mutable:
            written_tensors = _find_tensors(args[:1])
            self._written |= {tensor.untyped_storage()._cdata for tensor in written_tensors}
        for storage in (output.untyped_storage() for output in outputs):
            number = storage._cdata
            if number not in self._old_storages and number not in self._producers:
                self._producers[number] = len(self.calls), StorageWeakRef(storage)
        self.calls.append((str(func), [structure, *descriptions]))
        return result

    def _check(self, func: Any, args: Any, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        """Set `obstacle` if a graph cannot repeat an operation."""
        tags = [tag for tag in _TAGS if tag in func.tags]
        if func._schema.name in _INDEX_OPERATIONS:
            has_mask = any(index.dtype in (torch.bool, torch.uint8) for index in inputs[1:])
            tags = [torch.Tag.dynamic_output_shape] if has_mask else []
        for position, parameter in enumerate(func._schema.arguments):
            # The default of a probability is 0, which is equal to False.
            value = args[position] if position < len(args) else 0
            if parameter.name in ("dropout_p", "train") and value == 0:
                tags = []  # without dropout, an operation draws no numbers
        devices = {tensor.device for tensor in (*inputs, *outputs) if tensor.ndim}
        reads_old_memory = any(
            tensor.untyped_storage()._cdata in self._old_storages
            for tensor in inputs
            if tensor.is_cpu
        )
        for tag in tags:
            self.report(f"{func} {_TAGS[tag]}")
        if len(devices) > 1 or (reads_old_memory and self._device.type != "cpu"):
            self.report(f"{func} reads or copies a tensor of another device")

    def _describe(self, x: Any) -> Any:
        """Return a description of an argument. A tensor has an origin, and its layout."""
        if not isinstance(x, Tensor):
            return type(x), repr(x) if isinstance(x, float) else x
        inner_names, constants = _flatten(x)
        if inner_names:
            inner = [self._describe(getattr(x, name)) for name in inner_names]
            return type(x), constants, x.shape, inner
        storage = x.untyped_storage()
        producer = self._producers.get(storage._cdata)
        if producer is None:
            self._old_storages[storage._cdata] = storage
        origin = ("memory", storage._cdata) if producer is None else ("operation", producer[0])
        return Tensor, origin, (x.storage_offset(), x.shape, x.stride(), x.dtype, x.device)

    def writes_to(self, tensors: Iterable[Tensor]) -> bool:
        """Return whether an operation has changed one of `tensors`."""
        return any(
            tensor.untyped_storage()._cdata in self._written for tensor in _find_tensors(tensors)
        )

    def add_result(self, result: Any) -> None:
        """Describe the result of the step. Only the logits may be a new tensor."""
        tensors = _find_tensors(tree_leaves(result))
        self.calls.append(("the result", list(map(self._describe, tensors))))
        logits = getattr(result, "logits", None)
        other_tensors = [tensor for tensor in tensors if tensor is not logits]
        if any(tensor.untyped_storage()._cdata in self._producers for tensor in other_tensors):
            self.report("the model returns new tensors in addition to the logits")

    def find_difference(self, previous: "StepDescription") -> str:
        """Return the first difference from the description of the previous step, or ""."""
        pairs = zip(self.calls, previous.calls, strict=False)
        for (name, arguments), (old_name, old_arguments) in pairs:
            if name != old_name:
                return f"a step calls {name} where the previous step calls {old_name}"
            for argument, old_argument in zip(arguments, old_arguments, strict=False):
                if argument != old_argument:
                    is_tensor = isinstance(argument, tuple) and argument[0] is Tensor
                    change = (
                        "different memory in each step"
                        if is_tensor
                        else f"{old_argument}, then {argument}"
                    )
                    return f"{name} reads {change:.100}"
        has_other_length = len(self.calls) != len(previous.calls)
        return "steps have different numbers of operations" if has_other_length else ""


def _flatten(x: Any) -> tuple[Any, Any]:
    """Return the names of the tensors inside a wrapper such as a compact mask, and its constants.

    Return no names for any other object.
    """
    return x.__tensor_flatten__() if is_traceable_wrapper_subclass(x) else ((), None)


def _find_tensors(objects: Iterable[Any]) -> list[Tensor]:
    """Return the tensors among objects, and the tensors inside wrappers instead of the wrappers."""
    tensors = list[Tensor]()
    for x in objects:
        inner_names, _ = _flatten(x)
        tensors += _find_tensors(getattr(x, name) for name in inner_names)
        if isinstance(x, Tensor) and not inner_names:
            tensors.append(x)
    return tensors


def _copy(x: Any) -> Any:
    """Return a contiguous copy of a tensor, and any other object unchanged."""
    if is_traceable_wrapper_subclass(x):
        return transform_subclass(x, lambda _, inner: _copy(inner))
    if isinstance(x, Tensor):
        return x.clone(memory_format=torch.contiguous_format)
    return x


def _make_key(x: Any) -> Any:
    """Return everything but the values of a tensor, and any other object unchanged."""
    if not isinstance(x, Tensor):
        return x
    return type(x), _flatten(x), x.shape, x.dtype, x.device


class CapturedStep:
    """The forward of one `generate()`, which replays a graph after three steps.

    Attributes:
        model: The model.
        cache: Cache of the decoder's self-attention.
        max_length: Number of tokens per sequence that the call may store.
        obstacle: Reason why the steps of this call are not captured, or "".
        num_steps, num_replays: Number of calls, and of calls that replayed a graph.
    """

    def __init__(self, model: Any, cache: FP8PagedCache, max_length: int) -> None:
        self.model = model
        self.cache = cache
        self.max_length = max_length
        self.obstacle = ""
        self.num_steps = self.num_replays = self._num_key_changes = 0
        self._num_reserved = 0  # number of tokens for which pages are reserved
        # A fork of the cache and the function that prepares the inputs, until a step has succeeded.
        self._backup: FP8PagedCache | None = None
        self._prepare: Callable[[], dict[str, Any]] = dict
        # The attributes of each module, and a copy of them to restore after a failed step.
        self._attributes: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._forget()

    def _forget(self) -> None:
        """Drop the graph and everything that belongs to it."""
        self._key: Any = None
        self._offsets: list[Tensor] = []
        self._descriptions: list[StepDescription] = []
        self._graph: Any = None

    def begin(self) -> None:
        """Reserve pages after the prompt."""
        # Drafts and assisted decoding remove tokens after each step, so they record the past.
        if not any(group.record_past for group in self.cache._paged.groups.values()):
            if not self.cache.options.is_preallocated:
                self._backup = self.cache.fork()
                for module in self.model.modules():
                    for attributes in (vars(module), module._buffers):
                        self._attributes.append((attributes, dict(attributes)))
            self.reserve()

    def end(self) -> None:
        """Free the graph and the reserved pages, and log why steps were not captured."""
        self._forget()
        self.cache._paged.unreserve()
        if self.obstacle:
            warn_once(_LOG_MESSAGE.format(type(self.model).__name__, self.obstacle))

    def reserve(self) -> None:
        """Reserve pages for the next steps, whose addresses are then constant."""
        self._forget()
        self._num_reserved = self._num_key_changes = 0
        cache = self.cache
        paged = cache._paged
        paged.unreserve()
        length = cache._count_tokens()
        capacity = cache.options.max_cache_len
        counting_class = next(
            (type(layer).__name__ for layer in cache.stock_layers if counts_on_host(layer)), ""
        )
        if counting_class or not (paged.layers or capacity):
            self.refuse(f"{counting_class or 'the model'} counts tokens on the host")
        elif {length, *paged.read_lengths()} != {length}:
            self.refuse("the layers of the cache have different lengths")
        elif not 0 < length <= self.max_length + 1 - MIN_NEW_TOKENS:
            return
        elif capacity is not None:
            self._num_reserved = capacity - length
        else:
            # Only this method frees pages of a window that no later step reads.
            has_windows = any(window is not None for window in paged.groups)
            share = 0 if has_windows else length // RESERVED_DIVISOR
            capacity = min(length + max(MIN_RESERVED_TOKENS, share), self.max_length)
            try:
                paged.reserve(capacity)
                self._num_reserved = capacity - length
            except OutOfPagesError as error:
                self.refuse(str(error))

    def refuse(self, obstacle: str) -> None:
        """Run all later steps of this call eagerly."""
        self.obstacle = obstacle
        self._backup = None
        self._forget()
        self.cache._paged.unreserve()

    def prepare(self, run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the inputs of a step, which `run()` prepares for the cache."""
        self._prepare = run
        try:
            return run()
        except Exception as error:
            self._undo_first_step(error)
            return run()

    def _undo_first_step(self, error: Exception) -> None:
        """Undo a first step that raised `error`, because the model may need a growing cache.

        Raise the error of a later step.
        """
        if self._backup is None:
            raise error
        self._restore(self._backup)
        self.refuse(f"it needs a growing cache ({type(error).__name__}: {error})"[:200])

    def _restore(self, backup: FP8PagedCache) -> None:
        """Restore the cache and the attributes of all modules."""
        self.cache.take_contents(backup)
        for attributes, old_attributes in self._attributes:
            for name in attributes.keys() - old_attributes.keys():
                del attributes[name]
            attributes.update(old_attributes)

    def __call__(self, **inputs: Any) -> Any:
        """Compute a step. The next replay overwrites the logits."""
        self.num_steps += 1
        if self.obstacle or self._num_reserved < 1:
            return self.model(**inputs)
        ids = inputs.get("input_ids", inputs.get("decoder_input_ids"))
        is_single_token = ids is not None and ids.shape[1] == 1
        if is_single_token and self.cache.is_compileable:
            outputs = self._compute(inputs)
            self._num_reserved -= 1
        else:
            outputs = self.model(**inputs)
            self._num_reserved = 0
        if not is_single_token:
            self.refuse("a step has several tokens per sequence")
        elif self._num_reserved < 1 and not self.obstacle:
            self.reserve()
        return outputs

    def _compute(self, inputs: dict[str, Any]) -> Any:
        """Describe, capture or replay a step of one token per sequence."""
        paged = self.cache._paged
        tensors = _find_tensors(tree_leaves(inputs))
        key = paged.num_changes, tree_map(_make_key, inputs)
        offsets = [layer.pool.blocks.offsets for layer in paged.layers]
        if key != self._key or not all(map(operator.is_, offsets, self._offsets)):
            self._forget()
            self._num_key_changes += 1
            self._inputs = tree_map(_copy, inputs)
            self._key = key
            self._offsets = offsets
            self._buffers = _find_tensors(tree_leaves(self._inputs))
        torch._foreach_copy_(self._buffers, tensors)
        if self._graph is not None:
            self._graph.replay()
            self.num_replays += 1
        elif len(self._descriptions) < 2:
            return self._compute_described()
        else:
            graph = GRAPHS[self.model.device.type]()
            try:
                self._result = graph.capture(lambda: self.model(**self._inputs))
                self._graph = graph
            except CaptureError as error:
                self._result = self.model(**self._inputs)
                self.refuse(str(error))
        return self._result

    def _compute_described(self) -> Any:
        """Compute a step eagerly, and decide whether a graph can repeat it."""
        description = StepDescription(
            self.model.device, is_reserved=not self.cache.options.is_preallocated
        )
        try:
            with description:
                outputs = self.model(**self._inputs)
        except Exception as error:
            self._undo_first_step(error)
            return self.model(**self._prepare(), return_dict=True)
        description.add_result(outputs)
        if description.writes_to(self.model.buffers()):
            description.report("the model changes its buffers")
        elif self._backup is not None and _RANDOM not in description.obstacle:
            outputs = self._compare(outputs, self._backup)
        self._backup = None
        if self._num_key_changes > MAX_KEY_CHANGES:
            description.report("its inputs have different shapes or constants in each step")
        elif self._descriptions:
            description.report(description.find_difference(self._descriptions[0]))
        self._descriptions.append(description)
        if description.obstacle and not self.obstacle:
            self.refuse(description.obstacle)
        return outputs

    def _compare(self, reserved_outputs: Any, backup: FP8PagedCache) -> Any:
        """Compute the first step again with the growing cache, and return its result.

        Results may differ because masks for preallocated caches have other shapes, and a model may
        use masks for more than attention. If they are equal up to the order of sums, continue with
        the reserved pages.
        """
        reserved_cache = dict(vars(self.cache))
        self._restore(backup)
        outputs = self.model(**self._prepare(), return_dict=True)
        logits = outputs.logits.float()
        error = (reserved_outputs.logits.float() - logits).norm() / logits.norm()
        if error <= PRECISE_ERRORS.get(outputs.logits.dtype, MAX_ERROR):
            vars(self.cache).update(reserved_cache)
        else:
            self.refuse("its results differ with a preallocated cache")
        return outputs


def counts_on_host(layer: Any) -> bool:
    """Return whether a layer of transformers counts its tokens in Python, which a graph cannot."""
    has_keys = getattr(layer, "keys", None) is not None
    return not layer.is_compileable or (has_keys and isinstance(layer.get_seq_length(), int))


def find_obstacle(model: Any, cache: FP8PagedCache) -> str:
    """Run `model` on a few tokens. Return why its steps cannot be captured, or ""."""
    step = CapturedStep(model, cache, 2 + MIN_NEW_TOKENS)
    inputs = {"input_ids": torch.ones((1, 2), dtype=torch.long, device=model.device)}
    inputs |= with_cache(model, cache)
    model(**inputs)
    inputs["input_ids"] = inputs["input_ids"][:, :1]
    step.begin()
    step.prepare(lambda: inputs)
    for _ in range(2):
        step(**inputs)
    obstacle = find_model_obstacle(model) or step.obstacle
    step.obstacle = ""  # so that nothing is logged
    step.end()
    return obstacle


class _ThreadSteps(threading.local):
    """The `CapturedStep` of the last `generate()` of this thread, by its phase.

    Attributes:
        new_step: A step until `get_forward` returns it.
        next_step: A weak reference to a step until its decoding begins.
        running_step: The step whose decoding has begun.
    """

    new_step: CapturedStep | None = None
    next_step: Callable[[], CapturedStep | None] = staticmethod(lambda: None)
    running_step: CapturedStep | None = None


_thread_steps = _ThreadSteps()


def choose_forward(method: ModelMethod, model_kwargs: dict[str, Any], config: Any) -> bool:
    """Return whether `generate()` gets the forward of its steps from `get_forward`.

    `config` is the generation config of this call.
    """
    model = method.model
    cache = model_kwargs.get(CACHE)
    if isinstance(cache, EncoderDecoderCache):
        cache = cache.self_attention_cache
    is_off = os.environ.get(ENVIRONMENT_VARIABLE) == "0"
    if is_off or config.compile_config is not None or not isinstance(cache, FP8PagedCache):
        return bool(method.original_method(model_kwargs, config))
    if config.disable_compile or config.prefill_chunk_size or cache.options.offloading:
        return False
    obstacle = find_model_obstacle(model)
    if model.device.type not in GRAPHS:
        obstacle = f"no graphs are implemented for the device {model.device}"
    if obstacle:
        warn_once(_LOG_MESSAGE.format(type(model).__name__, obstacle))
        return False
    embeddings = model_kwargs.get("inputs_embeds")
    num_embeddings = 0 if embeddings is None else embeddings.shape[1]
    _thread_steps.new_step = CapturedStep(model, cache, config.max_length - 1 + num_embeddings)
    return True


def get_forward(method: ModelMethod, compile_config: Any) -> Any:
    """Return the step that `choose_forward` has made, or a compiled forward."""
    new_step = _thread_steps.new_step
    _thread_steps.new_step = None
    if new_step is None:
        return method.original_method(compile_config)
    _thread_steps.next_step = weakref.ref(new_step)
    return new_step


def prepare_inputs(method: ModelMethod, *args: Any, **kwargs: Any) -> Any:
    """Prepare the inputs of a step with the function `method.arguments[0]`."""
    step = _thread_steps.running_step
    run = partial(method.arguments[0], method, *args, **kwargs)
    return run() if step is None or step.model is not method.model else step.prepare(run)


@contextmanager
def decode(method: ModelMethod) -> Iterator[None]:
    """Run the steps of a `generate()` after the prompt."""
    step = _thread_steps.next_step()
    _thread_steps.next_step = _ThreadSteps.next_step
    outer_step = _thread_steps.running_step
    with method.original_method():
        if step is None:
            yield
            return
        try:
            _thread_steps.running_step = step
            step.begin()
            yield
        finally:
            _thread_steps.running_step = outer_step
            step.end()


def find_model_obstacle(model: Any) -> str:
    """Return why no step of a model can be captured, or ""."""
    modules = list(model.modules())
    hooks: list[Any] = []
    for module in modules:
        hooks += [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    packages = {getattr(hook, "__module__", "").split(".")[0] for hook in hooks}
    quantizer = getattr(model, "hf_quantizer", None)
    obstacles = {
        "the model is on several devices": len({*getattr(model, "hf_device_map", {}).values()}) > 1,
        "modules have hooks of accelerate": any(hasattr(module, "_hf_hook") for module in modules),
        "modules have hooks, which a graph does not call": packages - {"hf_fp8kv", "transformers"},
        "modules are compiled": any(module._compiled_call_impl is not None for module in modules),
        "its quantizer does not support it": quantizer and not quantizer.is_compileable,
    }
    return next((obstacle for obstacle, applies in obstacles.items() if applies), "")
