"""transformers' ContinuousBatchingManager over FP8 pages, and how a model comes to it."""

import threading
import weakref
from copy import copy
from typing import Any

import transformers

from ..attention.fp8_paged import NAME
from ..attention.masks import engine_step
from ..attention.switching import get_implementations, set_implementations
from ..errors import ConfigError
from ..ops import choose_backend
from .config import ServingConfig
from .engines import cache_class, rebind_globals, stock_manager

__all__ = ["PLACE", "Enabled", "FP8Manager", "dispatch", "put_back_attention"]

# Where a model keeps what `enable` was told.
PLACE = "_hf_fp8kv_serving"
# And the attention it ran before a manager of ours ran it.
_BEFORE = "_hf_fp8kv_attention_before"

_Stock: Any = stock_manager()
_lock = threading.Lock()
# Those that have been made, of all models.
_alive: weakref.WeakSet[Any] = weakref.WeakSet()


class Enabled:
    """What `enable` keeps on a model.

    Attributes:
        settings: what the user chose.
        kept: the stock manager that the model had kept for its next session, or None.
    """

    def __init__(self, settings: ServingConfig, kept: Any) -> None:
        self.settings, self.kept = settings, kept
        self._managers: list[weakref.ref[Any]] = []

    @property
    def managers(self) -> list[Any]:
        """Those that were made for the model and are still alive, the last one last."""
        return [manager for found in self._managers if (manager := found()) is not None]

    def add(self, manager: Any) -> None:
        """One more manager; it is not kept alive."""
        self._managers = [found for found in self._managers if found() is not None]
        self._managers.append(weakref.ref(manager))

    def __deepcopy__(self, memo: dict[int, Any]) -> "Enabled":
        return Enabled(self.settings, None)

    def __reduce__(self) -> tuple[Any, ...]:
        return Enabled, (self.settings, None)


class FP8Manager(_Stock):  # type: ignore[misc]
    """A ContinuousBatchingManager whose engine stores FP8 pages and attends to them as they are."""

    def __init__(self, model: Any, *args: Any, **kwargs: Any) -> None:
        self._enabled: Enabled = vars(model)[PLACE]
        self._put_back_at_end = False
        before = get_implementations(model)
        try:
            super().__init__(model, *args, **kwargs)
            asked, hints = _settings_of(args, kwargs)
            self._decide_compiling(asked)
            self._decide_graphs(asked, hints)
        except BaseException:
            set_implementations(model, before)
            if _another(before):
                vars(model).pop(_BEFORE, None)
            raise
        self._enabled.add(self)
        with _lock:
            _alive.add(self)

    def _decide_compiling(self, asked: Any) -> None:
        """Only the model around its attention is compiled: that works from lists of each step."""
        config = self.continuous_batching_config
        for name in ("varlen_compile_config", "decode_compile_config"):
            chosen = getattr(config, name)
            if chosen is None or not chosen.fullgraph:
                continue
            if getattr(asked, name) is not None:
                raise ConfigError(
                    f"{name}: expected fullgraph=False, got True; attention over FP8 pages is not "
                    "compiled, so that a compiled step has a part before each and a part after"
                )
            # An older engine's own choice for default_compile_level.
            chosen = copy(chosen)
            chosen.fullgraph = False
            setattr(config, name, chosen)

    def _decide_graphs(self, asked: Any, hints: Any) -> None:
        """Graphs only where they are asked for, and of steps that only decode.

        Prompts are split on the host into sets of about the same length, which no graph can hold;
        and the engine itself only takes its own attentions for able to work with a block table.
        """
        config, device = self.continuous_batching_config, self.model.device
        resolved, config.use_cuda_graph = config.use_cuda_graph, (False, False)
        wanted = asked.use_cuda_graph
        wanted = wanted[1] if isinstance(wanted, list | tuple) else bool(wanted)
        if not wanted:
            return
        kind = cache_class(self._enabled.settings)
        backend = choose_backend(self._enabled.settings.options.backend, device)
        able = kind.has_block_table_steps(self.model.config.get_text_config())
        if backend != "triton" or not any(resolved) or not able:
            raise ConfigError(
                "use_cuda_graph: expected a CUDA device, the triton backend, a model without "
                "sliding windows and transformers 5.18 or later for graphs of steps over FP8 "
                f"pages, got {device}, {backend!r}, {type(self.model).__name__} and "
                f"{transformers.__version__}; leave it out"
            )
        config.use_cuda_graph = (False, True)
        config.max_blocks_per_request = asked.max_blocks_per_request or _blocks(config, hints)

    def switch_to_cb_friendly_attn(self, model: Any, *args: Any, **kwargs: Any) -> None:
        """The model then runs "fp8_paged"; `stop` puts back what it ran before."""
        with _lock:
            before = get_implementations(model)
            if _another(before):
                vars(model)[_BEFORE] = before
                model.set_attn_implementation(NAME)

    def start(self) -> None:
        """As the engine's own; also after `stop`, which put the model's attention back."""
        if not self.is_running():
            self._put_back_at_end = False
            self.switch_to_cb_friendly_attn(self.model)
        super().start()

    def stop(self, *args: Any, **kwargs: Any) -> None:
        """As the engine's own; the attention is put back when no manager of the model runs."""
        super().stop(*args, **kwargs)
        self._put_back_at_end = True
        if not self.is_running():
            self._put_back()

    def _run_generation_loop(self) -> None:
        super()._run_generation_loop()
        if self._put_back_at_end:  # nobody waited for it
            self._put_back()

    def _put_back(self) -> None:
        put_back_attention(self.model, but=self)

    def warmup(self) -> None:
        """As the engine's own."""
        with engine_step():
            super().warmup()

    def _create_batch_processor(self) -> Any:
        make = rebind_globals(
            _Stock._create_batch_processor,
            PagedAttentionCache=cache_class(self._enabled.settings),
        )
        return make(self)

    def _generation_step(self) -> None:
        with engine_step():
            super()._generation_step()


