"""Four tasks that a cache can fail, for models of any size.

Chains and aggregation follow RULER (arXiv 2404.06654). Confusable keys differ in one digit, because
a unique key is found with any cache. Nothing is generated. A question is the beginning of a
sentence, which ends with the answer. An answer is correct if each of its tokens has a higher logit
than the next tokens of the wrong answers that begin alike. Later answers of a question follow
correct earlier answers.
"""

import random
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import count, cycle, islice, pairwise
from typing import Any

import torch

from ..errors import ConfigError
from .long_texts import read_prose

# Common nouns that are rare in Python's documentation.
_WORDS = """
apple banana bear bird blanket boat bottle bread butter button cake camel candle carpet cat chair
cheese cherry chicken clock coat coffee corn cow cup curtain deer desk dog dress duck eagle elephant
fish flower fox garden glass goat gold grass guitar hammer hat honey horse juice kitchen knife lake
lamp lemon lion mango meat milk mirror monkey moon mountain mouse ocean onion orange pencil pepper
piano pig pillow pizza plate potato rabbit rain rice river rose salt sheep shirt shoe silver snake
snow soap soup spider spoon stone sugar sun tea tiger tomato train tree turtle umbrella violin whale
window wine wolf
"""
_NUMBER_TEXT = "The secret number for {} is"
_WORD_TEXT = "The secret word for {} is"
_ANSWER_PREFIX = "\n\nAnswer: "
_NUMBERS = range(10_000, 100_000)
_TOKENS_PER_SENTENCE = 100  # number of tokens of a haystack for each hidden sentence
_MAX_HIDDEN_SENTENCES = 40  # maximum number of hidden sentences in a haystack
_GROUP_SIZE, _MAX_GROUPS = 4, 3  # keys that differ in one digit, and such groups in a haystack
_CHAIN_LINKS = 3  # number of links of a chain
_LIST_PREFIX = "A list of words:"
_COMMON_PREFIX = "\n\nThe most frequent words in the list above are:"
_NUM_WORDS = 40  # number of different words in a list
_NUM_COMMON_WORDS, _COMMON_REPEATS = 3, 30  # frequent words, and occurrences of each per rare word
_NUM_WRONG_ANSWERS = 4  # number of wrong answers for a word of a list
_QUESTION_TOKENS = 96  # number of tokens that are reserved for a question
_TOOL_TEXT = (
    '{{"type": "function", "function": {{"name": "{0}", "description": "Use it for the {1}.", '
    '"parameters": {{"type": "object", "properties": {{"{2}": {{"type": "integer"}}}}}}}}}}'
)
_REQUEST_TEXT = "\n\nRequest: call {} with {}.\nCall: "
_NAME_TEXT = '{"name": "'
_ARGUMENT_TEXT, _VALUE_TEXT = '", "arguments": {"', '": '
_TOOL_TOKENS = 60  # maximum number of tokens of a tool for most tokenizers


@dataclass(frozen=True)
class AnswerToken:
    """A token of an answer. At `index` of a question, its logit must exceed the wrong logits."""

    index: int
    correct_id: int
    wrong_ids: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Question:
    """A question after a haystack, `[1, T]`, int64, and the scored tokens of each answer."""

    ids: torch.Tensor
    answers: tuple[tuple[AnswerToken, ...], ...]


@dataclass(frozen=True, eq=False)
class Haystack:
    """A text `[1, N]`, int64, and its questions."""

    ids: torch.Tensor
    questions: tuple[Question, ...]


@dataclass(frozen=True)
class Part:
    """A part of a question: a text, the correct answer that follows it, and wrong answers."""

    text: str
    answer: str
    wrong_answers: Sequence[str]


