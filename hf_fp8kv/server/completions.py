"""Responses to chats and completions, as one object or streamed, with a choice for each answer."""

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any, NamedTuple

from .answer_text import AnswerPart
from .choices import Choice
from .errors import APIError
from .sampling import TokenLogprob
from .schemas import ChatBody, CompletionBody
from .token_texts import TokenTexts

# Parts of answers, each with its choice. None is the end of an answer.
ChoiceParts = Sequence[tuple[Choice, AnswerPart | None]]
# A token, whether it is the first token of its text, and the index of its first character.
_PlacedLogprob = tuple[TokenLogprob, bool, int]
DONE_EVENT = "data: [DONE]\n\n"


def format_event(event: dict[str, Any]) -> str:
    """Return the text of an event in a stream (server-sent events)."""
    return f"data: {json.dumps(event)}\n\n"


class Echo(NamedTuple):
    """A prompt before its answer, and the index of each token's first character."""

    text: str
    offsets: list[int]


class CompletionWriter:
    """Writes the response to one request. `name` is the model's name as the client sent it."""

    def __init__(
        self, body: ChatBody | CompletionBody, name: str, choices: list[Choice], texts: TokenTexts
    ) -> None:
        self._body = body
        self._choices = choices
        self._texts = texts
        self._is_chat = isinstance(body, ChatBody)
        id_prefix = "cmpl"
        object_type = "text_completion"
        self._content_key = "text"
        if self._is_chat:
            id_prefix = "chatcmpl"
            object_type = "chat.completion" + (".chunk" if body.stream else "")
            self._content_key = "delta" if body.stream else "message"
        self._common_fields: dict[str, Any] = {
            "id": f"{id_prefix}-{uuid.uuid4().hex}",
            "object": object_type,
            "created": int(time.time()),
            "model": name,
        }
        self._sends_usage_last = bool(body.stream_options.include_usage)
        self._has_logprobs = body.num_top_tokens is not None
        self._logprob_writers = [_LogprobWriter(choice, texts) for choice in choices]
        self._begun_choices: set[int] = set()  # indices of choices with a written part

    def collect(self, parts: ChoiceParts) -> dict[str, Any]:
        """Return the response for all parts. With log-probabilities this may take seconds."""
        choice_fields = [self._make_choice(choice) for choice in self._choices]
        for choice, part in parts:
            _merge_fields(choice_fields[choice.index], self._format_part(choice, part))
        return {
            **self._common_fields,
            "choices": choice_fields,
            "usage": count_usage(self._choices),
        }

    async def stream(self, part_groups: AsyncIterator[ChoiceParts]) -> AsyncIterator[str]:
        """Yield the events of the response, for parts in groups that arrive together."""
        if self._is_chat:
            yield "".join(
                self._format_choices_event(self._make_choice(choice)) for choice in self._choices
            )
        async for parts in part_groups:
            if self._has_logprobs and self._body.echo:
                # The first part has the prompt's log-probabilities. Formatting them here would
                # delay other clients.
                yield await asyncio.to_thread(self._format_parts, parts)
            else:
                yield self._format_parts(parts)
        if self._sends_usage_last:
            yield self._format_choices_event(usage=count_usage(self._choices))
        yield DONE_EVENT

    def _format_parts(self, parts: ChoiceParts) -> str:
        """Return the events for parts. The last event of a single answer may have the usage."""
        adds_usage = len(self._choices) == 1 and not self._sends_usage_last
        events = []
        for choice, part in parts:
            fields = self._format_part(choice, part)
            usage = {"usage": count_usage(self._choices)} if adds_usage and part is None else {}
            events.append(self._format_choices_event(fields, **usage))
        return "".join(events)

    def _format_choices_event(self, *choices: dict[str, Any], **fields: Any) -> str:
        return format_event({**self._common_fields, "choices": choices, **fields})

    def _make_choice(self, choice: Choice) -> dict[str, Any]:
        content: Any = {"role": "assistant", "content": ""} if self._is_chat else ""
        return {"index": choice.index, "finish_reason": None, self._content_key: content}

    def _format_part(self, choice: Choice, part: AnswerPart | None) -> dict[str, Any]:
        """Return the fields of a choice for a part of its answer. None is the end of the answer."""
        finish_reason = choice.finish_reason if part is None else None
        fields: dict[str, Any] = {"index": choice.index, "finish_reason": finish_reason}
        echo = None if choice.index in self._begun_choices else self._get_echo(choice)
        self._begun_choices.add(choice.index)
        if self._has_logprobs:
            num_tokens = part.num_tokens if part else choice.decoder.num_kept_tokens
            writer = self._logprob_writers[choice.index]
            fields["logprobs"] = writer.take_logprobs(num_tokens, echo, is_chat=self._is_chat)
        if self._is_chat:
            fields[self._content_key] = self._format_message(part)
        else:
            fields[self._content_key] = (echo.text if echo else "") + (part.text if part else "")
        return fields

    def _format_message(self, part: AnswerPart | None) -> dict[str, Any]:
        if part is None:
            return {}
        if part.call is None:
            return (
                {"reasoning_content": part.reasoning} if part.reasoning else {"content": part.text}
            )
        name, arguments = part.call
        index_field = {"index": part.call_index} if self._body.stream else {}
        call = {
            **index_field,
            "id": f"call_{uuid.uuid4().hex}",
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }
        return {"tool_calls": [call]}

    def _get_echo(self, choice: Choice) -> Echo | None:
        if not isinstance(self._body, CompletionBody) or not self._body.echo:
            return None
        prompt = self._body.prompts[choice.index // self._body.n]
        text = prompt if isinstance(prompt, str) else self._texts.decode(prompt)
        if not self._has_logprobs:
            return Echo(text, [])
        return Echo(text, self._texts.find_offsets(prompt, self._body.add_special_tokens))

    def format_error(self, error: APIError) -> str:
        """Return the events that report an error in a stream."""
        return format_event(error.to_dict()) + DONE_EVENT


def _merge_fields(merged: dict[str, Any], fields: dict[str, Any]) -> None:
    """Merge fields into `merged`. Append texts and lists, and merge objects field by field."""
    for name, value in fields.items():
        if isinstance(value, dict) and isinstance(merged.get(name), dict):
            _merge_fields(merged[name], value)
        elif isinstance(merged.get(name), str | list):
            merged[name] += value
        else:
            merged[name] = value


def count_usage(choices: Sequence[Choice]) -> dict[str, Any]:
    """Return the token counts of the choices. A prompt with several answers counts once."""
    num_new_tokens = sum(choice.decoder.num_tokens for choice in choices)
    sequences = [choice.sequence for choice in choices if choice.is_first]
    num_prompt_tokens = sum(len(sequence.prompt) for sequence in sequences)
    num_cached_tokens = sum(sequence.num_cached_tokens for sequence in sequences)
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_new_tokens,
        "total_tokens": num_prompt_tokens + num_new_tokens,
        "prompt_tokens_details": {"cached_tokens": num_cached_tokens},
    }


