"""Static scales of a model's keys and values, one pair a layer.

There is one direction and one unit: `real = stored * scale`, and a scale is made for E4M3FN (448 is
the largest code). What was made for another format is converted when it is read
(`sources.py`), and converted again when it is used (`LayerScales.converted`).

A layer without a scale never means 1.0: it is a `ScaleError`.
"""

import json
import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import save as to_safetensors

from .errors import ScaleError
from .formats import MIN_SCALE, Format

__all__ = [
    "CHECKPOINT_FORMATS",
    "OWN_FILE",
    "KVScales",
    "LayerScales",
    "declared_kv_scales",
    "resolve",
]

logger = logging.getLogger(__name__)

# Outside of these the reciprocal, or the largest code times the scale, may leave fp32.
_LOWEST, _HIGHEST = MIN_SCALE, 1 / MIN_SCALE
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

CHECKPOINT_FORMATS = (
    "vllm-json",
    "tgi",
    "compressed-tensors",
    "autofp8",
    "modelopt",
    "quark",
    "trtllm",
    "hf_fp8kv",
)
OWN_FILE = "kv_scales.safetensors"
OWN_SUMMARY = "kv_scales.json"
OWN_VERSION = 1

Granularity = Literal["tensor", "head", "channel"]


@dataclass(frozen=True, eq=False)
class LayerScales:
    """The scales of one layer: `real = stored * scale (+ centre)`.

    Attributes:
        k: float32 on the CPU: `[]` per tensor, `[Hkv, 1]` per head, `[Hkv, Dk]` or `[1, Dk]` per
            channel.
        v: the same for V, with Dv.
        k_center: `[Hkv, Dk]`, float32: what is subtracted from K before it is stored, or None.
        source: where the numbers are from: a file and the names of its tensors.
    """

    k: torch.Tensor
    v: torch.Tensor
    k_center: torch.Tensor | None = None
    source: str = "given"

    def __post_init__(self) -> None:
        object.__setattr__(self, "k", _checked_scale(self.k, f"K scale ({self.source})"))
        object.__setattr__(self, "v", _checked_scale(self.v, f"V scale ({self.source})"))
        if self.k_center is not None:
            what = f"centre of K ({self.source})"
            object.__setattr__(self, "k_center", _checked_center(self.k_center, what))
        sided = {"K": self.k, "V": self.v, "the centre": self.k_center}
        heads = {n: t.shape[0] for n, t in sided.items() if t is not None and t.ndim and len(t) > 1}
        if len(set(heads.values())) > 1:
            raise ScaleError(
                f"scales ({self.source}): expected one number of heads, got {heads}; "
                "give K, V and the centre scales of the same layer"
            )

    @property
    def granularity(self) -> Granularity:
        """The finer one of the two sides."""
        if any(t.ndim and t.shape[1] > 1 for t in (self.k, self.v)):
            return "channel"
        return "head" if any(t.numel() > 1 for t in (self.k, self.v)) else "tensor"

    def converted(self, k_format: Format, v_format: Format | None = None) -> "LayerScales":
        """The scales that let `k_format` (and `v_format`; None: the same) hold the same numbers.

        Only ever call this on scales in the unit of E4M3FN, and once: it is the last step before
        an operation. Centres are real numbers and stay.
        """
        v_format = v_format or k_format
        return LayerScales(
            self.k * k_format.scale_from_e4m3,
            self.v * v_format.scale_from_e4m3,
            self.k_center,
            self.source,
        )


