"""A fair order of prompts: short ones are not stuck behind a long one, which goes on all the same.

transformers' first-in-first-out scheduler lets requests that decode go first, and gives the rest of
a step's tokens to the oldest prompt. Beside a prompt of thousands of tokens a newcomer then waits
until the last of them. Here one half of that rest is for the other prompts, the shortest first, as
long as there are any: the oldest is at most twice as late as alone, and a newcomer that fits into a
half gets its first token in the next step.
"""

from collections.abc import Sequence
from typing import Any

from transformers.generation.continuous_batching.requests import RequestStatus
from transformers.generation.continuous_batching.scheduler import FIFOScheduler

from .sampling import wants_prompt

# Prompt tokens of a step whose logits are wanted: each has as many as the vocabulary.
PROMPT_STEP_TOKENS = 512


def share_steps(scheduler: Any) -> None:
    """Make a first-in-first-out scheduler share each step between prompts; others stay as is."""
    found: object = scheduler
    if not isinstance(found, FIFOScheduler):
        return
    process, schedule = scheduler._process_candidates, scheduler._schedule_request
    limits: dict[str, int] = {}

    def process_candidates(candidates: Sequence[Any], token_budget: int, *others: Any) -> Any:
        kept, limited = limit_scored(candidates)
        ordered, chosen = share_tokens(kept, token_budget)
        limits.clear()
        limits.update(limited)
        for request, tokens in chosen.items():
            limits[request] = min(tokens, limited.get(request, tokens))
        found = process(ordered, token_budget, *others)
        # The last one gives up its pages first: the newest prompt, not the longest. Decoding
        # requests stay in front, in their order.
        scheduler.starved_requests.sort(key=lambda one: is_prompt(one[0]) * one[0].created_time)
        return found

    def schedule_request(state: Any, tokens: Any, token_budget: int, *others: Any) -> None:
        limit = limits.get(state.request_id, token_budget)
        schedule(state, tokens, min(limit, token_budget), *others)

    scheduler._process_candidates = process_candidates
    scheduler._schedule_request = schedule_request


def is_prompt(state: Any) -> bool:
    """Return whether a request has no token yet."""
    return bool(state.status != RequestStatus.DECODING)


def limit_scored(candidates: Sequence[Any]) -> tuple[list[Any], dict[str, int]]:
    """Return the requests that a step may have, and limits of those whose prompts are scored.

    All of these together get PROMPT_STEP_TOKENS: each token has as many logits as the vocabulary.
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
    """Return the requests of a step in their order, and how many tokens some of them get at most.

    Requests that decode come first, as they are; then the other prompts that have a share, the
    shortest first; then the oldest prompt, which gets what is left; then the rest.
    """
    decoding = [state for state in candidates if not is_prompt(state)]
    prompts = [state for state in candidates if is_prompt(state)]
    room = tokens - len(decoding)
    if len(prompts) < 2 or room < 2:
        return [*decoding, *prompts], {}
    oldest = min(prompts, key=lambda state: state.created_time)
    others = [state for state in prompts if state is not oldest]
    others.sort(key=lambda state: len(state.remaining_prefill_tokens))  # stable: else as they came
    left, limits = room // 2, {}
    for state in others:
        limits[state.request_id] = share = min(len(state.remaining_prefill_tokens), left)
        left -= share
        if left == 0:
            break
    shared = len(limits)
    return [*decoding, *others[:shared], oldest, *others[shared:]], limits
