"""Tasks of the long suite: what is written, what is asked, and what counts as right."""

import io
import json
import re
from collections import Counter

import pytest
import torch
from rich.console import Console
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from benchmarks.long import answers, format_table, suite, tasks
from benchmarks.long.caches import ROWS, Row, choose_rows
from benchmarks.long.tasks import Haystack, Part, Question, Step
from hf_fp8kv.attention.switching import paged_attention
from hf_fp8kv.calibration.divergence import UNQUANTISED
from hf_fp8kv.errors import ConfigError

pytestmark = pytest.mark.text

LENGTH = 700


def make_tokenizer(words: list[str]) -> PreTrainedTokenizerFast:
    """Return a tokenizer of these words, and of digits."""
    known = ["<unk>", "<s>", *"0123456789", *words]
    model = models.WordLevel({word: n for n, word in enumerate(known)}, unk_token="<unk>")
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Whitespace(), pre_tokenizers.Digits(individual_digits=True)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


@pytest.fixture(scope="module")
def tokenizer():
    needed = (
        "The the secret number word for is . , Answer A list words most frequent in above are :"
    )
    return make_tokenizer([*tasks._WORDS.split(), *needed.split()])


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=160, hidden_size=64, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, initializer_range=0.5,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.fixture
def writer(tokenizer):
    return tasks.Writer(tokenizer, LENGTH, seed=3)


def read(tokenizer, ids: torch.Tensor) -> str:
    """Return the text of tokens `[1, T]`, digits joined."""
    return re.sub(r"(?<=\d) (?=\d)", "", tokenizer.decode(ids[0]))


# -- what is right -------------------------------------------------------------------------------


def test_an_answer_is_compared_where_its_candidates_part_from_it(tokenizer, writer):
    """As greedy decoding among them would: the first digit, then those behind the same one."""
    question = writer.ask(Part("the number is", "123", ["129", "145", "200", "123"]))
    digit = [tokenizer.convert_tokens_to_ids(str(d)) for d in range(10)]
    assert read(tokenizer, question.ids) == "the number is 12"
    expected = Step(2, digit[1], (digit[2],)), Step(3, digit[2], (digit[4],))
    assert question.answers == ((*expected, Step(4, digit[3], (digit[9],))),)


def test_an_answer_is_given_before_the_next_part(tokenizer, writer):
    question = writer.ask(Part("the lamp is", "7", ["89"]), Part(". the river is", "8", ["79"]))
    assert read(tokenizer, question.ids) == "the lamp is 7 . the river is"
    assert [[step.index for step in answer] for answer in question.answers] == [[2], [7]]


def test_answers_that_the_tokenizer_cannot_tell_apart(writer):
    with pytest.raises(ConfigError, match=r"tasks: expected a tokenizer that tells 'x' from 'y'"):
        writer.ask(Part("the lamp is", "x", ["y"]))


def test_every_step_must_be_right(model):
    """The right token above each wrong one, at each step of an answer."""
    ids = torch.arange(3, 12)[None]
    with torch.no_grad():
        order = model(ids).logits[0].argsort(-1, descending=True).tolist()

    def step(index: int, right: int, *wrong: int) -> Step:
        ranks = order[5 + index]
        return Step(index, ranks[right], tuple(ranks[rank] for rank in wrong))

    expected = {
        (step(0, 0, 1, 2),): True,
        (step(0, 1, 0, 2),): False,
        (step(0, 1, 2, 3), step(3, 7, 9, 8)): True,
        (step(0, 1, 2, 3), step(3, 7, 9, 6)): False,
        (step(0, 3, 2), step(3, 0, 1)): False,
    }
    haystack = Haystack(ids[:, :5], (Question(ids[:, 5:], tuple(expected)),))
    with paged_attention(model):
        found = answers._ask_all(model, [haystack], {"": answers.YARDSTICK}, lambda *told: None)
    assert found == {"": [*expected.values()]}


# -- what caches make of it ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def haystacks(model) -> list[Haystack]:
    """Two texts with nine and five answers, of which the unquantised cache has the first right."""
    made = []
    for seed, wanted in ((1, [True] * 7 + [False] * 2), (2, [True] * 3 + [False] * 2)):
        ids = torch.randint(160, (1, 70 + 2 * seed), generator=torch.Generator().manual_seed(seed))
        questions = []
        for number, right in enumerate(wanted):
            asked = torch.tensor([[number, 9, number + 20]])
            with torch.no_grad():
                order = model(torch.cat((ids, asked), 1)).logits[0, -1].argsort(descending=True)
            first, *others, last = order.tolist()
            answer = (Step(2, first, (*others, last)) if right else Step(2, last, (first,)),)
            questions.append(Question(asked, (answer,)))
        made.append(Haystack(ids, tuple(questions)))
    return made


