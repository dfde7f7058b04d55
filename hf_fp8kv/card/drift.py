"""Measure the drift of the divergence along long answers, and answers sampled with each cache."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from ..cache.cache import FP8PagedCache
from ..calibration.divergence import compute_logits, compute_scores
from .caches import UNQUANTIZED, Contender
from .predictions import Prefill

# Pages in the model's dtype store the same bits as DynamicCache, but a step does not copy them.
UNQUANTIZED_PAGES = Contender("", lambda model: FP8PagedCache(model.config, dtype="model"))
WINDOW_TOKENS = 32  # number of tokens of an answer whose divergences are averaged
_SLOPE_WINDOWS = 4  # number of windows whose mean is a point of a slope
_TEMPERATURE = 0.7
# Maximum numbers of tokens and of logits of a call.
_MAX_CHUNK_TOKENS = 128
_MAX_LOGITS = 1 << 26
_FEW_ROWS = 8  # maximum number of rows that are multiplied as weight times input
_JUMP_DEVIATIONS = 8.0  # standard deviations by which a jump exceeds the median of all windows
_MAX_LOG_CHANGE = math.log(11)  # +1,000%
_MIN_SLOPE_POINTS = 8  # minimum number of points of a slope, of 128 tokens each
_POWER = 0.8  # statistical power, the probability of finding the detectable slope


@torch.inference_mode()  # saves work in each of the many small operators of a step
def sample_answers(
    model: PreTrainedModel,
    prompts: Prefill,
    rows: slice,
    sampled: Contender,
    compared: Mapping[str, Contender],
    num_tokens: int,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Sample answers with one cache, and compare the predictions of other caches along them.

    Tokens are sampled one by one at a temperature of 0.7, without tokens that end a text. The noise
    of a token depends on its row and position, but not on the cache. Two caches therefore give
    different tokens only if their logits differ. All caches store the states of the prompts, which
    one call computed, as in `generate`. The other caches then read the answers in chunks. As in
    decoding, the tokens of a chunk attend only to stored keys and values, even within the chunk, so
    their logits differ from logits in decoding only by rounding.

    Args:
        model: The model, with the attention implementation to measure.
        prompts: The prefill of the prompts of all answers.
        rows: Rows of the prompts to answer.
        sampled: The cache to sample with.
        compared: The other caches, by name.
        num_tokens: Number of tokens of each answer.

    Returns:
        The answers, `[B, num_tokens]`, int64, and for each other cache the divergences after each
        token of the answers, `[B, num_tokens]`, float64.
    """
    states = [(keys[rows], values[rows]) for keys, values in prompts.states]
    cache = sampled.fill(model, states)
    other_caches = {name: contender.fill(model, states) for name, contender in compared.items()}
    end_ids = getattr(model.generation_config, "eos_token_id", None)
    excluded_ids = torch.tensor([] if end_ids is None else end_ids, dtype=torch.long).flatten()

    def sample_tokens(logits: torch.Tensor, position: int) -> torch.Tensor:
        last_logits = logits[:, -1].float().cpu().index_fill(1, excluded_ids, -math.inf)
        generator = torch.Generator().manual_seed(position)
        noise = torch.rand((len(prompts.logits), last_logits.shape[1]), generator=generator)
        # Adding Gumbel noise, -log(-log(noise)), makes the argmax a sample of the softmax.
        noisy_logits = last_logits / _TEMPERATURE - noise[rows].log().neg().log()
        return noisy_logits.argmax(-1, keepdim=True).to(logits.device)

    ids = sample_tokens(prompts.logits[rows], 0)
    answers = ids.new_empty(len(ids), num_tokens)
    kl = {name: torch.empty(answers.shape, dtype=torch.float64) for name in compared}
    chunk_size = max(min(_MAX_CHUNK_TOKENS, _MAX_LOGITS // prompts.logits[rows].numel()), 1)
    with _speed_up_few_rows(model):
        for positions in torch.arange(num_tokens).split(chunk_size):
            step_logits = []
            for position in positions.tolist():
                answers[:, position] = ids[:, 0]
                step_logits.append(compute_logits(model, ids, cache, {}, scored=True))
                ids = sample_tokens(step_logits[-1], position + 1)
            chunk_ids = answers[:, positions]
            logits = torch.cat(step_logits, 1)
            for name, contender in compared.items():
                other = compute_logits(model, chunk_ids, other_caches[name], {}, scored=True)
                exact, quantized = (other, logits) if contender is UNQUANTIZED else (logits, other)
                scores = compute_scores(exact, quantized, chunk_ids)
                kl[name][:, positions] = scores.kl.view(chunk_ids.shape)
    return answers, kl


@contextmanager
def _speed_up_few_rows(model: PreTrainedModel) -> Iterator[None]:
    """Compute linear layers of few rows as weight times input, two to four times as fast on a CPU.

    `linear` of torch 2.13 reads float32 weights at only 6 GB/s for 2 to 8 rows.
    """
    layers = [
        module
        for module in model.modules()
        if type(module) is torch.nn.Linear and module.weight.is_cpu
    ]
    for layer in layers:
        layer.forward = partial(_apply_linear, layer)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def _apply_linear(layer: torch.nn.Linear, states: torch.Tensor) -> torch.Tensor:
    rows = states.reshape(-1, states.shape[-1])
    if len(rows) > _FEW_ROWS:
        return torch.nn.functional.linear(states, layer.weight, layer.bias)
    # Without a contiguous input, the product takes two to four times as long.
    product = torch.nn.functional.linear(layer.weight, rows.contiguous()).T.contiguous()
    product = product.view(*states.shape[:-1], -1)
    return product if layer.bias is None else product + layer.bias


def average_windows(kl: torch.Tensor, size: int = WINDOW_TOKENS) -> torch.Tensor:
    """Return the means of `kl`, `[B, T]`, over windows of `size` tokens, `[B, T // size]`."""
    windows: torch.Tensor = kl[:, : kl.shape[1] // size * size].unflatten(1, (-1, size))
    return windows.mean(-1)


def describe_drift(windows: torch.Tensor, floor: torch.Tensor | None) -> dict[str, Any]:
    """Return the drift of the divergence along answers, relative to the drift of the floor.

    The slope is the change of the logarithm of the divergence per 1,000 tokens. Least squares fit
    one slope to all answers, and a separate mean to each answer. The 95% interval is from Student's
    t-distribution, and assumes that the errors of windows of 128 tokens are independent.

    Args:
        windows: Divergences by answer and window, `[B, W]`.
        floor: As `windows`, for rounding to bfloat16. None means no floor.

    Returns:
        `slope`, its interval `low` to `high`, and `detectable`, the slope that would be found with
        a probability of 80%. These are None for answers of fewer than 1,024 tokens. `jump` is None,
        or has the `position` and `factor` of a window far above the median.
    """
    jump = {"jump": _find_jump(windows, floor)}
    if windows.shape[1] < _MIN_SLOPE_POINTS * _SLOPE_WINDOWS:
        return dict.fromkeys(("slope", "low", "high", "detectable")) | jump
    log_kl = _compute_log(average_windows(windows, _SLOPE_WINDOWS))
    if floor is not None:
        log_kl = log_kl - _compute_log(average_windows(floor, _SLOPE_WINDOWS))
    kilotokens = torch.arange(log_kl.shape[1]).to(log_kl) * _SLOPE_WINDOWS * WINDOW_TOKENS / 1000
    kilotokens = kilotokens - kilotokens.mean()
    log_kl = log_kl - log_kl.mean(1, keepdim=True)
    sum_of_squares = len(log_kl) * kilotokens.square().sum()
    slope = (log_kl * kilotokens).sum() / sum_of_squares
    degrees = log_kl.numel() - len(log_kl) - 1
    residual = (log_kl - slope * kilotokens).square().sum()
    standard_error = (residual / degrees / sum_of_squares).sqrt().item()
    quantile = compute_student_quantile(0.975, degrees)
    return {
        "slope": slope.item(),
        "low": slope.item() - quantile * standard_error,
        "high": slope.item() + quantile * standard_error,
        "detectable": (quantile + compute_student_quantile(_POWER, degrees)) * standard_error,
        **jump,
    }


def format_change(logarithm: float) -> str:
    """Return a change of a logarithm as a change in percent, at most +1,000%."""
    return f"{math.expm1(logarithm):+.0%}" if logarithm < _MAX_LOG_CHANGE else "> +1,000%"


def _compute_log(windows: torch.Tensor) -> torch.Tensor:
    return windows.clamp(1e-15, 1e15).log()


def _find_jump(windows: torch.Tensor, floor: torch.Tensor | None) -> dict[str, Any] | None:
    """Return the window whose mean over all answers is far above the median window, or None."""
    log_kl = _compute_log(windows.mean(0))
    if floor is not None:
        log_kl = log_kl - _compute_log(floor.mean(0))
    excess = log_kl - log_kl.median()
    deviation = 1.4826 * excess.abs().median()  # estimates a standard deviation
    peak = int(excess.argmax())
    if excess[peak] < _JUMP_DEVIATIONS * deviation.clamp(min=0.1):
        return None
    return {"position": peak * WINDOW_TOKENS, "factor": excess[peak].exp().item()}


def compute_student_quantile(probability: float, degrees: int) -> float:
    """Return a quantile above the median of Student's t-distribution with `degrees` of freedom.

    With t = sqrt(degrees) * tan(angle), the density is proportional to cos(angle) ** (degrees - 1).
    """
    angle = torch.linspace(0, math.pi / 2, 1 << 16, dtype=torch.float64)
    integral = torch.cumulative_trapezoid(angle.cos() ** (degrees - 1), angle)
    index = int((integral / integral[-1] / 2 + 0.5 < probability).sum())
    return float(degrees**0.5 * math.tan(angle[index + 1].item()))


def compare_answers(
    answers: torch.Tensor, unquantized_answers: torch.Tensor, kl: torch.Tensor
) -> dict[str, Any]:
    """Compare the answers that a cache samples with the unquantized answers.

    Args:
        answers, unquantized_answers: Tokens, `[B, T]`, int64, on the CPU.
        kl: The divergence after each token of `answers`, `[B, T]`.

    Returns:
        `first`, the position of the first different token of each answer or None, and `kl_before`
        and `kl_after`, the mean divergences of the predictions before that token, and from that
        token on.
    """
    is_different = (answers != unquantized_answers).cumsum(1) > 0
    first_differences = [int(row.int().argmax()) if row.any() else None for row in is_different]
    # The first token has no divergence, because its logits come from the prefill of the prompt.
    predictions = torch.nn.functional.pad(kl[:, :-1], (1, 0))
    means = {
        name: predictions[is_selected].mean().item() if is_selected.any() else None
        for name, is_selected in (("kl_before", ~is_different), ("kl_after", is_different))
    }
    return {"first": first_differences, **means}
