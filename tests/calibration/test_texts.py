"""What a calibration reads: every kind of texts, no token lost, the same parts in any order."""

import contextlib
import itertools
import json
import os
import threading
import tracemalloc
from collections import Counter
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from hf_fp8kv.calibration import texts as reading
from hf_fp8kv.calibration.texts import Corpus, read_corpus
from hf_fp8kv.errors import ConfigError

LETTERS = [chr(i) for i in range(97, 123)]
WORDS = ["<s>", "<unk>", "user", "assistant", "system", ":", *LETTERS]
BOS, UNK, USER, ASSISTANT, SYSTEM, COLON = range(6)
A, B, C, D = range(6, 10)
TEMPLATE = "<s>{% for m in messages %}{{ m['role'] }}: {{ m['content'] }} {% endfor %}"
SAME = {"max_tokens": 1 << 20, "max_length": 1 << 10, "held_out": 0}


def words(
    template: str | None = TEMPLATE, *, bos: bool = False, letters: bool = False
) -> PreTrainedTokenizerFast:
    """A tokenizer whose tokens are words, or letters; its model has a context of 4 tokens."""
    model = models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<unk>")
    inner = Tokenizer(model)
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    if letters:
        inner.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    if bos:
        inner.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", BOS)]
        )
    found = PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token="<unk>", bos_token="<s>", model_max_length=4
    )
    found.chat_template = template
    return found


TOKENIZER = words()


def read(texts, tokenizer=TOKENIZER, **options) -> Corpus:
    return read_corpus(texts, tokenizer, **{**SAME, **options})


def ids(corpus: Corpus) -> list[list[int]]:
    return [window.tolist() for window in corpus.windows]


def error_of(texts, tokenizer=TOKENIZER, **options) -> str:
    with pytest.raises(ConfigError) as caught:
        read(texts, tokenizer, **options)
    message = str(caught.value)
    assert "expected" in message
    assert "got" in message
    return message


# -- what texts may be -----------------------------------------------------------------------------

CHAT = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b c"}]
CHAT_IDS = [BOS, USER, COLON, A, ASSISTANT, COLON, B, C]


class Dataset:
    """Like a data set of the package datasets: rows, as often as it is asked."""

    def __init__(self, *rows) -> None:
        self.rows = rows

    def __iter__(self):
        yield from self.rows


@pytest.mark.parametrize(
    ("item", "expected"),
    [
        ("a b c", [A, B, C]),
        ({"text": "a b c", "messages": None}, [A, B, C]),
        ({"id": 1, "messages": CHAT}, CHAT_IDS),
        ({"text": CHAT}, CHAT_IDS),
        (CHAT, CHAT_IDS),
        (tuple(CHAT), CHAT_IDS),
        ([A, B, C], [A, B, C]),
        ({"text": [A, B, C]}, [A, B, C]),
        (torch.tensor([A, B, C]), [A, B, C]),
        (torch.tensor([A, B, C], dtype=torch.uint16), [A, B, C]),
        (np.array([A, B, C]), [A, B, C]),
        ([np.int64(A), B], [A, B]),
    ],
)
def test_items(item, expected):
    for texts in ([item], (item,), iter([item]), Dataset(item)):
        found = read(texts)
        assert ids(found) == [expected]
        assert (found.texts, found.tokens) == (1, len(expected))
        assert found.windows[0].dtype == torch.int32
        assert found.held_out == ()


def test_other_iterables():
    both = [[A, B], [C, D]]
    assert ids(read(torch.tensor(both))) == both
    assert ids(read(Dataset({"body": "a b"}, {"body": "c d"}), text_column="body")) == both
    # Token ids need no tokenizer and are copied.
    given_ids = torch.tensor([A, 1 << 30], dtype=torch.int32)
    found = read([given_ids], None)
    given_ids.zero_()
    assert ids(found) == [[A, 1 << 30]]


def test_the_default_device_is_not_used():
    with torch.device("meta"):
        found = read(["a b", [A, B]])
    assert {w.device.type for w in found.windows} == {"cpu"}


def test_a_text_as_the_turn_of_a_user():
    assert ids(read(["a b", CHAT], chat_template=True)) == [CHAT_IDS, [BOS, USER, COLON, A, B]]
    assert ids(read(["a b"], chat_template=False)) == [[A, B]]


def test_special_tokens_come_once_per_text():
    found = read(["a b c d a", CHAT], words(bos=True), max_length=3)
    assert Counter(itertools.chain(*ids(found)))[BOS] == 2


