"""How RoPE turns keys with their position, according to a model's config."""

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

# A center serves this number of positions before and after the first call, or half of the model's
# positions if they are fewer.
_REACH = 2048
_MOST_POSITIONS = 1 << 20
# Models that only use RoPE in layers with a window. No field of their configs shows this.
_ROPE_WITH_WINDOW = frozenset(
    ("afmoe", "cohere2", "cohere2_moe", "exaone4", "exaone4_5", "exaone_moe", "flint", "kolibri1")
)


@dataclass(frozen=True)
class Turns:
    """How a layer's keys turn: pair i of n turns by `base ** (-i / n)` radians per position.

    Scaled RoPE is treated as plain RoPE. It has the same fast pairs, and its slow pairs are slower.

    Attributes:
        base: RoPE's theta.
        share: Share of a head's channels that are in pairs. These are the first channels.
        moving: Share of the pairs that turn. These are the first pairs, with unchanged speeds.
        mla: Numbers of channels of MLA's keys that do not turn and that turn. The latter are the
            last channels. Latents, which may be stored instead, do not turn. None means that
            `share` applies.
        neighbors: Whether channels 2i and 2i + 1 are a pair. Otherwise i and i + n are.
        positions: Maximum number of positions of the model.
    """

    base: float
    share: float = 1.0
    moving: float = 1.0
    mla: tuple[int, int] | None = None
    neighbors: bool = False
    positions: int = _MOST_POSITIONS

    @classmethod
    def of(cls, config: Any) -> "Callable[[int], Turns]":
        """Return a function from the index of a layer to its turns.

        The config is only read once, because reading its attributes is 10 to 20 times slower than
        usual.
        """
        kinds = config_field(config, "layer_types") or ()
        has_rope = config_field(config, "no_rope_layers") or ()
        ropes = config_field(config, "rope_parameters") or {}
        theta = config_field(config, "rope_theta")
        most = int(config_field(config, "max_position_embeddings") or _MOST_POSITIONS)
        sizes = [config_field(config, f"qk_{part}_head_dim") for part in ("nope", "rope")]
        mla = None if None in sizes else (sizes[0], sizes[1])
        neighbors = _turns_neighbors(config)
        needs_window = config.model_type in _ROPE_WITH_WINDOW
        # Granite 4 has RoPE's fields, but uses RoPE only if this field is "rope".
        never = getattr(config, "position_embedding_type", "rope") != "rope"

        def turns_of(index: int) -> Turns:
            kind = kinds[index] if index < len(kinds) else None
            rope = ropes
            if kind is not None and isinstance(ropes.get(kind), dict):
                rope = ropes[kind]
            base = rope.get("rope_theta", theta)
            without = index < len(has_rope) and not has_rope[index]
            if never or without or not base or (needs_window and kind == "full_attention"):
                return STILL
            part = float(rope.get("partial_rotary_factor", 1.0))
            keeps_pairs = rope.get("rope_type") == "proportional"
            share, moving = (1.0, part) if keeps_pairs else (part, 1.0)
            return cls(float(base), share, moving, mla, neighbors, most)

        return turns_of

    def steady(self, center: Tensor) -> Tensor:
        """Average a mean of keys, `[..., D]`, over the rotations at surrounding positions.

        A pair that turns by `f` radians per position is scaled by `sin(f * n) / (f * n)`, its mean
        over `n` positions before and after. Slow pairs therefore stay. Fast pairs, whose center
        would only increase errors at other positions, become 0.
        """
        # Dynamo ignores caches, and warns about them.
        compiles = torch.compiler.is_compiling()
        find: Any = _steadiness.__wrapped__ if compiles else _steadiness
        factors: Tensor = find(self, center.shape[-1], center.device)
        return center * factors


@functools.cache
def _steadiness(turns: Turns, dim: int, device: torch.device) -> Tensor:
    """Return the factors of `Turns.steady`: `[dim]`, float32, on `device`."""
    # Number of channels before the pairs, and number of pairs.
    before, pairs = 0, int(dim * turns.share) // 2
    if turns.mla is not None:
        before, pairs = turns.mla[0], turns.mla[1] // 2
        if sum(turns.mla) != dim:
            before, pairs = dim, 0
    with torch.inference_mode(False), torch.no_grad():
        pair = torch.arange(pairs, dtype=torch.float32, device="cpu")
        radians = turns.base ** -(pair / max(pairs, 1))  # per position
        radians = radians.where(pair < int(pairs * turns.moving), 0.0)
        reach = min(_REACH, turns.positions // 2)
        factors = torch.sinc(radians * (reach / math.pi))
        channels = factors.repeat_interleave(2) if turns.neighbors else factors.repeat(2)
        return pad(channels, (before, dim - before - 2 * pairs), value=1.0).to(device)


# Keys of a layer without RoPE.
STILL = Turns(1.0, share=0.0, positions=0)


def _turns_neighbors(config: Any) -> bool:
    """Return whether a model's code pairs channels 2i and 2i + 1, False if it is unknown."""
    name = type(config).__module__.replace("configuration_", "modeling_")
    module = sys.modules.get(name)
    return module is not None and _code_turns_neighbors(module)


@functools.cache
def _code_turns_neighbors(module: ModuleType) -> bool:
    rotate_half = getattr(module, "rotate_half", None)
    if rotate_half is None:
        # Llama 4 and DeepSeek V2 turn complex numbers.
        turn: Any = getattr(module, "apply_rotary_emb", None)
        return turn is not None and "freqs_cis" in inspect.signature(turn).parameters
    # Explicitly on the CPU, because the default device may be "meta".
    turned: list[float] = rotate_half(torch.arange(4.0, device="cpu")).tolist()
    return turned == [-1.0, 0.0, -3.0, 2.0]
