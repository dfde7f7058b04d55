"""Options: what a user chose, checked once, and shared by all layers of a cache."""

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from .. import ops
from ..errors import ConfigError, FP8KVError, ScaleError
from ..formats import (
    ADAPTIVE,
    AUTO,
    DEFAULT_DTYPE,
    FORMATS,
    STATIC_DTYPE,
    LayerPlan,
    SidePlan,
    parse_dtype,
)
from ..modeling.tensor_parallel import TensorParallel
from ..paging.offloading import OffloadBudget, Tiers
from ..paging.page_allocator import PageBudget
from ..paging.page_pool import PagePool
from ..scales import KVScales, LayerScales
from ..scales.kv_scales import StoragePlan, resolve
from ..scales.layer_scales import KEEP_OUT, check_ranks
from .plans import parse_plan

Prefill = Literal["exact", "stored"]
# Formats without the range that outliers need.
NARROW = ("fp8_e2m5", "int8")


@dataclass(frozen=True)
class CacheOptions:
    """The arguments of `FP8PagedCache` that concern every layer; immutable.

    Attributes:
        plan: how all layers are stored, or each layer.
        scales: static scales (or centers alone), a constant, a `StoragePlan` with its centers, or
            None for dynamic scales.
        page_size: slots per page, in tokens; a power of two from 8 to 1024.
        max_cache_len: tokens that the preallocated form has room for; None: the dynamic form.
        max_pages: the most pages that may be held at once; None: no limit.
        offloading: Whether pages are in host memory while their layer does not compute, or the
            number of pages of every layer for which the device has room.
        tensor_parallel: The rank of this process, and the number of processes.
    """

    plan: LayerPlan | Mapping[int, LayerPlan]
    scales: KVScales | float | None
    page_size: int
    max_cache_len: int | None
    max_pages: int | None
    prefill: Prefill
    backend: str
    tensor_parallel: TensorParallel
    offloading: bool | int = False

    @classmethod
    def parse(
        cls,
        *,
        dtype: object,
        key_dtype: object,
        value_dtype: object,
        scales: KVScales | str | os.PathLike[str] | float | None,
        plan: object = None,
        latent: bool = False,
        **fields: Any,
    ) -> "CacheOptions":
        """Return the checked options; `fields` are the others, as the user said them.

        `latent`: whether K are latents, and V their positions (MLA). These are a ninth of the
        numbers, and tell keys apart: they keep 16 bits unless a format is asked for. All heads read
        the latents, as keys and as values: they have no center.

        Raises:
            ConfigError: an argument cannot work. BackendError: the backend cannot run here.
        """
        ranks = fields["tensor_parallel"] = TensorParallel.parse(fields["tensor_parallel"])
        scales = resolve(scales, tp_rank=ranks.rank, tp_size=ranks.size)
        if isinstance(scales, StoragePlan):
            raise ConfigError(
                "scales: expected static scales, got a StoragePlan, whose scales are dynamic; pass "
                "it as plan"
            )
        if dtype == ADAPTIVE:
            raise ConfigError(
                f"dtype: expected a format, got {ADAPTIVE!r}, which needs the model; pass "
                f"plan=hf_fp8kv.choose_plan(model), or call enable(model, dtype={ADAPTIVE!r})"
            )
        chosen = parse_plan(plan)
        said = {"dtype": dtype, "key_dtype": key_dtype, "value_dtype": value_dtype}
        if isinstance(scales, KVScales) and scales.plan is not None:
            _refuse(said | {"plan": plan}, f"the scales ({scales.origin}) say")
            chosen = scales.plan
        elif chosen is not None:
            if isinstance(chosen, StoragePlan) or isinstance(scales, KVScales):
                said["scales"] = scales
            _refuse(said, "the plan says")
            if isinstance(chosen, StoragePlan):
                scales, chosen = chosen, chosen.plan
                assert chosen is not None
        else:
            both = None if dtype is None else parse_dtype(dtype)
            # A center of each sequence halves the error of K. Nothing says so of other formats, and
            # prefill="stored" promises that the way a text is cut into calls changes nothing.
            centered = both is key_dtype is scales is None and fields["prefill"] == "exact"
            default = both or (DEFAULT_DTYPE if scales is None else STATIC_DTYPE)
            k = default if key_dtype is None else parse_dtype(key_dtype, "key_dtype")
            v = AUTO if latent else default
            v = v if value_dtype is None else parse_dtype(value_dtype, "value_dtype")
            # Rotation makes up for a narrow range. Static scales are for numbers as they are.
            turned = NARROW if scales is None else ()
            chosen = LayerPlan(
                SidePlan(k, k in turned, centered and not latent), SidePlan(v, v in turned)
            )
        options = cls(plan=chosen, scales=scales, **fields)
        options.check()
        return options

    def check(self) -> None:
        """Raise ConfigError or BackendError unless the values are possible."""
        if self.prefill not in ("exact", "stored"):
            raise ConfigError(
                f"prefill: expected 'exact' or 'stored', got {self.prefill!r}; leave it out, "
                "unless a first call, too, is to read what is stored"
            )
        size = self.page_size
        _check_positive(size, "page_size")
        if size & (size - 1) or not 8 <= size <= 1024:
            raise ConfigError(
                f"page_size: expected a power of two from 8 to 1024 tokens, got {size!r}; leave it "
                "out for 64"
            )
        for name in ("max_cache_len", "max_pages"):
            if getattr(self, name) is not None:
                _check_positive(getattr(self, name), name)
        if not isinstance(self.offloading, bool):
            _check_positive(self.offloading, "offloading", "True, False or a number of pages")
        if self.offloading and self.is_preallocated:
            raise ConfigError(
                "offloading: expected a cache that grows, got one with max_cache_len="
                f"{self.max_cache_len}, whose addresses stay for compiled code and CUDA graphs; "
                "leave out one of the two"
            )
        if not isinstance(self.backend, str):
            raise ConfigError(
                f"backend: expected a name, such as 'torch', got {self.backend!r}; leave it out "
                "for the fastest one that runs here"
            )
        ops.choose_backend(self.backend, _DEVICE_OF_BACKEND.get(self.backend, torch.device("cpu")))
        check_ranks(*self.tensor_parallel)

    @property
    def is_preallocated(self) -> bool:
        """Whether all memory is taken at the first call (`max_cache_len`)."""
        return self.max_cache_len is not None

    @property
    def dynamic_scales(self) -> bool:
        """Whether each token and head gets a scale of its own."""
        return self.scales is None or (isinstance(self.scales, KVScales) and self.scales.is_dynamic)

    @property
    def first_call_centers(self) -> bool:
        """Whether the first call gives layers their centers."""
        if isinstance(self.scales, KVScales) and self.scales.centered:
            return False
        plans = [self.plan] if isinstance(self.plan, LayerPlan) else self.plan.values()
        return any(plan.k.centered for plan in plans)

    def check_stored(self, why: str) -> None:
        """Raise ConfigError if bytes depend on how a text is cut into calls.

        `why`: the argument that needs bytes which do not.
        """
        if self.prefill != "stored":
            raise ConfigError(
                f"{why}: expected prefill='stored', got {self.prefill!r}, with which a "
                "prompt is read unrounded; leave prefill out"
            )
        if self.first_call_centers:
            raise ConfigError(
                f"{why}: expected a plan that carries the centers of K, got one without: the "
                "center would be the mean of the first call, and so depend on where a text is cut "
                "into calls. Make the plan with hf_fp8kv.choose_plan(model), or store K without "
                "centers"
            )

    def layer_plan(self, index: int) -> LayerPlan:
        """Return how a layer is stored.

        Raises:
            ConfigError: a plan by hand that does not have this layer. ScaleError: scales' plan.
        """
        if isinstance(self.plan, LayerPlan):
            k, v = self.plan
            if isinstance(self.scales, KVScales) and not k.is_auto:
                layer = self.scales.layers.get(index)
                k = replace(k, centered=layer is not None and layer.k_center is not None)
            return LayerPlan(k, v)
        if index in self.plan:
            return self.plan[index]
        raise self._misfit(f"a plan for every paged layer, got none for layer {index}", "add it")

    def _misfit(self, what: str, advice: str = "") -> FP8KVError:
        """Return the error that scales, or a plan by hand, are another model's.

        `advice`: what to do with a plan.
        """
        if isinstance(self.scales, KVScales):
            name = "plan" if isinstance(self.scales, StoragePlan) else "scales"
            return ScaleError(
                f"{name} ({self.scales.origin}): expected {what}; use the {name} of this model, or "
                f"{KEEP_OUT}"
            )
        return ConfigError(f"plan: expected {what}; {advice}, or {KEEP_OUT}")

    def check_layers(self, paged: Collection[int], count: int) -> None:
        """Raise unless scales have all `paged` layers, and a plan none past the model's `count`.

        Raises:
            ScaleError: scales of another model. ConfigError: a plan by hand of another model.
        """
        layers = () if isinstance(self.plan, LayerPlan) else self.plan
        more = sorted(index for index in layers if index >= count)
        have = self.scales.layers if isinstance(self.scales, KVScales) else paged
        if missing := sorted(set(paged).difference(have)):
            raise self._misfit(f"scales for every paged layer, got none for layers {missing}")
        if more:
            what = f"layers from 0 to {count - 1}, which the model has, got {more}, too"
            raise self._misfit(what, "leave these out")

    def new_budget(self) -> PageBudget:
        """Return what a cache and its forks may hold."""
        if self.offloading:
            room = None if self.offloading is True else self.offloading
            return OffloadBudget(self.page_size, self.max_pages, room)
        return PageBudget(self.page_size, self.max_pages)

    def new_pool(
        self, plan: LayerPlan, budget: PageBudget | None = None, index: int = 0
    ) -> PagePool:
        """Return a pool without pages for layer `index`, which is stored so.

        `budget`: that of its cache; None: scratch, which is in one place.
        """
        tiers = Tiers(budget, index) if isinstance(budget, OffloadBudget) else None
        return PagePool(self.page_size, plan, self.dynamic_scales, tiers)

    def layer_scales(
        self, index: int, heads: int, k_dim: int, v_dim: int
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """Return K's scale `[Hkv, Dk]`, V's `[Hkv, Dv]`, K's center `[Hkv, Dk]` of one layer.

        float32 on the CPU, already in the unit of the stored formats; None where there is none.
        """
        if self.scales is None:
            return None, None, None
        plan = self.layer_plan(index)
        if isinstance(self.scales, KVScales):
            layer: LayerScales = self.scales.for_layer(
                index, num_kv_heads=heads, k_head_dim=k_dim, v_head_dim=v_dim,
                tp_rank=self.tensor_parallel.rank, tp_size=self.tensor_parallel.size,
            )  # fmt: skip
            k, v = (
                None
                if side.is_auto or scale is None or not scale.numel()
                else scale * FORMATS[side.format].scale_from_e4m3
                for scale, side in ((layer.k, plan.k), (layer.v, plan.v))
            )
            return k, v, layer.k_center if plan.k.centered else None
        constant = torch.tensor(self.scales, dtype=torch.float32, device="cpu")
        k = None if plan.k.format == AUTO else constant.repeat(heads, k_dim)
        v = None if plan.v.format == AUTO or not v_dim else constant.repeat(heads, v_dim)
        return k, v, None


def _refuse(others: Mapping[str, Any], who: str) -> None:
    """Raise ConfigError for arguments that say the same as a plan."""
    for name, value in others.items():
        if value is not None:
            raise ConfigError(
                f"{name}: expected None, since {who} how each layer is stored, got {value!r}; "
                "leave it out"
            )


# The device is not known yet: a backend is asked whether it runs on one that it is made for.
_DEVICE_OF_BACKEND = {"triton": torch.device("cuda")}


def _check_positive(value: object, argument: str, what: str = "a whole number") -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(
            f"{argument}: expected {what} above 0, got {value!r}; leave it out for the default"
        )
