"""Answers in OpenAI's format: chats and completions, as one object or streamed."""

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

# Parts of answers, with their choices. A part that is None is the end of an answer.
Parts = Sequence[tuple[Choice, Part | None]]
DONE_EVENT = "data: [DONE]\n\n"


def format_event(event: dict[str, Any]) -> str:
    """Return an event of a stream as text."""
    return f"data: {json.dumps(event)}\n\n"


class TokenTexts:
    """The texts of single tokens inside an answer, not of tokens at the start of a text."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._prefix_ids = tokenizer("a", add_special_tokens=False)["input_ids"]
        self._prefix_length = len(self.decode(self._prefix_ids))
        self._texts: dict[int, str] = {}

    def __call__(self, token: int) -> str:
        """Return the text of a token. U+FFFD stands for an incomplete character."""
        if token not in self._texts:
            self._texts[token] = self.decode([*self._prefix_ids, token])[self._prefix_length :]
        return self._texts[token]

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, including special tokens."""
        return str(self._tokenizer.decode(tokens, clean_up_tokenization_spaces=False))


class AnswerWriter:
    """Writes the answers to one request. `name` is the model's name as the client sent it."""

    def __init__(
        self,
        request: ChatRequest | CompletionRequest,
        name: str,
        choices: list[Choice],
        texts: TokenTexts,
    ) -> None:
        self._request, self._choices, self._texts = request, choices, texts
        self._is_chat = isinstance(request, ChatRequest)
        prefix, kind, self._content_key = "cmpl", "text_completion", "text"
        if self._is_chat:
            prefix, kind = "chatcmpl", "chat.completion" + (".chunk" if request.stream else "")
            self._content_key = "delta" if request.stream else "message"
        self._base: dict[str, Any] = {"id": f"{prefix}-{uuid.uuid4().hex}", "object": kind}
        self._base |= {"created": int(time.time()), "model": name}
        self._sends_usage_last = bool(request.stream_options.include_usage)
        self._call_prefix = f"call_{uuid.uuid4().hex}"
        self._has_scores = request.num_logprobs[0] is not None
        self._score_writers = [_ScoreWriter(choice, texts, echo=request.echo) for choice in choices]
        self._num_calls = Counter[int]()  # number of written calls, by choice

    def collect(self, parts: Parts) -> dict[str, Any]:
        """Return the answer for all parts. With log-probabilities this may take seconds."""
        choices = [self._make_choice(choice) for choice in self._choices]
        for choice, part in parts:
            _merge_fields(choices[choice.index], self._format_part(choice, part))
        answer = {**self._base, "choices": choices, "usage": count_usage(self._choices)}
        if self._request.prompt_logprobs is not None:
            targets = [answer] if self._is_chat else choices
            for writer, target in zip(self._score_writers, targets, strict=False):
                target["prompt_logprobs"] = writer.format_prompt()
        return answer

    async def stream(self, part_groups: AsyncIterator[Parts]) -> AsyncIterator[str]:
        """Yield the events of the answer."""
        if self._is_chat:
            yield "".join(self._format_choices(self._make_choice(x)) for x in self._choices)
        async for parts in part_groups:
            if self._has_scores and self._request.echo:
                # Formatting the prompt's scores in the first part would delay other clients.
                yield await asyncio.to_thread(self._format_parts, parts)
            else:
                yield self._format_parts(parts)
        if self._sends_usage_last:
            yield self._format_choices(usage=count_usage(self._choices))
        yield DONE_EVENT

    def _format_parts(self, parts: Parts) -> str:
        """Return the events for parts. The end of a single answer may include the usage."""
        adds_usage = len(self._choices) == 1 and not self._sends_usage_last
        return "".join(
            self._format_choices(self._format_part(choice, part), usage=count_usage(self._choices))
            if adds_usage and part is None
            else self._format_choices(self._format_part(choice, part))
            for choice, part in parts
        )

    def _format_choices(self, *choices: dict[str, Any], **fields: Any) -> str:
        return format_event({**self._base, "choices": choices, **fields})

    def _make_choice(self, choice: Choice) -> dict[str, Any]:
        content: Any = {"role": "assistant", "content": ""} if self._is_chat else ""
        return {"index": choice.index, "finish_reason": None, self._content_key: content}

    def _format_part(self, choice: Choice, part: Part | None) -> dict[str, Any]:
        """Return the fields of a part of an answer. None is the end of the answer."""
        fields: dict[str, Any] = {"index": choice.index}
        fields["finish_reason"] = choice.finish_reason if part is None else None
        if self._has_scores:
            num_tokens, writer = (part or choice).num_tokens, self._score_writers[choice.index]
            fields["logprobs"] = writer.take_scores(num_tokens, chat=self._is_chat)
        if self._is_chat:
            fields[self._content_key] = self._format_message(choice, part)
        else:
            echo = "" if choice.index in self._num_calls else self._get_echo(choice)
            fields[self._content_key] = echo + (part.text if part else "")
        self._num_calls[choice.index] += part is not None and part.call is not None
        return fields

    def _format_message(self, choice: Choice, part: Part | None) -> dict[str, Any]:
        if part is None:
            return {}
        if part.call is None:
            key = "reasoning_content" if part.reasoning else "content"
            return {key: part.reasoning or part.text}
        (name, arguments), call_index = part.call, self._num_calls[choice.index]
        index_field = {"index": call_index} if self._request.stream else {}
        call = {"id": f"{self._call_prefix}_{choice.index}_{call_index}", "type": "function"}
        function = {"name": name, "arguments": arguments}
        return {"tool_calls": [{**index_field, **call, "function": function}]}

    def _get_echo(self, choice: Choice) -> str:
        if not self._request.echo:
            return ""
        assert isinstance(self._request, CompletionRequest)
        prompt = self._request.prompts[choice.index // self._request.n]
        return prompt if isinstance(prompt, str) else self._texts.decode(prompt)

    def error_events(self, error: APIError) -> str:
        """Return the events that report an error in a stream."""
        return format_event(error.to_dict()) + DONE_EVENT


def _merge_fields(merged: dict[str, Any], part: dict[str, Any]) -> None:
    """Merge the fields of a part. Texts and lists are appended, and objects merged by field."""
    for name, value in part.items():
        if isinstance(value, dict) and isinstance(merged.get(name), dict):
            _merge_fields(merged[name], value)
        elif isinstance(merged.get(name), str | list):
            merged[name] += value
        else:
            merged[name] = value


def count_usage(choices: Sequence[Choice]) -> dict[str, Any]:
    """Return the token counts of the choices. A prompt with several answers counts once."""
    num_new = sum(choice.num_tokens for choice in choices)
    sequences = [choice.sequence for choice in choices if choice.is_first]
    num_prompt = sum(len(sequence.prompt) for sequence in sequences)
    num_cached = sum(sequence.cached_tokens for sequence in sequences)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_new,
        "total_tokens": num_prompt + num_new,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }


