"""KVScales: static scales of a model's keys and values, one pair for each layer, and their files.

`LayerScales` defines direction and unit. A missing scale is a `ScaleError`, and never means 1.0.
"""

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import CONFIG_MAPPING

from ..errors import ScaleError
from ..formats import summarize_plan
from ..utils.digests import digest_decoder
from ..utils.text import format_list
from ..utils.warn_once import warn_once
from . import save
from .checkpoint.configs import find_text_config
from .formats.base import reduce_scales, to_json
from .layer_scales import (
    SKIP_ADVICE,
    LayerScales,
    ScaleData,
    check_ranks,
    make_scalar,
    parse_constant,
)
from .load import read_checkpoint, read_file
from .read_options import ReadOptions

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False, repr=False)
class KVScales(ScaleData):
    """The static scales of a model, in the unit of E4M3FN.

    Attributes:
        layers: Scales by layer index, in ascending order.
        format: Format of the source, a key of `SCALE_FORMATS` or "trtllm".
        model_type: Type of the calibrated model in transformers, or None.
        origin: File, folder or repository of the scales.
        weights_digest: Digest of the weights of the calibrated model, or None.
        protection: Protected layers of a plan from `choose_plan`, and their effect, or None.

    Raises:
        ScaleError: `layers` is empty, or not a dict of `LayerScales`.
    """

    def made_for(self, model: torch.nn.Module) -> bool | None:
        """Return whether the model has the weights for which the scales were made.

        A training step changes the weights. None means unknown, because the scales have no digest,
        or the weights of the model are not completely in this process.
        """
        digest = self.weights_digest and digest_decoder(model)
        return digest == self.weights_digest if digest else None

    @classmethod
    def uniform(cls, num_layers: int, k: float = 1.0, v: float = 1.0) -> "KVScales":
        """Return the same constants for every layer. Raise ScaleError for an invalid constant."""
        if isinstance(num_layers, bool) or not isinstance(num_layers, int) or num_layers < 1:
            raise ScaleError(f"num_layers: expected at least 1, got {num_layers!r}")
        layer = LayerScales(
            make_scalar(parse_constant(k, "k")),
            make_scalar(parse_constant(v, "v")),
            source="uniform",
        )
        return cls(dict.fromkeys(range(num_layers), layer), origin="uniform")

    @classmethod
    def from_file(
        cls,
        path: str | os.PathLike[str],
        *,
        tp_rank: int = 0,
        tp_size: int = 1,
        strict: bool = True,
    ) -> "KVScales":
        """Read one file: a `kv_cache_scales.json`, a safetensors file, or a safetensors index.

        Args:
            path: The file. A `config.json` next to a checkpoint's safetensors is also read.
            tp_rank: Rank whose scales are read from a file with several ranks (docs/scales.md).
            tp_size: Number of ranks on which the model runs.
            strict: False turns missing layers, a different model type and a different number of
                ranks into a warning. Missing layers stay missing.

        Raises:
            ScaleError: The file is invalid.
        """
        return wrap_scales(read_file(Path(path), ReadOptions(tp_rank, tp_size, strict)))

    @classmethod
    def from_pretrained(
        cls,
        repo_or_dir: str | os.PathLike[str],
        *,
        tp_rank: int = 0,
        tp_size: int = 1,
        strict: bool = True,
        **hub_options: Any,
    ) -> "KVScales":
        """Read the scales of a checkpoint: a local folder, or a repository of the Hub.

        The order of the search is: `kv_scales.safetensors`, in `kv_scales/` or next to the config,
        the scale tensors of the checkpoint, `kv_cache_scales.json`. From a repository, only the
        configs and the safetensors files with scales are fetched.

        Args:
            repo_or_dir: The folder, or the name of the repository.
            tp_rank, tp_size, strict: As in `from_file`.
            hub_options: revision, token, cache_dir, local_files_only, force_download and
                subfolder, as in transformers.

        Raises:
            ScaleError: The scales are missing or invalid.
        """
        return wrap_scales(
            read_checkpoint(
                os.fspath(repo_or_dir), ReadOptions(tp_rank, tp_size, strict), **hub_options
            )
        )

    def save_pretrained(
        self,
        folder: str | os.PathLike[str],
        *,
        format: str = "hf_fp8kv",
        checkpoint: str | os.PathLike[str] | None = None,
        weights: save.Weights = "copy",
        overwrite: bool = False,
        tp_size: int = 1,
    ) -> list[Path]:
        """Write the scales in a format, alone or into a checkpoint, and return the paths.

        Either all files are written completely, or none. "hf_fp8kv" holds every granularity and the
        centers exactly. Scales that another format cannot hold are reduced to the largest
        scale, with a warning.

        Args:
            folder: The folder to write to. It is created if missing.
            format: A key of `SCALE_FORMATS`.
            checkpoint: A folder with a checkpoint. `folder` must be new or empty, and becomes a
                copy of it with the scales. All bytes of the weights stay the same.
            weights: "copy", or "link" for hard links to the weights, on the same disk.
            overwrite: Whether to replace existing scales, or the scales of `checkpoint` in its
                copy. In the folder of a model, the scales are added. Its weights and all entries of
                its `config.json` are kept.
            tp_size: Number of ranks, for "vllm-json". All ranks get the largest scale of a layer.

        Raises:
            ScaleError: The format cannot hold the scales, or the folder cannot be used for them.
        """
        writer = save.find_format(format, tp_size)
        target = Path(folder)
        scales, losses = reduce_scales(self, writer)
        source = target if checkpoint is None else Path(checkpoint)
        base = save.read_base(
            target,
            writer,
            writer.make_files(scales, tp_size),
            None if checkpoint is None else source,
            weights,
            overwrite=overwrite,
        )
        files = writer.make_files(scales, tp_size, base)
        if base is not None:
            model_types = [
                config.get("model_type") for config in (base.config, find_text_config(base.config))
            ]
            if self.model_type not in (None, *model_types) and any(model_types):
                raise ScaleError(
                    f"{base.origin}: expected a {self.model_type!r} model for these scales, got "
                    f"{model_types[0]!r}. Use the checkpoint for which they were made"
                )
            if base.removed_tensors:
                files = {"config.json": to_json(base.config), **files}
        paths = save.write_files(source, target, files, base, scales, weights, tp_size)
        losses += writer.describe_gaps(self, base)
        if losses:
            logger.warning("%s: written as %s: %s", target, format, "; ".join(losses))
        return paths

    def for_layer(
        self,
        index: int,
        *,
        num_kv_heads: int,
        k_head_dim: int,
        v_head_dim: int,
        tp_rank: int = 0,
        tp_size: int = 1,
    ) -> LayerScales:
        """Return the scales of a layer, expanded to `[Hkv, Dk]` and `[Hkv, Dv]`, contiguous.

        The result is cached, because every new cache needs it.

        Args:
            index: Index of the layer.
            num_kv_heads, k_head_dim, v_head_dim: Hkv, Dk and Dv in this process.
            tp_rank: Rank whose heads are selected, if the scales have the heads of all ranks.
            tp_size: Number of ranks that share the heads of the model.

        Raises:
            ScaleError: The layer is missing, or the scales have a different number of heads or a
                different head size.
        """
        check_ranks(tp_rank, tp_size)
        if index not in self.layers:
            raise ScaleError(
                f"scales ({self.origin}): expected layer {index}, got layers "
                f"{format_list(self.layers)}. Use this model's scales, or {SKIP_ADVICE}"
            )
        layer = self.layers[index]
        key = (num_kv_heads, k_head_dim, v_head_dim, tp_rank, tp_size)
        scales_by_size = _expanded_scales.setdefault(layer, {})
        if key in scales_by_size:
            return scales_by_size[key]

        def expand(tensor: torch.Tensor | None, dim: int, label: str) -> torch.Tensor | None:
            if tensor is None:
                return None
            label = f"{label} of layer {index} ({layer.source})"
            if tensor.ndim:
                tensor = tensor[_select_heads(len(tensor), num_kv_heads, tp_rank, tp_size, label)]
                if tensor.shape[1] not in (1, dim):
                    raise ScaleError(
                        f"{label}: expected a head size of {dim} or 1, got {tensor.shape[1]}. Use "
                        "this model's scales"
                    )
            return tensor.expand(num_kv_heads, dim).clone(memory_format=torch.contiguous_format)

        scales_by_size[key] = LayerScales(
            expand(layer.k, k_head_dim, "K scale"),
            expand(layer.v, v_head_dim, "V scale"),
            expand(layer.k_center, k_head_dim, "center of K"),
            layer.source,
            layer.plan,
        )
        return scales_by_size[key]


