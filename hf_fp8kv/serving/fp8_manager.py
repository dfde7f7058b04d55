"""transformers' ContinuousBatchingManager over FP8 pages, and the method that makes it."""

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from ..attention.switching import get_implementations, set_implementations
from ..errors import ConfigError
from ..modeling.exact_states import exact_states
from ..modeling.model_support import ATTENTION, DETERMINISTIC
from ..ops import choose_backend
from .config import ServingConfig
from .engines import StockCache, StockManager, StockMixin, cache_class, rebind_globals
from .engines.common import EngineCache
from .engines.sampling import NoiseLogitsWarper
from .probe import check_kinds

_METHOD = "init_continuous_batching"
_KEPT = "_cached_continuous_batching_manager"
# Blocks of the longest request if no hints are given: 8,192 tokens in pages of 256. Longer requests
# run without a graph.
_BLOCKS = 32

_lock = threading.Lock()
# By model, the number of blocks of `engine_attention`, and the attention before them.
_held = weakref.WeakKeyDictionary[Any, tuple[int, dict[str, Any]]]()


class Enabled:
    """`init_continuous_batching` of one enabled model: it makes managers of FP8 pages.

    It is an attribute of the model, not of its class. `generate_batch`, `generate` and the context
    manager of the model look it up there, so no other model is affected. A stock manager that was
    made in a different way would serve the model from stock pages, so its first step raises an
    error. `kept` is the stock manager that the model had kept for its next session.
    """

    def __init__(
        self,
        model: Any,
        config: ServingConfig,
        kept: Any = None,
        hook: RemovableHandle | None = None,
    ) -> None:
        self._model = weakref.ref(model)  # weak, since the model holds this object
        self.config, self.kept = config, kept
        self._hook = hook or model.register_forward_pre_hook(_reject_stock_cache, with_kwargs=True)
        # The living managers of the model, the newest last.
        self.managers = weakref.WeakKeyDictionary[Any, None]()

    def __call__(self, *args: Any, **kwargs: Any) -> "FP8Manager":
        """Return a manager. It takes the arguments of transformers' method."""
        stock = StockMixin.init_continuous_batching
        init = rebind_globals(stock, ContinuousBatchingManager=FP8Manager)
        with torch.no_grad():
            manager: FP8Manager = init(self._model(), *args, **kwargs)
        return manager

    @classmethod
    def install(cls, model: Any, config: ServingConfig) -> None:
        """Make a model's managers store FP8 pages. Set its kept stock manager aside."""
        vars(model)[_METHOD] = cls(model, config, vars(model).pop(_KEPT, None))

    def remove(self, model: Any) -> None:
        """Undo `install`."""
        del vars(model)[_METHOD]
        self._hook.remove()
        if vars(model).get(_KEPT) in self.managers:
            model.destroy_cached_continuous_batching_manager()
        if self.kept is not None and _KEPT not in vars(model):
            vars(model)[_KEPT] = self.kept

    def __deepcopy__(self, memo: dict[int, Any]) -> "Enabled":
        model = self._model()
        return Enabled(memo.get(id(model), model), self.config, None, deepcopy(self._hook, memo))

    def __reduce__(self) -> tuple[Any, ...]:
        return Enabled, (self._model(), self.config, None, self._hook)


def enabled_state(model: Any) -> Enabled | None:
    """Return the settings of `enable` on a model. None means that it was not enabled."""
    state = getattr(model, "__dict__", {}).get(_METHOD)
    return state if isinstance(state, Enabled) else None


def require_enabled(model: Any) -> Enabled:
    """Return what `enable` set on a model. Raises ConfigError."""
    state = enabled_state(model)
    if state is None:
        raise ConfigError(
            "model: expected one that hf_fp8kv.serving.enable() was called on, got another "
            f"{type(model).__name__}; call it first"
        )
    return state


def _reject_stock_cache(_model: Any, _args: Any, kwargs: dict[str, Any]) -> None:
    cache = kwargs.get("cache")
    if isinstance(cache, StockCache) and not isinstance(cache, EngineCache):
        raise ConfigError(
            "expected a manager of FP8 pages, since hf_fp8kv.serving.enable() was called on the "
            "model, got a ContinuousBatchingManager of transformers; make it with "
            "hf_fp8kv.serving.manager(model, ...) or model.init_continuous_batching(...)"
        )