class _ScoreWriter:
    """Writes log-probabilities of an answer in OpenAI's formats, or of its prompt in vLLM's."""

    def __init__(self, choice: Choice, texts: TokenTexts, *, echo: bool = False) -> None:
        self._sequence, self._texts, self._echoes_prompt = choice.sequence, texts, echo
        self._num_sent, self._offset = 0, 0  # in tokens and in characters

    def take_scores(self, num_tokens: int, *, chat: bool) -> dict[str, Any]:
        """Return the scores of the first `num_tokens` tokens, without scores already returned.

        With `echo`, the first call also returns the scores of the prompt, which come first.
        """
        scores = self._get_prompt_scores() if self._echoes_prompt else []
        self._echoes_prompt = False
        scores += self._sequence.logprobs[self._num_sent : num_tokens]
        self._num_sent = max(self._num_sent, min(len(self._sequence.logprobs), num_tokens))
        if chat:
            return {"content": [self._make_chat_entry(score) for score in scores], "refusal": None}
        texts = [self._texts(score.token) for score in scores]
        *offsets, self._offset = itertools.accumulate(map(len, texts), initial=self._offset)
        return {
            "tokens": texts,
            "token_logprobs": [score.logprob for score in scores],
            "top_logprobs": [
                None if score.logprob is None else self._map_top_tokens(score) for score in scores
            ],
            "text_offset": offsets,
        }

    def format_prompt(self) -> list[Any]:
        """Return the most likely tokens at each position of the prompt. The first entry is None."""
        return [None, *map(self._rank_tokens, self._get_prompt_scores()[1:])]

    def _rank_tokens(self, score: TokenLogprob) -> dict[str, Any]:
        missing = () if score.token in dict(score.top_tokens) else ((score.token, score.logprob),)
        return {
            str(token): {
                "logprob": logprob,
                "rank": score.rank if token == score.token else rank,
                "decoded_token": self._texts(token),
            }
            for rank, (token, logprob) in enumerate([*score.top_tokens, *missing], 1)
        }

    def _get_prompt_scores(self) -> list[TokenLogprob]:
        """Return the log-probabilities of the prompt's tokens. The first token has none."""
        prompt, logprobs = self._sequence.prompt, self._sequence.prompt_logprobs
        first_score = TokenLogprob(prompt[0], None, 0, ())
        return [first_score, *(logprobs[position] for position in range(1, len(prompt)))]

    def _map_top_tokens(self, score: TokenLogprob) -> dict[str, float | None]:
        logprobs: dict[str, float | None] = {}
        for token, logprob in (*score.top_tokens, (score.token, score.logprob)):
            # Two tokens may have the same text. The more likely token comes first.
            logprobs.setdefault(self._texts(token), logprob)
        return logprobs

    def _make_chat_entry(self, score: Any) -> dict[str, Any]:
        top = [self._make_entry(token, logprob) for token, logprob in score.top_tokens]
        return {**self._make_entry(score.token, score.logprob), "top_logprobs": top}

    def _make_entry(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._texts(token)
        is_text = "\N{REPLACEMENT CHARACTER}" not in text
        content = list(text.encode()) if is_text else None
        return {"token": text, "logprob": logprob, "bytes": content}
