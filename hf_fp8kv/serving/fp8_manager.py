"""transformers' ContinuousBatchingManager over FP8 pages, and the factory that makes it."""

import math
import threading
import uuid
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle
from transformers.generation.continuous_batching.requests import RequestState

from ..attention.switching import get_attn_implementations, set_attn_implementations
from ..cache.cache import FP8PagedCache
from ..errors import ConfigError
from ..modeling.exact_states import exact_states
from ..modeling.methods import ModelAttribute
from ..modeling.model_support import ATTENTION, DETERMINISTIC, unwrap_model
from ..ops import choose_backend
from ..prefix.engine_blocks import synchronize
from .config import ServingConfig
from .engines import (
    PROCESS_KEY,
    SALT_KEY,
    StockCache,
    StockManager,
    StockMixin,
    make_cache_class,
    order_streams,
    rebind_globals,
)
from .engines.common import EngineCache
from .engines.noise import NoiseLogitsWarper
from .probe import read_layer_windows

_FACTORY = ModelAttribute["ManagerFactory"]("init_continuous_batching")
# The manager that transformers keeps for later calls.
_CACHED_MANAGER = ModelAttribute[Any]("_cached_continuous_batching_manager")
# Blocks of the longest request without workload hints: 8,192 tokens in pages of 256. Longer
# requests run without a graph.
_DEFAULT_MAX_BLOCKS = 32

_lock = threading.Lock()
# The number of active `use_engine_attention` blocks, and the attention to restore, by model.
_attention_users = weakref.WeakKeyDictionary[Any, tuple[int, dict[str, Any]]]()


class ManagerFactory:
    """Replaces the method `init_continuous_batching` of one model. Makes managers of FP8 pages.

    The factory is an attribute of the model, not of its class. `generate_batch`, `generate` and the
    model's context manager look it up there, so no other model is affected. A manager that is made
    in a different way would use stock pages, so its first step raises an error. `stock_manager` is
    transformers' own manager that the model had cached for its next session.
    """

    def __init__(
        self,
        model: Any,
        config: ServingConfig,
        stock_manager: Any = None,
        hook: RemovableHandle | None = None,
    ) -> None:
        self._model = weakref.ref(model)  # weak, because the model references this object
        self.config = config
        self.stock_manager = stock_manager
        self._hook = hook or model.register_forward_pre_hook(_refuse_stock_cache, with_kwargs=True)
        # Managers of the model that are still referenced. The newest is last.
        self.managers = weakref.WeakKeyDictionary[Any, None]()

    def __call__(self, *args: Any, **kwargs: Any) -> "FP8Manager":
        """Return a manager. The arguments are as in transformers' method."""
        init = rebind_globals(
            StockMixin.init_continuous_batching, ContinuousBatchingManager=FP8Manager
        )
        with torch.no_grad():
            manager: FP8Manager = init(self._model(), *args, **kwargs)
        return manager

    @classmethod
    def install(cls, model: Any, config: ServingConfig) -> None:
        """Make a model's managers store FP8 pages. Keep its cached stock manager for `remove`."""
        _FACTORY.set(model, cls(model, config, _CACHED_MANAGER.remove(model)))

    def remove(self, model: Any) -> None:
        """Undo `install`."""
        _FACTORY.remove(model)
        self._hook.remove()
        if _CACHED_MANAGER.get(model) in self.managers:
            model.destroy_cached_continuous_batching_manager()
        if self.stock_manager is not None and not _CACHED_MANAGER.is_set(model):
            _CACHED_MANAGER.set(model, self.stock_manager)

    def __deepcopy__(self, memo: dict[int, Any]) -> "ManagerFactory":
        model = self._model()
        hook = deepcopy(self._hook, memo)
        return ManagerFactory(memo.get(id(model), model), self.config, None, hook)

    def __reduce__(self) -> tuple[Any, ...]:
        return ManagerFactory, (self._model(), self.config, None, self._hook)


def find_factory(model: Any) -> ManagerFactory | None:
    """Return the factory that `enable` set on a model, or None if the model is not enabled."""
    factory = _FACTORY.get(unwrap_model(model))
    return factory if isinstance(factory, ManagerFactory) else None


def require_enabled(model: Any) -> None:
    """Raise ConfigError unless `enable` was called on the model."""
    if find_factory(model) is None:
        raise ConfigError(
            "model: expected a model that hf_fp8kv.serving.enable() was called on, got another "
            f"{type(model).__name__}. Call enable() first"
        )


