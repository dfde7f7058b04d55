"""Measure the drift of the divergence along long answers, and answers sampled with each cache."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import Any

import torch
from transformers import PreTrainedModel

from ..calibration.divergence import compare_caches, compute_logits, compute_scores
from .caches import UNQUANTIZED, Contender

WINDOW = 32  # tokens of an answer whose divergences are averaged
_SLOPE_WINDOWS = 4  # windows whose divergences are averaged for slopes
_TEMPERATURE = 0.7
_MAX_CHUNK, _MAX_LOGITS = 128, 1 << 26  # maximum numbers of tokens and of logits of a call
_FEW_ROWS = 8  # maximum number of rows that are multiplied as weight times input
# A window whose divergence is this number of standard deviations above the trend is a jump.
_JUMP_DEVIATIONS = 8.0
_MAX_CHANGE = math.log(11)
_MIN_WINDOWS = 8  # windows of 128 tokens that a slope needs
_POWER = 0.8  # probability of finding the detectable slope


def sample_answers(
    model: PreTrainedModel, prompts: torch.Tensor, contender: Contender, tokens: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the logits `[B, 1, vocabulary]` and the tokens `[B, 1]` of answers by position.

    Tokens are sampled at a temperature of 0.7 under a cache. The noise of a token depends on its
    row and position, not on the cache: two caches give different tokens only if their logits
    differ. The token that ends a text is not sampled.

    Args:
        model: The model, with the attention implementation to measure.
        prompts: Tokens, `[B, P]`, int64, on the model's device.
        contender: The cache.
        tokens: Number of tokens of each answer.
    """
    end_ids = getattr(model.generation_config, "eos_token_id", None)
    excluded_ids = torch.tensor([] if end_ids is None else end_ids, dtype=torch.long).flatten()
    cache, ids = contender.make(model), prompts
    with _speed_up_few_rows(model):
        for position in range(tokens):
            logits = compute_logits(model, ids, cache, {}, scored=False)[:, -1:]
            scores = logits[:, -1].float().cpu().index_fill(1, excluded_ids, -math.inf)
            generator = torch.Generator().manual_seed(position)
            noise = torch.rand(scores.shape, generator=generator).log().neg().log()
            # Minus Gumbel noise: the largest sum is a sample of the softmax.
            ids = (scores / _TEMPERATURE - noise).argmax(-1, keepdim=True).to(prompts.device)
            yield logits, ids


@contextmanager
def _speed_up_few_rows(model: PreTrainedModel) -> Iterator[None]:
    """Compute linear layers on few rows as weight times input, two to four times as fast on a CPU.

    `linear` of torch 2.13 reads float32 weights at only 6 GB/s for 2 to 8 rows.
    """
    layers = [x for x in model.modules() if type(x) is torch.nn.Linear and x.weight.is_cpu]
    for layer in layers:
        layer.forward = partial(_apply_linear, layer)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def _apply_linear(layer: torch.nn.Linear, states: torch.Tensor) -> torch.Tensor:
    num_rows = states.numel() // states.shape[-1]
    if num_rows > _FEW_ROWS:
        return torch.nn.functional.linear(states, layer.weight, layer.bias)
    states = states.contiguous()  # otherwise the product takes two to four times as long
    product = (layer.weight @ states.reshape(num_rows, -1).T).T.view(*states.shape[:-1], -1)
    return product if layer.bias is None else product + layer.bias


def follow_answers(
    model: PreTrainedModel,
    prompts: torch.Tensor,
    answers: torch.Tensor,
    contenders: dict[str, Contender],
) -> dict[str, torch.Tensor]:
    """Return the divergence at each token of answers, `[B, T]`, by name of the cache.

    One call reads the prompt, as in `generate`. The answer follows in chunks. Its tokens attend to
    stored keys and values only, even within the chunk, so they read the bytes that decoding reads.

    Args:
        model: The model, with the attention implementation to measure.
        prompts: Tokens, `[B, P]`, int64, on the model's device.
        answers: Tokens, `[B, T]`, int64.
        contenders: The caches by name.
    """
    num_answers, length = answers.shape
    chunk = _choose_chunk(model, num_answers)
    makers = {name: partial(contender.make, model) for name, contender in contenders.items()}
    scores = compare_caches(
        model, torch.cat((prompts, answers), 1), makers, prefill=prompts.shape[1], chunk=chunk
    )
    sizes = [num_answers * min(chunk, length - start) for start in range(0, length, chunk)]
    return {
        name: torch.cat([part.view(num_answers, -1) for part in scores[name].kl.split(sizes)], 1)
        for name in contenders
    }