def test_blank_texts_are_skipped():
    found = read(["", "a b", " \n", [], {"text": ""}, {"messages": []}])
    assert (ids(found), found.texts) == ([[A, B]], 1)


def test_no_warning_about_the_length(tmp_path):
    tokenizer = words()
    (path := tmp_path / "x.txt").write_text("a b c d " * 5)
    read(["a b c d " * 5, CHAT], tokenizer)
    read(path, tokenizer)
    assert not tokenizer.deprecation_warnings  # what the tokenizer has warned of


# -- files -----------------------------------------------------------------------------------------

LINES = [
    '"a b c"',
    '{"text": "a b"}',
    "",
    json.dumps(CHAT),
    json.dumps({"messages": CHAT}),
    "[6, 7]",
]
LINES_IDS = [CHAT_IDS, CHAT_IDS, [A, B, C], [A, B], [A, B]]


@pytest.mark.parametrize("name", ["x.jsonl", "x.JSONL"])
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("bom", [b"", b"\xef\xbb\xbf"])
def test_json_lines(tmp_path, name, newline, bom):
    path = tmp_path / name
    content = bom + newline.join(LINES).encode()
    path.write_bytes(content)
    for texts in (path, str(path)):
        found = read(texts)
        assert ids(found) == LINES_IDS
        assert found.texts == 5


@pytest.mark.parametrize("name", ["x.txt", "x.TXT"])
@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("bom", [b"", b"\xef\xbb\xbf"])
def test_a_text_file_is_cut_where_paragraphs_end(tmp_path, name, newline, bom):
    path = tmp_path / name
    paragraphs = ["a a a", "b b\nb b", "c c c c c c c c c", "d"]
    content = bom + "\n\n".join(paragraphs).replace("\n", newline).encode()
    path.write_bytes(content)
    found = read(path, words(bos=True), max_length=12)
    assert ids(found) == [
        [BOS, *[C] * 9], [BOS, *[A] * 3, *[B] * 4], [BOS, D],
    ]  # fmt: skip
    assert found.texts == 3


LONG = "b" * 15


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a a a a a a\n\nb b\nb b b", ["a a a a a a", "b b\nb b b"]),
        # A paragraph that ends in the first half would leave a short piece.
        ("a\n\nb b b\nb b b\nc c c", ["a\n\nb b b\nb b b", "c c c"]),
        (f"a a a a a a\n{LONG} {LONG} {LONG} {LONG} {LONG}", ["a a a a a a", " ".join([LONG] * 5)]),
        (" ".join([LONG] * 12), [" ".join([LONG] * 10), " ".join([LONG] * 2)]),
    ],
)
def test_where_a_text_file_is_cut(tmp_path, text, expected):
    (path := tmp_path / "x.txt").write_text(text)
    found = read(path, max_length=11)  # a token is left for the special tokens of a text
    assert sorted(ids(found)) == sorted(TOKENIZER(piece)["input_ids"] for piece in expected)


@given(text=st.text("abcd\n\n  é日\r", max_size=600), max_length=st.integers(2, 40))
def test_a_text_file_keeps_all_of_its_letters(tmp_path_factory, text, max_length):
    text = f"ab cd\n{text}"
    path = tmp_path_factory.mktemp("text") / "x.txt"
    path.write_bytes(text.encode())
    found = read(path, words(letters=True), max_length=max_length)
    letters = Counter(i for window in ids(found) for i in window if i != UNK)
    expected = Counter({A + n: text.count(letter) for n, letter in enumerate("abcd")})
    assert letters <= expected
    # A window of one token is left out.
    assert (expected - letters).total() <= found.texts


def traced(*arguments, **options) -> tuple[Corpus, int]:
    """Read a corpus, and return the peak memory in bytes with it."""
    tracemalloc.start()
    try:
        return read(*arguments, **options), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("text", [b"x" * 8, b"a b c d\n"])
def test_a_huge_file_is_streamed(tmp_path, text):
    os.mkfifo(path := tmp_path / "x.txt")
    taken = 0

    def write() -> None:
        nonlocal taken
        with contextlib.suppress(BrokenPipeError), path.open("wb", buffering=0) as pipe:
            while taken < 50_000_000:
                taken += pipe.write(text * 1000)

    read(["a b"])
    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    found, peak = traced(path, words(letters=True), max_tokens=1000, max_length=128)
    writer.join(60)
    assert taken < 1 << 20, "more of the file was read than the tokens need and a pipe holds"
    assert peak < 16 << 20
    assert 999 <= found.tokens <= 1000


