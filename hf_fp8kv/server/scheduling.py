"""A fair order of prompts: short prompts do not wait for a long one, which still makes progress.

transformers' first-in-first-out scheduler prefers requests that decode, and gives the remaining
tokens of a step to the oldest prompt. A new request next to a prompt of thousands of tokens then
waits until all of them are computed. Here, half of the remaining tokens go to the other prompts,
the shortest first. So the oldest prompt takes at most twice as long as alone, and a new prompt that
fits into a half gets its first token in the next step.
"""

from collections.abc import Sequence
from typing import Any

from transformers.generation.continuous_batching.requests import RequestStatus
from transformers.generation.continuous_batching.scheduler import FIFOScheduler

from .sampling import wants_prompt

# Maximum number of prompt tokens of a step whose logits are needed. Each has one logit for every
# token of the vocabulary.
PROMPT_STEP_TOKENS = 512


def share_steps(scheduler: Any) -> None:
    """Make a first-in-first-out scheduler share each step between prompts. Skip other classes."""
    candidate: object = scheduler
    if not isinstance(candidate, FIFOScheduler):
        return
    process, schedule = scheduler._process_candidates, scheduler._schedule_request
    limits: dict[str, int] = {}

    def process_candidates(candidates: Sequence[Any], token_budget: int, *args: Any) -> Any:
        kept, limited = limit_scored(candidates)
        ordered, chosen = share_tokens(kept, token_budget)
        limits.clear()
        limits.update(limited | {name: min(n, limited.get(name, n)) for name, n in chosen.items()})
        result = process(ordered, token_budget, *args)
        # The last request gives up its pages first. This should be the newest prompt, not the
        # longest. Decoding requests stay in front, in their order.
        scheduler.starved_requests.sort(key=lambda one: is_prompt(one[0]) * one[0].created_time)
        return result

    def schedule_request(state: Any, tokens: Any, token_budget: int, *args: Any) -> None:
        limit = limits.get(state.request_id, token_budget)
        schedule(state, tokens, min(limit, token_budget), *args)

    scheduler._process_candidates = process_candidates
    scheduler._schedule_request = schedule_request


def is_prompt(state: Any) -> bool:
    """Return whether a request has no new token yet."""
    return bool(state.status != RequestStatus.DECODING)


def limit_scored(candidates: Sequence[Any]) -> tuple[list[Any], dict[str, int]]:
    """Return the candidates of a step, and limits of those whose prompts are scored.

    Scored prompts get PROMPT_STEP_TOKENS tokens of the step in total. Those without a token are
    left out.
    """
    kept, limits, left = [], {}, PROMPT_STEP_TOKENS
    for state in candidates:
        if wants_prompt(state) and is_prompt(state):
            if not left:
                continue
            tokens = min(len(state.remaining_prefill_tokens), left)
            limits[state.request_id] = tokens
            left -= tokens
        kept.append(state)
    return kept, limits


def share_tokens(candidates: Sequence[Any], tokens: int) -> tuple[list[Any], dict[str, int]]:
    """Return the requests of a step in their order, and token limits of some of them.

    Requests that decode come first, in their order. Then come the other prompts that have a share,
    the shortest first, the oldest prompt, which gets the remaining tokens, and all other prompts.
    """
    decoding = [state for state in candidates if not is_prompt(state)]
    prompts = [state for state in candidates if is_prompt(state)]
    room = tokens - len(decoding)
    if len(prompts) < 2 or room < 2:
        return [*decoding, *prompts], {}
    oldest = min(prompts, key=lambda state: state.created_time)
    others = [state for state in prompts if state is not oldest]
    others.sort(key=lambda state: len(state.remaining_prefill_tokens))  # stable
    left, limits = room // 2, {}
    for state in others:
        limits[state.request_id] = share = min(len(state.remaining_prefill_tokens), left)
        left -= share
        if left == 0:
            break
    shared = len(limits)
    return [*decoding, *others[:shared], oldest, *others[shared:]], limits
