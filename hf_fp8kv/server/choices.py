"""The choices of a request. Each choice is one answer, and runs as one request of the engine."""

import asyncio
import contextlib
import inspect
import itertools
import random
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from transformers.cli.serving.utils import build_response_parser, get_response_template
from transformers.utils.chat_parsing.response_templates import load_response_template

from ..utils.warn_once import warn_once
from .answer_text import AnswerDecoder, AnswerPart
from .engine import Engine
from .errors import UNSUPPORTED_CODE, APIError
from .metrics import Metrics
from .model import ServedModel
from .sampling import MIN_TEMPERATURE, Sequence, TokenLogprob, TokenRules
from .schemas import AnyBody, CompletionBody, make_value_error
from .structured import Grammars, Guide

_DEFAULT_NEW_TOKENS = 1024  # if a request does not limit its new tokens
# Maximum number of answers to one request that run at once, which leaves room for other requests.
_MAX_RUNNING_ANSWERS = 16
# The function of transformers 5.18 has no argument for tools.
_PARSER_ACCEPTS_TOOLS = "tools" in inspect.signature(build_response_parser).parameters

_ANCHOR_WARNING = (
    "the chat template does not begin answers like a template of {}, with {!r}, so an answer that "
    "the template begins (such as reasoning) is not recognized"
)


@dataclass(eq=False)
class Choice:
    """One answer to a prompt."""

    index: int
    is_first: bool  # whether this is the first answer to its prompt
    sequence: Sequence
    decoder: AnswerDecoder
    # Log-probabilities of the prompt, for all its answers. None means that they are not requested.
    prompt_logprobs: list[TokenLogprob] | None = None
    finish_reason: str = ""


