"""Long suite: what caches do to whole models at long context."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from transformers import PreTrainedModel

from ...attention.switching import paged_attention
from ...errors import ConfigError
from ...utils.environment import describe_run
from ..quality import describe_settings
from ..reporting import report_percents
from .caches import ROWS, choose_rows
from .predictions import count_tokens, score_text, summarize_predictions
from .texts import KINDS, read_texts

POSITIONS = (1024, 4096)
THOROUGH: dict[str, Any] = {"positions": (1024, 4096, 8192), "texts": 6}


def run_long_suite(
    model: PreTrainedModel,
    tokenizer: Any,
    *,
    name: str = "",
    texts: int = 2,
    positions: Sequence[int] = POSITIONS,
    scored: int = 64,
    kinds: Sequence[str] = tuple(KINDS),
    caches: Sequence[str] = tuple(ROWS),
    progress: Callable[[str, float], None] | None = None,
) -> dict[str, Any]:
    """Return what caches do to a model's predictions at long context, for JSON.

    Of `texts` texts of each kind, the `scored` tokens before each of the `positions` are scored
    under each cache, after one call with all tokens before them. In float32 one sees the cache
    alone. The texts come with Python: see `texts.py`.

    Args:
        model: a decoder; it is left as it was.
        tokenizer: the model's.
        name: what the result calls the model.
        texts: how many of each kind.
        positions: in tokens.
        scored: tokens before each position.
        kinds: of text, some of `KINDS`.
        caches: some of `ROWS`. Those that cannot be measured here are named in the result.
        progress: called with what is measured next, and the share that is done.

    Returns:
        `suite`, `date`, `command`, `versions`, `hardware`, `settings`, and

        * `caches`: each with `cache`, `title`, `bits` (of a number of a bf16 model, its share of
          the scales included) and `missing` (why it was not measured, or None);
        * `predictions`: each with `cache`, `position`, `kind` ("all": over all texts) and the
          fields of `summarize_texts`.

    Raises:
        ConfigError: unknown kinds or caches, a position that the model does not reach or that
            leaves no token before those that are scored, or too few texts.
    """
    positions = sorted(set(positions))
    _check_positions(model, positions, scored)
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown:
        raise ConfigError(f"kinds: expected some of {', '.join(KINDS)}, got {unknown[0]!r}")
    rows, missing = choose_rows(model, caches)
    read = {kind: read_texts(tokenizer, kind, texts, positions[-1]) for kind in kinds}
    config = model.config.get_text_config(decoder=True)
    head_size = (
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )
    total = count_tokens(rows, positions, scored) * texts * len(kinds)
    report = report_percents(progress, total)

    def on_call(what: str, cache: str, tokens: int) -> None:
        report(f"{what}, {cache}", tokens)

    with paged_attention(model):
        by_kind = {
            kind: [
                score_text(
                    model, ids.to(model.device), rows, positions=positions, scored=scored,
                    on_call=partial(on_call, f"{kind}, text {number} of {texts}"),
                )
                for number, ids in enumerate(of_kind, 1)
            ]
            for kind, of_kind in read.items()
        }  # fmt: skip
    return {
        **describe_run("long", device=str(model.device)),
        "settings": {
            **describe_settings(model, name, kinds, scored=scored),
            "texts_of_a_kind": texts,
            "positions": list(positions),
            "chat_template": bool(tokenizer.chat_template),
        },
        "caches": [
            {
                "cache": cache,
                "title": ROWS[cache].title,
                "bits": ROWS[cache].bits(head_size),
                "missing": missing.get(cache),
            }
            for cache in caches
        ],
        "predictions": summarize_predictions(by_kind, list(rows), positions),
    }


def _check_positions(model: PreTrainedModel, positions: Sequence[int], scored: int) -> None:
    limit = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if not positions or positions[0] <= scored or (limit is not None and positions[-1] > limit):
        raise ConfigError(
            f"positions: expected some above {scored}, the tokens that are scored before each"
            + (f", up to {limit}, the model's max_position_embeddings" if limit else "")
            + f"; got {', '.join(map(str, positions)) or 'none'}"
        )
