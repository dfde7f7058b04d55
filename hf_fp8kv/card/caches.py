"""The caches that a card compares, including imitations of other software by rounding."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel, QuantizedCache

from ..cache.cache import FP8PagedCache
from ..calibration.plan_choice import resolve_plan
from ..errors import ConfigError, FP8KVError
from ..formats.rotation import rotate
from ..scales import KVScales
from ..scales.checkpoint.configs import describe_kv_scales
from ..utils.text import suggest

FLOOR = "bf16"  # key of `CONTENDERS` for the smallest possible loss
CHECKPOINT = "checkpoint"  # key of `CONTENDERS` for the checkpoint's scales
_BLOCK_SIZE = 32  # number of values that share a scale in llama.cpp's formats
_ROTATION_SIZE = 64  # channels of V that q8_0 rotates together, if they divide the head size
# Number of tokens of a cache whose bytes are counted, a multiple of every page size.
_CACHE_TOKENS = 1024
KeysAndValues = tuple[torch.Tensor, torch.Tensor]  # keys and values of a layer, [B, Hkv, N, D]


@dataclass(frozen=True)
class Contender:
    """A kind of cache that a card measures.

    Attributes:
        title: Name in tables.
        make: Function that returns an empty cache for a model.
        bits: Bits per value of a cache of other software, which is imitated by rounding. None means
            that the cache itself is measured.
    """

    title: str
    make: Callable[[PreTrainedModel], Any]
    bits: float | None = None

    def fill(
        self, model: PreTrainedModel, states: list[KeysAndValues], num_tokens: int | None = None
    ) -> Any:
        """Return a new cache that holds the first `num_tokens` tokens. None means all tokens."""
        cache = self.make(model)
        for index, (keys, values) in enumerate(states):
            cache.update(keys[:, :, :num_tokens], values[:, :, :num_tokens], index)
        return cache

    def make_stored(self, model: PreTrainedModel) -> Any:
        """Return an empty cache whose first call also attends to stored states.

        None means that the cache returns unrounded states of its first call, as `QuantizedCache`.
        """
        cache = self.make(model)
        if isinstance(cache, RoundedCache):
            cache.prefill = "stored"
            return cache
        if not isinstance(cache, FP8PagedCache):
            return None
        options = replace(cache.options, prefill="stored")
        return FP8PagedCache.from_options(model.config, options, ())


class RoundedCache(DynamicCache):
    """An unquantized cache of rounded keys and values, which imitates a quantized cache."""

    prefill = "exact"  # as in `FP8PagedCache`

    def __init__(
        self,
        config: PreTrainedConfig,
        rounding: Callable[[torch.Tensor, torch.Tensor], KeysAndValues],
    ) -> None:
        super().__init__(config=config)
        self._rounding = rounding

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store rounded states. The first call returns unrounded states if `prefill` is "exact"."""
        is_exact = self.prefill == "exact" and not self.get_seq_length(layer_idx)
        rounded_states = self._rounding(key_states, value_states)
        keys, values = super().update(*rounded_states, layer_idx, *args, **kwargs)
        return (key_states, value_states) if is_exact else (keys, values)


def round_to_bfloat16(keys: torch.Tensor, values: torch.Tensor) -> KeysAndValues:
    """Return keys and values rounded to bfloat16, in their own dtype."""
    return keys.bfloat16().to(keys.dtype), values.bfloat16().to(values.dtype)


def round_to_q8_0(
    states: torch.Tensor, rotation_size: int | None = None, max_code: int = 127
) -> torch.Tensor:
    """Return the states `[..., D]` rounded like llama.cpp's q8_0, in their own dtype.

    q8_0 is int8 with a float16 scale for each block of 32 values of a head. The last block is
    shorter if D is not a multiple of 32. If D is a multiple of 64, llama.cpp first applies a
    Hadamard transform (ggml-org/llama.cpp pull request 21038, 2026-04): to K over the largest power
    of two that divides D, to V over 64 channels.

    Args:
        states: K or V.
        rotation_size: Number of channels that are rotated together. None means the number for K.
        max_code: The largest code. 31 means six bits.
    """
    head_dim = states.shape[-1]
    if not head_dim % _ROTATION_SIZE:
        groups = states.unflatten(-1, (-1, rotation_size or head_dim))
        return rotate(_round_blocks(rotate(groups), max_code)).view_as(states).to(states.dtype)
    return _round_blocks(states, max_code).to(states.dtype)


def _round_blocks(states: torch.Tensor, max_code: int) -> torch.Tensor:
    head_dim = states.shape[-1]
    padded_states = torch.nn.functional.pad(states.float(), (0, -head_dim % _BLOCK_SIZE))
    blocks = padded_states.unflatten(-1, (-1, _BLOCK_SIZE))
    scale = blocks.abs().amax(-1, keepdim=True) / max_code
    # llama.cpp divides by the scale in float32, and stores it in float16.
    codes = (blocks / scale.clamp(min=torch.finfo(scale.dtype).tiny)).round()
    rounded_blocks: torch.Tensor = codes * scale.half().float()
    return rounded_blocks.flatten(-2)[..., :head_dim]


def _make_paged(**options: Any) -> Callable[[PreTrainedModel], Any]:
    """Return a function that makes a cache with these options for a model."""
    return lambda model: FP8PagedCache(model.config, **options)


