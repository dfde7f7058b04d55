"""Answers in OpenAI's format: chats and completions, whole and streamed."""

import asyncio
import json
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any

from .choices import Choice
from .errors import APIError
from .sampling import TokenLogprob
from .schemas import ChatRequest, CompletionRequest
from .text import Part

DONE = "data: [DONE]\n\n"


def format_event(event: dict[str, Any]) -> str:
    """Return an event of a stream."""
    return f"data: {json.dumps(event)}\n\n"


class TokenTexts:
    """The texts of single tokens, as they are within a text; a tokenizer's own begin one."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._before = tokenizer("a", add_special_tokens=False)["input_ids"]
        self._length = len(self.decode(self._before))
        self._texts: dict[int, str] = {}

    def __call__(self, token: int) -> str:
        """Return the text of a token; U+FFFD stands for a part of a character."""
        if token not in self._texts:
            self._texts[token] = self.decode([*self._before, token])[self._length :]
        return self._texts[token]

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, with special ones."""
        return str(self._tokenizer.decode(tokens, clean_up_tokenization_spaces=False))


class Answers:
    """Writes the answers to one request; `name` is the model's, as the client gave it."""

    def __init__(
        self, request: ChatRequest | CompletionRequest, name: str, texts: TokenTexts
    ) -> None:
        self._request, self._texts = request, texts
        self._chat = isinstance(request, ChatRequest)
        prefix, kind = "cmpl", "text_completion"
        if self._chat:
            prefix, kind = "chatcmpl", "chat.completion" + (".chunk" if request.stream else "")
        self._base: dict[str, Any] = {"id": f"{prefix}-{uuid.uuid4().hex}", "object": kind}
        self._base |= {"created": int(time.time()), "model": name}
        self._prefix, self._with_scores = f"call_{uuid.uuid4().hex}", request.scores[0] is not None
        self._scores: list[_Scores] = []
        self._begun = Counter[int]()  # calls that were written, of the choices that have begun

    # -- one JSON object -------------------------------------------------------------------------

    def whole(self, choices: list[Choice], parts: Iterable[tuple[Choice, Part]]) -> dict[str, Any]:
        """Return the answer. With log probabilities this may take seconds."""
        found: list[list[Part]] = [[] for _ in choices]
        for choice, part in parts:
            found[choice.index].append(part)
        written = [self._whole_choice(c, p) for c, p in zip(choices, found, strict=True)]
        answer = {**self._base, "choices": written, "usage": count_usage(choices)}
        if self._chat and self._request.scores[1] is not None:
            answer["prompt_logprobs"] = _Scores(choices[0], self._texts).prompt()
        return answer

    def _whole_choice(self, choice: Choice, parts: list[Part]) -> dict[str, Any]:
        text = "".join(part.text for part in parts)
        written: dict[str, Any] = {"index": choice.index, "finish_reason": choice.finish_reason}
        scores = _Scores(choice, self._texts, echo=self._request.echo)
        if self._chat:
            message: dict[str, Any] = {"role": "assistant", "content": text}
            if thought := "".join(part.thought for part in parts):
                message["reasoning_content"] = thought
            calls = [part for part in parts if part.call is not None]
            if calls:
                message["tool_calls"] = [self._call(choice, i, p) for i, p in enumerate(calls)]
            written["message"] = message
        else:
            written["text"] = self._echo(choice) + text
            if self._request.scores[1] is not None and self._request.prompt_logprobs is not None:
                written["prompt_logprobs"] = scores.prompt()
        if self._with_scores:
            written["logprobs"] = scores.take(choice.tokens, chat=self._chat)
        return written

    def _call(self, choice: Choice, number: int, part: Part) -> dict[str, Any]:
        assert part.call is not None
        name, arguments = part.call
        return {
            "id": f"{self._prefix}_{choice.index}_{number}",
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }

    def _echo(self, choice: Choice) -> str:
        if not self._request.echo:
            return ""
        assert isinstance(self._request, CompletionRequest)
        given = self._request.prompts[choice.index // self._request.n]
        return given if isinstance(given, str) else self._texts.decode(given)

    # -- streams ---------------------------------------------------------------------------------

    async def stream(
        self, choices: list[Choice], found: AsyncIterator[list[tuple[Choice, Part | None]]]
    ) -> AsyncIterator[str]:
        """Yield the events of the answer."""
        self._scores = [_Scores(c, self._texts, echo=self._request.echo) for c in choices]
        usage = len(choices) == 1 and not self._request.include_usage
        if self._chat:
            role = {"role": "assistant", "content": ""}
            yield "".join(self._event(choice, delta=role) for choice in choices)
        async for parts in found:
            if self._with_scores and self._request.echo:
                # The first part has the scores of the prompt, for which other clients would wait.
                yield await asyncio.to_thread(self._write, parts, usage)
            else:
                yield self._write(parts, usage)
        if self._request.include_usage:
            yield format_event({**self._base, "choices": [], "usage": count_usage(choices)})
        yield DONE

    def _write(self, parts: list[tuple[Choice, Part | None]], usage: bool) -> str:
        """Return the events of parts; the last event of an answer may have its usage."""
        events = []
        for choice, part in parts:
            more: dict[str, Any] = {}
            if self._with_scores:
                tokens = choice.tokens if part is None else part.tokens
                more["logprobs"] = self._scores[choice.index].take(tokens, chat=self._chat)
            if part is None:
                more["finish_reason"] = choice.finish_reason
                if usage:
                    more["usage"] = count_usage([choice])
            if self._chat:
                more["delta"] = self._delta(choice, part)
            else:
                said = "" if choice.index in self._begun else self._echo(choice)
                more["text"] = said + (part.text if part else "")
            self._begun[choice.index] += part is not None and part.call is not None
            events.append(self._event(choice, **more))
        return "".join(events)

    def _delta(self, choice: Choice, part: Part | None) -> dict[str, Any]:
        if part is None:
            return {}
        if part.call is None:
            return {"reasoning_content": part.thought} if part.thought else {"content": part.text}
        number = self._begun[choice.index]
        return {"tool_calls": [{"index": number, **self._call(choice, number, part)}]}

    def _event(self, choice: Choice, usage: Any = None, **fields: Any) -> str:
        written = {"index": choice.index, "finish_reason": None, **fields}
        event = {**self._base, "choices": [written]}
        return format_event(event if usage is None else event | {"usage": usage})

    def failed(self, error: APIError) -> str:
        """Return the events of an error in a stream."""
        return format_event(error.body()) + DONE


def count_usage(choices: Iterable[Choice]) -> dict[str, Any]:
    """Return the tokens of an answer; a prompt counts once, however many answers it has."""
    prompt = cached = new = 0
    for choice in choices:
        new += choice.tokens
        if choice.leads:
            prompt += len(choice.sequence.prompt)
            cached += choice.sequence.cached_tokens
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
        """Return the scores of the first `count` tokens that no call has returned before.

        The first time the prompt comes before it, if that is repeated.
        """
        found: list[TokenLogprob | int] = self._of_prompt() if self._echo else []
        self._echo = False
        found += self._sequence.logprobs[self._sent : count]
        self._sent = max(self._sent, min(len(self._sequence.logprobs), count))
        if chat:
            return {"content": [self._chat_entry(one) for one in found], "refusal": None}
        texts = [self._texts(one if isinstance(one, int) else one.token) for one in found]
        offsets = []
        for text in texts:
            offsets.append(self._offset)
            self._offset += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [None if isinstance(one, int) else one.logprob for one in found],
            "top_logprobs": [self._top(one) for one in found],
            "text_offset": offsets,
        }

    def prompt(self) -> list[Any]:
        """Return, for each token of the prompt, the most likely ones there; None for the first."""
        return [None if isinstance(one, int) else self._ranks(one) for one in self._of_prompt()]

    def _ranks(self, one: TokenLogprob) -> dict[str, Any]:
        own = () if one.token in dict(one.top) else ((one.token, one.logprob),)
        return {
            str(token): {
                "logprob": logprob,
                "rank": one.rank if token == one.token else rank,
                "decoded_token": self._texts(token),
            }
            for rank, (token, logprob) in enumerate([*one.top, *own], 1)
        }

    def _of_prompt(self) -> list[TokenLogprob | int]:
        """Return the log probabilities of the prompt's tokens; the first is a token alone."""
        prompt, known = self._sequence.prompt, self._sequence.prompt_logprobs
        return [prompt[0], *(known[place] for place in range(1, len(prompt)))]

    def _top(self, one: TokenLogprob | int) -> dict[str, float] | None:
        if isinstance(one, int):
            return None
        found: dict[str, float] = {}
        for token, logprob in (*one.top, (one.token, one.logprob)):
            found.setdefault(self._texts(token), logprob)  # of two with one text, the likelier
        return found

    def _chat_entry(self, one: Any) -> dict[str, Any]:
        top = [self._entry(token, logprob) for token, logprob in one.top]
        return {**self._entry(one.token, one.logprob), "top_logprobs": top}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._texts(token)
        known = "\N{REPLACEMENT CHARACTER}" not in text
        return {"token": text, "logprob": logprob, "bytes": list(text.encode()) if known else None}