def test_a_long_line_is_cut_as_if_it_was_read_at_once(tmp_path, monkeypatch):
    (path := tmp_path / "x.txt").write_text("a b c d " * 3000 + "\n" + "a" * 5000 + " b")
    whole = read(path, words(letters=True), max_length=64)
    monkeypatch.setattr(reading, "_CHARACTERS", 100)
    assert ids(read(path, words(letters=True), max_length=64)) == ids(whole)


def test_blank_lines_take_no_memory(tmp_path):
    (path := tmp_path / "x.txt").write_text("\n" * 200_000 + "a b")
    found, peak = traced(path)
    assert (ids(found), found.texts) == ([[A, B]], 1)
    assert peak < 4 << 20


def test_a_huge_file_is_read_as_far_as_it_is_needed(tmp_path, monkeypatch):
    characters = []
    call = PreTrainedTokenizerFast.__call__

    def counted(self, text, *args, **kwargs):
        characters.extend(map(len, text))
        return call(self, text, *args, **kwargs)

    monkeypatch.setattr(PreTrainedTokenizerFast, "__call__", counted)
    (path := tmp_path / "x.txt").write_text("a b c d\n" * 500_000)
    found = read(path, max_tokens=1000, max_length=128)
    assert 2000 <= sum(characters) < 100_000
    assert 999 <= found.tokens <= 1000


# -- errors ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("texts", "parts"),
    [
        (
            "the capital",
            ["a file or a list of texts, got 'the capital'", "Pass [text] for one text"],
        ),
        ("a" * 9999, ["Pass [text]"]),
        ("a\0b", ["Pass [text]"]),
        (Path("nowhere.jsonl"), ["nowhere.jsonl", "an existing file"]),
        (Path(__file__).parent, ["an existing file"]),
        (None, ["a list of texts, got None"]),
        (3, ["a list of texts, got 3"]),
        (b"a b", ["texts[0]: ", "got 97"]),
        ({"train": ["a b"], "test": ["a"]}, ["'train'", "one split"]),
        (torch.tensor([A, B]), ["integers [N]", "got tensor(6)", "each text as one item"]),
        ([], ["texts: ", "got none"]),
        (["", " "], ["got none except blank texts"]),
        (["a", "b"], ["at least 2 tokens", "got 2 of one token"]),
        (["a b", 3.5], ["texts[1]: ", "got 3.5"]),
        (["a b", None], ["texts[1]: ", "got None", "leave out"]),
        ([b"a"], ["got b'a'"]),
        ([A, B], ["texts[0]: ", "got 6", "each text as one item"]),
        ([["a", "b"]], ["texts[0]: ", "got ['a', 'b']", "each text as one item"]),
        ([[[A], [A, B]]], ["texts[0]: ", "got [[6], [6, 7]]"]),
        ([[True, False]], ["got [True, False]"]),
        ([{"text": {"a": 1}}], ["texts[0], column 'text': ", "got {'a': 1}"]),
        ([{"text": None, "messages": CHAT}], ["column 'text'", "got None"]),
        ([{"body": "a", "id": 1}], ["'text' or 'messages'", "columns 'body', 'id'", "text_column"]),
        (CHAT, ["columns 'role', 'content'", "pass a conversation as a list"]),
        ([[{"text": "a"}]], ["texts[0]: ", "{'text': 'a'}", "Rename"]),
        ([[CHAT[0], "b"]], ["texts[0]: ", "got 'b'"]),
        ([torch.tensor([[A]])], ["texts[0]: ", "integers [N]", "tensor([[6]])"]),
        ([torch.tensor([1.0])], ["integers", "tensor([1.])"]),
        ([np.array(["a"])], ["integers", "<U1"]),
        ([[A, -1]], ["from 0 to 31", "got -1"]),
        ([[A, 32]], ["from 0 to 31", "got 32"]),
        ([torch.tensor([1 << 40])], ["from 0 to 31"]),
        (["a \ud800"], ["texts[0]: ", "UTF-8", r"'a \ud800'"]),
    ],
)
def test_errors_of_texts(texts, parts):
    message = error_of(texts)
    for part in parts:
        assert part in message
    assert len(message) < 400


