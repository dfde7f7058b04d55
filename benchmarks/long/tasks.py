"""Five tasks after the recipes of RULER (arXiv 2404.06654), for models of any size.

Nothing is generated. A question begins sentences, and what should follow each is an answer. It is
right if greedy decoding among it and its wrong candidates would say it: wherever they part, the
logit of the answer's token is above those of the others' tokens. So an answer may have several
tokens, and a question is one short call. Answers are given, right or not, before the next is asked.
"""

import random
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import count, cycle, islice, pairwise
from typing import Any

import torch

from hf_fp8kv.errors import ConfigError

from .texts import read_prose

# Things that Python's documentation does not talk about.
_WORDS = """
apple banana bear bird blanket boat bottle bread butter button cake camel candle carpet cat chair
cheese cherry chicken clock coat coffee corn cow cup curtain deer desk dog dress duck eagle elephant
fish flower fox garden glass goat gold grass guitar hammer hat honey horse juice kitchen knife lake
lamp lemon lion mango meat milk mirror monkey moon mountain mouse ocean onion orange pencil pepper
piano pig pillow pizza plate potato rabbit rain rice river rose salt sheep shirt shoe silver snake
snow soap soup spider spoon stone sugar sun tea tiger tomato train tree turtle umbrella violin whale
window wine wolf
"""
_NUMBER, _WORD = "The secret number for {} is", "The secret word for {} is"
_ASK = "\n\nAnswer: "
_DIGITS = 5
_APART = 100  # tokens of a haystack for each needle
_NEEDLES = 40  # in a haystack, at most
_TOGETHER = 4  # needles that a question of "several needles" asks for
_CHAIN = 3  # links of a chain
_LIST = "A list of words:"
_MOST = "\n\nThe most frequent words in the list above are:"
_VOCABULARY = 40  # different words in a list
_FREQUENT, _EXPONENT = 3, 2  # words that are asked for, and what Zipf's law is raised to
_COMMON, _RATIO = 3, 30  # words that are asked for, and how often they are for one of the others
_CHOICES = 4  # wrong words beside a right one of a list
_QUESTION = 96  # tokens that are kept free behind a haystack


@dataclass(frozen=True)
class Step:
    """A token of an answer: the logits at `index` of a question's tokens must prefer `right`."""

    index: int
    right: int
    wrong: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Question:
    """Tokens `[1, T]`, int64, that follow a haystack, and the steps of each answer."""

    ids: torch.Tensor
    answers: tuple[tuple[Step, ...], ...]


@dataclass(frozen=True, eq=False)
class Haystack:
    """A text `[1, N]`, int64, and what is asked about it."""

    ids: torch.Tensor
    questions: tuple[Question, ...]

    @property
    def answers(self) -> int:
        return sum(len(question.answers) for question in self.questions)


@dataclass(frozen=True)
class Part:
    """A part of a question: what is given, what follows, and candidates that do not."""

    given: str
    answer: str
    wrong: Sequence[str]


