"""What OpenAI's answers have, and those of transformers' handlers do not.

The model's name as the client gave it is in the handlers' own answers; here it is `[DONE]` at the
end of a stream, errors in OpenAI's format, the status `incomplete` of a truncated response, cached
tokens, log probabilities, and the prompt where it is to be repeated.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

from .grammars import inner_tokenizer
from .logits import TokenLogprob
from .requests import ServerRequest
from .validation import CHAT, COMPLETIONS, RESPONSES

_DATA = "data: "
DONE = "data: [DONE]\n\n"
_COMPLETED = '"type":"response.completed"'
_INCOMPLETE = {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}


def format_event(event: dict[str, Any]) -> str:
    """Return an event of a stream."""
    return f"{_DATA}{json.dumps(event)}\n\n"


def read_events(text: str) -> list[dict[str, Any] | None]:
    """Return the events in a part of a stream; None: its end."""
    parts = [part.removeprefix(_DATA) for part in text.split("\n\n") if part]
    return [None if part == "[DONE]" else json.loads(part) for part in parts]


class TokenTexts:
    """The texts of single tokens, as they are within a text; a tokenizer's own begin one."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = inner_tokenizer(tokenizer)
        self._before = self._tokenizer("a", add_special_tokens=False)["input_ids"]
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


# -- one JSON object -------------------------------------------------------------------------------


def complete_json(
    path: str, content: dict[str, Any], request: ServerRequest, texts: TokenTexts
) -> dict[str, Any]:
    """Return an answer with what it lacks; changed in place."""
    _add_cached_tokens(content, request)
    if path == RESPONSES:
        if request.truncated:
            content |= _INCOMPLETE
        return content
    (choice,) = content["choices"]
    if request.truncated and choice["finish_reason"] == "tool_calls":
        choice["finish_reason"] = "length"  # the last call's arguments are cut
    wanted, writer = request.logprobs, _LogprobWriter(path, request, texts)
    tokens = content["usage"]["completion_tokens"]
    if request.body.get("echo"):
        choice["text"] = writer.echo() + choice["text"]
    if wanted is not None and wanted.top is not None:
        choice["logprobs"] = writer.take(tokens)
    if request.body.get("prompt_logprobs") is not None:
        holder = content if path == CHAT else choice
        holder["prompt_logprobs"] = writer.prompt()
    return content


def _add_cached_tokens(content: dict[str, Any], request: ServerRequest) -> None:
    """Say how many of the prompt's tokens were not computed, where OpenAI's answers do."""
    usage = content.get("usage")
    if usage is not None:
        details = "input_tokens_details" if "input_tokens" in usage else "prompt_tokens_details"
        usage[details] = {**(usage.get(details) or {}), "cached_tokens": request.cached_tokens}


class _LogprobWriter:
    """Log probabilities in OpenAI's two formats, and those of prompts in vLLM's."""

    def __init__(self, path: str, request: ServerRequest, texts: TokenTexts) -> None:
        self._chat, self._request, self._texts = path == CHAT, request, texts
        self._sent = 0  # tokens of the answer
        self._offset = 0  # characters
        self._echoes = bool(request.body.get("echo")) and request.logprobs is not None

    def echo(self) -> str:
        """Return the prompt's text."""
        tokens = self._request.prompt_tokens
        return str(self._request.body["prompt"]) if tokens is None else self._texts.decode(tokens)

    def take(self, count: int) -> dict[str, Any]:
        """Return what there is of the answer's first `count` tokens that was not taken before.

        The first time the prompt comes before it, if that is repeated.
        """
        wanted = self._request.logprobs
        found: list[TokenLogprob | int] = []
        if wanted is not None:
            if self._echoes:
                self._echoes = False
                found += self._of_prompt()
            found += wanted.answer[self._sent : count]
            self._sent = max(self._sent, min(len(wanted.answer), count))
        if self._chat:
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
        return [
            None
            if isinstance(one, int)
            else {
                str(token): {
                    "logprob": logprob,
                    "rank": one.rank if token == one.token else rank,
                    "decoded_token": self._texts(token),
                }
                for rank, (token, logprob) in enumerate(
                    [*one.top, *({one.token: one.logprob}.items() - set(one.top))], 1
                )
            }
            for one in self._of_prompt()
        ]

    def _of_prompt(self) -> list[TokenLogprob | int]:
        """Return the log probabilities of the prompt's tokens; the first is a token alone."""
        request, wanted = self._request, self._request.logprobs
        if wanted is None or not request.prompt_ids:
            return []
        first, *others = request.prompt_ids
        return [first, *(wanted.prompt[place] for place in range(1, 1 + len(others)))]

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