class ChoiceMaker:
    """Makes the choices of each request. Requests without a seed get random seeds from `seed`."""

    def __init__(self, served_model: ServedModel, engine: Engine, seed: int | None) -> None:
        self._served_model = served_model
        self._engine = engine
        self.grammars = Grammars(
            served_model.tokenizer, engine.vocab_size, engine.fixed_steps_reason
        )
        self._seeds = random.Random(seed)  # generates the seeds of requests without a seed

    def check_length(self, body: AnyBody) -> None:
        """Raise APIError for a prompt with too many characters to fit. It is not tokenized yet."""
        length = body.max_prompt_length
        max_tokens = self._engine.max_tokens
        token_length = self._served_model.max_token_length
        if length > max_tokens * token_length:
            raise APIError(
                400,
                f"expected at most {max_tokens} tokens of at most {token_length} characters each, "
                f"got {length} characters. Send a shorter prompt",
                code="context_length_exceeded",
            )

    def make_choices(self, body: AnyBody, guide: Guide | None) -> list[Choice]:
        """Return the choices of a request, `n` for each prompt. They do not run yet.

        This may take seconds, because prompts are tokenized here, and decoded again by parsers.

        Raises:
            APIError: The request exceeds the limits of this engine or model.
        """
        prompts = self._served_model.make_prompts(body)
        rules = self._read_rules(body)
        vocab_size = self._engine.vocab_size
        field_tokens = {
            "logit_bias": rules.logit_bias,
            "stop_token_ids": body.stop_token_ids,
            "prompt": itertools.chain.from_iterable(prompts),
        }
        for field, tokens in field_tokens.items():
            largest_token = max(tokens, default=0)
            if largest_token >= vocab_size:
                raise make_value_error(field, f"tokens below {vocab_size}", largest_token)
        eos_setting = None if body.ignore_eos else self._get_default(body, "eos_token_id")
        eos_tokens = eos_setting if isinstance(eos_setting, list) else [eos_setting]
        end_tokens = frozenset(
            token
            for token in (*eos_tokens, *body.stop_token_ids)
            if token is not None and token >= 0  # some models set -1 instead of None
        )
        has_prompt_logprobs = body.echo and body.num_top_tokens is not None
        choices: list[Choice] = []
        for prompt in prompts:
            max_new_tokens = self._limit_new_tokens(body, prompt)
            prompt_logprobs = list[TokenLogprob]() if has_prompt_logprobs else None
            for index in range(body.n):
                sequence = Sequence(
                    prompt,
                    max_new_tokens,
                    end_tokens,
                    rules=rules,
                    guide=None if guide is None else guide.fork(),
                    num_top_tokens=body.num_top_tokens,
                    cache_salt=body.cache_salt,
                    **self._read_sampling(body, index),
                )
                decoder = AnswerDecoder(
                    self._served_model.tokenizer.backend_tokenizer,
                    stop_strings=body.stop,
                    end_tokens=frozenset(body.stop_token_ids),
                    min_tokens=body.min_tokens,
                    parser=self._build_parser(body, prompt),
                    forced_tool=body.forced_tool,
                )
                choices.append(
                    Choice(
                        len(choices),
                        is_first=index == 0,
                        sequence=sequence,
                        decoder=decoder,
                        prompt_logprobs=prompt_logprobs,
                    )
                )
        return choices

    def _build_parser(self, body: AnyBody, prompt: list[int]) -> Any:
        """Return transformers' parser of answers in a chat, or None.

        The parser reads the part of the prompt that begins the answer. Without the anchor of this
        part, transformers would put the whole prompt into the answer.
        """
        tokenizer = self._served_model.tokenizer
        model = self._served_model.model
        template = get_response_template(tokenizer, model)
        if template is None or isinstance(body, CompletionBody):
            return None
        anchor = load_response_template(template).start_anchor_re
        if anchor is not None and not anchor.search(tokenizer.decode(prompt)):
            warn_once(_ANCHOR_WARNING.format(type(model).__name__, anchor.pattern))
            prompt = []
        tools = {"tools": body.template_tools} if _PARSER_ACCEPTS_TOOLS else {}
        return build_response_parser(tokenizer, model, prompt, **tools)

    def _get_default(self, body: AnyBody, name: str) -> Any:
        return getattr(
            body.generation_config or self._served_model.model.generation_config, name, None
        )

    def _read_sampling(self, body: AnyBody, index: int) -> dict[str, Any]:
        """Return the sampling fields of the answer with this index.

        A temperature above zero, top_p, top_k or min_p enables sampling, whatever the model's
        default is. Equal seeds would give equal answers, so answer `index` uses `seed + index`.
        """
        names = ("temperature", "top_p", "top_k", "min_p")
        values = {name: getattr(body, name) for name in names}
        requested = {name: value for name, value in values.items() if value is not None}
        options = {name: self._get_default(body, name) for name in names} | requested
        temperature = 1.0 if options["temperature"] is None else options["temperature"]
        does_sample = bool(requested) or self._get_default(body, "do_sample")
        if not does_sample or temperature < MIN_TEMPERATURE:
            return {}
        if (options["top_k"] or 0) <= 0:
            options["top_k"] = None
        seed = self._seeds.getrandbits(63) if body.seed is None else body.seed + index
        options |= {"temperature": temperature, "seed": seed}
        return {name: value for name, value in options.items() if value is not None}

    def _limit_new_tokens(self, body: AnyBody, prompt: list[int]) -> int:
        """Return the maximum number of new tokens. 0 means that only the prompt is requested."""
        field, requested = body.token_limit
        max_tokens = self._engine.max_tokens
        if not prompt:
            raise APIError(400, "expected a prompt of at least one token, got none")
        if requested is None and body.generation_config is not None:
            requested = body.generation_config.max_new_tokens
        if requested is None:
            requested = max(min(_DEFAULT_NEW_TOKENS, max_tokens - len(prompt)), 1)
        if len(prompt) + requested > max_tokens:
            raise APIError(
                400,
                f"expected at most {max_tokens} tokens of prompt and answer, got {len(prompt)} "
                f"tokens and {requested} new tokens. Shorten the prompt, or request fewer tokens",
                param=field,
                code="context_length_exceeded",
            )
        return requested

    def _read_rules(self, body: AnyBody) -> TokenRules:
        """Return the rules of a request. Raise APIError if the engine does not support them."""
        fixed_steps_reason = self._engine.fixed_steps_reason
        penalty = body.repetition_penalty
        if penalty is None and body.generation_config is None and fixed_steps_reason is None:
            penalty = self._get_default(body, "repetition_penalty")
        rules = TokenRules(
            repetition_penalty=penalty or 1.0,
            presence_penalty=body.presence_penalty,
            frequency_penalty=body.frequency_penalty,
            logit_bias={int(token): float(bias) for token, bias in body.logit_bias.items()},
            min_tokens=body.min_tokens,
        )
        has_logprobs = body.num_top_tokens is not None
        if fixed_steps_reason is not None and (has_logprobs or rules):
            field = "logprobs" if has_logprobs else "penalties, biases, min_tokens"
            raise APIError(
                400,
                f"{field}: not supported by this server, because {fixed_steps_reason}. Omit the "
                "field",
                code=UNSUPPORTED_CODE,
            )
        return rules


