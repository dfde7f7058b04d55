"""The rotation of a model's keys by RoPE, read from its config."""

import functools
import inspect
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..modeling.model_support import config_field

# Number of positions before and after the first call over which a center is averaged, limited to
# half of the model's positions.
_AVERAGED_POSITIONS = 2048
_DEFAULT_MAX_POSITIONS = 1 << 20
# Model types that use RoPE only in layers with a window. No field of their configs shows this.
_ROPE_ONLY_WITH_WINDOW = frozenset(
    ("afmoe", "cohere2", "cohere2_moe", "exaone4", "exaone4_5", "exaone_moe", "flint", "kolibri1")
)


@dataclass(frozen=True)
class RopeRotation:
    """The RoPE rotation of a layer: pair i of n rotates by `theta ** (-i / n)` per position.

    Scaled RoPE is treated as unscaled RoPE, because scaling only slows pairs that are already slow.

    Attributes:
        theta: Base of the frequencies, which are in radians per position.
        paired_fraction: Fraction of a head's channels that RoPE pairs, counted from channel 0.
        rotating_fraction: Fraction of the pairs that rotate, counted from pair 0.
        mla_dims: Sizes of the unrotated and the rotated part of an MLA key, in this order. None if
            `paired_fraction` applies. Latents do not rotate.
        interleaved: Whether channels 2i and 2i + 1 are a pair. Otherwise channels i and i + n are.
        max_positions: Maximum number of positions of the model.
    """

    theta: float
    paired_fraction: float = 1.0
    rotating_fraction: float = 1.0
    mla_dims: tuple[int, int] | None = None
    interleaved: bool = False
    max_positions: int = _DEFAULT_MAX_POSITIONS

    @classmethod
    def from_config(cls, config: Any) -> "Callable[[int], RopeRotation]":
        """Return a function from the index of a layer to its rotation.

        The config is read once, because reading its attributes is 10 to 20 times slower than usual.
        """
        layer_types = config_field(config, "layer_types") or ()
        rope_layers = config_field(config, "no_rope_layers") or ()
        all_parameters = config_field(config, "rope_parameters") or {}
        default_theta = config_field(config, "rope_theta")
        max_positions = config_field(config, "max_position_embeddings") or _DEFAULT_MAX_POSITIONS
        part_dims = [config_field(config, f"qk_{part}_head_dim") for part in ("nope", "rope")]
        mla_dims = None if None in part_dims else (part_dims[0], part_dims[1])
        module = sys.modules.get(type(config).__module__.replace("configuration_", "modeling_"))
        interleaved = module is not None and _code_is_interleaved(module)
        needs_window = config.model_type in _ROPE_ONLY_WITH_WINDOW
        # Granite 4 has RoPE's fields, but uses RoPE only if this field is "rope".
        model_uses_rope = getattr(config, "position_embedding_type", "rope") == "rope"

        def get_rotation(index: int) -> RopeRotation:
            layer_type = layer_types[index] if index < len(layer_types) else None
            layer_parameters = all_parameters.get(layer_type)
            parameters = layer_parameters if isinstance(layer_parameters, dict) else all_parameters
            layer_theta = parameters.get("rope_theta", default_theta)
            uses_rope = index >= len(rope_layers) or bool(rope_layers[index])
            uses_rope &= not (needs_window and layer_type == "full_attention")
            if not (model_uses_rope and uses_rope and layer_theta):
                return NO_ROPE
            rotary_factor = float(parameters.get("partial_rotary_factor", 1.0))
            is_proportional = parameters.get("rope_type") == "proportional"
            fractions = (1.0, rotary_factor) if is_proportional else (rotary_factor, 1.0)
            return cls(float(layer_theta), *fractions, mla_dims, interleaved, int(max_positions))

        return get_rotation

    def average(self, center: Tensor) -> Tensor:
        """Return a center, `[..., D]`, averaged over the RoPE rotations of nearby positions.

        The average over `n` positions before and after scales a pair with the frequency `f`, in
        radians per position, by `sin(f * n) / (f * n)`. Slow pairs are therefore kept. Fast pairs,
        whose center would only increase errors at other positions, become 0.
        """
        # Dynamo ignores `functools.cache`, and warns about it.
        is_compiling = torch.compiler.is_compiling()
        compute: Any = _compute_factors.__wrapped__ if is_compiling else _compute_factors
        factors: Tensor = compute(self, center.shape[-1], center.device)
        return center * factors


@functools.cache
def _compute_factors(rope: RopeRotation, dim: int, device: torch.device) -> Tensor:
    """Return the factors of `RopeRotation.average`: `[dim]`, float32, on `device`."""
    num_before, num_rotary = rope.mla_dims or (0, int(dim * rope.paired_fraction))
    if rope.mla_dims is not None and sum(rope.mla_dims) != dim:
        num_before = num_rotary = 0  # latents
    num_pairs = num_rotary // 2
    with torch.inference_mode(False), torch.no_grad():
        pair_index = torch.arange(num_pairs, dtype=torch.float32, device="cpu")
        frequencies = rope.theta ** -(pair_index / max(num_pairs, 1))  # in radians per position
        frequencies = frequencies.where(pair_index < int(num_pairs * rope.rotating_fraction), 0.0)
        num_positions = min(_AVERAGED_POSITIONS, rope.max_positions // 2)
        factors = torch.sinc(frequencies * (num_positions / math.pi))
        factors = factors.repeat_interleave(2) if rope.interleaved else factors.repeat(2)
        num_after = dim - num_before - len(factors)
        return pad(factors, (num_before, num_after), value=1.0).to(device)


NO_ROPE = RopeRotation(1.0, paired_fraction=0.0, max_positions=0)  # for a layer without RoPE


@functools.cache
def _code_is_interleaved(module: ModuleType) -> bool:
    """Return whether the RoPE function of a module pairs neighboring channels."""
    rotate_half = getattr(module, "rotate_half", None)
    if rotate_half is None:
        # Llama 4 and DeepSeek V2 rotate complex numbers, so their pairs are interleaved.
        apply: Any = getattr(module, "apply_rotary_emb", None)
        return apply is not None and "freqs_cis" in inspect.signature(apply).parameters
    # The device is explicit, because the default device may be "meta".
    rotated: list[float] = rotate_half(torch.arange(4.0, device="cpu")).tolist()
    return rotated == [-1.0, 0.0, -3.0, 2.0]
