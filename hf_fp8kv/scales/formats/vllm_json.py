"""The reader of `kv_cache_scales.json`: vLLM's `quantization_param_path`."""

import logging
import re
from collections.abc import Collection, Mapping
from pathlib import Path

from ...errors import ScaleError
from ...utils.files import convert_read_errors
from ...utils.text import format_list, format_value
from ..kv_scales import KVScales
from ..layer_scales import LayerScales
from ..validation import checked_constant, scalar
from .request import Request, check_model_type, complete, expected_layers, ranks_to_take

__all__ = ["JSON_FILE", "read_vllm_json"]

logger = logging.getLogger(__package__)

JSON_FILE = "kv_cache_scales.json"


def read_vllm_json(
    path: Path, data: Mapping[str, object], want: Request, config: Mapping[str, object]
) -> KVScales:
    """The format of vLLM's `quantization_param_path`: one number a layer, for K and V alike."""
    cache = data.get("kv_cache")
    if not isinstance(cache, dict):
        raise ScaleError(
            f"{path}: expected an object 'kv_cache' with 'dtype' and 'scaling_factor', got "
            f"{format_list(data) or 'nothing'}; this is not a kv_cache_scales.json"
        )
    if cache.get("dtype") != "float8_e4m3fn":
        raise ScaleError(
            f"{path}: kv_cache.dtype: expected 'float8_e4m3fn', "
            f"got {format_value(cache.get('dtype'))}; "
            "scales of another format cannot be used"
        )
    model_type = data.get("model_type")
    if not isinstance(model_type, str | None) or ("model_type" not in data and want.strict):
        raise ScaleError(
            f"{path}: model_type: expected a string or null, got {format_value(model_type)}; add "
            "it, or pass strict=False"
        )
    wanted_type = want.model_type or config.get("model_type")
    check_model_type(path, model_type, wanted_type, want)
    ranks = _ranks(path, cache.get("scaling_factor"))
    layers = {
        layer: LayerScales(scalar(s), scalar(s), source=f"{path}: layer {layer}")
        for layer, s in _of_ranks(path, ranks, want).items()
    }
    expected = expected_layers(layers, config, want)
    # Its readers refuse a file with another number of layers, too many as well as too few.
    extra = [layer for layer in layers if layer not in expected]
    if extra and want.strict:
        raise ScaleError(
            f"{path}: expected {len(expected)} layers, got also layers {format_list(extra)}; use "
            "the scales of this very model, or pass strict=False"
        )
    layers = complete(layers, expected, want, str(path))
    return KVScales(layers, "vllm-json", model_type, str(path))


def _ranks(path: Path, factors: object) -> dict[int, dict[int, float]]:
    """The numbers of every rank, each of them checked; "rank0" is an old spelling of "0"."""
    if not isinstance(factors, dict) or not factors:
        raise ScaleError(
            f"{path}: kv_cache.scaling_factor: expected an object of ranks, "
            f"got {format_value(factors)}; "
            'it looks like {"0": {"0": 0.02}}'
        )
    ranks: dict[int, dict[int, float]] = {}
    for rank_key, entries in factors.items():
        rank = _index(path, rank_key, r"(?:rank)?([0-9]{1,9})", "a rank", ranks)
        if not isinstance(entries, dict) or not entries:
            raise ScaleError(
                f"{path}: rank {rank}: expected an object of layers, got {format_value(entries)}; "
                'it looks like {"0": 0.02}'
            )
        ranks[rank] = {}
        for layer_key, value in entries.items():
            layer = _index(path, layer_key, r"([0-9]{1,9})", "a layer", ranks[rank])
            what = f"{path}: rank {rank}, layer {layer}"
            if isinstance(value, str):
                with convert_read_errors(what, "a number"):
                    value = float(value)
            ranks[rank][layer] = checked_constant(value, what)
    if sorted(ranks) != list(range(len(ranks))):
        raise ScaleError(
            f"{path}: expected the ranks 0 to {len(ranks) - 1}, got {format_list(sorted(ranks))}; "
            "a rank is missing"
        )
    for rank, entry in ranks.items():
        if set(entry) != set(ranks[0]):
            raise ScaleError(
                f"{path}: expected the same layers for every rank, got {len(ranks[0])} layers for "
                f"rank 0 and {len(entry)} for rank {rank}; calibrate again"
            )
    return ranks


def _index(path: Path, key: str, pattern: str, what: str, seen: Collection[int]) -> int:
    match = re.fullmatch(pattern, key)
    if match is None:
        raise ScaleError(
            f"{path}: expected {what} such as '0' as the key, got {format_value(key)}; rename it"
        )
    if int(match[1]) in seen:
        raise ScaleError(f"{path}: expected {what} {match[1]} once, got it twice; delete one")
    return int(match[1])


def _of_ranks(path: Path, ranks: dict[int, dict[int, float]], want: Request) -> dict[int, float]:
    """This rank's scales, or in one process the largest over the ranks: nothing overflows."""
    if all(entry == ranks[0] for entry in ranks.values()):
        ranks = {0: ranks[0]}
    taken = [ranks[rank] for rank in ranks_to_take(path, len(ranks), want)]
    if any(entry != taken[0] for entry in taken):
        logger.warning("%s: the scales of its %d ranks differ: the largest one is used of each "
                       "layer", path, len(ranks))  # fmt: skip
    return {layer: max(entry[layer] for entry in taken) for layer in taken[0]}