# -- streams ---------------------------------------------------------------------------------------


async def complete_stream(
    path: str, parts: Any, request: ServerRequest, texts: TokenTexts
) -> AsyncIterator[str]:
    """Yield the parts of a streamed answer with what they lack."""
    complete = _complete_response if path == RESPONSES else _Chunks(path, request, texts).complete
    wanted = request.logprobs
    scored = wanted is not None and wanted.prompt_top is not None
    async with contextlib.aclosing(parts):
        async for part in parts:
            if scored:  # the first part has the whole prompt's, and other clients would wait
                scored = False
                yield await asyncio.to_thread(complete, part, request)
            else:
                yield complete(part, request)
    if path != RESPONSES:
        yield DONE


class _Chunks:
    """The chunks of a streamed chat or completion, one part after the other."""

    def __init__(self, path: str, request: ServerRequest, texts: TokenTexts) -> None:
        self._path, self._writer = path, _LogprobWriter(path, request, texts)
        body, wanted = request.body, request.logprobs
        self._echoes = bool(body.get("echo"))
        self._logprobs = wanted is not None and wanted.top is not None
        self._usage_apart = bool(body.get("stream_options", {}).get("include_usage"))

    def complete(self, part: str, request: ServerRequest) -> str:
        """Return a part of the stream with what its events lack."""
        if request.error is not None:
            # As the handlers write it: the message between quotes, whatever it contains.
            stock = f'data: {{"error": "{request.error.message}"}}\n\n'
            if part.endswith(stock):
                event = format_event(request.error.body())
                return self.complete(part.removesuffix(stock), request) + event
        if not (self._logprobs or self._echoes or '"usage":{' in part or '"tool_calls"' in part):
            return part
        return "".join(self._complete(event, request) for event in read_events(part) if event)

    def _complete(self, event: dict[str, Any], request: ServerRequest) -> str:
        _add_cached_tokens(event, request)
        (choice,) = event["choices"]
        ended = choice.get("finish_reason") is not None
        if request.truncated and choice.get("finish_reason") == "tool_calls":
            choice["finish_reason"] = "length"
        if self._echoes and self._path == COMPLETIONS:
            self._echoes = False
            choice["text"] = self._writer.echo() + choice["text"]
        if self._logprobs and (self._path == COMPLETIONS or "role" not in choice["delta"]):
            tokens = event["usage"]["completion_tokens"] if ended else request.part_tokens.popleft()
            choice["logprobs"] = self._writer.take(tokens)
        if not (ended and self._usage_apart):
            return format_event(event)
        # OpenAI's last chunk, which clients of `include_usage` wait for, has no choices.
        last = {**event, "choices": []}
        del event["usage"]
        return format_event(event) + format_event(last)


def _complete_response(part: str, request: ServerRequest) -> str:
    # Text of the model has its quotes escaped.
    if _COMPLETED not in part:
        return part
    (event,) = read_events(part)
    assert event is not None
    _add_cached_tokens(event["response"], request)
    if request.truncated:
        event["type"] = "response.incomplete"
        event["response"] |= _INCOMPLETE
    return format_event(event)