class FP8Manager(StockManager):  # type: ignore[misc]
    """A ContinuousBatchingManager whose engine stores FP8 pages and attends to the stored bytes."""

    def __init__(self, *, model: Any, **given: Any) -> None:
        self._enabled: Enabled = vars(model)[_METHOD]
        # Called with a new batch processor, before its first step.
        self.on_processor: Callable[[Any], None] = lambda _: None
        with engine_attention(model):
            super().__init__(model=model, **given)
            self._check_compilation()
            self._choose_graphs(given["continuous_batching_config"], given["workload_hints"])
            self._noise: NoiseLogitsWarper | None = None
            if DETERMINISTIC in vars(model) and self.generation_config.do_sample:
                self._noise = NoiseLogitsWarper(self.logit_processor)
        self._enabled.managers[self] = None

    def _check_compilation(self) -> None:
        """Refuse to compile attention, which works from lists of each step."""
        config = self.continuous_batching_config
        for name in ("varlen_compile_config", "decode_compile_config"):
            chosen = getattr(config, name)
            if chosen is not None and chosen.fullgraph:
                raise ConfigError(
                    f"{name}: expected fullgraph=False, got True; attention over FP8 pages is not "
                    "compiled, so that a compiled step has a part before each and a part after"
                )

    def _choose_graphs(self, requested: Any, hints: Any) -> None:
        """Use CUDA graphs only if they are requested, and only for steps that decode.

        Prompts are split on the host into sets of about the same length, which no graph can hold.
        The engine itself accepts only its own attention functions for steps with a block table.
        """
        config, device = self.continuous_batching_config, self.model.device
        resolved, config.use_cuda_graph = config.use_cuda_graph, (False, False)
        decode = requested.use_cuda_graph
        if not (decode[1] if isinstance(decode, list | tuple) else decode):
            return
        backend = choose_backend(self._enabled.config.options.backend, device)
        windows = check_kinds(self.model.config.get_text_config())
        if backend != "triton" or not any(resolved) or any(windows):
            raise ConfigError(
                "use_cuda_graph: expected a CUDA device, the triton backend and a model without "
                f"sliding windows for graphs of steps over FP8 pages, got {device}, {backend!r} "
                f"and {type(self.model).__name__}; leave it out"
            )
        config.use_cuda_graph = (False, True)
        # The longest request counts, as for the engine's own attention functions.
        tokens = 0 if hints is None else hints.max_prompt_length + hints.max_generated_length
        blocks = -(-tokens // config.page_size) + 1 if tokens else _BLOCKS
        config.max_blocks_per_request = requested.max_blocks_per_request or blocks

    def switch_to_cb_friendly_attn(self, *_: Any, **__: Any) -> None:
        """Do nothing, because the engine's steps run within `engine_attention`."""

    def start(self) -> None:
        """Start the engine's thread, with the attention "fp8_paged" until the thread ends."""
        if not self.is_running():
            self._attention = ExitStack()
            self._attention.enter_context(engine_attention(self.model))
        super().start()

    def _run_generation_loop(self, *args: Any, **kwargs: Any) -> None:
        with self._attention, exact_states(engine=True):
            super()._run_generation_loop(*args, **kwargs)

    def warmup(self) -> None:
        """Capture graphs and compile ahead, as the stock method does."""
        with engine_attention(self.model), exact_states(engine=True):
            super().warmup()

    def _create_batch_processor(self) -> Any:
        if self.batch_processor is not None:
            return super()._create_batch_processor()  # the same processor again
        chosen, identity = self._enabled.config, ""
        if chosen.store is not None:
            page_size = self.continuous_batching_config.page_size
            identity = chosen.identify(self.model, page_size)
        create = rebind_globals(
            StockManager._create_batch_processor, PagedAttentionCache=cache_class(chosen, identity)
        )
        processor = create(self)
        if self._noise is not None:
            self._noise.install(processor.model_runner)
        processor.cache.scheduler = weakref.ref(processor.scheduler)
        self.on_processor(processor)
        return processor


def running_managers(model: Any) -> list[Any]:
    """Return the managers whose threads run a model, of transformers' own class or of ours."""
    targets = [getattr(thread, "_target", None) for thread in threading.enumerate()]
    owners = [getattr(target, "__self__", None) for target in targets]
    return [one for one in owners if isinstance(one, StockManager) and one.model is model]


@contextmanager
def engine_attention(model: Any) -> Iterator[None]:
    """Use the attention "fp8_paged" until the last of several blocks ends, in any thread."""
    with _lock:
        count, before = _held.get(model) or (0, get_implementations(model))
        if not count:
            model.set_attn_implementation(ATTENTION)
        _held[model] = count + 1, before
    try:
        yield
    finally:
        with _lock:
            count, before = _held.pop(model)
            if count > 1:
                _held[model] = count - 1, before
            else:
                set_implementations(model, before)
