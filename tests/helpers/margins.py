"""Checks that greedy tokens do not depend on the CPU, because the best logit leads by a margin."""

from typing import Any

import torch
from transformers import LogitsProcessor, LogitsProcessorList


class WideMargins(LogitsProcessor):
    """Assert at each step of generate() that the best logit leads the next one by `least`.

    A different order of sums changes a logit by less than `least`, so all CPUs choose equal tokens.
    """

    def __init__(self, least: float) -> None:
        self.least = least

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        best, second = scores.float().topk(2).values.unbind(-1)
        margin, row = (best - second).min(0)
        assert margin >= self.least, (
            f"a thin margin: in row {int(row)}, after {input_ids.shape[1]} tokens, the best logit "
            f"leads by {margin:.1e}, expected at least {self.least:.1e}. Use a different prompt"
        )
        return scores


def wide_margins(least: float) -> LogitsProcessorList:
    """Return the value of generate()'s `logits_processor` that asserts margins."""
    return LogitsProcessorList([WideMargins(least)])


@torch.no_grad()
def greedy_deficit(model: Any, prompt: list[int], answer: list[int]) -> float:
    """Return the largest distance of an answer's token from the best logit of its step.

    The model reads prompt and answer in one call, without a cache. In 16 bits, two CPUs may choose
    differently between two nearly equal tokens, and continue differently. Each answer is then still
    greedy to within the rounding, but an answer from a wrong page is not.
    """
    logits = model(torch.tensor([[*prompt, *answer]]), use_cache=False).logits[0].float()
    steps = logits[len(prompt) - 1 : -1]
    logits_of_answer = steps.gather(1, torch.tensor(answer)[:, None])[:, 0]
    return (steps.amax(1) - logits_of_answer).max().item()