class RunningRequest:
    """A request whose body has been read and whose response is not finished.

    Construct it in the task that `fail` may cancel.
    """

    def __init__(self, engine: Engine, metrics: Metrics) -> None:
        self._engine = engine
        self._metrics = metrics
        # Tuples of a choice and a part of its answer, and exceptions.
        self._queue: asyncio.Queue[Any] = asyncio.Queue()
        self._task = asyncio.current_task()
        self._answer_tasks: list[asyncio.Task[None]] = []

    def fail(self, error: APIError) -> None:
        """End all unfinished answers with an error, or cancel the task if no answer runs."""
        if self._answer_tasks:
            self._queue.put_nowait(error)
        elif self._task is not None:
            self._task.cancel()

    async def run(
        self, choices: list[Choice], *, streaming: bool
    ) -> AsyncGenerator[list[tuple[Choice, AnswerPart | None]], None]:
        """Yield the parts of all answers as they are generated. None is the end of one answer.

        The first answer to a prompt starts first, so that the next answers find the prompt in the
        pages. Close the generator to cancel unfinished answers.

        Raises:
            APIError: An answer failed. This ends all answers of the request.
        """
        running_limit = asyncio.Semaphore(_MAX_RUNNING_ANSWERS)
        self._metrics.unfinished_answers[self] = 0
        per_step = streaming or not all(choice.is_first for choice in choices)
        for choice in choices:
            if choice.is_first:
                started = asyncio.Event()  # shared by the answers to a prompt
            self._answer_tasks.append(
                asyncio.create_task(self._answer(choice, running_limit, started, per_step))
            )
        num_unfinished = len(choices)
        try:
            while num_unfinished:
                outcomes = [await self._queue.get()]
                while not self._queue.empty():
                    outcomes.append(self._queue.get_nowait())
                parts = list(
                    itertools.takewhile(lambda outcome: isinstance(outcome, tuple), outcomes)
                )
                num_unfinished -= sum(part is None for _, part in parts)
                if parts:
                    yield parts
                if len(parts) < len(outcomes):
                    raise outcomes[len(parts)]
        finally:
            for task in self._answer_tasks:
                task.cancel()
            await asyncio.gather(*self._answer_tasks, return_exceptions=True)
            self._answer_tasks.clear()

    async def _answer(
        self, choice: Choice, limit: asyncio.Semaphore, started: asyncio.Event, per_step: bool
    ) -> None:
        if not choice.is_first:
            await started.wait()
        try:
            async with limit:
                self._metrics.unfinished_answers[self] += 1
                try:
                    await self._generate(choice, started, per_step)
                finally:
                    self._metrics.unfinished_answers[self] -= 1
        except Exception as error:
            self._queue.put_nowait(error)
        finally:
            started.set()

    async def _generate(self, choice: Choice, started: asyncio.Event, per_step: bool) -> None:
        """Queue the parts of one answer as they are generated, and set its `finish_reason`."""
        sequence = choice.sequence
        decoder = choice.decoder
        if choice.prompt_logprobs is not None and choice.is_first:
            num_top_tokens = sequence.num_top_tokens or 0
            choice.prompt_logprobs += await self._engine.score_prompt(
                sequence.prompt, num_top_tokens
            )
        last_token: int | None = None
        if sequence.max_new_tokens > 0:
            stream = self._engine.stream(sequence, per_step=per_step or bool(decoder.stop_strings))
            async with contextlib.aclosing(stream):
                async for tokens in stream:
                    started.set()
                    last_token = tokens[-1] if tokens else last_token
                    self._queue_parts(choice, decoder.add_tokens(tokens))
                    if decoder.is_stopped:
                        break
            self._metrics.record_end(sequence)
            self._queue_parts(choice, decoder.finish())
        is_guide_complete = sequence.guide is not None and sequence.guide.is_complete
        is_guide_complete &= sequence.max_new_tokens > 0
        if decoder.is_stopped or is_guide_complete or last_token in sequence.end_tokens:
            choice.finish_reason = "tool_calls" if decoder.num_calls else "stop"
        else:
            choice.finish_reason = "length"
        self._queue.put_nowait((choice, None))

    def _queue_parts(self, choice: Choice, parts: list[AnswerPart]) -> None:
        for part in parts:
            self._queue.put_nowait((choice, part))
