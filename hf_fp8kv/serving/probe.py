"""A probe of whether a model computes the same for packed requests as for each request alone.

An engine passes all tokens of a step to the model as one sequence, with positions that begin anew
for each request, and a cache in the keyword arguments. A model that counts its positions itself, or
does not pass the keywords on to its attention, ignores both, and its answers are nonsense. So a few
tokens are run both ways before the model is used.
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

# Lengths of two sequences. The last token of each comes in a second step.
LENGTHS = (4, 3)
# Relative RMS errors of the logits. For the models of tests/helpers/tiny_models.py in float32, it
# is at most 1e-5 if a model can run packed requests, and at least 2e-3 if it cannot. In 16 bits the
# order of sums changes logits by up to 0.03 there, and a wrong result of a model with real
# positions is far above 0.1.
_TOLERANCE, _TOLERANCE_16 = 1e-3, 0.1
_FULL, _SLIDING = "full_attention", "sliding_attention"
_SLOTS = 8


def check_kinds(config: Any) -> list[int | None]:
    """Return the window of each layer, as engines read a config. None means full attention.

    Raises:
        ConfigError: Engines have no cache for some layer.
    """
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        return [window] * config.num_hidden_layers
    unknown = sorted(set(kinds) - {_FULL, _SLIDING})
    if unknown:
        raise ConfigError(
            f"expected layers of the types {_FULL} and {_SLIDING}, got {', '.join(unknown)} "
            f"({getattr(config, 'model_type', type(config).__name__)}); continuous batching of "
            "transformers has no cache for these, use generate() with FP8PagedCache"
        )
    return [window if kind == _SLIDING else None for kind in kinds]


def check_packing(model: PreTrainedModel, chosen: ServingConfig) -> None:
    """Raise ConfigError if the logits of seven packed tokens differ from each sequence's own."""
    name = type(model).__name__
    vocabulary = model.config.get_text_config().vocab_size
    ids = ((torch.arange(sum(LENGTHS), device=model.device) * 37 + 11) % vocabulary)[None]
    try:
        # One attention function for both, because the model's own may lack something (sdpa has no
        # softcap).
        with torch.no_grad(), eval_mode(model), exact_states(), paged_attention(model):
            separate = [
                model(input_ids=text, use_cache=False).logits[0].float()
                for text in ids.split(LENGTHS, 1)
            ]
            with exact_states(engine=True):
                packed = _run_packed(model, ids, _PackedCache(model, chosen))
    except FP8KVError:
        raise
    except Exception as error:
        raise ConfigError(
            f"expected a model that can run packed requests, got {name}, which fails with them: "
            f"{type(error).__name__}: {error}; use generate() with FP8PagedCache"
        ) from error
    difference = _relative_error(packed, torch.cat(separate))
    if not difference < (_TOLERANCE_16 if model.dtype.itemsize < 4 else _TOLERANCE):
        raise ConfigError(
            f"expected a model that can run packed requests, got {name}, whose logits differ with "
            f"them (relative RMS {difference:.2g}): it counts positions by itself, or does not "
            "pass the engine's cache to its attention, so transformers' own continuous batching "
            "of it is wrong as well. Use generate() with FP8PagedCache, or pass probe=False if "
            "you have checked its answers"
        )


def _run_packed(model: Any, ids: torch.Tensor, cache: "_PackedCache") -> torch.Tensor:
    """Return the logits of all sequences, computed in two steps: the last tokens in the second."""
    parts: list[list[torch.Tensor]] = [[] for _ in LENGTHS]
    lasts = [length - 1 for length in LENGTHS]
    for starts, counts in (([0] * len(lasts), lasts), (lasts, [1] * len(lasts))):
        spans = [slice(a, a + n) for a, n in zip(starts, counts, strict=True)]
        cache.begin(starts, counts)
        positions = torch.arange(ids.shape[1], device=ids.device)
        texts = zip(ids[0].split(LENGTHS), spans, strict=True)
        logits = model(
            input_ids=torch.cat([text[span] for text, span in texts])[None],
            position_ids=torch.cat([positions[span] for span in spans])[None],
            attention_mask=None, use_cache=False, cache=cache,
        ).logits[0].float()  # fmt: skip
        for rows, part in zip(parts, logits.split(counts), strict=True):
            rows.append(part)
    return torch.cat([part for rows in parts for part in rows])


def _relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the relative RMS error. A constant added to all logits of a row has no effect."""
    actual, expected = (x - x.mean(-1, keepdim=True) for x in (actual, expected))
    return float((actual - expected).norm() / expected.norm().clamp(min=1e-30))


class _PackedCache(EngineCache, StockCache):  # type: ignore[misc]
    """A cache without an engine: one page for each sequence, in the model's own dtype."""

    def __init__(self, model: PreTrainedModel, chosen: ServingConfig) -> None:
        config, options = model.config.get_text_config(), chosen.options
        unquantized = ServingConfig.parse(
            dtype=AUTO, backend=options.backend, tensor_parallel=options.tensor_parallel
        )
        self.prepare(unquantized, config, _SLOTS, model.dtype, model.device)
        windows = check_kinds(config)
        self.windows = list(dict.fromkeys(windows))
        self._kind_of = {n: self.windows.index(window) for n, window in enumerate(windows)}
        size = len(windows), len(LENGTHS) * self.page_layout.bytes_per_page
        memory = torch.zeros(size, dtype=torch.uint8, device=model.device)
        self.add_layers({layer: self.page_layout.carve(row) for layer, row in enumerate(memory)})

    def begin(self, starts: list[int], counts: list[int]) -> None:
        """Record the tokens of each sequence in the next step."""
        batch = object()
        for page, (start, count) in enumerate(zip(starts, counts, strict=True)):
            self.record(batch, start, count, [[page]] * len(self.windows))
