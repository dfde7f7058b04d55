"""The format "compressed-tensors": what LLM Compressor writes, per tensor or per head."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ..checkpoint.config import Config, Declaration, as_mapping, parse_entry
from ..checkpoint.tensor_names import OUTPUTS, PAIR
from ..layer_scales import ScaleData
from .tensor_format import QuantizationFormat

_SCHEME = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False, "group_size": None}


class CompressedTensors(QuantizationFormat):
    """compressed-tensors."""

    name = "compressed-tensors"
    quant_method = "compressed-tensors"
    granularity = "head"
    tensor_names = (replace(PAIR, shape=(1,)), OUTPUTS)

    def recognizes(self, entry: str, method: str) -> bool:
        return method == self.quant_method or entry == "compression_config"

    def accepts(self, entry: str, method: str) -> bool:
        return method == self.quant_method or (entry == "compression_config" and not method)

    def parse_block(self, where: str, block: Mapping[str, object]) -> list[Declaration]:
        """Parse the outputs of named projections, which were the cache before `kv_cache_scheme`."""
        declarations = []
        for name, group in as_mapping(block.get("config_groups")).items():
            if _targets_projections(group):
                declarations += parse_entry(
                    f"{where}.config_groups.{name}.output_activations (kv_cache)",
                    as_mapping(group).get("output_activations"),
                )
        return declarations

    def remove_declaration(self, block: dict[str, object]) -> None:
        groups = block.get("config_groups")
        for name, group in dict(as_mapping(groups)).items():
            if isinstance(groups, dict) and isinstance(group, dict) and _targets_projections(group):
                group.pop("output_activations", None)
                if not group.get("weights") and not group.get("input_activations"):
                    del groups[name]

    def declare(self, config: Config, scales: ScaleData, excluded: Sequence[str]) -> None:
        per_head = any(layer.static[0].ndim for layer in scales.layers.values())
        status = {"format": "dense", "quantization_status": "compressed"}
        block = self.quantization_block(config, {**status, "config_groups": {}, "ignore": []})
        block["kv_cache_scheme"] = {"strategy": "attn_head" if per_head else "tensor", **_SCHEME}
        # vLLM fills in the numbers of heads only beside this entry.
        block.setdefault("config_groups", {})


def _targets_projections(group: object) -> bool:
    """Return whether a config group names the projections of K or V."""
    targets = as_mapping(group).get("targets")
    targets = list(map(str, targets)) if isinstance(targets, list) else []
    return any("k_proj" in target or "v_proj" in target for target in targets)