@pytest.mark.parametrize(
    ("name", "content", "parts"),
    [
        ("x.txt", b"", ["got none"]),
        ("x.jsonl", b"\n\n", ["got none"]),
        ("x.txt", b"a\nb\n\xff c", ["x.txt: ", "UTF-8", "0xff"]),
        ("x.txt", "a b".encode("utf-16"), ["Save the file as UTF-8"]),
        ("x.jsonl", b'"a"\n"\xff"', ["x.jsonl: ", "UTF-8", "0xff"]),
        ("x.jsonl", b'"a b"\n{"text"', ["x.jsonl, line 2: ", "JSON", "JSONDecodeError"]),
        ("x.jsonl", b"[" * 100_000, ["line 1", "RecursionError"]),
        ("x.jsonl", b'"a b"\n\n3', ["line 3", "got 3"]),
        ("x.jsonl", b'"a b"\n{"body": ""}', ["line 2", "columns 'body'"]),
        ("x.jsonl", b'{"text": 3}', ["line 1, column 'text'", "got 3"]),
        ("x.json", b"[]", ["x.json: ", "got .json", "Rename"]),
        ("x.parquet", b"PAR1", ["a dataset"]),
        ("x.jsonl.gz", b"not gzip", ["got .gz"]),
        ("x", b"a b", ["got no suffix"]),
    ],
)
def test_errors_of_files(tmp_path, name, content, parts):
    (path := tmp_path / name).write_bytes(content)
    message = error_of(path)
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"max_tokens": 1}, "max_tokens"),
        ({"max_length": 1}, "max_length"),
        ({"max_length": 2.0}, "max_length"),
        ({"held_out": -1}, "held_out"),
        ({"held_out": True}, "held_out"),
        ({"chat_template": "x"}, "chat_template"),
        ({"tokenizer": "gpt2"}, "AutoTokenizer.from_pretrained"),
        ({"tokenizer": None}, "texts[0]: expected token ids without a tokenizer"),
        ({"tokenizer": words(None), "chat_template": True}, "set tokenizer.chat_template"),
        ({"text_column": "body"}, "expected a column 'body', got the columns 'messages'"),
        ({"chat_template": False}, "a text with chat_template=False, got a list of messages"),
        ({"tokenizer": words(None)}, "texts[1], column 'messages': expected a conversation that"),
        ({"tokenizer": words("{{ raise_exception('no turns') }}")}, "TemplateError: no turns"),
    ],
)
def test_errors_of_options(options, part):
    assert part in error_of(["a b", {"messages": CHAT}], **options)


def test_what_needs_a_tokenizer(tmp_path):
    class Processor:
        tokenizer = TOKENIZER

    assert "the `tokenizer` of a processor" in error_of(["a"], Processor())
    (path := tmp_path / "x.txt").write_text("a b")
    assert "without a tokenizer" in error_of(path, None)


# -- windows and parts -----------------------------------------------------------------------------

TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=30)
CORPORA = st.lists(TOKENS, min_size=1, max_size=12).filter(lambda c: any(len(t) > 1 for t in c))


def windows_of(text: list[int], max_length: int) -> list[tuple[int, ...]]:
    """The specification: consecutive windows, without one of a single token."""
    cut = [tuple(text[i : i + max_length]) for i in range(0, len(text), max_length)]
    return [window for window in cut if len(window) > 1]


def tuples(windows) -> list[tuple[int, ...]]:
    return [tuple(window.tolist()) for window in windows]