_expanded_scales = WeakKeyDictionary[LayerScales, dict[tuple[int, ...], LayerScales]]()


def _select_heads(num_stored: int, num_heads: int, tp_rank: int, tp_size: int, label: str) -> slice:
    """Return the slice of a rank's `num_heads` heads among all `num_stored` heads."""
    if num_stored in (1, num_heads):
        return slice(0, num_stored)
    if num_stored == num_heads * tp_size:
        return slice(tp_rank * num_heads, (tp_rank + 1) * num_heads)
    # Neighboring ranks have copies of one head if there are more ranks than heads.
    if num_heads == 1 and tp_size % num_stored == 0:
        return slice(tp_rank * num_stored // tp_size, tp_rank * num_stored // tp_size + 1)
    total = "" if tp_size == 1 else f" (or {num_heads * tp_size} of all {tp_size} ranks)"
    raise ScaleError(
        f"{label}: expected {num_heads} heads{total}, got {num_stored}. Use this model's scales, "
        "with an entry for each KV head, and the rank of this process "
        "(hf_fp8kv.tensor_parallel(model) returns it)"
    )


class StoragePlan(KVScales):
    """Format, rotation and center of each layer, with scales that the cache computes.

    `hf_fp8kv.choose_plan` returns a plan, with the files, attributes and methods of `KVScales`.

    Raises:
        ScaleError: A layer has no plan, or has static scales.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.is_dynamic:
            raise ScaleError(
                f"plan ({self.origin}): expected layers without static scales, got {self!r}. Pass "
                "static scales as `scales`"
            )

    def __repr__(self) -> str:
        protection = "" if self.protection is None else f"; {self.protection}"
        return f"StoragePlan({summarize_plan(self.plan or {})}; {self.origin}{protection})"

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "StoragePlan":
        """Read the plan in a file, a folder or a repository of the Hub.

        Raises:
            ScaleError: The scales are static, or have no plan.
        """
        plan = resolve_scales(path)
        if not isinstance(plan, StoragePlan):
            raise ScaleError(
                f"plan: expected a StoragePlan in {path}, got {plan!r}. Pass static scales as "
                "`scales`"
            )
        return plan


def wrap_scales(data: ScaleData) -> KVScales:
    """Return the scales as `KVScales`, or as a `StoragePlan` if the cache computes them."""
    scales_class = StoragePlan if data.is_dynamic else KVScales
    return scales_class(**vars(data))


def resolve_scales(
    scales: KVScales | str | os.PathLike[str] | float | None, **options: Any
) -> KVScales | float | None:
    """Return the scales for the argument `scales` of a cache. Raise ScaleError if it is invalid.

    None means dynamic scales, and a number means a constant scale for every layer. A string or path
    is a file, a folder or a repository of the Hub. `options` are keywords of `from_pretrained`.
    """
    if scales is None or isinstance(scales, KVScales):
        return scales
    if isinstance(scales, int | float):
        return parse_constant(scales, "scales")
    if not isinstance(scales, str | os.PathLike):
        raise ScaleError(
            "scales: expected None, a number, KVScales, a path or a repository id, got "
            f"{type(scales).__name__}"
        )
    return KVScales.from_pretrained(scales, **options)


def warn_if_stale(model: torch.nn.Module, scales: KVScales | float | None) -> None:
    """Warn once if scales were made for other weights or, without a digest, for another model."""
    if not isinstance(scales, KVScales):
        return
    model_name = type(model).__name__
    is_made_for_model = scales.made_for(model)
    if is_made_for_model is False:
        effect = "Values that exceed the old range saturate"
        if scales.is_dynamic:
            effect = "Nothing saturates, but the plan and centers may no longer fit"
        warn_once(
            f"static scales ({scales.origin}) were made for different weights than {model_name} "
            f"has now. {effect}. Calibrate again (hf_fp8kv.calibrate), or use dynamic scales "
            "(scales=None). scales.made_for(model) checks the weights"
        )
    elif is_made_for_model is None and (other_model := _describe_other_model(scales, model.config)):
        warn_once(
            f"the scales or the plan ({scales.origin}) were made for {other_model}, which "
            f"{model_name} is not. Use the scales or the plan of this model"
        )


def _describe_other_model(scales: KVScales, config: Any) -> str:
    """Describe the model of the scales, or return "" if it may be the model with this config.

    The text model of a multimodal model has a different type, and may use the same scales.
    """
    model_type = scales.model_type
    if model_type is None or (
        model_type in CONFIG_MAPPING and CONFIG_MAPPING[model_type].sub_configs
    ):
        return ""
    decoder = config.get_text_config(decoder=True)
    if model_type not in (config.model_type, decoder.model_type):
        return f"a model of type {model_type!r}"
    num_layers = max(scales.layers, default=-1) + 1
    num_draft_layers = getattr(decoder, "num_nextn_predict_layers", None) or 0
    if num_layers > getattr(decoder, "num_hidden_layers", num_layers) + num_draft_layers:
        return f"a model with {num_layers} layers"
    return ""
