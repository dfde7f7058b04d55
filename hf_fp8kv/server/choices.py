"""The answers to one request: one request of the engine for each, with one queue for all parts."""

import asyncio
import contextlib
import inspect
import itertools
import random
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from transformers.cli.serving.utils import build_response_parser

from .engine import Engine
from .errors import UNSUPPORTED, APIError
from .metrics import Metrics
from .model import ServedModel
from .sampling import LEAST_TEMPERATURE, Sequence, TokenRules
from .schemas import CompletionRequest, Request, invalid
from .structured import Grammars, Guide
from .text import AnswerText, Part

# Default limit of new tokens.
_NEW_TOKENS = 1024
# Maximum number of answers of one request that run at once, to leave room for other requests.
_AT_ONCE = 16
# transformers 5.18 parses answers without the tools.
_TAKES_TOOLS = "tools" in inspect.signature(build_response_parser).parameters


@dataclass(eq=False)
class Choice:
    """One answer to a prompt."""

    index: int
    leads: bool  # whether it is the first answer to its prompt
    sequence: Sequence
    text: AnswerText
    scores_only: bool = False  # whether only the scores of the prompt are requested
    finish_reason: str = ""

    @property
    def tokens(self) -> int:
        """The number of tokens of the answer."""
        return 0 if self.scores_only else self.text.tokens


class ChoiceMaker:
    """Makes the choices of requests. `seed` is the server's."""

    def __init__(self, served: ServedModel, engine: Engine, seed: int | None) -> None:
        self._served, self._engine = served, engine
        self.grammars = Grammars(served.tokenizer, engine.vocabulary, engine.fixed_steps)
        self._seeds = random.Random(seed)  # for requests without a seed

    def check_length(self, request: Request) -> None:
        """Raise APIError for a text that cannot fit, before its tokens are counted."""
        characters = max(request.lengths)
        tokens, longest = self._engine.max_tokens, self._served.longest_token
        if characters > tokens * longest:
            raise APIError(
                400,
                f"expected at most {tokens} tokens, got {characters} characters, and no token has "
                f"more than {longest}; send less",
                code="context_length_exceeded",
            )

    def make(self, request: Request, guide: Guide | None) -> list[Choice]:
        """Return the choices, `n` for each prompt, before any of them runs.

        It tokenizes prompts and words, and decodes prompts for parsers, which may take seconds.

        Raises:
            APIError: The request exceeds this engine or model.
        """
        prompts, rules = self._served.make_prompts(request), self._read_rules(request)
        given = {"logit_bias": rules.logit_bias, "stop_token_ids": request.stop_token_ids}
        most = self._engine.vocabulary
        for field, tokens in (*given.items(), *(("prompt", prompt) for prompt in prompts)):
            if max(tokens, default=0) >= most:
                raise invalid(field, f"tokens below {most}", max(tokens))
        top, prompt_top = request.scores
        end = None if request.ignore_eos else self._default(request, "eos_token_id")
        ends = [*(end if isinstance(end, list) else [end]), *request.stop_token_ids]
        choices: list[Choice] = []
        for prompt in prompts:
            limit, scores_only = self._count_new_tokens(request, prompt)
            for nth in range(request.n):
                sequence = Sequence(
                    prompt,
                    limit,
                    frozenset(token for token in ends if token is not None and token >= 0),
                    rules=rules,
                    guide=None if guide is None else guide.fork(),
                    top=top,
                    prompt_top=prompt_top,
                    **self._read_sampling(request, nth),
                )
                text = AnswerText(
                    self._served.tokenizer.backend_tokenizer,
                    stops=request.stop,
                    hidden=frozenset(request.stop_token_ids),
                    min_tokens=request.min_tokens,
                    parser=self._build_parser(request, prompt),
                    forced=request.forced_tool,
                )
                choices.append(Choice(len(choices), nth == 0, sequence, text, scores_only))
        return choices

    def _build_parser(self, request: Request, prompt: list[int]) -> Any:
        if isinstance(request, CompletionRequest):
            return None
        tools = {"tools": request.plain_tools} if _TAKES_TOOLS else {}
        return build_response_parser(self._served.tokenizer, self._served.model, prompt, **tools)

    def _default(self, request: Request, name: str) -> Any:
        defaults = request.generation_config or self._served.model.generation_config
        return getattr(defaults, name, None)

    def _read_sampling(self, request: Request, nth: int) -> dict[str, Any]:
        """Return the sampling fields of the answer `nth` to a prompt.

        A temperature above zero, top_p, top_k or min_p means sampling, whatever the model's own
        default is. With one seed all answers would be the same, so each has the next seed.
        """
        names = ("temperature", "top_p", "top_k", "min_p")
        given = {name: getattr(request, name) for name in names}
        is_given = any(value is not None for value in given.values())
        given = {n: self._default(request, n) if x is None else x for n, x in given.items()}
        temperature = 1.0 if given["temperature"] is None else given["temperature"]
        samples = self._default(request, "do_sample") or is_given
        if not samples or temperature < LEAST_TEMPERATURE:
            return {}
        if (given["top_k"] or 0) <= 0:
            given["top_k"] = None
        seed = self._seeds.getrandbits(63) if request.seed is None else request.seed + nth
        given |= {"temperature": temperature, "seed": seed}
        return {name: value for name, value in given.items() if value is not None}

    def _count_new_tokens(self, request: Request, prompt: list[int]) -> tuple[int, bool]:
        """Return the limit of new tokens, and whether only the prompt's scores are requested."""
        engine = self._engine
        if not prompt:
            raise APIError(400, "expected a prompt of at least one token, got none")
        field, requested = request.limit
        scores_only = requested == 0  # the engine still makes one token
        # The last token is part of the answer, and never stored.
        rooms = [(engine.page_tokens + 1 - len(prompt), f"the pages hold {engine.page_tokens}")]
        if engine.model_tokens is not None:
            # With `scores_only` the engine's token is not part of an answer, and not input.
            left = engine.model_tokens - len(prompt) + scores_only
            rooms.append((left, f"the model holds {engine.model_tokens}"))
        room, holder = min(rooms)
        if requested is None and request.generation_config is not None:
            requested = request.generation_config.max_new_tokens
        limit = min(_NEW_TOKENS, room) if requested is None else max(requested, 1)
        if room < 1 or limit > room:
            raise APIError(
                400,
                f"expected a prompt and new tokens that fit, got {len(prompt)} tokens and "
                f"{max(limit, 1)} new ones, and {holder}; send less, or ask for less",
                param=field,
                code="context_length_exceeded",
            )
        return limit, scores_only

    def _read_rules(self, request: Request) -> TokenRules:
        """Return the rules of a request, or the model's own. Raises APIError."""
        engine, tokenizer = self._engine, self._served.tokenizer
        penalty = request.repetition_penalty
        if penalty is None and request.generation_config is None and engine.fixed_steps is None:
            penalty = self._default(request, "repetition_penalty")
        bias = {int(token): float(value) for token, value in request.logit_bias.items()}
        words = {
            tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
            for word in request.bad_words
            for text in (word, f" {word.lstrip()}")  # at a beginning, and after another word
        }
        rules = TokenRules(
            penalty or 1.0, request.presence_penalty, request.frequency_penalty, bias,
            request.min_tokens, tuple(sorted(words - {()})),
        )  # fmt: skip
        is_scored = any(top is not None for top in request.scores)
        for name, value in (("logprobs", is_scored), ("penalties, biases, bad_words", rules)):
            if value and engine.fixed_steps is not None:
                text = f"{name}: this server has none, since {engine.fixed_steps}; leave it out"
                raise APIError(400, text, code=UNSUPPORTED)
        return rules