def _imitate_q8_0(max_code: int) -> Callable[[PreTrainedModel], Any]:
    def round_states(keys: torch.Tensor, values: torch.Tensor) -> KeysAndValues:
        return (
            round_to_q8_0(keys, None, max_code),
            round_to_q8_0(values, _ROTATION_SIZE, max_code),
        )

    return lambda model: RoundedCache(model.config, round_states)


UNQUANTIZED = Contender("unquantized", lambda model: DynamicCache(config=model.config))
CONTENDERS = {
    "default": Contender('FP8PagedCache, dtype="adaptive"', FP8PagedCache),
    "fp8_e3m4": Contender('FP8PagedCache, dtype="fp8_e3m4"', _make_paged(dtype="fp8_e3m4")),
    "fp8": Contender('FP8PagedCache, dtype="fp8"', _make_paged(dtype="fp8")),
    "6-bit": Contender(
        "FP8PagedCache, bits=6",
        lambda model: FP8PagedCache(model.config, **resolve_plan(model, {"bits": 6})),
    ),
    CHECKPOINT: Contender(
        "FP8PagedCache, the checkpoint's scales",
        lambda model: FP8PagedCache.from_pretrained(str(model.name_or_path), config=model.config),
    ),
    "fp8-1.0": Contender(
        'FP8PagedCache, dtype="fp8", scale 1.0', _make_paged(dtype="fp8", scales=1.0)
    ),
    "q8_0": Contender(
        "q8_0 of llama.cpp (rounding only)", _imitate_q8_0(127), 8 + 16 / _BLOCK_SIZE
    ),
    "q6_0": Contender(
        "q8_0 with six bits (rounding only)", _imitate_q8_0(31), 6 + 16 / _BLOCK_SIZE
    ),
    "QuantizedCache": Contender(
        'QuantizedCache("fp8")', lambda model: QuantizedCache("fp8", model.config)
    ),
    FLOOR: Contender(
        "K and V rounded to bfloat16",
        lambda model: RoundedCache(model.config, round_to_bfloat16),
        16,
    ),
}
STANDARD_CACHES = ("default", "fp8_e3m4", "fp8", "QuantizedCache", FLOOR)


def choose_contenders(
    model: PreTrainedModel, names: Iterable[str] = (), scales: KVScales | None = None
) -> tuple[dict[str, Contender], dict[str, str]]:
    """Return the caches that a card measures, and the reasons to leave out a cache, by name.

    Args:
        model: The model.
        names: Keys of `CONTENDERS`, or plans such as "int8 rotated" or "fp8_e3m4 + int4 rotated"
            (K and V). Empty means the standard caches, and the checkpoint's scales if it declares
            any.
        scales: Additional static scales to measure.

    Raises:
        ConfigError: A name is neither a cache nor a plan, or no cache can be measured.
    """
    default_names = list(STANDARD_CACHES)
    if describe_kv_scales(model.config):
        default_names.append(CHECKPOINT)
    contenders: dict[str, Contender] = {}
    refusals: dict[str, str] = {}
    for name in names or default_names:
        plan = name.split(" + ") if " + " in name else name
        contender = CONTENDERS.get(name) or Contender(
            f"FP8PagedCache, {name}", _make_paged(plan=plan)
        )
        try:
            contender.make(model)
        except (FP8KVError, ValueError) as error:
            if name not in CONTENDERS:
                raise ConfigError(
                    f"caches: expected some of {', '.join(CONTENDERS)}, or a plan such as 'int8 "
                    f"rotated', got {name!r}.{suggest(name, CONTENDERS)}"
                ) from error
            refusals[name] = " ".join(str(error).split())
        else:
            contenders[name] = contender
    if scales is not None:
        title = f"FP8PagedCache, scales of {scales.origin}"
        contenders["scales"] = Contender(title, _make_paged(scales=scales))
        contenders["scales"].make(model)
    if not contenders:
        raise ConfigError(f"caches: expected a usable cache. {' '.join(refusals.values())}")
    return contenders, refusals


def count_token_bytes(
    contender: Contender,
    model: PreTrainedModel,
    states: list[KeysAndValues],
    num_tokens: int = _CACHE_TOKENS,
) -> float:
    """Return the bytes per token of a cache of `num_tokens`, if the model's dtype is bfloat16.

    Args:
        contender: The cache.
        model: The model.
        states: Keys and values of each layer, with any number of tokens.
        num_tokens: Number of tokens in the cache, a multiple of every page size.
    """

    def resize(tensor: torch.Tensor) -> torch.Tensor:
        shape = (*tensor.shape[:2], num_tokens, tensor.shape[3])
        return tensor.new_ones(shape, dtype=torch.bfloat16)

    cache = contender.fill(model, [(resize(keys), resize(values)) for keys, values in states])
    is_paged = isinstance(cache, FP8PagedCache)
    num_bytes = cache.memory_footprint().used_bytes if is_paged else count_bytes(cache)
    return num_bytes * (contender.bits or 16) / 16 / num_tokens


def count_bytes(cache: Any) -> int:
    """Return the number of bytes in a cache of this package or of transformers."""
    if isinstance(cache, FP8PagedCache):
        return cache.memory_footprint().total_bytes
    # Layers may share a tensor, which counts once.
    attributes = set(tree_leaves([vars(layer) for layer in cache.layers]))
    return sum(getattr(attribute, "nbytes", 0) for attribute in attributes)
