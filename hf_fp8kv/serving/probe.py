"""A probe of whether a model gives for packed requests what it gives for each alone.

An engine hands the model all tokens of a step as one sequence, with positions that begin anew for
each request, and a cache in the keyword arguments. A model that counts its positions itself, or
does not pass the keywords on to its attention, ignores both and answers with nonsense. So a model
is run on a few tokens both ways before it is used.
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
from .step import LayerKind

# Two texts; the last token of each comes in a step of its own.
LENGTHS = (4, 3)
# Relative RMS of the logits: in float32 no model that takes packed requests exceeds 1e-5, and none
# that does not stays below 2e-3, of all that tests/helpers/tiny_models.py builds. In 16 bits the
# order of sums counts: up to 0.03 there, and what is wrong in a model with real positions is far
# above 0.1.
_TOLERANCE, _TOLERANCE_16 = 1e-3, 0.1
_FULL, _SLIDING = "full_attention", "sliding_attention"
_SLOTS = 8


def check_kinds(config: Any) -> list[int | None]:
    """Return the window of each layer, None for full attention, as engines see a config.

    Raises ConfigError for layers that no engine has a cache for.
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
    """Raise ConfigError unless the model gives for seven packed tokens what each text gives."""
    name = type(model).__name__
    vocabulary = model.config.get_text_config().vocab_size
    ids = ((torch.arange(sum(LENGTHS), device=model.device) * 37 + 11) % vocabulary)[None]
    try:
        # One attention for both: the model's may leave something out, such as sdpa a softcap.
        with torch.no_grad(), eval_mode(model), exact_states(), paged_attention(model):
            wanted = [
                model(input_ids=text, use_cache=False).logits[0].float()
                for text in ids.split(LENGTHS, 1)
            ]
            with exact_states(engine=True):
                packed = _run_packed(model, ids, _PackedCache(model, chosen))
    except FP8KVError:
        raise
    except Exception as error:
        raise ConfigError(
            f"expected a model that takes packed requests, got {name}, which fails with them: "
            f"{type(error).__name__}: {error}; use generate() with FP8PagedCache"
        ) from error
    difference = _relative_error(torch.cat(packed), torch.cat(wanted))
    if not difference < (_TOLERANCE_16 if model.dtype.itemsize < 4 else _TOLERANCE):
        raise ConfigError(
            f"expected a model that takes packed requests, got {name}, whose logits differ with "
            f"them (relative RMS {difference:.2g}): it counts positions by itself, or does not "
            "hand the engine's cache to its attention, and transformers' own continuous batching "
            "of it is wrong, too. Use generate() with FP8PagedCache; or pass probe=False if you "
            "know better"
        )


def _run_packed(model: Any, ids: torch.Tensor, cache: "_PackedCache") -> list[torch.Tensor]:
    """Return the logits of each text, computed in two steps: the last token of each in its own."""
    texts = [text[0] for text in ids.split(LENGTHS, 1)]
    starts = [0] * len(texts)
    parts: list[list[torch.Tensor]] = [[] for _ in texts]
    for counts in ([len(text) - 1 for text in texts], [1] * len(texts)):
        spans = [range(a, a + n) for a, n in zip(starts, counts, strict=True)]
        cache.begin(starts, counts)
        positions = torch.tensor([p for span in spans for p in span], device=ids.device)
        tokens = torch.cat([t[s.start : s.stop] for t, s in zip(texts, spans, strict=True)])
        logits = model(
            input_ids=tokens[None], position_ids=positions[None], attention_mask=None,
            use_cache=False, cache=cache,
        ).logits[0].float()  # fmt: skip
        for rows, part in zip(parts, logits.split(counts), strict=True):
            rows.append(part)
        starts = [span.stop for span in spans]
    return [torch.cat(rows) for rows in parts]


def _relative_error(actual: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the relative RMS error; ignores a constant added to all logits of a row."""
    actual, wanted = (x - x.mean(-1, keepdim=True) for x in (actual, wanted))
    return float((actual - wanted).norm() / wanted.norm().clamp(min=1e-30))


class _PackedCache(EngineCache, StockCache):  # type: ignore[misc]
    """A cache without an engine: one page for each text, in the model's own dtype."""

    def __init__(self, model: PreTrainedModel, chosen: ServingConfig) -> None:
        config, options = model.config.get_text_config(), chosen.options
        unquantized = ServingConfig.parse(
            dtype=AUTO, backend=options.backend, tensor_parallel=options.tensor_parallel
        )
        self.prepare(unquantized, config, _SLOTS, model.dtype, model.device)
        windows = check_kinds(config)
        kinds = list(dict.fromkeys(windows))
        self.kinds = [LayerKind(window, _SLOTS) for window in kinds]
        self._kind_of = {layer: kinds.index(window) for layer, window in enumerate(windows)}
        size = len(LENGTHS) * self.page_layout.bytes_per_page
        self._pages = {
            layer: self.page_layout.carve(torch.zeros(size, dtype=torch.uint8, device=model.device))
            for layer in self._kind_of
        }

    def begin(self, starts: list[int], counts: list[int]) -> None:
        """Record the tokens of each text in the next step."""
        batch = object()
        for page, (start, count) in enumerate(zip(starts, counts, strict=True)):
            self.record(batch, start, count, [[page]] * len(self.kinds))
