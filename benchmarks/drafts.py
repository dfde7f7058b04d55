"""Measure how many tokens a step of speculative decoding yields with each cache of the target.

A draft model proposes tokens, and the target accepts each with a probability that is the sum of
min(p, q) over the vocabulary. A quantized cache changes the target's distribution p. The acceptance
is computed at each scored position of the card's texts. `--real` also decodes with drafts.
"""

import copy
import io
import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel

from hf_fp8kv.attention.switching import paged_attention
from hf_fp8kv.calibration.divergence import compute_logits, compute_scores
from hf_fp8kv.card.caches import CONTENDERS, FLOOR, Contender, States
from hf_fp8kv.card.long_texts import KINDS, read_texts
from hf_fp8kv.card.predictions import prefill
from hf_fp8kv.utils.environment import describe_run

from .shared import MODEL_OPTIONS, Options, Result, load_model_before, main

NUM_DRAFTED = 5  # tokens that the draft model proposes in a step
EARLY_EXIT, ROUNDED = "early exit", "rounded weights"
_GROUP_SIZE, _MAX_CODE = 32, 7  # values of a weight that share a scale, and largest 4-bit code
CACHES = (FLOOR, "default", "fp8_e3m4", "fp8", "fp8-1.0", "6-bit")
LONG_CACHES = (FLOOR, "default", "fp8")  # at the longest context
REAL_CACHES = (FLOOR, "default", "fp8-1.0")
_NUM_RESAMPLES = 2000
Acceptance = dict[str, list[float]]  # probability at each scored position of a text, by draft


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
    layer = model.model.layers[num_layers - 1]
    handle = layer.register_forward_hook(lambda module, args, output: recorded.append(output))
    logits = compute()
    handle.remove()
    hidden = recorded[0] if isinstance(recorded[0], torch.Tensor) else recorded[0][0]
    with torch.no_grad():
        exit_logits: torch.Tensor = model.lm_head(model.model.norm(hidden))
    return logits, exit_logits


def count_tokens(acceptance: torch.Tensor) -> torch.Tensor:
    """Return the expected tokens of a step at each position, `[N - NUM_DRAFTED + 1]`.

    A step yields the target's token after the accepted draft tokens, so at least one token.
    """
    windows = acceptance.unfold(0, NUM_DRAFTED, 1)
    return 1 + windows.cumprod(1).sum(1)


def score_context(
    model: PreTrainedModel,
    draft: PreTrainedModel,
    ids: torch.Tensor,
    contenders: Mapping[str, Contender],
    *,
    scored: int,
    exit_layers: int,
) -> dict[str, dict[str, Any]]:
    """Return the acceptance, the divergence and the total variation of each cache in a text."""
    start = ids.shape[1] - scored
    states: list[States] = prefill(model, ids[:, :start]).states
    draft_cache = DynamicCache()
    compute_logits(draft, ids[:, :start], draft_cache, {}, scored=False)
    rounded_q = compute_logits(draft, ids[:, start:], draft_cache, {}, scored=True).softmax(-1)
    exact: torch.Tensor | None = None
    entries: dict[str, dict[str, Any]] = {}
    for name, contender in contenders.items():
        cache = contender.fill(model, states)
        compute = partial(compute_logits, model, ids[:, start:], cache, {}, scored=True)
        logits, exit_logits = compute_exit_logits(model, exit_layers, compute)
        exact = logits if exact is None else exact  # the first cache has 16 bits
        scores = compute_scores(exact, logits, ids[:, start + 1 :])
        p = logits.softmax(-1)
        entries[name] = {
            "kl": scores.kl.mean().item(),
            "total_variation": scores.total_variation.mean().item(),
            EARLY_EXIT: torch.minimum(p, exit_logits.softmax(-1)).sum(-1)[0].tolist(),
            ROUNDED: torch.minimum(p, rounded_q).sum(-1)[0].tolist(),
        }
    return entries


def summarize(texts: list[dict[str, dict[str, Any]]], context: int) -> list[Result]:
    """Return a row for each cache and draft, with intervals over the texts."""
    generator = np.random.default_rng(0)
    samples = generator.integers(0, len(texts), (_NUM_RESAMPLES, len(texts)))
    rows = []
    for draft in (EARLY_EXIT, ROUNDED):
        tokens = {
            name: np.array([count_tokens(torch.tensor(x[name][draft])).mean() for x in texts])
            for name in texts[0]
        }
        for name in texts[0]:
            ratios = tokens[name][samples].mean(1) / tokens[FLOOR][samples].mean(1)
            low, high = np.quantile(ratios, (0.025, 0.975)).tolist()
            rows.append(
                {
                    "context": context,
                    "draft": draft,
                    "cache": name,
                    "acceptance": float(np.mean([np.mean(x[name][draft]) for x in texts])),
                    "tokens": float(tokens[name].mean()),
                    "ratio": float(tokens[name].mean() / tokens[FLOOR].mean()),
                    "low": low,
                    "high": high,
                    "kl": float(np.mean([x[name]["kl"] for x in texts])),
                    "total_variation": float(np.mean([x[name]["total_variation"] for x in texts])),
                }
            )
    return rows


