"""Measure how many tokens a step of speculative decoding yields with each cache of the target.

A draft model proposes tokens, and the target accepts each with a probability that is the sum of
min(p, q) over the vocabulary. A quantized cache changes the target's distribution p. The acceptance
is computed at each scored position of the card's texts.
"""

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel

from hf_fp8kv.attention.switching import paged_attention
from hf_fp8kv.calibration.divergence import compute_logits, compute_scores
from hf_fp8kv.card.caches import CONTENDERS, FLOOR, Contender, KeysAndValues
from hf_fp8kv.card.long_texts import KINDS, read_texts
from hf_fp8kv.card.predictions import record_states

from .shared import MODEL_OPTIONS, Result, load_model_before, main

NUM_DRAFTED = 5  # tokens that the draft model proposes in a step
EARLY_EXIT, ROUNDED = "early exit", "rounded weights"
_GROUP_SIZE = 32  # values of a weight that share a scale
_MAX_CODE = 7  # largest 4-bit code
CACHES = (FLOOR, "default", "fp8_e3m4", "fp8", "fp8-1.0", "6-bit")
LONG_CACHES = (FLOOR, "default", "fp8")  # at the longest of at least three contexts
_NUM_RESAMPLES = 2000


def round_weights(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy of a model whose matrices are rounded to 4 bits in groups of 32 values."""
    draft = copy.deepcopy(model)
    for name, parameter in draft.named_parameters():
        if parameter.ndim == 2 and "embed" not in name and "lm_head" not in name:
            groups = parameter.data.unflatten(1, (-1, _GROUP_SIZE))
            scale = groups.abs().amax(-1, keepdim=True) / _MAX_CODE
            parameter.data.copy_(((groups / scale).round() * scale).flatten(1))
    return draft


def compute_exit_logits(
    model: Any, num_layers: int, compute: Callable[[], torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits of `compute`, and the logits after the first `num_layers` layers."""
    recorded: list[torch.Tensor] = []
    with model.model.layers[num_layers - 1].register_forward_hook(
        lambda _module, _args, output: recorded.append(output)
    ):
        logits = compute()
    hidden = recorded[0] if isinstance(recorded[0], torch.Tensor) else recorded[0][0]
    with torch.no_grad():
        exit_logits: torch.Tensor = model.lm_head(model.model.norm(hidden))
    return logits, exit_logits


def count_tokens(acceptance: torch.Tensor) -> torch.Tensor:
    """Return the expected tokens of a step at each position, `[N - NUM_DRAFTED + 1]`.

    A step yields the target's token after the accepted draft tokens, so at least one token.
    """
    return 1 + acceptance.unfold(0, NUM_DRAFTED, 1).cumprod(1).sum(1)


def score_context(
    model: PreTrainedModel,
    draft: PreTrainedModel,
    ids: torch.Tensor,
    contenders: Mapping[str, Contender],
    *,
    scored: int,
    exit_layers: int,
) -> dict[str, dict[str, Any]]:
    """Return the acceptance, the divergence and the total variation of each cache in a text.

    Args:
        model: The target.
        draft: The draft model `round_weights(model)`.
        ids: Tokens of the text, `[1, N]`, int64.
        contenders: The caches by name. The first cache has 16 bits, and is the reference.
        scored: Number of scored tokens at the end of the text.
        exit_layers: Number of layers of the draft by early exit.
    """
    start = ids.shape[1] - scored
    states: list[KeysAndValues] = record_states(model, ids[:, :start])
    draft_cache = DynamicCache()
    compute_logits(draft, ids[:, :start], draft_cache, scored=False)
    rounded_q = compute_logits(draft, ids[:, start:], draft_cache, scored=True).softmax(-1)
    reference_logits: torch.Tensor | None = None
    results: dict[str, dict[str, Any]] = {}
    for name, contender in contenders.items():
        cache = contender.fill(model, states)
        compute = partial(compute_logits, model, ids[:, start:], cache, scored=True)
        logits, exit_logits = compute_exit_logits(model, exit_layers, compute)
        reference_logits = logits if reference_logits is None else reference_logits
        scores = compute_scores(reference_logits, logits, ids[:, start + 1 :])
        p = logits.softmax(-1)
        results[name] = {
            "kl": scores.kl.mean().item(),
            "total_variation": scores.total_variation.mean().item(),
            EARLY_EXIT: torch.minimum(p, exit_logits.softmax(-1)).sum(-1)[0].tolist(),
            ROUNDED: torch.minimum(p, rounded_q).sum(-1)[0].tolist(),
        }
    return results


def summarize(results: list[dict[str, dict[str, Any]]], context: int) -> list[Result]:
    """Return a row for each cache and draft, with intervals over the texts.

    `results` has the result of `score_context` for each text.
    """
    samples = np.random.default_rng(0).integers(0, len(results), (_NUM_RESAMPLES, len(results)))
    rows = []
    for draft in (EARLY_EXIT, ROUNDED):
        tokens: dict[str, Any] = {}
        for name in results[0]:
            acceptances = [
                torch.tensor(result[name][draft], dtype=torch.float64) for result in results
            ]
            tokens[name] = np.array([count_tokens(each).mean() for each in acceptances])
            ratios = tokens[name][samples].mean(1) / tokens[FLOOR][samples].mean(1)
            low, high = np.quantile(ratios, (0.025, 0.975)).tolist()
            rows.append(
                {
                    "context": context,
                    "draft": draft,
                    "cache": name,
                    "acceptance": float(np.mean([each.mean() for each in acceptances])),
                    "tokens": float(tokens[name].mean()),
                    "ratio": float(tokens[name].mean() / tokens[FLOOR].mean()),
                    "low": low,
                    "high": high,
                    "kl": float(np.mean([result[name]["kl"] for result in results])),
                    "total_variation": float(
                        np.mean([result[name]["total_variation"] for result in results])
                    ),
                }
            )
    return rows


@load_model_before
def measure(
    model: PreTrainedModel,
    tokenizer: Any,
    *,
    contexts: str = "1024,4096,8192",
    num_texts: int = 4,
    scored: int = 256,
    exit_layers: int = 0,
    progress: Callable[[str], None],
) -> Result:
    """Return the rows of all contexts.

    Args:
        model: The target, in float32.
        tokenizer: The model's tokenizer.
        contexts: Numbers of tokens of a text, separated by commas.
        num_texts: Number of texts of each kind in `KINDS`.
        scored: Number of scored tokens at the end of each text.
        exit_layers: Number of layers of the draft by early exit. 0 means nine tenths of the layers.
        progress: Function that is called with the name of each text.
    """
    draft = round_weights(model)
    exit_layers = exit_layers or model.config.num_hidden_layers * 9 // 10
    lengths = [int(length) for length in contexts.split(",")]
    rows: list[Result] = []
    with paged_attention(model), paged_attention(draft):
        for length in lengths:
            is_longest = len(lengths) > 2 and length == max(lengths)
            cache_names = LONG_CACHES if is_longest else CACHES
            contenders = {name: CONTENDERS[name] for name in cache_names}
            results: list[Any] = []
            for kind in KINDS:
                for ids in read_texts(tokenizer, kind, num_texts, length):
                    progress(f"{length} tokens, text {len(results) + 1}")
                    results.append(score_context(
                        model, draft, ids.to(model.device), contenders, scored=scored,
                        exit_layers=exit_layers,
                    ))  # fmt: skip
            rows += summarize(results, length)
    return {"rows": rows, "drafted": NUM_DRAFTED, "exit_layers": exit_layers}


if __name__ == "__main__":
    main(__doc__, measure, {
        **MODEL_OPTIONS,
        "--contexts": {"help": "Numbers of tokens, separated by commas."},
        "--texts": {
            "type": int, "dest": "num_texts",
            "help": f"Number of texts of each of {len(KINDS)} kinds.",
        },
        "--scored": {"type": int, "help": "Number of scored tokens at the end of each text."},
        "--exit-layers": {"type": int, "help": "Number of layers of the draft by early exit."},
    })  # fmt: skip