class Writer:
    """Write haystacks in the tokens of a model.

    Args:
        tokenizer: the model's.
        length: tokens of a haystack and its longest question.
        seed: another one gives other text, words and numbers.
    """

    def __init__(self, tokenizer: Any, length: int, seed: int) -> None:
        self._tokenizer, self._seed = tokenizer, seed
        self.length = length - _QUESTION
        self.random = random.Random(seed)

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, without special ones."""
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def draw_words(self, count: int) -> list[str]:
        """Return different words."""
        return self.random.sample(_WORDS.split(), count)

    def draw_numbers(self, count: int) -> list[str]:
        """Return different numbers of five digits."""
        return [str(n) for n in self.random.sample(range(10 ** (_DIGITS - 1), 10**_DIGITS), count)]

    def hide(self, needles: Sequence[str]) -> torch.Tensor:
        """Return sentences of prose with the needles among them, in their order, `[1, N]`."""
        start, lines = self._start(), [self.encode(f"{needle}\n") for needle in needles]
        room = self.length - len(start) - sum(map(len, lines))
        prose: list[list[int]] = []
        for sentence in _read_sentences(self._seed):
            ids = self.encode(f"{sentence}\n")
            if len(ids) > room:
                break
            prose.append(ids)
            room -= len(ids)
        # Number n of m is somewhere in the part n of m of the text.
        for number, line in reversed([*enumerate(lines)]):
            first, last = (len(prose) * n // len(lines) for n in (number, number + 1))
            prose.insert(self.random.randint(first, last), line)
        return torch.tensor([start + [token for line in prose for token in line]])

    def list_words(self, head: str, words: Iterable[str]) -> torch.Tensor:
        """Return a heading and as many of endless words as there is room for, `[1, N]`."""
        ids = [*self._start(), *self.encode(head)]
        for word in words:
            ids += self.encode(f" {word},")
            if len(ids) >= self.length:
                break
        return torch.tensor([ids[: self.length]])

    def ask(self, *parts: Part) -> Question:
        """Return a question.

        Raises:
            ConfigError: the tokenizer has the same tokens for an answer and all candidates.
        """
        ids: list[int] = []
        answers: list[tuple[Step, ...]] = []
        for part in parts:
            ids += self.encode(part.given)
            right = self.encode(f" {part.answer}")
            wrong = [self.encode(f" {candidate}") for candidate in part.wrong]
            steps = []
            for n, token in enumerate(right):
                others = {other[n] for other in wrong if other[:n] == right[:n] and other[n:]}
                if others := others - {token}:
                    steps.append(Step(len(ids) + n - 1, token, tuple(sorted(others))))
            if not steps:
                raise ConfigError(
                    f"tasks: expected a tokenizer that tells {part.answer!r} from "
                    f"{', '.join(map(repr, part.wrong))}, got the same tokens; leave tasks out"
                )
            answers.append(tuple(steps))
            ids += right
        return Question(torch.tensor([ids[:-1]]), tuple(answers))

    def _start(self) -> list[int]:
        """Return what the tokenizer puts in front of a text: <bos>, or nothing."""
        bos = self._tokenizer.bos_token_id
        return [bos] if self._tokenizer("a")["input_ids"][0] == bos else []


def _read_sentences(seed: int) -> Iterable[str]:
    """Return sentences of prose without end, another beginning for each seed."""
    paragraphs = list(islice(read_prose(), 200))
    first = 37 * seed % len(paragraphs)
    for paragraph in cycle(paragraphs[first:] + paragraphs[:first]):
        yield from re.split(r"(?<=\.) ", paragraph.strip())


def write_single_needle(writer: Writer, needles: int) -> Haystack:
    """Return a haystack of numbers, each asked for by itself."""
    ids, parts = _hide_numbers(writer, needles)
    return Haystack(ids, tuple(map(writer.ask, parts)))


def write_several_needles(writer: Writer, needles: int) -> Haystack:
    """Return a haystack of numbers, of which each question asks for some, far from each other."""
    stride = max(needles // _TOGETHER, 1)
    ids, parts = _hide_numbers(writer, stride * _TOGETHER)
    return Haystack(ids, tuple(writer.ask(*parts[n::stride]) for n in range(stride)))


def _hide_numbers(writer: Writer, count: int) -> tuple[torch.Tensor, list[Part]]:
    """Return prose with the numbers of so many things, `[1, N]`, and what asks for each."""
    needles = [*zip(writer.draw_words(count), writer.draw_numbers(count), strict=True)]
    ids = writer.hide([f"{_NUMBER.format(word)} {number}." for word, number in needles])
    return ids, [_ask_number(word, number) for word, number in needles]


def _ask_number(word: str, number: str) -> Part:
    """Return what asks for a number: the candidates for each digit are all digits."""
    wrong = [
        number[:place] + digit + number[place + 1 :]
        for place in range(_DIGITS)
        for digit in "0123456789"
        if digit != number[place]
    ]
    return Part(_ASK + _NUMBER.format(word), number, wrong)


def write_variables(writer: Writer, needles: int) -> Haystack:
    """Return a haystack of chains: words that stand for words, and the last for a number."""
    number_of = max(needles // _CHAIN, 1)
    words, numbers = writer.draw_words(number_of * _CHAIN), writer.draw_numbers(number_of)
    chains = [words[n::number_of] for n in range(number_of)]
    # As in programs, what stands for something is said before what stands for that.
    said = [f"{_NUMBER.format(chain[0])} {n}." for chain, n in zip(chains, numbers, strict=True)]
    for link in range(1, _CHAIN):
        said += [f"{_WORD.format(chain[link])} {chain[link - 1]}." for chain in chains]
    questions = []
    for chain, number in zip(chains, numbers, strict=True):
        parts = [
            Part(_ASK + _WORD.format(word), before, [other for other in words if other != before])
            for word, before in pairwise(chain[::-1])
        ]
        questions.append(writer.ask(*parts, _ask_number(chain[0], number)))
    return Haystack(writer.hide(said), tuple(questions))


def write_frequent_words(writer: Writer, needles: int) -> Haystack:
    """Return a list of words by Zipf's law, whose most frequent ones are asked for."""
    words = writer.draw_words(_VOCABULARY)
    weights = [rank**-_EXPONENT for rank in range(1, len(words) + 1)]
    drawn = (word for _ in count() for word in writer.random.choices(words, weights))
    return _list_words(writer, drawn, words[:_FREQUENT], words[_FREQUENT:])