@dataclass(frozen=True, eq=False, repr=False)
class KVScales:
    """The static scales of a model, in the unit of E4M3FN.

    Attributes:
        layers: the scales of each layer, in the order of the layers.
        format: what they were read from, one of `CHECKPOINT_FORMATS`.
        model_type: the model they were made for, as transformers names it, where the file says so.
        origin: the file, folder or repository they were read from.
    """

    layers: dict[int, LayerScales]
    format: str = "hf_fp8kv"
    model_type: str | None = None
    origin: str = "memory"

    def __post_init__(self) -> None:
        if self.format not in CHECKPOINT_FORMATS:
            raise ScaleError(
                f"format: expected one of {', '.join(CHECKPOINT_FORMATS)}, got {self.format!r}"
            )
        if not isinstance(self.layers, Mapping) or not self.layers:
            raise ScaleError(
                f"scales ({self.origin}): expected a dict with at least one layer, got "
                f"{self.layers!r}; use scales=None for dynamic scales"
            )
        for index, layer in self.layers.items():
            if isinstance(index, bool) or not isinstance(index, int) or index < 0:
                raise ScaleError(
                    f"scales ({self.origin}): expected layer indices from 0, got {index!r}"
                )
            if not isinstance(layer, LayerScales):
                raise ScaleError(
                    f"scales ({self.origin}): expected LayerScales for layer {index}, got "
                    f"{type(layer).__name__}"
                )
        object.__setattr__(self, "layers", dict(sorted(self.layers.items())))

    def __repr__(self) -> str:
        kinds = "/".join(sorted({layer.granularity for layer in self.layers.values()}))
        return (
            f"KVScales({len(self.layers)} layers, per {kinds}, centred={self.centered}, "
            f"format={self.format!r}, origin={self.origin!r})"
        )

    @property
    def centered(self) -> bool:
        """Whether any layer carries a centre of K."""
        return any(layer.k_center is not None for layer in self.layers.values())

    @classmethod
    def uniform(cls, num_layers: int, k: float = 1.0, v: float = 1.0) -> "KVScales":
        """The same two constants for every layer."""
        if isinstance(num_layers, bool) or not isinstance(num_layers, int) or num_layers < 1:
            raise ScaleError(f"num_layers: expected at least 1, got {num_layers!r}")
        k, v = checked_constant(k, "k"), checked_constant(v, "v")
        layer = LayerScales(scalar(k), scalar(v), source="uniform")
        return cls(dict.fromkeys(range(num_layers), layer), origin="uniform")

    @classmethod
    def from_file(
        cls,
        path: str | os.PathLike[str],
        *,
        tp_rank: int = 0,
        tp_size: int = 1,
        strict: bool = True,
        num_layers: int | None = None,
        model_type: str | None = None,
    ) -> "KVScales":
        """Reads one file: a `kv_cache_scales.json`, a safetensors file, or a safetensors index.

        Args:
            path: the file. A `config.json` beside a checkpoint's safetensors is read too.
            tp_rank: which rank's scales of a file with several; see docs/scales.md.
            tp_size: how many ranks the model runs on.
            strict: False turns missing layers, another model type and another number of ranks
                into a warning; the layers that are missing stay missing.
            num_layers: the layers that are expected; None: as the file or the config says.
            model_type: the model type that is expected; None: any.

        Raises:
            ScaleError: whatever is wrong with the file.
        """
        from .sources import Request, read_file

        want = Request(tp_rank, tp_size, strict, num_layers, model_type)
        return read_file(Path(path), want)

    @classmethod
    def from_pretrained(
        cls,
        repo_or_dir: str | os.PathLike[str],
        *,
        revision: str | None = None,
        token: str | bool | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        local_files_only: bool = False,
        force_download: bool = False,
        subfolder: str | None = None,
        tp_rank: int = 0,
        tp_size: int = 1,
        strict: bool = True,
    ) -> "KVScales":
        """Reads the scales of a checkpoint: a local folder, or a repository of the Hub.

        Looked for in this order: `kv_scales.safetensors`, the scale tensors of the checkpoint,
        `kv_cache_scales.json`. Of a repository only the configs and the safetensors files that
        hold scales are fetched. The last three arguments are those of `from_file`.

        Raises:
            ScaleError: whatever is wrong, also when there are no scales at all.
        """
        from .sources import Request, read_checkpoint

        return read_checkpoint(
            os.fspath(repo_or_dir),
            Request(tp_rank, tp_size, strict),
            revision=revision,
            token=token,
            cache_dir=cache_dir,
            local_files_only=local_files_only,
            force_download=force_download,
            subfolder=subfolder,
        )

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
        """The scales of one layer, spread out to `[Hkv, Dk]` and `[Hkv, Dv]`, contiguous.

        Args:
            index: the layer.
            num_kv_heads: the heads of K and V in this process.
            k_head_dim: Dk.
            v_head_dim: Dv.
            tp_rank: with scales of all ranks' heads, which rank's heads to take.
            tp_size: over how many ranks the model's heads are spread.

        Raises:
            ScaleError: the layer is missing, or the scales are of another number of heads or
                another head size.
        """
        check_ranks(tp_rank, tp_size)
        if index not in self.layers:
            raise ScaleError(
                f"scales ({self.origin}): expected layer {index}, got layers "
                f"{shortened(self.layers)}; use the scales of this very model, or keep the layer "
                "out with skip_layers"
            )
        layer = self.layers[index]

        def spread(tensor: torch.Tensor, dim: int, what: str) -> torch.Tensor:
            what = f"{what} of layer {index} ({layer.source})"
            if tensor.ndim:
                tensor = tensor[_heads_of(tensor.shape[0], num_kv_heads, tp_rank, tp_size, what)]
                if tensor.shape[1] not in (1, dim):
                    raise ScaleError(
                        f"{what}: expected a head size of {dim} or 1, got {tensor.shape[1]}; "
                        "use the scales of this very model"
                    )
            return tensor.expand(num_kv_heads, dim).clone(memory_format=torch.contiguous_format)

        center = layer.k_center
        return LayerScales(
            spread(layer.k, k_head_dim, "K scale"),
            spread(layer.v, v_head_dim, "V scale"),
            None if center is None else spread(center, k_head_dim, "centre of K"),
            layer.source,
        )

    def save_pretrained(
        self, folder: str | os.PathLike[str], *, format: str = "hf_fp8kv"
    ) -> list[Path]:
        """Writes `kv_scales.safetensors`, and `kv_scales.json` for people; returns the paths.

        Each file appears whole or not at all. Only the format "hf_fp8kv" can be written: it holds
        every granularity and the centres exactly.

        Raises:
            ScaleError: for another format, or when the folder cannot be written.
        """
        if format != "hf_fp8kv":
            raise ScaleError(
                f"format: expected 'hf_fp8kv', got {format!r}; no other can be written"
            )
        about = {
            "version": OWN_VERSION,
            "dtype": "float8_e4m3fn",
            "layers": list(self.layers),
            "model_type": self.model_type,
            "origin": self.origin,
            "read_as": self.format,
        }
        tensors: dict[str, torch.Tensor] = {}
        for index, layer in self.layers.items():
            tensors[f"layers.{index}.k_scale"] = layer.k.clone()
            tensors[f"layers.{index}.v_scale"] = layer.v.clone()
            if layer.k_center is not None:
                tensors[f"layers.{index}.k_center"] = layer.k_center.clone()
        summary = {**about, "scales": {str(i): _summary(s) for i, s in self.layers.items()}}
        path = Path(folder)
        # The scales come last: with them in place, the pair is complete.
        files = {
            path / OWN_SUMMARY: json.dumps(summary, indent=2).encode() + b"\n",
            path / OWN_FILE: to_safetensors(tensors, {"hf_fp8kv": json.dumps(about)}),
        }
        try:
            path.mkdir(parents=True, exist_ok=True)
            for file, content in files.items():
                _write_whole(file, content)
        except OSError as error:
            raise ScaleError(
                f"{path}: expected a folder that can be written, got {error}; choose another"
            ) from error
        return list(files)


