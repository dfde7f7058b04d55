"""Checks that greedy tokens do not depend on the CPU: the best logit must lead by a margin."""

from typing import Any

import torch
from transformers import LogitsProcessor, LogitsProcessorList


class WideMargins(LogitsProcessor):
    """Asserts at each step of generate() that the best logit leads the second by `min_margin`.

    A different order of sums must change logits by less. Then all CPUs choose the same tokens.
    """

    def __init__(self, min_margin: float) -> None:
        self.min_margin = min_margin

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        best, second_best = scores.float().topk(2).values.unbind(-1)
        margin, row = (best - second_best).min(0)
        assert margin >= self.min_margin, (
            f"expected a lead of the best logit of at least {self.min_margin:.1e}, got "
            f"{margin:.1e} in row {int(row)} after {input_ids.shape[1]} tokens. Choose a different "
            "prompt"
        )
        return scores


def require_wide_margins(min_margin: float) -> LogitsProcessorList:
    """Return a `logits_processor` for generate() that asserts margins of at least `min_margin`."""
    return LogitsProcessorList([WideMargins(min_margin)])


@torch.no_grad()
def compute_greedy_deficit(model: Any, prompt: list[int], answer: list[int]) -> float:
    """Return the largest gap between the best logit of a step and the logit of the answer's token.

    The model reads prompt and answer in one call, without a cache. In 16 bits, two CPUs may choose
    different tokens if two logits are nearly equal, and then continue differently. Both answers are
    greedy up to rounding. An answer that is computed from a wrong page is not.
    """
    logits = model(torch.tensor([[*prompt, *answer]]), use_cache=False).logits[0].float()
    step_logits = logits[len(prompt) - 1 : -1]
    answer_logits = step_logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
    return (step_logits.amax(1) - answer_logits).max().item()
