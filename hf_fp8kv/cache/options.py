"""Options: what a user chose, checked once, and shared by all layers of a cache."""

from dataclasses import dataclass
from typing import Any, Literal

import torch

from .. import ops
from ..errors import ConfigError
from ..formats import AUTO, DEFAULT_DTYPE, FORMATS, STATIC_DTYPE, parse_dtype
from ..paging.page_pool import PagePool
from ..scales import KVScales, LayerScales
from ..scales.validation import check_ranks

Prefill = Literal["exact", "stored"]


@dataclass(frozen=True)
class CacheOptions:
    """The arguments of `FP8PagedCache` that concern every layer; immutable.

    Attributes:
        key_format: a key of `FORMATS`, or "auto".
        value_format: the same for V.
        scales: static scales, a constant, or None for dynamic ones.
        center_keys: None: if the scales carry centers; True: if not, from the first call; False:
            never.
        page_size: slots per page, in tokens; a power of two from 8 to 1024.
        max_cache_len: tokens that the preallocated form has room for; None: the dynamic form.
        max_pages: the most pages that may be held at once; None: no limit.
    """

    key_format: str
    value_format: str
    scales: KVScales | float | None
    center_keys: bool | None
    page_size: int
    max_cache_len: int | None
    max_pages: int | None
    prefill: Prefill
    backend: str
    tp_rank: int
    tp_size: int

    @classmethod
    def parse(
        cls,
        *,
        dtype: object,
        key_dtype: object,
        value_dtype: object,
        scales: KVScales | float | None,
        center_keys: bool | None,
        **fields: Any,
    ) -> "CacheOptions":
        """Return the checked options; `fields` are the others, as the user said them.

        Raises:
            ConfigError: an argument cannot work. BackendError: the backend cannot run here.
        """
        default = DEFAULT_DTYPE if scales is None else STATIC_DTYPE
        both = default if dtype is None else parse_dtype(dtype)
        key_format = both if key_dtype is None else parse_dtype(key_dtype, "key_dtype")
        # prefill="stored" promises that the way a text is cut into calls changes nothing.
        may_center = dtype is None and scales is None and fields["prefill"] == "exact"
        if center_keys is None and may_center and key_format == DEFAULT_DTYPE:
            center_keys = True
        options = cls(
            key_format=key_format,
            value_format=both if value_dtype is None else parse_dtype(value_dtype, "value_dtype"),
            scales=scales,
            center_keys=center_keys,
            **fields,
        )
        options._check()
        return options

    def _check(self) -> None:
        if self.center_keys not in (None, True, False):
            raise ConfigError(
                f"center_keys: expected None, True or False, got {self.center_keys!r}"
            )
        if self.prefill not in ("exact", "stored"):
            raise ConfigError(f"prefill: expected 'exact' or 'stored', got {self.prefill!r}")
        size = self.page_size
        _check_positive(size, "page_size")
        if size & (size - 1) or not 8 <= size <= 1024:
            raise ConfigError(
                f"page_size: expected a power of two from 8 to 1024 tokens, got {size!r}"
            )
        for name in ("max_cache_len", "max_pages"):
            if getattr(self, name) is not None:
                _check_positive(getattr(self, name), name)
        if not isinstance(self.backend, str):
            raise ConfigError(f"backend: expected a name, got {self.backend!r}")
        ops.choose_backend(self.backend, _DEVICE_OF_BACKEND.get(self.backend, torch.device("cpu")))
        check_ranks(self.tp_rank, self.tp_size)
        if self.center_keys and self.key_format == AUTO:
            raise ConfigError(
                "center_keys=True expected an 8-bit format of K, got 'auto', which stores K as it "
                "is; leave center_keys out, or choose a key_dtype"
            )

    @property
    def is_preallocated(self) -> bool:
        """Whether all memory is taken at the first call (`max_cache_len`)."""
        return self.max_cache_len is not None

    @property
    def dynamic_scales(self) -> bool:
        """Whether each token and head gets a scale of its own."""
        return self.scales is None

    @property
    def first_call_centers(self) -> bool:
        """Whether the center is the mean of the first call."""
        centered = isinstance(self.scales, KVScales) and self.scales.centered
        return self.center_keys is True and not centered

    def new_pool(self) -> PagePool:
        """Return a pool without pages."""
        return PagePool(
            self.page_size, self.key_format, self.value_format, dynamic=self.dynamic_scales
        )

    def layer_scales(
        self, index: int, heads: int, k_dim: int, v_dim: int
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """Return K's scale `[Hkv, Dk]`, V's `[Hkv, Dv]`, K's center `[Hkv, Dk]` of one layer.

        float32 on the CPU, already in the unit of the stored formats; None where there is none.
        """
        if self.scales is None:
            return None, None, None
        if isinstance(self.scales, KVScales):
            layer: LayerScales = self.scales.for_layer(
                index, num_kv_heads=heads, k_head_dim=k_dim, v_head_dim=v_dim,
                tp_rank=self.tp_rank, tp_size=self.tp_size,
            )  # fmt: skip
            k, v = (
                None if name == AUTO else scale * FORMATS[name].scale_from_e4m3
                for scale, name in ((layer.k, self.key_format), (layer.v, self.value_format))
            )
            return k, v, None if k is None or self.center_keys is False else layer.k_center
        constant = torch.tensor(self.scales, dtype=torch.float32)
        k = None if self.key_format == AUTO else constant.repeat(heads, k_dim)
        v = None if self.value_format == AUTO else constant.repeat(heads, v_dim)
        return k, v, None


# The device is not known yet: a backend is asked whether it runs on one that it is made for.
_DEVICE_OF_BACKEND = {"triton": torch.device("cuda")}


def _check_positive(value: object, argument: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{argument}: expected a whole number above 0, got {value!r}")
