"""Answers in OpenAI's format: chats and completions, in one piece and streamed."""

import asyncio
import itertools
import json
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from typing import Any

from .choices import Choice
from .errors import APIError
from .sampling import TokenLogprob
from .schemas import ChatRequest, CompletionRequest
from .text import Part

# None is the end of an answer.
Parts = Sequence[tuple[Choice, Part | None]]
DONE = "data: [DONE]\n\n"


def format_event(event: dict[str, Any]) -> str:
    """Return an event of a stream."""
    return f"data: {json.dumps(event)}\n\n"


class TokenTexts:
    """The texts of single tokens within a text. (A tokenizer decodes them as the first ones.)"""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._before = tokenizer("a", add_special_tokens=False)["input_ids"]
        self._length = len(self.decode(self._before))
        self._texts: dict[int, str] = {}

    def __call__(self, token: int) -> str:
        """Return the text of a token. U+FFFD stands for a part of a character."""
        if token not in self._texts:
            self._texts[token] = self.decode([*self._before, token])[self._length :]
        return self._texts[token]

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, including special ones."""
        return str(self._tokenizer.decode(tokens, clean_up_tokenization_spaces=False))


class Answers:
    """Writes the answers to one request. `name` is the model's, as the client gave it."""

    def __init__(
        self,
        request: ChatRequest | CompletionRequest,
        name: str,
        choices: list[Choice],
        texts: TokenTexts,
    ) -> None:
        self._request, self._choices, self._texts = request, choices, texts
        self._chat = isinstance(request, ChatRequest)
        prefix, kind = "cmpl", "text_completion"
        if self._chat:
            prefix, kind = "chatcmpl", "chat.completion" + (".chunk" if request.stream else "")
        self._base: dict[str, Any] = {"id": f"{prefix}-{uuid.uuid4().hex}", "object": kind}
        self._base |= {"created": int(time.time()), "model": name}
        self._usage_last = bool(request.stream_options.include_usage)
        self._message = "delta" if request.stream else "message"
        self._prefix, self._with_scores = f"call_{uuid.uuid4().hex}", request.scores[0] is not None
        self._scores = [_Scores(choice, texts, echo=request.echo) for choice in choices]
        self._begun = Counter[int]()  # number of written calls of each choice that has begun

    def collect(self, parts: Parts) -> dict[str, Any]:
        """Return the answer from all of its parts. With log probabilities this may take seconds."""
        written = [self._begin(choice) for choice in self._choices]
        for choice, part in parts:
            _join(written[choice.index], self._write(choice, part))
        answer = {**self._base, "choices": written, "usage": count_usage(self._choices)}
        if self._request.prompt_logprobs is not None:
            targets = [answer] if self._chat else written
            for scores, target in zip(self._scores, targets, strict=False):
                target["prompt_logprobs"] = scores.format_prompt()
        return answer

    async def stream(self, groups: AsyncIterator[Parts]) -> AsyncIterator[str]:
        """Yield the events of the answer."""
        if self._chat:
            yield "".join(self._event(self._begin(choice)) for choice in self._choices)
        async for parts in groups:
            if self._with_scores and self._request.echo:
                # The first part has the scores of the prompt, which would delay other clients.
                yield await asyncio.to_thread(self._events, parts)
            else:
                yield self._events(parts)
        if self._usage_last:
            yield self._event(usage=count_usage(self._choices))
        yield DONE

    def _events(self, parts: Parts) -> str:
        """Return the events of parts. The end of a single answer may include the usage."""
        alone = len(self._choices) == 1 and not self._usage_last
        return "".join(
            self._event(self._write(choice, part), usage=count_usage(self._choices))
            if alone and part is None
            else self._event(self._write(choice, part))
            for choice, part in parts
        )

    def _event(self, *written: dict[str, Any], **fields: Any) -> str:
        return format_event({**self._base, "choices": written, **fields})

    def _begin(self, choice: Choice) -> dict[str, Any]:
        empty: Any = {self._message: {"role": "assistant", "content": ""}}
        empty = empty if self._chat else {"text": ""}
        return {"index": choice.index, "finish_reason": None, **empty}

    def _write(self, choice: Choice, part: Part | None) -> dict[str, Any]:
        """Return the fields of a part of an answer. None is its end."""
        written: dict[str, Any] = {"index": choice.index}
        written["finish_reason"] = choice.finish_reason if part is None else None
        if self._with_scores:
            tokens = choice.tokens if part is None else part.tokens
            written["logprobs"] = self._scores[choice.index].take(tokens, chat=self._chat)
        if self._chat:
            written[self._message] = self._delta(choice, part)
        else:
            echo = "" if choice.index in self._begun else self._echo(choice)
            written["text"] = echo + (part.text if part else "")
        self._begun[choice.index] += part is not None and part.call is not None
        return written

    def _delta(self, choice: Choice, part: Part | None) -> dict[str, Any]:
        if part is None:
            return {}
        if part.call is None:
            return {"reasoning_content": part.thought} if part.thought else {"content": part.text}
        (name, arguments), number = part.call, self._begun[choice.index]
        place = {"index": number} if self._request.stream else {}
        call = {"id": f"{self._prefix}_{choice.index}_{number}", "type": "function"}
        function = {"name": name, "arguments": arguments}
        return {"tool_calls": [{**place, **call, "function": function}]}

    def _echo(self, choice: Choice) -> str:
        if not self._request.echo:
            return ""
        assert isinstance(self._request, CompletionRequest)
        given = self._request.prompts[choice.index // self._request.n]
        return given if isinstance(given, str) else self._texts.decode(given)

    def error_events(self, error: APIError) -> str:
        """Return the events of an error in a stream."""
        return format_event(error.body()) + DONE


def _join(joined: dict[str, Any], part: dict[str, Any]) -> None:
    """Add the fields of a part: texts and lists at the end, and objects by their fields."""
    for name, value in part.items():
        if isinstance(value, dict) and isinstance(joined.get(name), dict):
            _join(joined[name], value)
        elif isinstance(joined.get(name), str | list):
            joined[name] += value
        else:
            joined[name] = value


def count_usage(choices: Sequence[Choice]) -> dict[str, Any]:
    """Return the token counts of an answer. A prompt counts once, however many answers it has."""
    new = sum(choice.tokens for choice in choices)
    prompts = [choice.sequence for choice in choices if choice.leads]
    prompt = sum(len(sequence.prompt) for sequence in prompts)
    cached = sum(sequence.cached_tokens for sequence in prompts)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": new,
        "total_tokens": prompt + new,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


class _Scores:
    """Log probabilities of one answer in OpenAI's two formats, and of its prompt in vLLM's."""

    def __init__(self, choice: Choice, texts: TokenTexts, *, echo: bool = False) -> None:
        self._sequence, self._texts, self._echo = choice.sequence, texts, echo
        self._sent = self._offset = 0  # tokens, characters

    def take(self, count: int, *, chat: bool) -> dict[str, Any]:
        """Return the scores of the first `count` tokens, except those returned before.

        With `echo`, the first call returns the scores of the prompt before them.
        """
        scores = self._prompt_scores() if self._echo else []
        self._echo = False
        scores += self._sequence.logprobs[self._sent : count]
        self._sent = max(self._sent, min(len(self._sequence.logprobs), count))
        if chat:
            return {"content": [self._chat_entry(score) for score in scores], "refusal": None}
        texts = [self._texts(score.token) for score in scores]
        *offsets, self._offset = itertools.accumulate(map(len, texts), initial=self._offset)
        return {
            "tokens": texts,
            "token_logprobs": [score.logprob for score in scores],
            "top_logprobs": [
                None if score.logprob is None else self._top(score) for score in scores
            ],
            "text_offset": offsets,
        }

    def format_prompt(self) -> list[Any]:
        """Return the most likely tokens at each position of the prompt. None is at the first."""
        return [None, *map(self._ranks, self._prompt_scores()[1:])]

    def _ranks(self, score: TokenLogprob) -> dict[str, Any]:
        last = () if score.token in dict(score.top) else ((score.token, score.logprob),)
        return {
            str(token): {
                "logprob": logprob,
                "rank": score.rank if token == score.token else rank,
                "decoded_token": self._texts(token),
            }
            for rank, (token, logprob) in enumerate([*score.top, *last], 1)
        }

    def _prompt_scores(self) -> list[TokenLogprob]:
        """Return the log probabilities of the prompt's tokens. The first token has none."""
        prompt, logprobs = self._sequence.prompt, self._sequence.prompt_logprobs
        first = TokenLogprob(prompt[0], None, 0, ())
        return [first, *(logprobs[place] for place in range(1, len(prompt)))]

    def _top(self, score: TokenLogprob) -> dict[str, float | None]:
        logprobs: dict[str, float | None] = {}
        for token, logprob in (*score.top, (score.token, score.logprob)):
            # Two tokens may have the same text. The more likely one comes first.
            logprobs.setdefault(self._texts(token), logprob)
        return logprobs

    def _chat_entry(self, score: Any) -> dict[str, Any]:
        top = [self._entry(token, logprob) for token, logprob in score.top]
        return {**self._entry(score.token, score.logprob), "top_logprobs": top}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._texts(token)
        is_text = "\N{REPLACEMENT CHARACTER}" not in text
        content = list(text.encode()) if is_text else None
        return {"token": text, "logprob": logprob, "bytes": content}