def resolve(
    scales: KVScales | str | os.PathLike[str] | float | None,
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    local_files_only: bool = False,
    force_download: bool = False,
    subfolder: str | None = None,
    tp_rank: int = 0,
    tp_size: int = 1,
    strict: bool = True,
) -> KVScales | float | None:
    """What the argument `scales` of a cache stands for.

    None is dynamic scales, a number is that constant for every layer, a string or path is a file,
    a folder or a repository of the Hub, and the other arguments are those of
    `KVScales.from_pretrained`.

    Raises:
        ScaleError: for anything else, or whatever is wrong with the file.
    """
    if scales is None or isinstance(scales, KVScales):
        return scales
    if isinstance(scales, int | float):
        return checked_constant(scales, "scales")
    if not isinstance(scales, str | os.PathLike):
        raise ScaleError(
            "scales: expected None, a number, KVScales, a path or a repository id, got "
            f"{type(scales).__name__}"
        )
    path = Path(scales)
    if path.is_file() or (path.suffix in (".json", ".safetensors") and not path.is_dir()):
        return KVScales.from_file(path, tp_rank=tp_rank, tp_size=tp_size, strict=strict)
    return KVScales.from_pretrained(
        scales,
        revision=revision,
        token=token,
        cache_dir=cache_dir,
        local_files_only=local_files_only,
        force_download=force_download,
        subfolder=subfolder,
        tp_rank=tp_rank,
        tp_size=tp_size,
        strict=strict,
    )


def declared_kv_scales(config: object) -> str | None:
    """A short description, when a config says that its checkpoint holds static FP8 KV scales.

    Args:
        config: transformers' config, or the dict of a `config.json`.
    """
    from .sources import declaration

    found = declaration(config)
    return found.what if found.kind == "static" else None