@given(corpus=CORPORA, max_length=st.integers(2, 12), held_out=st.integers(0, 60))
def test_no_token_is_lost_or_invented(corpus, max_length, held_out):
    found = read(corpus, max_length=max_length, held_out=held_out)
    kept, apart = tuples(found.windows), tuples(found.held_out)
    expected = Counter(w for text in corpus for w in windows_of(text, max_length))
    assert Counter(kept + apart) == expected
    assert found.tokens == sum(map(len, kept))
    assert not set(kept) & set(apart)
    assert kept
    assert bool(apart) == (held_out > 0 and len(expected) > 1)
    for part in (kept, apart):
        assert [len(w) for w in part] == sorted(map(len, part), reverse=True)
    total, held = found.tokens + sum(map(len, apart)), sum(map(len, apart))
    if held > min(2 * held_out, total // 4):  # then it is one window, and its copies
        assert len(set(apart)) <= 1
        assert 2 * held <= total


@given(st.data(), CORPORA, st.integers(2, 12), st.integers(0, 60))
def test_the_order_of_the_texts_does_not_matter(data, corpus, max_length, held_out):
    other = data.draw(st.permutations(corpus))
    total = sum(len(w) for text in corpus for w in windows_of(text, max_length))
    for max_tokens in (1 << 20, max(total, 2)):
        options = {"max_length": max_length, "held_out": held_out, "max_tokens": max_tokens}
        one, two = read(corpus, **options), read(other, **options)
        assert tuples(one.windows) == tuples(two.windows)
        assert tuples(one.held_out) == tuples(two.held_out)
        assert (one.texts, one.tokens) == (two.texts, two.tokens) or max_tokens == total


@given(CORPORA, st.integers(2, 12), st.integers(2, 100))
def test_reading_stops_at_max_tokens(corpus, max_length, max_tokens):
    found = read(corpus, max_length=max_length, max_tokens=max_tokens)
    total = sum(len(w) for text in corpus for w in windows_of(text, max_length))
    assert found.tokens in ({max_tokens, max_tokens - 1} if total >= max_tokens else {total})
    assert min(map(len, found.windows)) >= 2
    # The last window is cut.
    found = read(["a b c", "b c d a"], max_tokens=5)
    assert ids(found) == [[A, B, C], [B, C]]


def test_a_generator_without_an_end():
    read_so_far = []

    def forever():
        for number in itertools.count():
            read_so_far.append(number)
            yield [number % 20, number % 7, 3]

    found = read(forever(), max_tokens=300, held_out=30)
    assert found.tokens + sum(map(len, found.held_out)) == 300
    assert len(read_so_far) == 100


def distinct(count: int, length: int, start: int = 0) -> list[list[int]]:
    """Texts of token ids that share no window."""
    return [[start + i] * length for i in range(count)]


def test_a_text_stays_on_one_side():
    corpus = [list(range(start, start + 40)) for start in range(0, 4000, 40)]
    found = read(corpus, None, held_out=190, max_length=10)
    texts = {window[0].item() // 40 for window in found.held_out}
    assert len(texts) == 5
    assert sum(map(len, found.held_out)) == 200


def test_a_window_shared_by_texts_is_not_held_out():
    corpus = [[100 + i // 2] * 10 + [i] * 10 for i in range(40)]
    found = read(corpus, None, held_out=100, max_length=10)
    assert len(found.held_out) == 10
    assert all(window[0] < 100 for window in found.held_out)


def test_a_window_does_not_keep_its_text_in_memory():
    for window in read([list(range(1000))], None, max_length=10, held_out=100).windows:
        assert window.untyped_storage().nbytes() == 40


@pytest.mark.parametrize(
    ("corpus", "held_out", "expected"),
    [
        ([[1] * 10], 100, []),  # one window
        ([[1] * 10, [1] * 10], 100, []),  # one window, twice
        ([[1] * 10, [2] * 3], 100, [3]),
        (distinct(3, 10), 100, [10]),
        (distinct(100, 10), 1, [10]),  # at least one
        ([[9] * 100, *distinct(8, 30)], 1, [30]),  # within a quarter
        (distinct(8, 10), 0, []),
        # The longest windows.
        ([*distinct(40, 5), *distinct(40, 10, 100), *distinct(40, 7, 200)], 50, [10] * 5),
        # Single windows of one long text, of which at most a quarter.
        ([list(range(1000))], 40, [10] * 4),
        ([list(range(1000))], 4000, [10] * 25),
    ],
)
def test_how_much_is_held_out(corpus, held_out, expected):
    longest = 100 if [9] * 100 in corpus else 10
    found = read(corpus, None, held_out=held_out, max_length=longest)
    assert [len(w) for w in found.held_out] == expected


def test_what_is_held_out_does_not_depend_on_the_process():
    found = read(distinct(100, 10), None, held_out=20)
    assert tuples(found.held_out) == [(28,) * 10, (75,) * 10]


# -- a real tokenizer ------------------------------------------------------------------------------


def test_the_demo_tokenizer(demo_model_path, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(demo_model_path)
    text = "The cache stores keys and values.\n\nÜber 日本語 🙂\n"
    chat = tokenizer.apply_chat_template(CHAT, return_dict=False)
    found = read([text, {"messages": CHAT}], tokenizer)
    assert sorted(ids(found)) == sorted([tokenizer(text)["input_ids"], chat])

    (path := tmp_path / "x.txt").write_text(text * 500)
    found = read(path, tokenizer, max_length=256, held_out=1024)
    lengths = [len(w) for w in (*found.windows, *found.held_out)]
    assert len(lengths) == found.texts  # no piece is longer than a window
    assert sum(lengths) / len(lengths) > 0.85 * 256