class _LogprobWriter:
    """Writes the log-probabilities of an answer, and of its prompt, in OpenAI's formats."""

    def __init__(self, choice: Choice, texts: TokenTexts) -> None:
        self._choice = choice
        self._texts = texts
        self._num_sent = 0  # number of the answer's tokens whose log-probabilities were returned
        self._prompt_length = 0  # number of characters before the answer

    def take_logprobs(self, num_tokens: int, echo: Echo | None, *, is_chat: bool) -> dict[str, Any]:
        """Return the log-probabilities of tokens up to `num_tokens` that were not returned before.

        The log-probabilities of the prompt `echo` come first. None omits them.
        """
        placed_logprobs = [] if echo is None else self._place_prompt(echo)
        new_logprobs = self._choice.sequence.logprobs[self._num_sent : num_tokens]
        placed_logprobs += [self._place_next(token_logprob) for token_logprob in new_logprobs]
        if is_chat:
            content = [
                self._format_logprob(token_logprob, is_first)
                for token_logprob, is_first, _ in placed_logprobs
            ]
            return {"content": content, "refusal": None}
        columns: dict[str, list[Any]] = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }
        for token_logprob, is_first, offset in placed_logprobs:
            columns["tokens"].append(self._texts.get_text(token_logprob.token, is_first))
            columns["token_logprobs"].append(token_logprob.logprob)
            columns["top_logprobs"].append(self._map_top_tokens(token_logprob, is_first))
            columns["text_offset"].append(offset)
        return columns

    def _place_prompt(self, echo: Echo) -> list[_PlacedLogprob]:
        """Return the log-probabilities of the prompt with their places in its text."""
        self._prompt_length = len(echo.text)
        pairs = zip(self._choice.prompt_logprobs or (), echo.offsets, strict=True)
        return [(token_logprob, offset == 0, offset) for token_logprob, offset in pairs]

    def _place_next(self, token_logprob: TokenLogprob) -> _PlacedLogprob:
        """Return the next log-probability of the answer with its place in the text."""
        old_end, end = self._choice.decoder.text_ends[self._num_sent : self._num_sent + 2]
        self._num_sent += 1
        offset = self._texts.find_offset(token_logprob.token, old_end, end)
        return token_logprob, old_end == 0, self._prompt_length + offset

    def _map_top_tokens(
        self, token_logprob: TokenLogprob, is_first: bool
    ) -> dict[str, float] | None:
        """Return log-probabilities by text. Tokens with equal texts are named by their ids.

        None means that the token has no log-probability.
        """
        if token_logprob.logprob is None:
            return None
        chosen_text = self._texts.get_text(token_logprob.token, is_first)
        logprobs: dict[str, float] = {}
        logprob_by_token = dict(token_logprob.top_tokens)
        logprob_by_token[token_logprob.token] = token_logprob.logprob
        for token, logprob in logprob_by_token.items():
            text = self._texts.get_text(token, is_first)
            is_taken = token != token_logprob.token and (text == chosen_text or text in logprobs)
            logprobs[f"token_id:{token}" if is_taken else text] = logprob
        return logprobs

    def _format_logprob(self, token_logprob: TokenLogprob, is_first: bool) -> dict[str, Any]:
        top_logprobs = [self._format_token(*pair, is_first) for pair in token_logprob.top_tokens]
        token_fields = self._format_token(token_logprob.token, token_logprob.logprob, is_first)
        return {**token_fields, "top_logprobs": top_logprobs}

    def _format_token(self, token: int, logprob: float | None, is_first: bool) -> dict[str, Any]:
        text = self._texts.get_text(token, is_first)
        # The answer's text omits these tokens.
        omits = token in self._choice.decoder.end_tokens or token in self._texts.special_tokens
        token_bytes = b"" if omits else self._texts.get_bytes(token, is_first)
        return {"token": text, "logprob": logprob, "bytes": list(token_bytes)}
