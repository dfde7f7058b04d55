"""`PagedLayerBase`: a layer stored in pages, as transformers' `Cache` expects it."""

import operator
import weakref
from abc import abstractmethod

import torch
from transformers.cache_utils import CacheLayerMixin

from .. import ops
from ..errors import ConfigError
from ..modeling.tensor_parallel import check_split
from ..ops import Pages
from ..paging.layer_group import LayerGroup
from ..paging.offloading import OffloadedPool
from ..paging.page_pool import PagePool
from .centers import FirstTokens
from .options import CacheOptions
from .paged_tensor import PagedKV, densify, make_handles
from .snapshot import LayerSnapshot
from .turns import Turns


class PagedLayerBase(CacheLayerMixin):
    """A layer stored in pages: what `FP8PagedLayer` and `FP8PagedPreallocatedLayer` share.

    Attributes:
        index: the layer's number in the model; scales are looked up by it.
        first_tokens: what the layers of the cache know of padding.
        pool: the bytes; shared with forks.
        storage: how they are stored.
        k_static_scale: `[Hkv, Dk]`, float32, or None.
        v_static_scale: `[Hkv, Dv]`, float32, or None.
        k_center: `[B, Hkv, Dk]`, float32, or None.
        whole_heads: KV heads of the whole model, of which a part may be here; None: not known.
        query_heads: query heads of this process; 0: not known.
        turns: how K turns with the position; None: that is not known.
        assigned: what was assigned to `keys` or `values`, until the other one is.
        following: the layer that computes next, weak: layers come in a circle.
    """

    is_croppable = True
    supports_early_init = True
    device: torch.device
    dtype: torch.dtype
    v_dtype: torch.dtype
    is_empty: bool
    query_heads = 0
    turns: Turns | None = None

    def __init__(
        self,
        index: int,
        options: CacheOptions,
        group: LayerGroup,
        first_tokens: FirstTokens,
        whole_heads: int | None = None,
        pool: PagePool | None = None,
    ) -> None:
        # The base class would assign `keys` and `values`, which are properties here.
        self.index, self.options, self.group = index, options, group
        self.first_tokens, self.whole_heads = first_tokens, whole_heads
        self.storage = options.layer_plan(index)
        budget = group.table.allocator.budget
        self.pool = pool or options.new_pool(self.storage, budget, index)
        self.member = group.add(self.pool)
        self.is_sliding = group.window is not None
        self._ready = False
        self.assigned: dict[str, torch.Tensor] = {}
        self.following: weakref.ref[PagedLayerBase] = weakref.ref(self)
        self._clear_scales()

    def __repr__(self) -> str:
        window = "" if self.group.window is None else f", window={self.group.window}"
        return f"{type(self).__name__}({self.storage}{window})"

    def _clear_scales(self) -> None:
        self.k_static_scale: torch.Tensor | None = None
        self.v_static_scale: torch.Tensor | None = None
        self.k_center: torch.Tensor | None = None
        self._scale_center: torch.Tensor | None = None

    # transformers assigns this, `keys` and `values` as attributes; here they follow the pool.
    @property
    def is_initialized(self) -> bool:  # type: ignore[override]
        """Whether shapes are known and there is a pool; a fork may have given it back."""
        return self._ready and self.pool.is_allocated

    @property
    def query_rows(self) -> int:
        """Query rows of one token for each KV head, as far as is known."""
        return max(1, self.query_heads // self.pool.heads)

    @property
    def sliding_window(self) -> int | None:
        """Tokens that a query sees, or None."""
        return self.group.window

    @property
    def record_past(self) -> bool:
        """Whether pages behind the window stay until `crop`."""
        return self.group.record_past

    @record_past.setter
    def record_past(self, value: bool) -> None:
        self.group.record_past = value

    def activate_past_recording(self) -> None:
        """Keep pages that fall out of the window until `crop`, which can go back to them."""
        self.group.record_past = True

    def _prepare_scales(self, key: torch.Tensor, value: torch.Tensor) -> None:
        """Look up the static scales, once the shapes are known.

        Raises:
            ScaleError: scales of other heads. ConfigError: a model that is not split.
        """
        heads, k_dim, v_dim = key.shape[1], key.shape[3], value.shape[3]
        check_split(self.index, heads, self.whole_heads, self.options.tensor_parallel.size)
        scales = self.options.layer_scales(self.index, heads, k_dim, v_dim)
        k, v, center = (None if t is None else t.to(key.device) for t in scales)
        self.k_static_scale, self.v_static_scale, self._scale_center = k, v, center
        self.backend = ops.choose_backend(self.options.backend, key.device)
        self.dtype, self.v_dtype, self.device = key.dtype, value.dtype, key.device

    def _first_center(self, key: torch.Tensor) -> torch.Tensor | None:
        """Return the center to freeze for a first call: `[B, Hkv, Dk]`, float32, or None."""
        if self._scale_center is not None:
            return self._scale_center.expand(key.shape[0], -1, -1).contiguous()
        if self.storage.k.centered:
            return self.first_tokens.find_center(key, self.turns)
        return None

    def _check_tokens(self, key: torch.Tensor, value: torch.Tensor) -> None:
        """Raise ConfigError for tokens that this layer cannot take; change nothing."""
        if self.assigned:
            raise ConfigError(
                "expected both layer.keys and layer.values to be assigned, got "
                f"{'keys' if 'k' in self.assigned else 'values'} alone; assign the other, too"
            )
        shape, v_shape = key.shape, value.shape
        size, heads, tokens, k_dim = shape if len(shape) == 4 else (0, 0, 0, 0)
        if not tokens or len(v_shape) != 4 or v_shape != (size, heads, tokens, v_shape[3]):
            raise ConfigError(
                "expected keys [B, Hkv, T, Dk] and values [B, Hkv, T, Dv] with T > 0, got "
                f"{tuple(shape)} and {tuple(v_shape)}"
            )
        # Two dtypes are right: under autocast RoPE leaves K in fp32.
        known = self.is_initialized
        floating = known or (key.is_floating_point() and value.is_floating_point())
        if not floating or key.device != value.device:
            raise ConfigError(
                "expected keys and values of a floating dtype on one device, got "
                f"{key.dtype} on {key.device} and {value.dtype} on {value.device}"
            )
        pool, got = self.pool, (heads, k_dim, v_shape[3], key.dtype, value.dtype)
        expected = known and (pool.heads, pool.k_dim, pool.v_dim, pool.dtype, pool.v_dtype)
        if known and got != expected:
            raise ConfigError(
                "expected keys and values like the first call's (heads, key size, value size, "
                f"dtypes) = {expected}, got {got}; a cache belongs to one model: make a new "
                "FP8PagedCache for another one"
            )
        batch = self.group.table.batch
        if batch and size != batch:
            raise ConfigError(
                f"expected {batch} sequences, which the cache holds, got {size}; use "
                "batch_repeat_interleave or batch_select_indices, or a new cache"
            )

    def _pages(self, table: torch.Tensor, pool: PagePool | None = None) -> Pages:
        """Return the pages of the layer's pool, or of another, and their block table."""
        pool = pool or self.pool
        scales = self.k_static_scale, self.v_static_scale, self.k_center
        return pool.record(self.storage, table, *scales)

    def _handles(
        self, pages: Pages, lengths: torch.Tensor, plan: torch.Tensor | None, start: int, stop: int
    ) -> tuple[PagedKV, PagedKV]:
        ragged = self.options.is_preallocated
        span = (start, stop, self.group.window or 0, ragged, self.backend)
        return make_handles(pages, lengths, plan, (self.dtype, self.v_dtype), *span)

    @property
    def keys(self) -> PagedKV | None:
        """The stored keys, as `update` returns them; None before the first token."""
        both = self.stored()
        return None if both is None else both[0]

    @keys.setter
    def keys(self, tokens: torch.Tensor | None) -> None:
        self._assign("k", tokens)

    @property
    def values(self) -> PagedKV | None:
        """The stored values, as `update` returns them; None before the first token."""
        both = self.stored()
        return None if both is None else both[1]

    @values.setter
    def values(self, tokens: torch.Tensor | None) -> None:
        self._assign("v", tokens)

    def _assign(self, side: str, tokens: torch.Tensor | None) -> None:
        """Replace what is stored once both sides were assigned, as code for dense layers does."""
        if tokens is None:
            raise ConfigError(
                "expected keys or values [B, Hkv, T, D], got None; call cache.reset()"
            )
        self.assigned[side] = tokens
        if len(self.assigned) == 2:
            key, value = (self.assigned.pop(side) for side in ("k", "v"))
            self.replace(densify(key), densify(value))

    @abstractmethod
    def replace(self, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store these tokens instead of all that are stored."""

    @abstractmethod
    def stored(self) -> tuple[PagedKV, PagedKV] | None:
        """Return handles on all that is stored and not yet behind the window, or None."""

    @abstractmethod
    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` tokens of this layer."""

    def drop_removed(self) -> None:
        """Drop what belongs to tokens that were removed."""

    @abstractmethod
    def select_rows(self, sequences: torch.Tensor) -> None:
        """Select sequences `[B']` of what this layer alone holds."""

    @abstractmethod
    def host_length(self) -> int:
        """Return the tokens stored as a number; waits for the device in the preallocated form."""

    def snapshot(self, group: LayerGroup, length: int) -> LayerSnapshot:
        """Return what the layer holds, `length` tokens; `group` is a fork of its group."""
        if not self.is_initialized:
            return LayerSnapshot(self.index, group, length, turns=self.turns)
        attributes = vars(self)
        setup = {name: attributes[name] for name in _SETUP}
        return LayerSnapshot(
            self.index, group, length, self.pool, self.k_center, setup, self.storage, self.turns
        )

    @abstractmethod
    def restore(self, snapshot: LayerSnapshot) -> None:
        """Take what a layer held; only for a new layer."""

    @abstractmethod
    def pages_in_use(self) -> int:
        """Return the pages of the pool that this layer needs, forks apart."""

    def memory_footprint(self) -> dict[str, int]:
        """Return bytes by kind: `pages`, `scales`, `tables`, `used`, and `host` if it is not 0."""
        if not self.is_initialized:
            return {}
        sizes = {"scales": 0, **self.pool.memory_footprint()}
        static = (self.k_static_scale, self.v_static_scale, self.k_center)
        sizes["scales"] += sum(t.nbytes for t in static if t is not None)
        return {**sizes, "used": self.pages_in_use() * self.pool.bytes_per_page()}

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Raise ConfigError: sequences are reordered for the whole cache at once."""
        raise ConfigError(_WHOLE_CACHE.format("reorder_cache"))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Raise ConfigError: sequences are repeated for the whole cache at once."""
        raise ConfigError(_WHOLE_CACHE.format("batch_repeat_interleave"))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Raise ConfigError: sequences are selected for the whole cache at once."""
        raise ConfigError(_WHOLE_CACHE.format("batch_select_indices"))

    def offload(self) -> None:
        """Move the bytes to the CPU's memory."""
        if self.pool.is_allocated:
            self.pool.move(torch.device("cpu"))

    def prefetch(self) -> None:
        """Move the bytes back to the layer's device."""
        if self.pool.is_allocated:
            self.pool.move(self.device)

    def _bring_pages(self) -> None:
        """Have the stored tokens where the layer computes, and those of the next layer soon."""
        pool = self.pool
        if isinstance(pool, OffloadedPool):
            following = self.following() or self
            assert isinstance(following.pool, OffloadedPool)
            held, following_held = (x.group.held_pages(x.member) for x in (self, following))
            pool.budget.use(pool, held, following.pool, following_held)
        elif pool.is_allocated and pool.block.device != self.device:
            self.prefetch()

    def move_to(self, device: torch.device) -> None:
        """Move what the layer holds to `device`, where the model computes this layer.

        A cache from a file is on one device, and the model's layers may be on several.
        """
        self.backend = ops.choose_backend(self.options.backend, device)
        self.device = self.pool.device = device
        # Written in place later, in inference mode and outside of it.
        with torch.inference_mode(False), torch.no_grad():
            self.prefetch()
            for name in ("k_static_scale", "v_static_scale", "k_center", "_scale_center"):
                tensor = getattr(self, name)
                setattr(self, name, None if tensor is None else tensor.to(device))


# What `_prepare_scales` sets.
_SETUP = (
    "k_static_scale", "v_static_scale", "_scale_center", "backend", "dtype", "v_dtype", "device",
)  # fmt: skip
_WHOLE_CACHE = (
    "{0} expected the whole cache, got one layer: layers share one block table; call cache.{0}"
)


def parse_crop(tokens_to_remove: int) -> int:
    """Return how many tokens `crop` has to remove; transformers passes a number below 1."""
    try:
        tokens_to_remove = operator.index(tokens_to_remove)
    except TypeError:
        raise ConfigError(f"crop: expected a whole number, got {tokens_to_remove!r}") from None
    if tokens_to_remove > 0:
        raise ConfigError(
            f"crop: expected a number of tokens to remove, as 0 or less, got {tokens_to_remove}; "
            "crop(-n) removes the last n tokens"
        )
    return -tokens_to_remove


def refuse_export() -> None:
    """Raise ConfigError where torch.export runs Python with tensors that have no content."""
    if torch.compiler.is_compiling() and not torch.compiler.is_dynamo_compiling():
        raise ConfigError(
            "expected torch.export with strict=True and a preallocated cache, which the module "
            "holds, got another export of FP8PagedCache; export the model without a cache "
            "(use_cache=False), or compile it with torch.compile"
        )
