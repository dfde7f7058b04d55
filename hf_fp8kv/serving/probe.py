"""Check that a model computes the same for packed requests as for each request alone.

An engine passes all tokens of a step to the model as one sequence, with positions that restart for
each request, and a cache in the keyword arguments. A model computes wrong logits if it computes its
own position ids, or does not pass the keyword arguments to its attention. `check_packing` therefore
runs the model on a few tokens, packed and separately.
"""

from typing import Any

import torch
from transformers import PreTrainedModel

from ..attention.switching import eval_mode, paged_attention
from ..errors import ConfigError, FP8KVError
from ..formats import AUTO
from ..modeling.exact_states import exact_states
from .config import ServingConfig
from .engines import StockCache
from .engines.common import EngineCache
from .layout import view_layers

# Lengths of the two sequences, in tokens. The last token of each is computed in a second step.
_LENGTHS = (4, 3)
# Maximum relative RMS errors of the logits. With the models of tests/helpers/tiny_models.py in
# float32, the error is at most 1e-5 if a model can run packed requests, and at least 2e-3 if not.
# In 16 bits the order of sums causes errors of up to 0.03, and wrong positions cause errors far
# above 0.1.
_TOLERANCE = 1e-3
_TOLERANCE_16_BIT = 0.1
_FULL_ATTENTION = "full_attention"
_SLIDING_ATTENTION = "sliding_attention"
_PAGE_SIZE = 8


def read_layer_windows(config: Any) -> list[int | None]:
    """Return the window of each layer, in tokens or None, by the rules of transformers' engines.

    Raise ConfigError if engines have no cache for the type of a layer.
    """
    window = getattr(config, "sliding_window", None)
    layer_types = getattr(config, "layer_types", None)
    if layer_types is None:
        return [window] * config.num_hidden_layers
    if unknown_types := sorted(set(layer_types) - {_FULL_ATTENTION, _SLIDING_ATTENTION}):
        raise ConfigError(
            f"expected layers of the types {_FULL_ATTENTION} and {_SLIDING_ATTENTION}, got "
            f"{', '.join(unknown_types)} ({getattr(config, 'model_type', type(config).__name__)}). "
            "Continuous batching has no cache for such layers. Use generate() with FP8PagedCache"
        )
    return [window if layer_type == _SLIDING_ATTENTION else None for layer_type in layer_types]


def check_packing(model: PreTrainedModel, config: ServingConfig) -> None:
    """Raise ConfigError if packing two short sequences into one changes their logits."""
    model_name = type(model).__name__
    vocab_size = model.config.get_text_config().vocab_size
    # Arbitrary tokens, of which neighbors differ.
    ids = ((torch.arange(sum(_LENGTHS), device=model.device) * 37 + 11) % vocab_size)[None]
    try:
        # Both runs use the same attention function, because the model's own function may lack a
        # feature (sdpa has no softcap).
        with torch.no_grad(), eval_mode(model), exact_states(), paged_attention(model):
            separate_logits = [
                model(input_ids=sequence, use_cache=False).logits[0].float()
                for sequence in ids.split(_LENGTHS, 1)
            ]
            with exact_states(is_engine_step=True):
                packed_logits = _run_packed(model, ids, _PackedCache(model, config))
    except FP8KVError:
        raise
    except Exception as error:
        raise ConfigError(
            f"expected a model that can run packed requests, got {model_name}. It raised "
            f"{type(error).__name__}: {error}. Use generate() with FP8PagedCache"
        ) from error
    rms_error = _compute_relative_rms(packed_logits, torch.cat(separate_logits))
    tolerance = _TOLERANCE_16_BIT if model.dtype.itemsize < 4 else _TOLERANCE
    if not rms_error < tolerance:  # the error may be NaN
        raise ConfigError(
            f"expected a model that can run packed requests, got {model_name}. Packing changes its "
            f"logits (relative RMS {rms_error:.2g}). It computes its own position ids, or does not "
            "pass the engine's cache to its attention, so transformers' own continuous batching is "
            "also wrong for it. Use generate() with FP8PagedCache, or pass probe=False if you have "
            "checked its answers"
        )


def _run_packed(model: Any, ids: torch.Tensor, cache: "_PackedCache") -> torch.Tensor:
    """Return the logits of all sequences, with the last token of each in a second step."""
    sequence_logits: list[list[torch.Tensor]] = [[] for _ in _LENGTHS]
    prompt_lengths = [length - 1 for length in _LENGTHS]  # numbers of tokens in the first step
    steps = (([0, 0], prompt_lengths), (prompt_lengths, [1, 1]))
    for starts, counts in steps:
        spans = [slice(start, start + count) for start, count in zip(starts, counts, strict=True)]
        cache.begin_step(starts, counts)
        positions = torch.arange(ids.shape[1], device=ids.device)
        logits = (
            model(
                input_ids=torch.cat(
                    [
                        sequence[span]
                        for sequence, span in zip(ids[0].split(_LENGTHS), spans, strict=True)
                    ]
                )[None],
                position_ids=torch.cat([positions[span] for span in spans])[None],
                attention_mask=None,
                use_cache=False,
                cache=cache,
            )
            .logits[0]
            .float()
        )
        for step_logits, new_logits in zip(sequence_logits, logits.split(counts), strict=True):
            step_logits.append(new_logits)
    return torch.cat([torch.cat(step_logits) for step_logits in sequence_logits])


def _compute_relative_rms(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the relative RMS error. A constant added to all logits of a row has no effect."""
    actual = actual - actual.mean(-1, keepdim=True)
    expected = expected - expected.mean(-1, keepdim=True)
    return float((actual - expected).norm() / expected.norm().clamp(min=1e-30))


class _PackedCache(EngineCache, StockCache):  # type: ignore[misc]
    """A cache without an engine, with one page for each sequence, in the dtype of the model."""

    def __init__(self, model: PreTrainedModel, serving_config: ServingConfig) -> None:
        config = model.config.get_text_config()
        options = serving_config.options
        unquantized = ServingConfig.parse(
            dtype=AUTO, backend=options.backend, tensor_parallel=options.tensor_parallel
        )
        self.prepare(unquantized, config, _PAGE_SIZE, model.dtype, model.device)
        windows = read_layer_windows(config)
        self.windows = list(dict.fromkeys(windows))
        self._window_indices = {
            index: self.windows.index(window) for index, window in enumerate(windows)
        }
        block_size = sum(layout.bytes_per_page for layout in self.page_layouts)
        blocks = torch.zeros(len(_LENGTHS), block_size, dtype=torch.uint8, device=model.device)
        self.add_layers(dict(enumerate(view_layers(blocks, self.page_layouts))))

    def begin_step(self, starts: list[int], counts: list[int]) -> None:
        """Record the next step: for each sequence, its first position and its number of tokens."""
        step = object()  # a new object marks a new step
        for page, (start, count) in enumerate(zip(starts, counts, strict=True)):
            self.record(step, start, count, [[page]] * len(self.windows))