class RunningRequest:
    """A request that is being answered, from its body to the end of its answer."""

    def __init__(self, engine: Engine, metrics: Metrics) -> None:
        self._engine, self._metrics = engine, metrics
        self._queue: asyncio.Queue[Any] = asyncio.Queue()  # parts of choices, and exceptions

    def fail(self, error: APIError) -> None:
        """End the answer early."""
        self._queue.put_nowait(error)

    async def run(
        self, choices: list[Choice], *, streaming: bool
    ) -> AsyncGenerator[list[tuple[Choice, Part | None]], None]:
        """Yield the parts of all answers as they come. None is the end of one answer.

        The first answer to a prompt begins first, so that the next ones find the prompt in the
        pages. Close the generator to cancel unfinished answers.

        Raises:
            APIError: An answer failed, which ends all of them.
        """
        room = asyncio.Semaphore(_AT_ONCE)
        self._metrics.unfinished[self] = 0
        each_token = streaming or not all(choice.leads for choice in choices)
        begun: list[asyncio.Event] = []  # of each prompt
        tasks = []
        for choice in choices:
            if choice.leads:
                begun.append(asyncio.Event())
            answer = self._answer(choice, room, begun[-1], each_token)
            tasks.append(asyncio.create_task(answer))
        left = len(choices)
        try:
            while left:
                items = [await self._queue.get()]
                while not self._queue.empty():
                    items.append(self._queue.get_nowait())
                parts = list(itertools.takewhile(lambda item: isinstance(item, tuple), items))
                left -= sum(part is None for _, part in parts)
                if parts:
                    yield parts
                if len(parts) < len(items):
                    raise items[len(parts)]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _answer(
        self, choice: Choice, room: asyncio.Semaphore, begun: asyncio.Event, each_token: bool
    ) -> None:
        if not choice.leads:
            await begun.wait()
        try:
            async with room:
                self._metrics.unfinished[self] += 1
                try:
                    await self._generate(choice, begun, each_token)
                finally:
                    self._metrics.unfinished[self] -= 1
        except Exception as error:
            self._queue.put_nowait(error)
        finally:
            begun.set()

    async def _generate(self, choice: Choice, begun: asyncio.Event, each_token: bool) -> None:
        sequence, text = choice.sequence, choice.text
        stream = self._engine.stream(sequence, each_token=each_token or bool(text.stops))
        last: int | None = None
        async with contextlib.aclosing(stream):
            async for tokens in stream:
                begun.set()
                last = tokens[-1] if tokens else last
                self._put(choice, text.put(tokens))
                if text.stopped:
                    break
        self._metrics.note_end(sequence)
        self._put(choice, text.end())
        is_complete = sequence.guide is not None and sequence.guide.complete
        if not (text.stopped or is_complete or last in sequence.ends) or choice.scores_only:
            choice.finish_reason = "length"
        else:
            choice.finish_reason = "tool_calls" if text.calls else "stop"
        self._queue.put_nowait((choice, None))

    def _put(self, choice: Choice, parts: list[Part]) -> None:
        for part in () if choice.scores_only else parts:
            self._queue.put_nowait((choice, part))