def write_common_words(writer: Writer, needles: int) -> Haystack:
    """Return a list with a few words that are much more common than all others, and asked for."""
    words = writer.draw_words(_VOCABULARY)
    bag = words[:_COMMON] * _RATIO + words[_COMMON:]
    drawn = (word for _ in count() for word in writer.random.sample(bag, len(bag)))
    return _list_words(writer, drawn, words[:_COMMON], words[_COMMON:])


def _list_words(
    writer: Writer, drawn: Iterable[str], right: Sequence[str], wrong: Sequence[str]
) -> Haystack:
    """Return a list, and a question for each order in which the right words can go around."""
    questions = []
    for first in range(len(right)):
        heads = (_MOST, *"," * (len(right) - 1))
        around = (*right[first:], *right[:first])
        choices = (writer.random.sample(wrong, _CHOICES) for _ in right)
        questions.append(writer.ask(*map(Part, heads, around, choices)))
    return Haystack(writer.list_words(_LIST, drawn), tuple(questions))


# By name, what writes a haystack, of so many needles if it is of needles.
TASKS: dict[str, Callable[[Writer, int], Haystack]] = {
    "single needle": write_single_needle,
    "several needles": write_several_needles,
    "variables": write_variables,
    "frequent words": write_frequent_words,
    "common words": write_common_words,
}


def write_haystacks(tokenizer: Any, task: str, length: int, answers: int) -> list[Haystack]:
    """Return as few haystacks as have so many answers, or a few more.

    Args:
        tokenizer: the model's.
        task: a key of `TASKS`.
        length: tokens of a haystack and its longest question.
        answers: how many, in all haystacks.

    Raises:
        ConfigError: the haystacks are too short, or the tokenizer is of no use for this.
    """
    haystacks: list[Haystack] = []
    while (left := answers - sum(haystack.answers for haystack in haystacks)) > 0:
        writer = Writer(tokenizer, length, len(haystacks))
        needles = max(min(left, _NEEDLES, length // _APART), 1)
        haystacks.append(TASKS[task](writer, needles))
        tokens = max(question.ids.shape[1] for question in haystacks[-1].questions)
        if haystacks[-1].ids.shape[1] + tokens > length:
            raise ConfigError(
                f"positions: expected room for a question of {tokens} tokens, got {length} for "
                f"{haystacks[-1].ids.shape[1]} and it; ask for longer texts, or leave tasks out"
            )
    return haystacks