class Writer:
    """Writes haystacks and questions as tokens of a model.

    Args:
        tokenizer: The model's tokenizer.
        length: Number of tokens of a haystack and its longest question.
        seed: Seed of the prose, words and numbers.
    """

    def __init__(self, tokenizer: Any, length: int, seed: int) -> None:
        self._tokenizer, self._seed = tokenizer, seed
        self.haystack_length = length - _QUESTION_TOKENS
        self.random = random.Random(seed)

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text without special tokens."""
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def draw_words(self, num_words: int) -> list[str]:
        """Return distinct random words."""
        return self.random.sample(_WORDS.split(), num_words)

    def draw_numbers(self, num_numbers: int) -> list[str]:
        """Return distinct random numbers of five digits."""
        return [str(number) for number in self.random.sample(_NUMBERS, num_numbers)]

    def hide_sentences(self, sentences: Sequence[str]) -> torch.Tensor:
        """Return the tokens of prose that contains the sentences in this order, `[1, N]`."""
        start_ids = self._get_start_ids()
        lines = [self.encode(f"{sentence}\n") for sentence in sentences]
        tokens_left = self.haystack_length - len(start_ids) - sum(map(len, lines))
        prose: list[list[int]] = []
        for sentence in _read_sentences(self._seed):
            ids = self.encode(f"{sentence}\n")
            if len(ids) > tokens_left:
                break
            prose.append(ids)
            tokens_left -= len(ids)
        # Each hidden sentence is inserted into a separate section of the prose, in order.
        for index, line in reversed([*enumerate(lines)]):
            start_index, stop_index = (len(prose) * n // len(lines) for n in (index, index + 1))
            prose.insert(self.random.randint(start_index, stop_index), line)
        return torch.tensor([start_ids + [token for line in prose for token in line]])

    def encode_haystack(self, text: str) -> torch.Tensor:
        """Return the tokens of a text, `[1, N]`, truncated to the length of a haystack."""
        return torch.tensor([(self._get_start_ids() + self.encode(text))[: self.haystack_length]])

    def make_question(self, *parts: Part) -> Question:
        """Return the question of these parts, with the tokens at which each answer is scored.

        Raises:
            ConfigError: The tokenizer encodes an answer and all wrong answers as the same tokens.
        """
        ids: list[int] = []
        answers: list[tuple[AnswerToken, ...]] = []
        for part in parts:
            ids += self.encode(part.text)
            answer = self.encode(part.answer)
            wrong_answers = [self.encode(text) for text in part.wrong_answers]
            tokens = []
            for n, token in enumerate(answer):
                wrong_ids = {
                    wrong[n] for wrong in wrong_answers if wrong[:n] == answer[:n] and wrong[n:]
                } - {token}
                if wrong_ids:
                    tokens.append(AnswerToken(len(ids) + n - 1, token, tuple(sorted(wrong_ids))))
            if not tokens:
                raise ConfigError(
                    f"tasks: expected different tokens for {part.answer!r} and "
                    f"{', '.join(map(repr, part.wrong_answers))}, got the same tokens"
                )
            answers.append(tuple(tokens))
            ids += answer
        return Question(torch.tensor([ids[:-1]]), tuple(answers))

    def _get_start_ids(self) -> list[int]:
        """Return the tokens that the tokenizer adds before a text: <bos>, or nothing."""
        bos_id = self._tokenizer.bos_token_id
        return [bos_id] if self._tokenizer("a")["input_ids"][0] == bos_id else []


def _read_sentences(seed: int) -> Iterable[str]:
    """Yield an endless sequence of sentences. The seed determines the first sentence."""
    paragraphs = list(islice(read_prose(), 200))
    start = 37 * seed % len(paragraphs)
    for paragraph in cycle(paragraphs[start:] + paragraphs[:start]):
        yield from re.split(r"(?<=\.) ", paragraph.strip())


def write_confusable_keys(writer: Writer, num_sentences: int) -> Haystack:
    """Return a haystack of numbers whose keys differ in one digit from three other keys.

    The wrong answers are all other numbers of the haystack.
    """
    num_groups = min(max(num_sentences // _GROUP_SIZE, 1), _MAX_GROUPS)
    words = writer.draw_words(num_groups)
    key_numbers = writer.draw_numbers(num_groups)
    keys = [
        f"{word} {number}{digit}"
        for word, number in zip(words, key_numbers, strict=True)
        for digit in writer.random.sample(range(10), _GROUP_SIZE)
    ]
    numbers = dict(zip(keys, writer.draw_numbers(len(keys)), strict=True))
    shuffled_keys = writer.random.sample(keys, len(keys))
    ids = writer.hide_sentences(
        [f"{_NUMBER_TEXT.format(key)} {numbers[key]}." for key in shuffled_keys]
    )
    return Haystack(ids, tuple(writer.make_question(_make_part(key, numbers)) for key in keys))


def _make_part(key: str, numbers: dict[str, str]) -> Part:
    wrong_answers = [f" {number}" for number in numbers.values() if number != numbers[key]]
    return Part(_ANSWER_PREFIX + _NUMBER_TEXT.format(key), f" {numbers[key]}", wrong_answers)


def write_chains(writer: Writer, num_sentences: int) -> Haystack:
    """Return a haystack of chains of words. A word refers to its predecessor or to a number."""
    num_chains = max(num_sentences // _CHAIN_LINKS, 2)
    words = writer.draw_words(num_chains * _CHAIN_LINKS)
    numbers = writer.draw_numbers(num_chains)
    chains = [words[n::num_chains] for n in range(num_chains)]
    first_numbers = {chain[0]: number for chain, number in zip(chains, numbers, strict=True)}
    # A word is defined before the words that refer to it, as in programs.
    sentences = [f"{_NUMBER_TEXT.format(word)} {number}." for word, number in first_numbers.items()]
    for link in range(1, _CHAIN_LINKS):
        sentences += [f"{_WORD_TEXT.format(chain[link])} {chain[link - 1]}." for chain in chains]
    questions = []
    for chain in chains:
        parts = [
            Part(
                _ANSWER_PREFIX + _WORD_TEXT.format(key),
                f" {answer}",
                [f" {word}" for word in words if word != answer],
            )
            for key, answer in pairwise(chain[::-1])
        ]
        questions.append(writer.make_question(*parts, _make_part(chain[0], first_numbers)))
    return Haystack(writer.hide_sentences(sentences), tuple(questions))


def write_aggregation(writer: Writer, num_sentences: int) -> Haystack:
    """Return a list in which three words are far more frequent than all other words."""
    words = writer.draw_words(_NUM_WORDS)
    rare_words = words[_NUM_COMMON_WORDS:]
    all_words = words[:_NUM_COMMON_WORDS] * _COMMON_REPEATS + rare_words
    stream = (word for _ in count() for word in writer.random.sample(all_words, len(all_words)))
    text = _LIST_PREFIX + "".join(f" {word}," for word in islice(stream, writer.haystack_length))
    questions = []
    for start in range(_NUM_COMMON_WORDS):
        answers = (*words[start:_NUM_COMMON_WORDS], *words[:start])
        parts = [
            Part(
                text,
                f" {word}",
                [f" {wrong}" for wrong in writer.random.sample(rare_words, _NUM_WRONG_ANSWERS)],
            )
            for text, word in zip(
                (_COMMON_PREFIX, *"," * (_NUM_COMMON_WORDS - 1)), answers, strict=True
            )
        ]
        questions.append(writer.make_question(*parts))
    return Haystack(writer.encode_haystack(text), tuple(questions))


def write_tool_calls(writer: Writer, num_sentences: int) -> Haystack:
    """Return descriptions of tools as JSON, and requests that call each tool but the example.

    A request has the name and a number. The name of the argument is only in the description.
    The wrong answers are the names, arguments and numbers of all other tools.
    """
    num_tools = max(min(num_sentences, writer.haystack_length // _TOOL_TOKENS - 1, 30), 3)
    words = writer.draw_words(3 * num_tools)
    numbers = writer.draw_numbers(num_tools)
    tools = [*zip(words[:num_tools], words[num_tools : 2 * num_tools], numbers, strict=True)]

    def make_parts(tool: tuple[str, str, str]) -> list[Part]:
        name, _, number = tool
        wrong_answers = zip(*(other for other in tools if other != tool), strict=True)
        texts = (_REQUEST_TEXT.format(name, number) + _NAME_TEXT, _ARGUMENT_TEXT, _VALUE_TEXT)
        return [*map(Part, texts, tool, wrong_answers)]

    example, *requests = writer.random.sample(tools, num_tools)
    example_call = "".join(part.text + part.answer for part in make_parts(example)) + "}}"
    text = "\n".join(
        _TOOL_TEXT.format(name, topic, argument)
        for (name, argument, _), topic in zip(tools, words[2 * num_tools :], strict=True)
    )
    questions = tuple(writer.make_question(*make_parts(tool)) for tool in requests)
    return Haystack(writer.encode_haystack(text + example_call), questions)


# Functions of a writer and the number of hidden sentences, by task.
TASKS: dict[str, Callable[[Writer, int], Haystack]] = {
    "confusable keys": write_confusable_keys,
    "chains": write_chains,
    "aggregation": write_aggregation,
    "tool calls": write_tool_calls,
}


def write_haystacks(tokenizer: Any, task: str, length: int, num_answers: int) -> list[Haystack]:
    """Return the fewest haystacks that have at least `num_answers` answers in total.

    Args:
        tokenizer: The model's tokenizer.
        task: A key of `TASKS`.
        length: Number of tokens of a haystack and its longest question.
        num_answers: Minimum number of answers in all haystacks.

    Raises:
        ConfigError: `length` is too small, or the tokenizer encodes different answers as the same.
    """
    haystacks: list[Haystack] = []
    while num_answers > 0:
        writer = Writer(tokenizer, length, len(haystacks))
        num_sentences = max(
            min(num_answers, _MAX_HIDDEN_SENTENCES, length // _TOKENS_PER_SENTENCE), 1
        )
        haystacks.append(haystack := TASKS[task](writer, num_sentences))
        num_answers -= sum(len(question.answers) for question in haystack.questions)
        min_length = haystack.ids.shape[1] + max(
            question.ids.shape[1] for question in haystack.questions
        )
        if min_length > length:
            raise ConfigError(
                f"tasks: expected at least {min_length} tokens for a haystack and its longest "
                f"question, got {length}"
            )
    return haystacks
