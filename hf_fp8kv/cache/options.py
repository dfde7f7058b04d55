"""The checked options of a cache, shared by all of its layers."""

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
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
from ..paging.offloading import OffloadBudget, OffloadedLayer
from ..paging.page_allocator import PageBudget
from ..paging.page_pool import PagePool
from ..scales import KVScales, LayerScales
from ..scales.kv_scales import StoragePlan, resolve_scales
from ..scales.layer_scales import SKIP_ADVICE, check_ranks
from ..utils.arguments import check_count
from .plans import parse_plan

# Formats whose range is too narrow for outliers, because they have fewer than 3 exponent bits.
NARROW_FORMATS = tuple(fmt.name for fmt in FORMATS.values() if fmt.bits - 1 - fmt.mantissa_bits < 3)


@dataclass(frozen=True)
class CacheOptions:
    """The arguments of `FP8PagedCache` that apply to every layer.

    Attributes:
        plan: Storage plan of all layers, or of each layer.
        scales: Static scales, a constant scale, a `StoragePlan` with its centers, or None for
            dynamic scales.
        page_size: Slots (tokens) per page, a power of two from 8 to 1024.
        max_cache_len: Tokens per sequence of a preallocated cache. None means that it grows.
        max_pages: Maximum number of pages in use. None means no limit.
        prefill: Whether a call on an empty cache reads "exact" or "stored" K and V.
        backend: "auto", or the name of a backend.
        tensor_parallel: The rank of this process, and the number of processes.
        offloading: Whether pages are in host memory while their layer does not compute, or the
            number of pages per layer that may stay on the device.
    """

    plan: LayerPlan | Mapping[int, LayerPlan]
    scales: KVScales | float | None
    page_size: int = 64
    max_cache_len: int | None = None
    max_pages: int | None = None
    prefill: Literal["exact", "stored"] = "exact"
    backend: str = "auto"
    tensor_parallel: TensorParallel = field(default_factory=TensorParallel)
    offloading: bool | int = False

    @classmethod
    def parse(
        cls,
        *,
        dtype: object = None,
        key_dtype: object = None,
        value_dtype: object = None,
        scales: KVScales | str | os.PathLike[str] | float | None = None,
        plan: object = None,
        is_latent: bool = False,
        **other_options: Any,
    ) -> "CacheOptions":
        """Return checked options. `other_options` are the remaining fields of the class.

        `is_latent` is whether K holds latents and V the RoPE parts of the keys (MLA). RoPE parts
        are a ninth of the values and distinguish keys, so they keep the model's dtype unless a
        format is passed.

        Raises:
            ConfigError: An argument is invalid.
            BackendError: The backend cannot run here.
        """
        ranks = TensorParallel.parse(other_options.pop("tensor_parallel", None))
        scales = resolve_scales(scales, tp_rank=ranks.rank, tp_size=ranks.size)
        if isinstance(scales, StoragePlan):
            raise ConfigError(
                "scales: expected static scales, got a StoragePlan, whose scales are dynamic. Pass "
                "it as plan"
            )
        if dtype == ADAPTIVE:
            raise ConfigError(
                f"dtype: expected a format, got {ADAPTIVE!r}, which needs the model. Pass the "
                "model instead of its config: FP8PagedCache(model)"
            )
        parsed_plan = parse_plan(plan)
        formats = {"dtype": dtype, "key_dtype": key_dtype, "value_dtype": value_dtype}
        resolved_plan: LayerPlan | Mapping[int, LayerPlan]
        if isinstance(scales, KVScales) and scales.plan is not None:
            _refuse_arguments(formats | {"plan": plan}, f"the scales ({scales.origin}) define")
            resolved_plan = scales.plan
        elif isinstance(parsed_plan, StoragePlan):
            _refuse_arguments(formats | {"scales": scales}, "the plan defines")
            assert parsed_plan.plan is not None
            resolved_plan = parsed_plan.plan
            scales = parsed_plan  # it holds the centers
        elif parsed_plan is not None:
            static_scales = scales if isinstance(scales, KVScales) else None
            _refuse_arguments(formats | {"scales": static_scales}, "the plan defines")
            resolved_plan = parsed_plan
        else:
            resolved_plan = _make_layer_plan(
                formats, has_scales=scales is not None, is_latent=is_latent
            )
        options = cls(plan=resolved_plan, scales=scales, tensor_parallel=ranks, **other_options)
        options.check()
        return options

    def check(self) -> None:
        """Raise ConfigError or BackendError if an option is invalid."""
        if self.prefill not in ("exact", "stored"):
            raise ConfigError(
                f"prefill: expected 'exact' or 'stored', got {self.prefill!r}. Leave it out, "
                "unless a first call must also read stored keys and values"
            )
        plans = [self.plan] if isinstance(self.plan, LayerPlan) else self.plan.values()
        if not isinstance(self.scales, KVScales) and any(plan.k.centered for plan in plans):
            raise ConfigError(
                "plan: expected the center of K for each layer with 'centered' K, got only the "
                "word. Pass plan=hf_fp8kv.choose_plan(model), call enable(model), which chooses a "
                "plan with centers, or leave 'centered' out"
            )
        check_supported_page_size(self.page_size, "page_size", "Leave it out for 64")
        for name in ("max_cache_len", "max_pages"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name))
        if not isinstance(self.offloading, bool):
            check_count("offloading", self.offloading, expected="True, False or a whole number")
        if self.offloading and self.is_preallocated:
            raise ConfigError(
                "offloading: expected a cache that grows, got max_cache_len="
                f"{self.max_cache_len}, whose addresses stay for compiled code and CUDA graphs. "
                "Leave out one of the two"
            )
        if not isinstance(self.backend, str):
            raise ConfigError(
                f"backend: expected a name, such as 'torch', got {self.backend!r}. Leave it out "
                "for the fastest backend that runs here"
            )
        device_type = "cuda" if self.backend == "triton" else "cpu"  # the device is not known yet
        ops.choose_backend(self.backend, torch.device(device_type))
        check_ranks(*self.tensor_parallel)

    @property
    def is_preallocated(self) -> bool:
        """Whether all memory is allocated at the first call (`max_cache_len`)."""
        return self.max_cache_len is not None

    @property
    def has_dynamic_scales(self) -> bool:
        """Whether each token and head has a separate scale."""
        return self.scales is None or (isinstance(self.scales, KVScales) and self.scales.is_dynamic)

    def check_stored(self, argument: str) -> None:
        """Raise ConfigError if the stored bytes depend on how a sequence is split into calls.

        `argument` is the argument of the user that does not allow this dependence.
        """
        if self.prefill != "stored":
            raise ConfigError(
                f"{argument}: expected prefill='stored', got {self.prefill!r}, whose first call "
                "reads unrounded K and V, so pages depend on how a sequence is split into calls. "
                "Make the cache with prefill='stored'"
            )

    def get_layer_plan(self, index: int) -> LayerPlan:
        """Return the storage plan of a layer.

        Raises:
            ConfigError: The given plan does not have this layer.
            ScaleError: The plan of the scales does not have this layer.
        """
        if isinstance(self.plan, LayerPlan):
            k, v = self.plan
            if isinstance(self.scales, KVScales) and not k.is_auto:
                scales = self.scales.layers.get(index)
                k = replace(k, centered=scales is not None and scales.k_center is not None)
            return LayerPlan(k, v)
        if index in self.plan:
            return self.plan[index]
        raise self._make_error(
            f"a plan for every paged layer, got none for layer {index}", "Add it"
        )

    def _make_error(self, expected: str, advice: str = "") -> FP8KVError:
        """Return the error for scales or a plan of another model. `advice` is for a plan."""
        if isinstance(self.scales, KVScales):
            name = "plan" if isinstance(self.scales, StoragePlan) else "scales"
            return ScaleError(
                f"{name} ({self.scales.origin}): expected {expected}. Use the {name} of this "
                f"model, or {SKIP_ADVICE}"
            )
        return ConfigError(f"plan: expected {expected}. {advice}, or {SKIP_ADVICE}")

    def check_layers(self, paged_layers: Collection[int], num_layers: int) -> None:
        """Check that scales have all `paged_layers`, and that a plan only has layers of the model.

        Raises:
            ScaleError: The scales, or a `StoragePlan`, belong to another model.
            ConfigError: Any other plan belongs to another model.
        """
        planned_layers = () if isinstance(self.plan, LayerPlan) else self.plan
        scaled_layers = self.scales.layers if isinstance(self.scales, KVScales) else paged_layers
        if missing_layers := sorted(set(paged_layers).difference(scaled_layers)):
            raise self._make_error(
                f"scales for every paged layer, got none for layers {missing_layers}"
            )
        if extra_layers := sorted(index for index in planned_layers if index >= num_layers):
            raise self._make_error(
                f"only layers of the model, 0 to {num_layers - 1}, but also got {extra_layers}",
                "Leave them out",
            )

    def make_budget(self) -> PageBudget:
        """Return a page budget for a cache and its forks."""
        if self.offloading:
            device_pages = None if self.offloading is True else self.offloading
            return OffloadBudget(self.page_size, self.max_pages, device_pages)
        return PageBudget(self.page_size, self.max_pages)

    def make_pool(
        self, plan: LayerPlan, budget: PageBudget | None = None, index: int = 0
    ) -> PagePool:
        """Return a pool without pages for layer `index` with this storage plan.

        `budget` is the budget of the cache, or None for scratch pages, which are never offloaded.
        """
        memory = OffloadedLayer(budget, index) if isinstance(budget, OffloadBudget) else None
        return PagePool(self.page_size, plan, self.has_dynamic_scales, memory)

    def expand_scales(
        self, scales: KVScales, index: int, num_heads: int, k_dim: int, v_dim: int
    ) -> LayerScales:
        """Return the scales of a layer with `num_heads` heads in this process. See `for_layer`."""
        return scales.for_layer(
            index,
            num_kv_heads=num_heads,
            k_head_dim=k_dim,
            v_head_dim=v_dim,
            tp_rank=self.tensor_parallel.rank,
            tp_size=self.tensor_parallel.size,
        )

    def get_layer_scales(
        self, index: int, num_heads: int, k_dim: int, v_dim: int
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """Return the scales of K `[Hkv, Dk]` and V `[Hkv, Dv]`, and the center `[Hkv, Dk]`.

        Each is float32 on the CPU, in the unit of the stored format, or None.
        """
        if self.scales is None:
            return None, None, None
        plan = self.get_layer_plan(index)
        if isinstance(self.scales, KVScales):
            scales = self.expand_scales(self.scales, index, num_heads, k_dim, v_dim)
            k, v = (
                scale * FORMATS[side.format].scale_from_e4m3
                if not side.is_auto and scale is not None and scale.numel()
                else None
                for scale, side in ((scales.k, plan.k), (scales.v, plan.v))
            )
            return k, v, scales.k_center if plan.k.centered else None
        scale = torch.tensor(self.scales, dtype=torch.float32, device="cpu")
        k = None if plan.k.format == AUTO else scale.repeat(num_heads, k_dim)
        v = None if plan.v.format == AUTO or not v_dim else scale.repeat(num_heads, v_dim)
        return k, v, None


def _make_layer_plan(
    formats: Mapping[str, object], *, has_scales: bool, is_latent: bool
) -> LayerPlan:
    """Return the plan of the arguments `dtype`, `key_dtype` and `value_dtype`, or the default."""
    parsed_formats = {
        argument: parse_dtype(dtype, argument)
        for argument, dtype in formats.items()
        if dtype is not None
    }
    default = parsed_formats.get("dtype", STATIC_DTYPE if has_scales else DEFAULT_DTYPE)
    k_format = parsed_formats.get("key_dtype", default)
    v_format = parsed_formats.get("value_dtype", AUTO if is_latent else default)
    # Rotation compensates for a narrow range. Static scales are for unrotated values.
    rotated_formats = () if has_scales else NARROW_FORMATS
    return LayerPlan(
        SidePlan(k_format, k_format in rotated_formats),
        SidePlan(v_format, v_format in rotated_formats),
    )


def _refuse_arguments(arguments: Mapping[str, Any], source: str) -> None:
    """Raise ConfigError for arguments that conflict with a plan."""
    for name, argument in arguments.items():
        if argument is not None:
            raise ConfigError(
                f"{name}: expected None, because {source} how each layer is stored, got "
                f"{argument!r}. Leave it out"
            )


def check_supported_page_size(size: int, name: str, advice: str) -> None:
    """Raise ConfigError, with `advice`, for a number of tokens that a page cannot have."""
    if type(size) is not int or size & (size - 1) or not 8 <= size <= 1024:
        raise ConfigError(
            f"{name}: expected a power of two from 8 to 1024 tokens, got {size!r}. {advice}"
        )