class Turned(DynamicCache):
    """A cache that gets the values of the first call wrong."""

    def update(self, k, v, index, *args, **kwargs):
        first = index >= len(self.layers) or not self.layers[index].get_seq_length()
        return super().update(k, -v if first else v, index, *args, **kwargs)


def test_answers_are_lost_by_a_cache_with_other_values(model, haystacks):
    rows = {
        "whole": Row("whole", lambda config: DynamicCache(config=config)),
        "exact": Row("exact", ROWS["default"].make, asks=True),
        "turned": Row("turned", lambda config: Turned()),
    }
    told: list[tuple[str, int]] = []
    with paged_attention(model):
        found = answers.run_task(model, haystacks, rows, lambda *told_: told.append(told_))
    assert (found["asked"], found["ceiling"], found["dropped"]) == (14, 10 / 14, False)
    by_cache = {answer["cache"]: answer for answer in found["answers"]}
    assert list(by_cache) == list(rows)
    assert by_cache["whole"] == {"cache": "whole", "right": 10, "lost": 0}
    assert by_cache["exact"]["lost"] <= 2  # close calls of random weights
    # What a cache gets right by chance does not make up for what it loses.
    lost, right = by_cache["turned"]["lost"], by_cache["turned"]["right"]
    assert 5 <= lost <= 10
    assert 10 - lost <= right <= 14 - lost
    assert {cache for cache, _ in told} == {UNQUANTISED, *rows}
    assert sum(tokens for _, tokens in told) == answers.count_tokens(haystacks, rows)


def test_questions_leave_the_cache_as_it_was(model, haystacks):
    """Each is asked behind the haystack alone: in another order, the answers are the same."""
    packages = (name for name, row in ROWS.items() if row.needs)
    rows, _ = choose_rows(model, ["default", "e4m3", "stock-fp8", "q8_0", *packages])
    turned = [Haystack(h.ids, h.questions[::-1]) for h in haystacks]
    with paged_attention(model):
        found, other = (
            answers._ask_all(model, asked, rows, lambda cache, tokens: None)
            for asked in (haystacks, turned)
        )
    for name in rows:
        assert found[name] == other[name][:9][::-1] + other[name][9:][::-1]


def test_a_task_below_the_ceiling_is_dropped(model, haystacks):
    """Half is enough. The other caches are not even made."""

    def fail(config):
        raise AssertionError("asked")

    rows = {"e4m3": Row("e4m3", fail)}
    questions = haystacks[0].questions
    told: list[int] = []
    for asked, dropped in ((questions[5:], False), (questions[6:], True)):
        of_task = [Haystack(haystacks[0].ids, asked)]
        if not dropped:
            with pytest.raises(AssertionError, match="asked"):
                answers.run_task(model, of_task, rows)
            continue
        found = answers.run_task(model, of_task, rows, lambda cache, tokens: told.append(tokens))
        assert found == {"asked": 3, "ceiling": 1 / 3, "dropped": True, "answers": []}
        assert sum(told) == answers.count_tokens(of_task, rows)


def test_tasks_in_the_suite(model, tokenizer, tmp_path, monkeypatch):
    """At each position, and saved after each task."""
    saved: list[int] = []
    monkeypatch.setattr(answers, "CEILING", 0)
    monkeypatch.setattr(
        suite, "write_all",
        lambda files: saved.append(len(json.loads(files[tmp_path / "long.json"])["tasks"])),
    )  # fmt: skip
    asked = {"tasks": ["single needle", "common words"], "positions": [450, 300], "answers": 3}
    said: list[float] = []
    result = suite.run_long_suite(
        model, tokenizer, name="tiny", kinds=(), caches=["e4m3", "default"], **asked,
        save=tmp_path / "long.json", progress=lambda what, share: said.append(share),
    )  # fmt: skip
    assert saved == [0, 1, 2, 3, 4, 4]
    assert result["predictions"] == []
    found = [(task["position"], task["task"], task["asked"]) for task in result["tasks"]]
    single, common = ("single needle", 3), ("common words", 9)
    assert found == [(300, *single), (300, *common), (450, *single), (450, *common)]
    for task in result["tasks"]:
        assert [answer["cache"] for answer in task["answers"]] == ["e4m3", "default"]
        assert not task["dropped"]
        for answer in task["answers"]:
            unquantised = round(task["ceiling"] * task["asked"])
            assert 0 <= answer["lost"] <= unquantised
            assert answer["right"] >= unquantised - answer["lost"]
    assert said == sorted(said)
    assert said[-1] == 1
    console = Console(width=200, file=io.StringIO())
    console.print(format_table(result))
    shown = console.file.getvalue()
    assert "right answers at 300 tokens" in shown
    assert "common words, of 9" in shown
    assert "INCOMPLETE" not in shown


