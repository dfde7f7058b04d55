"""transformers' ContinuousBatchingManager over FP8 pages, and how a model comes to it."""

import threading
from typing import Any
from weakref import WeakSet

from ..attention import NAME, engine_step
from ..errors import ConfigError
from ..support import implementations
from .engines import cache_class, rebound, stock_manager
from .settings import Settings

__all__ = ["Enabled", "PLACE", "FP8Manager", "dispatch"]

# Where a model keeps what `enable` was told.
PLACE = "_hf_fp8kv_serving"

_Stock: Any = stock_manager()


class Enabled:
    """What `enable` keeps on a model.

    Attributes:
        settings: what the user chose.
        managers: those that were made for the model and are still alive.
        kept: the stock manager that the model had kept for its next session, or None.
    """

    def __init__(self, settings: Settings, kept: Any) -> None:
        self.settings, self.kept = settings, kept
        self.managers: WeakSet[Any] = WeakSet()

    def __deepcopy__(self, memo: dict[int, Any]) -> "Enabled":
        return Enabled(self.settings, None)

    def __reduce__(self) -> tuple[Any, ...]:
        return Enabled, (self.settings, None)


class FP8Manager(_Stock):  # type: ignore[misc]
    """A ContinuousBatchingManager whose engine stores FP8 pages and attends to them as they are."""

    def __init__(self, model: Any, *args: Any, **kwargs: Any) -> None:
        self._enabled: Enabled = vars(model)[PLACE]
        super().__init__(model, *args, **kwargs)
        config = self.continuous_batching_config
        if any(config.cuda_graph_booleans):
            self._put_back_attention()
            raise ConfigError(
                "expected ContinuousBatchingConfig(use_cuda_graph=None or False), got "
                f"{config.use_cuda_graph} (paddings and graph settings switch them on, too): steps "
                "over FP8 pages are not captured in graphs; leave these settings out"
            )
        self._enabled.managers.add(self)

    def switch_to_cb_friendly_attn(self, model: Any, *args: Any, **kwargs: Any) -> None:
        """The model then runs "fp8_paged"; `stop` puts back what it ran before."""
        before = implementations(model)
        if any(name not in (NAME, None) for name in before.values()):
            self._original_attn_impl = {k: name for k, name in before.items() if name is not None}
            model.set_attn_implementation(NAME)

    def _put_back_attention(self) -> None:
        if self._original_attn_impl is not None:
            self.model.set_attn_implementation(self._original_attn_impl)
            self._original_attn_impl = None

    def warmup(self) -> None:
        """As the engine's own."""
        with engine_step():
            super().warmup()

    def _create_batch_processor(self) -> Any:
        make = rebound(
            _Stock._create_batch_processor,
            PagedAttentionCache=cache_class(self._enabled.settings),
        )
        return make(self)

    def _generation_step(self) -> None:
        with engine_step():
            super()._generation_step()


_lock = threading.Lock()
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

