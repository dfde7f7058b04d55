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

# A center is averaged over this number of positions before and after the first call, or over half
# of the model's positions if they are fewer.
_AVERAGED_POSITIONS = 2048
_DEFAULT_MAX_POSITIONS = 1 << 20
# Models that only use RoPE in layers with a window. No field of their configs shows this.
_ROPE_WITH_WINDOW = frozenset(
    ("afmoe", "cohere2", "cohere2_moe", "exaone4", "exaone4_5", "exaone_moe", "flint", "kolibri1")
)


@dataclass(frozen=True)
class RopeRotation:
    """A layer's rotation: pair i of n rotates by `theta ** (-i / n)` radians per position.

    Scaled RoPE is treated as plain RoPE. It has the same fast pairs, and its slow pairs are slower.

    Attributes:
        theta: Base of the angles.
        rotary_fraction: Fraction of a head's channels that are in pairs. These come first.
        rotating_fraction: Fraction of the pairs that rotate. These come first, at the same speeds.
        mla: Sizes of the unrotated and of the rotated part of an MLA key, in this order. Latents,
            which may be stored instead, do not rotate. None means that `rotary_fraction` applies.
        interleaved: Whether channels 2i and 2i + 1 are a pair. Otherwise i and i + n are.
        max_positions: Maximum number of positions of the model.
    """

    theta: float
    rotary_fraction: float = 1.0
    rotating_fraction: float = 1.0
    mla: tuple[int, int] | None = None
    interleaved: bool = False
    max_positions: int = _DEFAULT_MAX_POSITIONS

    @classmethod
    def from_config(cls, config: Any) -> "Callable[[int], RopeRotation]":
        """Return a function from the index of a layer to its rotation.

        The config is read once, because its attributes are 10 to 20 times slower than an object's.
        """
        kinds = config_field(config, "layer_types") or ()
        has_rope = config_field(config, "no_rope_layers") or ()
        ropes = config_field(config, "rope_parameters") or {}
        theta = config_field(config, "rope_theta")
        positions = config_field(config, "max_position_embeddings") or _DEFAULT_MAX_POSITIONS
        sizes = [config_field(config, f"qk_{part}_head_dim") for part in ("nope", "rope")]
        mla = None if None in sizes else (sizes[0], sizes[1])
        interleaved = _is_interleaved(config)
        needs_window = config.model_type in _ROPE_WITH_WINDOW
        # Granite 4 has RoPE's fields, but uses RoPE only if this field is "rope".
        model_lacks_rope = getattr(config, "position_embedding_type", "rope") != "rope"

        def find_rotation(index: int) -> RopeRotation:
            kind = kinds[index] if index < len(kinds) else None
            rope = ropes
            if kind is not None and isinstance(ropes.get(kind), dict):
                rope = ropes[kind]
            layer_theta = rope.get("rope_theta", theta)
            lacks_rope = index < len(has_rope) and not has_rope[index]
            lacks_rope |= needs_window and kind == "full_attention"
            if model_lacks_rope or lacks_rope or not layer_theta:
                return NO_ROPE
            fraction = float(rope.get("partial_rotary_factor", 1.0))
            keeps_pairs = rope.get("rope_type") == "proportional"
            fractions = (1.0, fraction) if keeps_pairs else (fraction, 1.0)
            return cls(float(layer_theta), *fractions, mla, interleaved, int(positions))

        return find_rotation

    def average(self, center: Tensor) -> Tensor:
        """Return a center, `[..., D]`, averaged over its rotations to surrounding positions.

        A pair that rotates by `f` radians per position is scaled by `sin(f * n) / (f * n)`, its
        mean over `n` positions before and after. Slow pairs therefore stay. Fast pairs, whose
        center would only increase errors at other positions, become 0.
        """
        # Dynamo ignores `functools.cache`, and warns about it.
        compiles = torch.compiler.is_compiling()
        compute: Any = _average_factors.__wrapped__ if compiles else _average_factors
        factors: Tensor = compute(self, center.shape[-1], center.device)
        return center * factors


@functools.cache
def _average_factors(rope: RopeRotation, dim: int, device: torch.device) -> Tensor:
    """Return the factors of `RopeRotation.average`: `[dim]`, float32, on `device`."""
    # Number of channels before the pairs, and number of pairs.
    before, pairs = 0, int(dim * rope.rotary_fraction) // 2
    if rope.mla is not None:
        before, pairs = rope.mla[0], rope.mla[1] // 2
        if sum(rope.mla) != dim:
            before, pairs = dim, 0
    with torch.inference_mode(False), torch.no_grad():
        pair = torch.arange(pairs, dtype=torch.float32, device="cpu")
        radians = rope.theta ** -(pair / max(pairs, 1))  # per position
        radians = radians.where(pair < int(pairs * rope.rotating_fraction), 0.0)
        positions = min(_AVERAGED_POSITIONS, rope.max_positions // 2)
        factors = torch.sinc(radians * (positions / math.pi))
        channels = factors.repeat_interleave(2) if rope.interleaved else factors.repeat(2)
        return pad(channels, (before, dim - before - 2 * pairs), value=1.0).to(device)


NO_ROPE = RopeRotation(1.0, rotary_fraction=0.0, max_positions=0)  # of a layer without RoPE


def _is_interleaved(config: Any) -> bool:
    """Return whether a model's code pairs channels 2i and 2i + 1, False if it is unknown."""
    name = type(config).__module__.replace("configuration_", "modeling_")
    module = sys.modules.get(name)
    return module is not None and _code_is_interleaved(module)


@functools.cache
def _code_is_interleaved(module: ModuleType) -> bool:
    rotate_half = getattr(module, "rotate_half", None)
    if rotate_half is None:
        # Llama 4 and DeepSeek V2 rotate complex numbers.
        apply: Any = getattr(module, "apply_rotary_emb", None)
        return apply is not None and "freqs_cis" in inspect.signature(apply).parameters
    # Explicitly on the CPU, because the default device may be "meta".
    rotated: list[float] = rotate_half(torch.arange(4.0, device="cpu")).tolist()
    return rotated == [-1.0, 0.0, -3.0, 2.0]