def decode_with_drafts(
    model: Any, draft: Any, ids: torch.Tensor, contender: Contender, num_tokens: int
) -> float:
    """Return the tokens per step of sampled decoding with drafts by the rounded model."""
    draft = copy.copy(draft)
    draft.generation_config = copy.deepcopy(draft.generation_config)
    draft.generation_config.num_assistant_tokens = NUM_DRAFTED
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    draft.generation_config.assistant_confidence_threshold = 0.0
    num_calls = 0

    def count_call(module: Any, args: Any, output: Any) -> None:
        nonlocal num_calls
        num_calls += 1

    torch.manual_seed(0)
    handle = model.register_forward_hook(count_call)
    output = model.generate(
        ids, past_key_values=contender.make(model), assistant_model=draft, do_sample=True, top_k=0,
        max_new_tokens=num_tokens, min_new_tokens=num_tokens,
    )  # fmt: skip
    handle.remove()
    return float((output.shape[1] - ids.shape[1]) / num_calls)


@load_model_before
def measure(
    model: PreTrainedModel,
    tokenizer: Any,
    *,
    name: str,
    contexts: str = "1024,4096,8192",
    texts: int = 4,
    scored: int = 256,
    exit_layers: int = 0,
    real: int = 0,
    plot: str | None = None,
    progress: Any = None,
) -> Result:
    """Return the rows of all contexts, and of decoding `real` tokens with drafts if it is not 0."""
    draft = round_weights(model)
    exit_layers = exit_layers or model.config.num_hidden_layers * 9 // 10
    lengths = [int(x) for x in contexts.split(",")]
    rows: list[Result] = []
    with paged_attention(model), paged_attention(draft):
        for length in lengths:
            is_longest = len(lengths) > 2 and length == max(lengths)
            contenders = {x: CONTENDERS[x] for x in (LONG_CACHES if is_longest else CACHES)}
            entries: list[Any] = []
            for kind in KINDS:
                for ids in read_texts(tokenizer, kind, texts, length):
                    if progress is not None:
                        progress(f"{length} tokens, text {len(entries) + 1}")
                    entries.append(
                        score_context(
                            model, draft, ids.to(model.device), contenders, scored=scored,
                            exit_layers=exit_layers,
                        )
                    )  # fmt: skip
            rows += summarize(entries, length)
        if real:
            ids = read_texts(tokenizer, next(iter(KINDS)), 1, lengths[0])[0].to(model.device)
            for cache in REAL_CACHES:
                tokens = decode_with_drafts(model, draft, ids, CONTENDERS[cache], real)
                row = {"context": lengths[0], "draft": f"{ROUNDED}, decoded", "cache": cache}
                rows.append({**row, "tokens": tokens})
    if plot is not None:
        Path(plot).write_bytes(draw_plot(rows))
    settings = {
        "model": name, "texts": texts * len(KINDS), "scored": scored, "exit_layers": exit_layers,
        "drafted": NUM_DRAFTED, "decoded": real,
    }  # fmt: skip
    run = describe_run("drafts", device=str(model.device))
    return {**run, "settings": settings, "rows": rows}


def draw_plot(rows: list[Result]) -> bytes:
    """Return a PNG of the lost acceptance by divergence, with the bound sqrt(KL / 2).

    A logarithmic axis shows no gains.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 5), layout="constrained")
    axes = figure.subplots()
    rows = [row for row in rows if "kl" in row]
    exact = {(x["context"], x["draft"]): x["acceptance"] for x in rows if x["cache"] == FLOOR}
    for draft, marker in ((EARLY_EXIT, "o"), (ROUNDED, "s")):
        points = [
            (x["kl"], exact[x["context"], draft] - x["acceptance"])
            for x in rows if x["draft"] == draft and x["cache"] != FLOOR
        ]  # fmt: skip
        axes.plot(*zip(*points, strict=True), marker, label=f"lost acceptance, {draft}")
    points = sorted({(x["kl"], x["total_variation"]) for x in rows if x["cache"] != FLOOR})
    axes.plot(*zip(*points, strict=True), "^", label="total variation")
    kl = [x for x, _ in points]
    axes.plot(kl, [math.sqrt(x / 2) for x in kl], label="bound sqrt(KL / 2)")
    axes.set(xlabel="mean KL from the 16-bit cache", xscale="log", yscale="log")
    axes.set_ylabel("probability of a draft token")
    axes.legend(frameon=False)
    png = io.BytesIO()
    figure.savefig(png, dpi=100, format="png")
    return png.getvalue()


OPTIONS: Options = {
    **MODEL_OPTIONS,
    "--contexts": {"help": "Numbers of tokens, separated by commas."},
    "--texts": {"type": int, "help": f"Number of texts of each of {len(KINDS)} kinds."},
    "--scored": {"type": int, "help": "Number of scored tokens at the end of each text."},
    "--exit-layers": {"type": int, "help": "Layers of the draft by early exit."},
    "--real": {"type": int, "help": "Number of tokens to decode with drafts."},
    "--plot": {"help": "Path of a PNG of the lost acceptance by divergence."},
}

if __name__ == "__main__":
    main(__doc__, measure, OPTIONS)
