"""Page pool: the bytes of one layer's pages. It does not know who holds which page."""

import torch

from ..errors import ConfigError
from ..formats import AUTO
from .block_table import Copies
from .page_allocator import Ints
from .pending_write import PendingWrite


class PagePool:
    """One layer's stored keys and values.

    Made before the first token is known; `allocate` gives it shapes. Forks of a cache share it.

    Attributes:
        pending: tokens that attention has to store; see `LayerGroup.defer_write`.
        k: `[P, Hkv, S, Dk]`, uint8, or the model's dtype for "auto".
        v: `[P, Hkv, Dv, S]`: V is stored transposed, since no GPU loads 8-bit data transposed.
        token_scales: `[P, Hkv, S, 2]`, bfloat16, of K and of V, when a side's scales are dynamic;
            else None. The half of a side without dynamic scales is unused.
    """

    k: torch.Tensor
    v: torch.Tensor

    def __init__(
        self, page_size: int, key_format: str, value_format: str, *, dynamic: bool
    ) -> None:
        self.page_size = page_size
        self.key_format, self.value_format = key_format, value_format
        self.dynamic = dynamic
        self.token_scales: torch.Tensor | None = None
        self.is_allocated = False
        self.pending: list[PendingWrite] = []

    def store_pending(self) -> None:
        """Store what was left to an attention that did not come: before bytes move."""
        for write in self.pending:
            write.store()
        self.pending.clear()

    def allocate(self, key: torch.Tensor, value: torch.Tensor, pages: int) -> None:
        """Make `pages` zeroed pages for keys `[B, Hkv, T, Dk]` and values `[B, Hkv, T, Dv]`.

        Only shapes, dtypes and the device are read.
        """
        self.dtype, self.v_dtype, self.device = key.dtype, value.dtype, key.device
        self.heads, self.k_dim, self.v_dim = key.shape[1], key.shape[3], value.shape[3]
        slots = self.page_size
        self.k = self._zeros(pages, self.heads, slots, self.k_dim, dtype=self.key_dtype)
        self.v = self._zeros(pages, self.heads, self.v_dim, slots, dtype=self.value_dtype)
        if self.dynamic and (self.key_format, self.value_format) != (AUTO, AUTO):
            self.token_scales = self._zeros(pages, self.heads, slots, 2, dtype=torch.bfloat16)
        self.is_allocated = True

    def empty_tokens(self, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys `[B, Hkv, 0, Dk]` and values `[B, Hkv, 0, Dv]` like those of `allocate`."""
        key = torch.empty(batch, self.heads, 0, self.k_dim, dtype=self.dtype, device=self.device)
        return key, key.new_empty((batch, self.heads, 0, self.v_dim), dtype=self.v_dtype)

    @property
    def key_dtype(self) -> torch.dtype:
        """What a stored number of K is held in."""
        return self.dtype if self.key_format == AUTO else torch.uint8

    @property
    def value_dtype(self) -> torch.dtype:
        """What a stored number of V is held in."""
        return self.v_dtype if self.value_format == AUTO else torch.uint8

    @property
    def pages(self) -> int:
        """Pages that there is room for."""
        return len(self.k) if self.is_allocated else 0

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return every tensor of the pool by name; each has the pages as its first axis."""
        names = ("k", "v", "token_scales")
        return {name: tensor for name in names if (tensor := getattr(self, name)) is not None}

    def grow(self, pages: int) -> None:
        """Make room for `pages` pages; the content stays, new pages are zero."""
        if pages <= self.pages:
            return
        self.store_pending()
        # One tensor after the other: at most one of them exists twice at a time.
        for name, old in self.tensors().items():
            new = zeros((pages, *old.shape[1:]), old.dtype, old.device)
            new[: len(old)] = old
            setattr(self, name, new)
            del old

    def like(self, pages: int) -> "PagePool":
        """Return a pool of `pages` zeroed pages of the same kind."""
        pool = PagePool(self.page_size, self.key_format, self.value_format, dynamic=self.dynamic)
        pool.allocate(*self.empty_tokens(1), pages)
        return pool

    def copy(self, copies: Copies, source: "PagePool | None" = None) -> None:
        """Copy pages, given as `(sources, destinations)`, within the pool or from `source`."""
        sources, destinations = (torch.from_numpy(c).to(self.k.device).long() for c in copies)
        origin = (source or self).tensors()
        for name, tensor in self.tensors().items():
            tensor[destinations] = origin[name][sources]

    def keep(self, pages: Ints) -> None:
        """Keep only `pages`, ascending, as pages 0, 1, ...; those that do not exist are zero."""
        self.store_pending()
        kept = torch.from_numpy(pages[pages < self.pages]).to(self.k.device).long()
        # One tensor after the other, as in `grow`.
        for name, old in self.tensors().items():
            new = zeros((len(pages), *old.shape[1:]), old.dtype, old.device)
            new[: len(kept)] = old[kept]
            setattr(self, name, new)
            del old

    def free(self) -> None:
        """Give the bytes back; `allocate` brings new ones."""
        self.pending.clear()
        for name in self.tensors():
            delattr(self, name)
        self.token_scales = None
        self.is_allocated = False

    def zero(self) -> None:
        """Set every page to zero, at the same address."""
        for tensor in self.tensors().values():
            tensor.zero_()

    def move(self, device: torch.device) -> None:
        """Move the bytes to `device`; `self.device` still names where the layer computes."""
        self.store_pending()
        for name, tensor in self.tensors().items():
            # Towards the CPU torch would return before the bytes are there.
            setattr(self, name, tensor.to(device, non_blocking=device.type != "cpu"))

    def check(self, key: torch.Tensor, value: torch.Tensor) -> None:
        """Raise ConfigError unless tokens like these fit the pool; change nothing."""
        expected = (self.heads, self.k_dim, self.v_dim, self.dtype, self.v_dtype)
        got = (key.shape[1], key.shape[3], value.shape[3], key.dtype, value.dtype)
        if got != expected:
            raise ConfigError(
                "expected keys and values like the first call's (heads, key size, value size, "
                f"dtypes) = {expected}, got {got}; a cache belongs to one model: make a new "
                "FP8PagedCache for another one"
            )

    def bytes_per_page(self) -> int:
        """Return the bytes of one page: K, V and dynamic scales."""
        return sum(t[0].numel() * t.element_size() for t in self.tensors().values() if len(t))

    def _zeros(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        return zeros(shape, dtype, self.device)


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return zeros that may be written in inference mode and outside of it alike."""
    with torch.inference_mode(False), torch.no_grad():
        return torch.zeros(shape, dtype=dtype, device=device)