def check_ranks(tp_rank: int, tp_size: int) -> None:
    """Raises ScaleError unless `0 <= tp_rank < tp_size`."""
    for value in (tp_rank, tp_size):
        if isinstance(value, bool) or not isinstance(value, int):
            raise ScaleError(f"tp_rank, tp_size: expected integers, got {value!r}")
    if not 0 <= tp_rank < tp_size:
        raise ScaleError(
            f"expected 0 <= tp_rank < tp_size, got tp_rank={tp_rank} and tp_size={tp_size}"
        )


def scalar(value: float) -> torch.Tensor:
    """The number as float32 on the CPU, whatever torch's default dtype and device are."""
    return torch.tensor(value, dtype=torch.float32, device="cpu")


def shortened(values: Iterable[object], limit: int = 8) -> str:
    """The first few values for a message, and dots when there are more."""
    shown = [str(value) for value in islice(values, limit + 1)]
    return ", ".join(shown[:limit]) + (", ..." if len(shown) > limit else "")


def checked_constant(value: object, what: str) -> float:
    """The number as a float; ScaleError unless it can be a scale."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    # Compared before it is converted: an integer may be too large for a float.
    if number and _LOWEST <= value <= _HIGHEST:  # type: ignore[operator]
        return float(value)  # type: ignore[arg-type]
    raise ScaleError(
        f"{what}: expected a finite number above 0 (from 2^-100 to 2^100), got {value!r}"
    )


def _checked_tensor(tensor: object, what: str) -> torch.Tensor:
    if not isinstance(tensor, torch.Tensor) or tensor.is_meta:
        got = "a tensor on meta" if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise ScaleError(f"{what}: expected a tensor with data, got {got}")
    if tensor.dtype not in _DTYPES:
        raise ScaleError(
            f"{what}: expected float32, bfloat16, float16 or float64, got {tensor.dtype}; "
            "convert it"
        )
    return tensor.detach().to("cpu", torch.float32, copy=True).contiguous()


def _checked_scale(tensor: object, what: str) -> torch.Tensor:
    scale = _checked_tensor(tensor, what)
    if scale.numel() == 1:
        scale = scale.reshape(())
    if scale.ndim not in (0, 2) or scale.numel() == 0:
        raise ScaleError(
            f"{what}: expected the shape [], [heads, 1], [heads, D] or [1, D], got "
            f"{list(scale.shape)}; reshape it"
        )
    bad = ~((scale >= _LOWEST) & (scale <= _HIGHEST))
    if bad.any():
        raise ScaleError(
            f"{what}: expected finite numbers above 0 (from 2^-100 to 2^100), got "
            f"{scale[bad][0].item()!r}; calibrate again, or leave the scales out (scales=None is "
            "dynamic)"
        )
    return scale


def _checked_center(tensor: object, what: str) -> torch.Tensor:
    center = _checked_tensor(tensor, what)
    if center.ndim != 2 or center.numel() == 0:
        raise ScaleError(f"{what}: expected the shape [heads, D], got {list(center.shape)}")
    bad = ~center.isfinite()
    if bad.any():
        raise ScaleError(
            f"{what}: expected finite numbers, got {center[bad][0].item()!r}; calibrate again"
        )
    return center


def _heads_of(heads: int, wanted: int, tp_rank: int, tp_size: int, what: str) -> slice:
    """Which rows of `[heads, ...]` are those of this rank, which has `wanted` heads."""
    if heads in (1, wanted):
        return slice(0, heads)
    if heads == wanted * tp_size:
        return slice(tp_rank * wanted, (tp_rank + 1) * wanted)
    # More ranks than heads: neighbouring ranks hold a copy of the same head.
    if wanted == 1 and tp_size % heads == 0:
        return slice(tp_rank * heads // tp_size, tp_rank * heads // tp_size + 1)
    total = "" if tp_size == 1 else f" (or {wanted * tp_size} of all {tp_size} ranks)"
    raise ScaleError(
        f"{what}: expected {wanted} heads{total}, got {heads}; use the scales of this very model, "
        "and its tp_size"
    )


def _summary(layer: LayerScales) -> dict[str, object]:
    """The largest scale of each side, for people to read."""
    return {
        "k": layer.k.max().item(),
        "v": layer.v.max().item(),
        "granularity": layer.granularity,
        "centered": layer.k_center is not None,
        "source": layer.source,
    }


def _write_whole(path: Path, content: bytes) -> None:
    """The file is there with all of its content, or as it was before."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