def put_back_attention(model: Any, *, but: FP8Manager | None = None) -> None:
    """The model runs the attention of before, unless a manager of ours (another one) still runs."""
    with _lock:
        others = [m for m in _alive if m is not but and m.model is model]
        if not any(manager.is_running() for manager in others):
            before = vars(model).pop(_BEFORE, None)
            if before is not None:
                set_implementations(model, before)


def _another(attention: dict[str, Any]) -> bool:
    """Whether a model, or a part of it, runs another attention than "fp8_paged"."""
    return any(name not in (NAME, None) for name in attention.values())


def _settings_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """The settings that a manager is made with (after the model), and hints on its work."""
    names = ("generation_config", "continuous_batching_config", "workload_hints")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    return given["continuous_batching_config"], given.get("workload_hints")


def _blocks(config: Any, hints: Any) -> int:
    """Pages of the longest request: what the engine would take for its own attentions."""
    tokens = 0 if hints is None else hints.max_prompt_length + hints.max_generated_length
    return -(-tokens // config.page_size) + 1 if tokens else _BLOCKS


# Where nothing is known of the requests: 8,192 tokens in pages of 256. Longer ones run without.
_BLOCKS = 32

_installed = False


def dispatch() -> None:
    """From now on a manager that is made for an enabled model is an FP8Manager.

    All ways to the engine end in `ContinuousBatchingManager(model, ...)`, and the model says which
    class that is: no other model's manager is touched, in no thread, and none of an enabled model
    is missed. What stays when no model is enabled is a look at the model.
    """
    global _installed
    with _lock:
        if not _installed:
            _Stock.__new__ = staticmethod(_new)
            _installed = True


def _new(cls: type, *args: Any, **kwargs: Any) -> Any:
    model = kwargs.get("model", args[0] if args else None)
    if cls is _Stock and PLACE in getattr(model, "__dict__", ()):
        cls = FP8Manager
    return object.__new__(cls)