def _refuse_stock_cache(_model: Any, _args: Any, kwargs: dict[str, Any]) -> None:
    cache = kwargs.get("cache")
    if isinstance(cache, StockCache) and not isinstance(cache, EngineCache):
        raise ConfigError(
            "expected a manager of FP8 pages, because hf_fp8kv.serving.enable() was called on the "
            "model, got a ContinuousBatchingManager of transformers. Make the manager with "
            "model.init_continuous_batching(...)"
        )


class FP8Manager(StockManager):  # type: ignore[misc]
    """A ContinuousBatchingManager whose engine stores FP8 pages and attends to the stored bytes."""

    def __init__(self, *, model: Any, **kwargs: Any) -> None:
        self.batch_processor: Any
        factory = find_factory(model)
        assert factory is not None
        self._factory = factory
        self.max_request_tokens = 0  # maximum of one request. 0 until the pages are allocated
        with use_engine_attention(model):
            super().__init__(model=model, **kwargs)
            # Every rank of a tensor-parallel group hashes blocks with the key of the first rank.
            broadcast = self.distributed_helper.tp_broadcast_object_from_rank_0
            self._hash_key: bytes = broadcast(PROCESS_KEY)
            self.logit_processor.supported_keys[SALT_KEY] = str
            self._check_compilation()
            self._choose_graphs(kwargs["continuous_batching_config"], kwargs["workload_hints"])
            self._noise_warper: NoiseLogitsWarper | None = None
            if DETERMINISTIC.is_set(model) and self.generation_config.do_sample:
                self._noise_warper = NoiseLogitsWarper(self.logit_processor)
        self._factory.managers[self] = None

    def _check_compilation(self) -> None:
        """Refuse to compile attention, which reads Python lists in each step."""
        for name in ("varlen_compile_config", "decode_compile_config"):
            compile_config = getattr(self.continuous_batching_config, name)
            if compile_config is not None and compile_config.fullgraph:
                raise ConfigError(
                    f"{name}: expected fullgraph=False, got True. Attention over FP8 pages is not "
                    "compiled, so a compiled step consists of the parts between attention calls"
                )

    def _choose_graphs(self, requested_config: Any, hints: Any) -> None:
        """Use CUDA graphs only if they are requested, and only for steps that decode.

        The host groups prompts by length, which no graph can record. The stock engine uses block
        tables only with stock attention functions, so the size of the tables is set here.
        """
        config = self.continuous_batching_config
        device = self.model.device
        resolved_graphs = config.use_cuda_graph
        config.use_cuda_graph = (False, False)
        requested = requested_config.use_cuda_graph  # for all steps, or (prompts, decode steps)
        is_requested = requested[1] if isinstance(requested, list | tuple) else requested
        if not is_requested:
            return
        backend = choose_backend(self._factory.config.options.backend, device)
        windows = read_layer_windows(self.model.config.get_text_config())
        if backend != "triton" or not any(resolved_graphs) or any(windows):
            raise ConfigError(
                "use_cuda_graph: expected a CUDA device, the triton backend and a model without "
                f"sliding windows for graphs of steps over FP8 pages, got {device}, {backend!r} "
                f"and {type(self.model).__name__}. Omit use_cuda_graph"
            )
        config.use_cuda_graph = (False, True)
        # Tables have room for the longest request, as for the engine's own attention functions.
        max_tokens = 0 if hints is None else hints.max_prompt_length + hints.max_generated_length
        max_blocks = _DEFAULT_MAX_BLOCKS
        if max_tokens:
            max_blocks = math.ceil(max_tokens / config.page_size) + 1
        config.max_blocks_per_request = requested_config.max_blocks_per_request or max_blocks

    def switch_to_cb_friendly_attn(self, *_: Any, **__: Any) -> None:
        """Do nothing, because the engine's steps already run in `use_engine_attention`."""

    def add_request(
        self,
        input_ids: list[int],
        request_id: str | None = None,
        max_new_tokens: int | None = None,
        *args: Any,
        cache_salt: str | None = None,
        **kwargs: Any,
    ) -> Any:
        """Add a request, like the stock method. Allocate the pages if there are none yet.

        Requests share blocks of tokens only if they have the same `cache_salt`, or if both have
        none.

        Raises:
            ConfigError: The pages are too few for the prompt and its new tokens, or the salt is
                not a string, or is empty.
        """
        if cache_salt is not None:
            if not isinstance(cache_salt, str) or not cache_salt:
                raise ConfigError(
                    f"cache_salt: expected a string that is not empty, got {cache_salt!r}. Omit "
                    "cache_salt if requests may share pages with all other requests"
                )
            kwargs[SALT_KEY] = cache_salt
        error = self._find_length_error(input_ids, max_new_tokens)
        if error is not None:
            raise error
        return super().add_request(input_ids, request_id, max_new_tokens, *args, **kwargs)

    def add_requests(
        self, inputs: list[list[int]], max_new_tokens: int | None = None, *args: Any, **kwargs: Any
    ) -> list[str]:
        """Add requests, like the stock method. `generate_batch` calls it.

        A request that does not fit the pages gets an output with the error. All other requests
        run.
        """
        errors = [self._find_length_error(input_ids, max_new_tokens) for input_ids in inputs]
        fitting_inputs = [
            input_ids for input_ids, error in zip(inputs, errors, strict=True) if error is None
        ]
        added_ids = iter(super().add_requests(fitting_inputs, max_new_tokens, *args, **kwargs))
        request_ids = []
        for input_ids, error in zip(inputs, errors, strict=True):
            request_id = next(added_ids) if error is None else uuid.uuid4().hex
            request_ids.append(request_id)
            if error is not None:
                # The names of child requests are as in the stock method.
                child_ids = [
                    f"{request_id}__child#{child}" for child in range(self.num_return_sequences - 1)
                ]
                for output_id in (*child_ids, request_id):
                    state = RequestState(output_id, list(input_ids))
                    self.output_router.fail_and_deliver(state, error)
        return request_ids

    def _find_length_error(
        self, input_ids: list[int], max_new_tokens: int | None
    ) -> ConfigError | None:
        """Return an error if a request needs more than all pages, otherwise None.

        Such a request would end the engine.
        """
        if self.background_thread_status.can_accept_new_requests() is not None:
            return None  # the stock method ignores the request
        self.allocate_pages()
        if max_new_tokens is None:
            max_new_tokens = self.generation_config.max_new_tokens or 1
        # The last token is never stored.
        if len(input_ids) + max_new_tokens - 1 <= self.max_request_tokens:
            return None
        return ConfigError(
            "input_ids: expected a prompt and new tokens that fit the engine's pages, which hold "
            f"{self.max_request_tokens} tokens of one request, got {len(input_ids)} tokens and "
            f"max_new_tokens={max_new_tokens}. Shorten the prompt, reduce max_new_tokens, or "
            "increase num_blocks"
        )

    def make_cache(self) -> FP8PagedCache:
        """Return an empty cache for `generate()` that stores K and V like the engine's pages."""
        return FP8PagedCache(self.model.config, prefill="stored", **self._factory.config.keywords)

    def start(self) -> None:
        """Start the engine's thread, with the attention "fp8_paged" until the thread ends."""
        self.allocate_pages()
        if not self.is_running():
            self._attention = ExitStack()
            self._attention.enter_context(use_engine_attention(self.model))
        try:
            super().start()
        except BaseException:  # the thread, which would restore the attention, did not start
            self._attention.close()
            raise

    def allocate_pages(self) -> None:
        """Allocate the pages of the batch processor, if there are none yet."""
        if self.batch_processor is None:
            with use_engine_attention(self.model):
                self.batch_processor = self._create_batch_processor()

    def _run_generation_loop(self, *args: Any, **kwargs: Any) -> None:
        with self._attention, exact_states(is_engine_step=True):
            super()._run_generation_loop(*args, **kwargs)

    def warmup(self) -> None:
        """Capture graphs and compile in advance, like the stock method."""
        with use_engine_attention(self.model), exact_states(is_engine_step=True):
            super().warmup()

    def _create_batch_processor(self) -> Any:
        if self.batch_processor is not None:
            return super()._create_batch_processor()  # returns the same processor
        config = self._factory.config
        identity = ""
        if config.prefix_store is not None:
            identity = config.identify(self.model, self.continuous_batching_config.page_size)
        cache_class = make_cache_class(config, identity, self._hash_key)
        processor = rebind_globals(
            StockManager._create_batch_processor, PagedAttentionCache=cache_class
        )(self)
        order_streams(processor.inputs_and_outputs)
        # The thread of the engine may have a different current stream than this thread, which
        # zeroes the pages.
        synchronize(self.model.device)
        if self._noise_warper is not None:
            self._noise_warper.install(processor.model_runner)
        processor.cache.scheduler = weakref.ref(processor.scheduler)
        self.max_request_tokens = processor.cache.compute_max_request_tokens()
        return processor


@contextmanager
def use_engine_attention(model: Any) -> Iterator[None]:
    """Use the attention "fp8_paged" until the last such `with` block ends, in any thread."""
    with _lock:
        num_users, original = _attention_users.get(model) or (0, get_attn_implementations(model))
        if not num_users:
            model.set_attn_implementation(ATTENTION)
        _attention_users[model] = (num_users + 1, original)
    try:
        yield
    finally:
        with _lock:
            num_users, original = _attention_users.pop(model)
            if num_users > 1:
                _attention_users[model] = (num_users - 1, original)
            else:
                set_attn_implementations(model, original)