# -- what is written -----------------------------------------------------------------------------


@pytest.mark.parametrize("task", tasks.TASKS)
@pytest.mark.parametrize("length", [430, LENGTH])
def test_haystacks_are_as_long_as_asked_for(tokenizer, task, length):
    written = tasks.write_haystacks(tokenizer, task, length, 30)
    assert len(written) > 1
    assert 30 <= sum(haystack.answers for haystack in written) <= 50
    for haystack in written:
        longest = max(question.ids.shape[1] for question in haystack.questions)
        assert length - 200 < haystack.ids.shape[1] <= length - longest
        assert haystack.ids.dtype == torch.int64
    assert not torch.equal(written[0].ids[:, :300], written[1].ids[:, :300])
    again = tasks.write_haystacks(tokenizer, task, length, 30)
    assert all(torch.equal(one.ids, other.ids) for one, other in zip(written, again, strict=True))


@pytest.mark.parametrize("task", ["single needle", "several needles", "variables"])
def test_what_is_asked_for_is_in_the_text(tokenizer, task):
    """Every link of every question, once, and the answers in the right place of the steps."""
    writer = tasks.Writer(tokenizer, 2 * LENGTH, seed=1)
    haystack = tasks.TASKS[task](writer, 12)
    text = read(tokenizer, haystack.ids)
    said = dict(re.findall(r"secret (?:number|word) for (\w+) is (\w+) \.", text))
    assert len(said) == 12
    assert haystack.answers == 12
    # From the first to the last eighth of the text.
    places = sorted(m.start() / len(text) for m in re.finditer("The secret", text))
    assert places[0] < 1 / 8
    assert places[-1] > 7 / 8
    asked = []
    for question in haystack.questions:
        # The last answer's last token is not among what is given.
        last = question.answers[-1][-1]
        full = torch.cat([question.ids, torch.tensor([[last.right]])], dim=1)
        links = re.findall(r"The secret (?:number|word) for (\w+) is (\w+)", read(tokenizer, full))
        assert all(said[word] == answer for word, answer in links)
        assert len(links) == len(question.answers)
        asked += [word for word, _ in links]
        for steps in question.answers:
            for step in steps:
                assert full[0, step.index + 1] == step.right
                assert step.right not in step.wrong
                assert len(step.wrong) >= 8  # all other digits, or words
        if task == "variables":
            assert [word for word, _ in links[1:]] == [answer for _, answer in links[:-1]]
    assert sorted(asked) == sorted(said)


@pytest.mark.parametrize(
    ("task", "right", "least"), [("frequent words", 3, 1.2), ("common words", 3, 9)]
)
def test_right_words_are_the_most_frequent(tokenizer, task, right, least):
    writer = tasks.Writer(tokenizer, 4000, seed=2)
    haystack = tasks.TASKS[task](writer, 1)
    words = re.findall(r"(\w+) ,", read(tokenizer, haystack.ids))
    counted = Counter(words).most_common()
    top = {tokenizer.convert_tokens_to_ids(word) for word, _ in counted[:right]}
    assert counted[right - 1][1] > least * counted[right][1]
    assert len(haystack.questions) == right
    for question in haystack.questions:
        assert {steps[0].right for steps in question.answers} == top
        for steps in question.answers:
            assert len(steps) == 1
            assert len(steps[0].wrong) == 4
            assert not top & set(steps[0].wrong)


def test_a_text_begins_as_the_tokenizer_begins_it(tokenizer):
    tokenizer = make_tokenizer(tasks._WORDS.split())
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    bos = tokenizer.bos_token_id
    assert bos not in tasks.write_haystacks(tokenizer, "single needle", LENGTH, 1)[0].ids
    tokenizer._tokenizer.post_processor = processors.TemplateProcessing(
        "<s> $A", special_tokens=[("<s>", bos)]
    )
    ids = tasks.write_haystacks(tokenizer, "frequent words", LENGTH, 1)[0].ids[0]
    assert ids[0] == bos
    assert bos not in ids[1:]


def test_texts_that_are_too_short(tokenizer):
    with pytest.raises(ConfigError, match=r"positions: expected room for .* got 80 for"):
        tasks.write_haystacks(tokenizer, "several needles", 80, 1)
