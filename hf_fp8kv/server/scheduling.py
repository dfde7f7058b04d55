"""A fair order of prompts: short prompts do not wait for a long prompt, which still progresses.

transformers' first-in-first-out scheduler prefers requests that decode, and gives the remaining
tokens of a step to the oldest prompt. A new request next to a prompt of thousands of tokens then
waits until the whole prompt is computed. Here, half of the remaining tokens go to newer prompts,
the shortest first. The oldest prompt takes at most twice as long as alone, and a new prompt that
fits into this half gets its first token in the next step.
"""

from collections.abc import Sequence
from typing import Any

from transformers.generation.continuous_batching.requests import RequestStatus
from transformers.generation.continuous_batching.scheduler import FIFOScheduler

from .sampling import needs_prompt_logprobs

# Maximum number of prompt tokens in a step whose logits are needed. Each of these tokens has one
# logit for every token of the vocabulary.
MAX_SCORED_TOKENS = 512


def share_steps(scheduler: Any) -> None:
    """Make a FIFOScheduler share each step between prompts. Do not change other schedulers."""
    instance: object = scheduler
    if not isinstance(instance, FIFOScheduler):
        return
    stock_process, stock_schedule = scheduler._process_candidates, scheduler._schedule_request
    limits: dict[str, int] = {}  # maximum number of tokens in this step, by request id

    def process_candidates(candidates: Sequence[Any], token_budget: int, *args: Any) -> Any:
        admitted, scored_limits = limit_scoring(candidates)
        ordered, shares = share_tokens(admitted, token_budget)
        limits.clear()
        limits.update(scored_limits)
        limits.update({x: min(share, scored_limits.get(x, share)) for x, share in shares.items()})
        scheduled = stock_process(ordered, token_budget, *args)
        # The last request loses its pages first. This should be the newest prompt, not the longest
        # prompt. Decoding requests stay in front, in their order.
        scheduler.starved_requests.sort(key=lambda pair: is_prompt(pair[0]) * pair[0].created_time)
        return scheduled

    def schedule_request(state: Any, tokens: Any, token_budget: int, *args: Any) -> None:
        limit = limits.get(state.request_id, token_budget)
        stock_schedule(state, tokens, min(limit, token_budget), *args)

    scheduler._process_candidates = process_candidates
    scheduler._schedule_request = schedule_request


def is_prompt(state: Any) -> bool:
    """Return whether a request has no new token yet."""
    return bool(state.status != RequestStatus.DECODING)


def limit_scoring(candidates: Sequence[Any]) -> tuple[list[Any], dict[str, int]]:
    """Return the requests admitted to a step, and token limits of the scored prompts, by id.

    A scored prompt is a prompt whose log-probabilities are requested. In total, scored prompts get
    at most MAX_SCORED_TOKENS tokens of the step. Those that would get no token are not admitted.
    """
    admitted, limits, budget = [], {}, MAX_SCORED_TOKENS
    for state in candidates:
        if needs_prompt_logprobs(state) and is_prompt(state):
            if not budget:
                continue
            limits[state.request_id] = limit = min(len(state.remaining_prefill_tokens), budget)
            budget -= limit
        admitted.append(state)
    return admitted, limits


def share_tokens(candidates: Sequence[Any], num_tokens: int) -> tuple[list[Any], dict[str, int]]:
    """Return the requests of a step in a new order, and token limits of some prompts, by id.

    Requests that decode come first, in their order. The newer prompts that get tokens follow, the
    shortest first. Then come the oldest prompt, which gets the remaining tokens, and other prompts.
    """
    decoding = [state for state in candidates if not is_prompt(state)]
    prompts = [state for state in candidates if is_prompt(state)]
    prompt_budget = num_tokens - len(decoding)
    if len(prompts) < 2 or prompt_budget < 2:
        return [*decoding, *prompts], {}
    oldest = min(prompts, key=lambda state: state.created_time)
    newer_prompts = [state for state in prompts if state is not oldest]
    newer_prompts.sort(key=lambda state: len(state.remaining_prefill_tokens))  # a stable sort
    shared_budget, limits = prompt_budget // 2, {}
    for state in newer_prompts:
        limits[state.request_id] = limit = min(len(state.remaining_prefill_tokens), shared_budget)
        shared_budget -= limit
        if shared_budget == 0:
            break
    num_limited = len(limits)
    return [*decoding, *newer_prompts[:num_limited], oldest, *newer_prompts[num_limited:]], limits
