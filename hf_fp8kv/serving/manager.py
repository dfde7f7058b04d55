"""transformers' ContinuousBatchingManager over FP8 pages, and how a model comes to it."""

import threading
import weakref
from typing import Any

from ..attention import NAME, engine_step
from ..errors import ConfigError
from ..support import implementations, restore
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
        kept: the stock manager that the model had kept for its next session, or None.
    """

    def __init__(self, settings: Settings, kept: Any) -> None:
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
        before = implementations(model)
        try:
            super().__init__(model, *args, **kwargs)
            self._check()
        except BaseException:
            restore(model, before)
            raise
        self._enabled.add(self)

    def _check(self) -> None:
        config = self.continuous_batching_config
        if any(config.cuda_graph_booleans):
            raise ConfigError(
                "expected ContinuousBatchingConfig(use_cuda_graph=None or False), got "
                f"{config.use_cuda_graph} (paddings for graphs switch them on, too): steps over "
                "FP8 pages are not captured in graphs; leave these settings out"
            )

    def switch_to_cb_friendly_attn(self, model: Any, *args: Any, **kwargs: Any) -> None:
        """The model then runs "fp8_paged"; `stop` puts back what it ran before."""
        before = implementations(model)
        if any(name not in (NAME, None) for name in before.values()):
            self._original_attn_impl = {k: name for k, name in before.items() if name is not None}
            model.set_attn_implementation(NAME)

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