def _choose_chunk(model: PreTrainedModel, num_answers: int) -> int:
    vocab_size: int = model.config.get_text_config(decoder=True).vocab_size
    return max(min(_MAX_CHUNK, _MAX_LOGITS // (num_answers * vocab_size)), 1)


def average_windows(kl: torch.Tensor, window: int = WINDOW) -> torch.Tensor:
    """Return the means over windows of tokens, `[B, T // window]`."""
    windows: torch.Tensor = kl[:, : kl.shape[1] // window * window].unflatten(1, (-1, window))
    return windows.mean(-1)


def describe_drift(windows: torch.Tensor, floor: torch.Tensor | None) -> dict[str, Any]:
    """Return the drift of the divergence along answers, relative to the drift of the floor.

    One slope is fitted to the logarithms of the divergences of all answers, each answer with its
    own mean. It is the change of the logarithm per 1,000 tokens. The interval covers 95 % by
    Student's distribution, if the errors of windows of 128 tokens are independent.

    Args:
        windows: Divergences by answer and window, `[B, W]`.
        floor: As `windows`, for rounding to bfloat16. None fits the divergences themselves.

    Returns:
        `slope`, `low`, `high`, and `detectable`, the smallest slope found with a probability
        of 80 %. These are None for answers of fewer than 1,024 tokens. `jump` is None, or has the
        `position` and `factor` of a window far above the trend.
    """
    jump = {"jump": _find_jump(windows, floor)}
    if windows.shape[1] < _MIN_WINDOWS * _SLOPE_WINDOWS:
        return dict.fromkeys(("slope", "low", "high", "detectable")) | jump
    y = _log_divergence(average_windows(windows, _SLOPE_WINDOWS))
    if floor is not None:
        y = y - _log_divergence(average_windows(floor, _SLOPE_WINDOWS))
    x = torch.arange(y.shape[1], dtype=y.dtype) * _SLOPE_WINDOWS * WINDOW / 1000
    x, y = x - x.mean(), y - y.mean(1, keepdim=True)
    weight = len(y) * x.square().sum()
    slope = (y * x).sum() / weight
    degrees = y.numel() - len(y) - 1
    error = ((y - slope * x).square().sum() / degrees / weight).sqrt().item()
    width = student_quantile(0.975, degrees)
    return {
        "slope": slope.item(),
        "low": slope.item() - width * error,
        "high": slope.item() + width * error,
        "detectable": (width + student_quantile(_POWER, degrees)) * error,
        **jump,
    }


def format_change(logarithm: float) -> str:
    """Return a change of a logarithm as a change in percent, at most +1,000 %."""
    return f"{math.expm1(logarithm):+.0%}" if logarithm < _MAX_CHANGE else "> +1,000%"


def _log_divergence(windows: torch.Tensor) -> torch.Tensor:
    return windows.clamp(1e-15, 1e15).log()


def _find_jump(windows: torch.Tensor, floor: torch.Tensor | None) -> dict[str, Any] | None:
    """Return the window whose mean over the answers is far above the trend, or None."""
    trend = _log_divergence(windows.mean(0))
    if floor is not None:
        trend = trend - _log_divergence(floor.mean(0))
    excess = trend - trend.median()
    deviation = 1.4826 * excess.abs().median()  # of a normal distribution
    peak = int(excess.argmax())
    if excess[peak] < _JUMP_DEVIATIONS * deviation.clamp(min=0.1):
        return None
    return {"position": peak * WINDOW, "factor": excess[peak].exp().item()}


def student_quantile(probability: float, degrees: int) -> float:
    """Return a quantile, above the median, of Student's distribution with `degrees` of freedom.

    The density is integrated over the angle whose tangent is the value over sqrt(degrees).
    """
    angle = torch.linspace(0, math.pi / 2, 1 << 16, dtype=torch.float64)
    integral = torch.cumulative_trapezoid(angle.cos() ** (degrees - 1), angle)
    index = int((integral / integral[-1] / 2 + 0.5 < probability).sum())
    return float(degrees**0.5 * math.tan(angle[index + 1].item()))


def run_freely(
    model: PreTrainedModel, prompts: torch.Tensor, expected: torch.Tensor, contender: Contender
) -> dict[str, Any]:
    """Sample answers under a cache, and compare them with the unquantized answers.

    Args:
        model: The model, with the attention implementation to measure.
        prompts: Tokens, `[B, P]`, int64, on the model's device.
        expected: The unquantized answers, `[B, T]`.
        contender: The cache.

    Returns:
        `first`, the position of the first different token of each answer or None, and `kl_before`
        and `kl_after`, the mean divergences of the predictions before that token, and from that
        token on.
    """
    exact_cache, last_ids, kl = UNQUANTIZED.make(model), prompts, []
    num_answers, length = expected.shape
    chunk = _choose_chunk(model, num_answers)
    answers = sample_answers(model, prompts, contender, length)
    sampled_ids = prompts[:, :0]
    while steps := [*islice(answers, chunk)]:
        logits, ids = (torch.cat(x, 1) for x in zip(*steps, strict=True))
        inputs = torch.cat((last_ids, ids[:, :-1]), 1)
        exact_logits = compute_logits(model, inputs, exact_cache, {}, scored=True)[:, -len(steps) :]
        kl.append(compute_scores(exact_logits, logits, ids).kl.view(num_answers, -1))
        sampled_ids, last_ids = torch.cat((sampled_ids, ids), 1), ids[:, -1:]
    is_different = (sampled_ids != expected).cpu().cumsum(1) > 0
    first_differences = [int(row.int().argmax()) if row.any() else None for row in is_different]

    def average_kl(is_selected: torch.Tensor) -> float | None:
        return torch.cat(kl, 1)[is_selected].mean().item() if is_selected.any() else None

    kl_before, kl_after = average_kl(~is_different), average_kl(is_different)
    return {"first": first_differences, "kl_before": kl_before, "kl_after": kl_after}
