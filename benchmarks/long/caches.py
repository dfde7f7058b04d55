"""The caches that the long suite compares: this package's, and their rivals."""

import functools
import importlib.util
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel, QuantizedCache

from hf_fp8kv.cache.cache import FP8PagedCache
from hf_fp8kv.calibration.plan_choice import choose_plan, resolve_plan
from hf_fp8kv.errors import ConfigError
from hf_fp8kv.formats import ADAPTIVE
from hf_fp8kv.scales.kv_scales import StoragePlan

# The numbers of a block that share a scale in llama.cpp's q8_0.
_BLOCK = 32
_LARGEST = 127
# What pip calls the packages that a rival needs, by the name of the module.
_PACKAGES = {"optimum.quanto": "optimum-quanto", "hqq": "hqq"}


@dataclass(frozen=True)
class Row:
    """A row of the tables: a cache and how it gets its tokens.

    `bits` are those of a number in a bf16 model, with its share of the scales, for a head size.
    """

    title: str
    make: Callable[[PreTrainedModel], Any]
    bits: Callable[[int], float] = lambda size: 8 + 16 / size  # a bf16 scale per token and head
    needs: str = ""  # the module that it needs


class RoundedCache(DynamicCache):
    """An unquantised cache of keys and values that `rounding` has been applied to.

    It stands for caches of other programs and packages: what matters is what they keep of a number,
    not where.
    """

    def __init__(
        self, config: PreTrainedConfig, rounding: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        super().__init__(config=config)
        self._rounding = rounding

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int,
        *args: Any, **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """Store what the rounding keeps; a first call attends to its own unrounded numbers."""
        first = not self.get_seq_length(layer_idx)
        rounded = self._rounding(key_states), self._rounding(value_states)
        keys, values = super().update(*rounded, layer_idx, *args, **kwargs)
        return (key_states, value_states) if first else (keys, values)


def round_to_bfloat16(states: torch.Tensor) -> torch.Tensor:
    """Return what bfloat16 keeps of the numbers."""
    return states.bfloat16().to(states.dtype)


def round_to_q8_0(states: torch.Tensor) -> torch.Tensor:
    """Return what q8_0 keeps: int8 with a float16 scale for each block of 32 along the head.

    Args:
        states: `[..., D]`; the last block is shorter where D is no multiple of 32.
    """
    size = states.shape[-1]
    padded = torch.nn.functional.pad(states.float(), (0, -size % _BLOCK))
    blocks = padded.unflatten(-1, (-1, _BLOCK))
    scale = blocks.abs().amax(-1, keepdim=True) / _LARGEST
    # As llama.cpp: codes of the unrounded scale, which is then stored as float16.
    codes = (blocks / scale.clamp(min=torch.finfo(scale.dtype).tiny)).round()
    rounded: torch.Tensor = codes * scale.half().float()
    return rounded.flatten(-2)[..., :size].to(states.dtype)


def round_to_quanto_int8(states: torch.Tensor) -> torch.Tensor:
    """Return what optimum-quanto's qint8 keeps, with a scale for each token and head.

    transformers' `QuantizedCache` takes this package with 2 and 4 bits only.
    """
    from optimum.quanto import AbsmaxOptimizer, qint8, quantize_weight

    rows = states.reshape(-1, states.shape[-1])
    scale = AbsmaxOptimizer()(rows, qtype=qint8, axis=0)
    rounded: torch.Tensor = quantize_weight(rows, qint8, 0, scale).dequantize()
    return rounded.reshape(states.shape).to(states.dtype)


def _paged(**options: Any) -> Callable[[PreTrainedModel], Any]:
    return lambda model: FP8PagedCache(model.config, **options)


def _adaptive(model: PreTrainedModel) -> FP8PagedCache:
    _, plan = resolve_plan(model, ADAPTIVE, None)
    return FP8PagedCache(model.config, plan=plan)


@functools.cache
def _plan_of_texts(model: PreTrainedModel) -> StoragePlan:
    """Return a plan chosen on torch's docstrings, which no kind of text is taken from."""
    docstrings = (getattr(torch, name).__doc__ for name in sorted(dir(torch)))
    return choose_plan(
        model, [text for text in docstrings if isinstance(text, str)], chat_template=False
    )


def _adaptive_texts(model: PreTrainedModel) -> FP8PagedCache:
    return FP8PagedCache(model.config, plan=_plan_of_texts(model))


def _rounded(rounding: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[PreTrainedModel], Any]:
    return lambda model: RoundedCache(model.config, rounding)


def _stock(backend: str, **options: Any) -> Callable[[PreTrainedModel], Any]:
    return lambda model: QuantizedCache(backend, model.config, **options)


def _constant(bits: float) -> Callable[[int], float]:
    return lambda size: bits


ROWS: dict[str, Row] = {
    "adaptive": Row('FP8PagedCache, dtype="adaptive"', _adaptive),
    "adaptive-texts": Row("FP8PagedCache, a plan chosen on texts", _adaptive_texts),
    "default": Row("FP8PagedCache, the default", _paged()),
    "e3m4": Row("fp8_e3m4", _paged(dtype="fp8_e3m4")),
    "e4m3": Row("fp8_e4m3", _paged(dtype="fp8_e4m3")),
    "e2m5": Row("fp8_e2m5", _paged(dtype="fp8_e2m5")),
    # Where K has outliers that turn with the position, this is what the choice has to avoid.
    "e2m5-rotated": Row(
        "fp8_e2m5, K rotated and centered, V rotated",
        _paged(plan=("fp8_e2m5 rotated centered", "fp8_e2m5 rotated")),
    ),
    "int8": Row("int8", _paged(dtype="int8")),
    "e4m3-1.0": Row("fp8_e4m3, scale 1.0", _paged(dtype="fp8_e4m3", scales=1.0), _constant(8)),
    "bf16": Row("K and V in bfloat16", _rounded(round_to_bfloat16), _constant(16)),
    "q8_0": Row("q8_0 (int8, blocks of 32)", _rounded(round_to_q8_0), _constant(8 + 16 / _BLOCK)),
    "stock-fp8": Row("QuantizedCache fp8", _stock("fp8"), _constant(8)),
    "quanto-int8": Row(
        "quanto int8, per token and head", _rounded(round_to_quanto_int8), needs="optimum.quanto"
    ),
    # Of these three: a scale and a zero point for 64 numbers.
    "quanto-int4": Row(
        "QuantizedCache quanto int4", _stock("quanto", nbits=4), _constant(4.5),
        needs="optimum.quanto",
    ),
    "hqq-int8": Row(
        "QuantizedCache hqq int8", _stock("hqq", nbits=8), _constant(8.5), needs="hqq"
    ),
    "hqq-int4": Row(
        "QuantizedCache hqq int4", _stock("hqq", nbits=4), _constant(4.5), needs="hqq"
    ),
}  # fmt: skip


def choose_rows(
    model: PreTrainedModel, names: Iterable[str]
) -> tuple[dict[str, Row], dict[str, str]]:
    """Return the rows that can be measured here, and why the others cannot.

    Raises:
        ConfigError: a name that no row has.
    """
    rows: dict[str, Row] = {}
    missing: dict[str, str] = {}
    for name in names:
        if name not in ROWS:
            raise ConfigError(
                f"caches: expected some of {', '.join(ROWS)}, got {name!r}; name them as here"
            )
        row = ROWS[name]
        if row.needs and not _is_installed(row.needs):
            missing[name] = f"not installed: pip install {_PACKAGES[row.needs]}"
            continue
        try:
            row.make(model)
        except (ConfigError, ValueError, ImportError) as error:
            missing[name] = f"refused: {' '.join(str(error).split())}"
        else:
            rows[name] = row
    return rows, missing


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # not even the package around it
        return False
