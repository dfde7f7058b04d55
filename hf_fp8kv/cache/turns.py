"""Turns: how RoPE turns keys with their position, as far as a model's config says."""

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

# How many positions before and after those of a first call its center is meant for, where the
# model goes as far.
_REACH = 2048
_MOST_POSITIONS = 1 << 20
# Models whose layers have RoPE only if they have a window, which no field of their configs says.
_ROPE_WITH_WINDOW = frozenset(
    ("afmoe", "cohere2", "cohere2_moe", "exaone4", "exaone4_5", "exaone_moe", "flint", "kolibri1")
)


@dataclass(frozen=True)
class Turns:
    """How a layer's keys turn: pair i of n channels by `base ** (-i / n)` radians a position.

    Scaled RoPE is taken for the plain one: it has the same fast pairs, and slower slow ones.

    Attributes:
        base: RoPE's theta.
        share: of a head's channels, the part that is in pairs: the first ones.
        moving: of the pairs, the part that turns: the first ones, at the same speeds.
        mla: of MLA's keys the channels that stay and the last ones, which turn; its latents, which
            may be stored in their place, stay. None: see `share`.
        neighbors: whether channels 2i and 2i + 1 are a pair; otherwise i and i + n are.
        positions: that the model has.
    """

    base: float
    share: float = 1.0
    moving: float = 1.0
    mla: tuple[int, int] | None = None
    neighbors: bool = False
    positions: int = _MOST_POSITIONS

    @classmethod
    def of(cls, config: Any) -> "Callable[[int], Turns | None]":
        """Return a function that returns the turns of a layer, or None without a config.

        The config is read once, which takes 10 to 20 times as long as an attribute elsewhere.
        """
        if config is None:
            return lambda _index: None
        kinds = config_field(config, "layer_types") or ()
        has_rope = config_field(config, "no_rope_layers") or ()
        ropes = config_field(config, "rope_parameters") or {}
        theta = config_field(config, "rope_theta")
        most = int(config_field(config, "max_position_embeddings") or _MOST_POSITIONS)
        sizes = [config_field(config, f"qk_{part}_head_dim") for part in ("nope", "rope")]
        mla = None if None in sizes else (sizes[0], sizes[1])
        neighbors = _turns_neighbors(config)
        needs_window = config.model_type in _ROPE_WITH_WINDOW
        # Granite 4 has fields of RoPE, and uses it only if this field says so.
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
        """Return of a mean of keys, `[..., D]`, what is left of it in the positions around.

        What turns by `f` a position has the mean `sin(f * n) / (f * n)` of itself over the `n`
        positions before and after. So slow pairs stay, and fast ones, which a center would only
        make larger elsewhere, become 0.
        """
        # The compiler does without memory between calls.
        compiles = torch.compiler.is_compiling()
        find: Any = _steadiness.__wrapped__ if compiles else _steadiness
        factors: Tensor = find(self, center.shape[-1], center.device)
        return center * factors


@functools.cache
def _steadiness(turns: Turns, dim: int, device: torch.device) -> Tensor:
    """Return the factors of `Turns.steady`: `[dim]`, float32, on `device`."""
    # Channels before those that turn, and pairs that do.
    before, pairs = 0, int(dim * turns.share) // 2
    if turns.mla is not None:
        before, pairs = turns.mla[0], turns.mla[1] // 2
        if sum(turns.mla) != dim:
            before, pairs = dim, 0
    with torch.inference_mode(False), torch.no_grad():
        pair = torch.arange(pairs, dtype=torch.float32, device="cpu")
        radians = turns.base ** -(pair / max(pairs, 1))  # in a position
        radians = radians.where(pair < int(pairs * turns.moving), 0.0)
        reach = min(_REACH, turns.positions // 2)
        left = torch.sinc(radians * (reach / math.pi))
        both = left.repeat_interleave(2) if turns.neighbors else left.repeat(2)
        return pad(both, (before, dim - before - 2 * pairs), value=1.0).to(device)


# Keys of a layer without RoPE.
STILL = Turns(1.0, share=0.0, positions=0)


def _turns_neighbors(config: Any) -> bool:
    """Return whether a model's code turns channels 2i and 2i + 1 together, as far as it says."""
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
    # Not where new tensors go by default, which may be no device.
    turned: list[float] = rotate_half(torch.arange(4.0, device="cpu")).tolist()
    return turned == [-1.0, 0.0, -3.0, 2.0]
