"""What a calibration reads: every kind of texts, no token lost, the same parts in any order."""

import contextlib
import gzip
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

from hf_fp8kv.calibration import text_files
from hf_fp8kv.calibration.corpus import Corpus, read_corpus
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
    assert ";" in message
    return message


# -- what texts may be -----------------------------------------------------------------------------

CHAT = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b c"}]
SHARE_GPT = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b c"}]
ROLES = [
    {"from": who, "value": text} for who, text in (("system", "a"), ("user", "b"), ("chatgpt", "c"))
]
CHAT_IDS = [BOS, USER, COLON, A, ASSISTANT, COLON, B, C]


class Dataset:
    """Like a data set of the package datasets: rows, as often as it is asked."""

    def __init__(self, *rows) -> None:
        self.rows = rows

    def __iter__(self):
        yield from self.rows


class Indexed:
    """Like a map-style data set of torch."""

    def __getitem__(self, index: int) -> str:
        return ["a b", "c d"][index]


@pytest.mark.parametrize(
    ("item", "expected"),
    [
        ("a b c", [A, B, C]),
        ({"text": "a b c", "messages": None}, [A, B, C]),
        ({"id": 1, "messages": CHAT}, CHAT_IDS),
        ({"conversations": SHARE_GPT}, CHAT_IDS),
        ({"text": CHAT}, CHAT_IDS),
        (CHAT, CHAT_IDS),
        (tuple(SHARE_GPT), CHAT_IDS),
        (ROLES, [BOS, SYSTEM, COLON, A, USER, COLON, B, ASSISTANT, COLON, C]),
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
        assert (found.texts, found.tokens, found.complete) == (1, len(expected), True)
        assert found.windows[0].dtype == torch.int32
        assert found.held_out == ()


def test_other_iterables():
    both = [[A, B], [C, D]]
    assert ids(read(Indexed())) == both
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


@pytest.mark.parametrize("name", ["x.jsonl", "x.json-lines", "x.NDJSON", "x.jsonl.gz"])
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("bom", [b"", b"\xef\xbb\xbf"])
def test_json_lines(tmp_path, name, newline, bom):
    path = tmp_path / name
    content = bom + newline.join(LINES).encode()
    path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    for texts in (path, str(path)):
        found = read(texts)
        assert ids(found) == LINES_IDS
        assert found.texts == 5


@pytest.mark.parametrize("name", ["x.txt", "x", "x.md", "x.txt.gz"])
@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("bom", [b"", b"\xef\xbb\xbf"])
def test_a_text_file_is_cut_where_paragraphs_end(tmp_path, name, newline, bom):
    path = tmp_path / name
    paragraphs = ["a a a", "b b\nb b", "c c c c c c c c c", "d"]
    content = bom + "\n\n".join(paragraphs).replace("\n", newline).encode()
    path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
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
        (" ".join([LONG] * 11), [" ".join([LONG] * 10), LONG]),
        ("\n\n  a\n  b\n \n", ["  a\n  b"]),
    ],
)
def test_where_a_text_file_is_cut(tmp_path, text, expected):
    (path := tmp_path / "x.txt").write_text(text)
    found = text_files.split_text_file(path, lambda units: [len(u.split()) for u in units], 10, 32)
    assert list(found) == expected


@given(
    text=st.text("abcd\n\n  é日\r", max_size=600),
    max_length=st.integers(2, 40),
    start=st.sampled_from([0, (1 << 16) - 300, (1 << 16) - 40, (1 << 16) - 1]),
)
def test_a_text_file_keeps_all_of_its_words(tmp_path_factory, text, max_length, start):
    """Also where a character or a line end lies on both sides of the 64 KiB that are read."""
    text = ("ab cd\n" * (start // 6 + 1))[:start] + text
    path = tmp_path_factory.mktemp("text") / "x.txt"
    path.write_bytes(text.encode())
    count = lambda units: [len(unit.split()) for unit in units]  # noqa: E731
    found = list(text_files.split_text_file(path, count, max_length, 32))
    # Parts of a word of more than 32 letters may be on both sides of a cut.
    assert "".join("".join(found).split()) == "".join(text.split())
    assert all(len(piece.split()) <= max_length for piece in found if len(piece) > 32)


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
    assert taken < 1 << 20, "more of the file was read than is needed, and what a pipe holds"
    assert peak < 16 << 20
    assert not found.complete
    assert 999 <= found.tokens <= 1000


def test_blank_lines_take_no_memory(tmp_path):
    (path := tmp_path / "x.txt").write_text("\n" * 200_000 + "a b")
    found, peak = traced(path)
    assert (ids(found), found.texts) == ([[A, B]], 1)
    assert peak < 4 << 20


def test_a_huge_text_is_tokenised_as_far_as_it_is_read(monkeypatch):
    characters = []
    call = PreTrainedTokenizerFast.__call__

    def counted(self, text, *args, **kwargs):
        characters.append(len(text))
        return call(self, text, *args, **kwargs)

    monkeypatch.setattr(PreTrainedTokenizerFast, "__call__", counted)
    found = read(["a b c d " * 6_250_000], max_tokens=1000, max_length=128)
    assert 2000 <= sum(characters) < 100_000
    assert found.tokens == 1000


@pytest.mark.parametrize("gap", [*range(1150, 1200, 3), 5000, 100_000])
def test_where_a_text_is_cut_for_the_tokenizer_does_not_show(gap):
    found = read(["a " * 9 + " " * gap + "user" + " b" * 200], max_tokens=10)
    assert ids(found) == [[A] * 9 + [USER]]


# -- errors ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("texts", "parts"),
    [
        (
            "the capital",
            ["a file or a list of texts, got 'the capital'", "pass [text] for one text"],
        ),
        ("a" * 9999, ["pass [text]"]),
        ("a\0b", ["pass [text]"]),
        (Path("nowhere.jsonl"), ["nowhere.jsonl", "no such file"]),
        (Path(__file__).parent, ["got a folder"]),
        (None, ["got NoneType"]),
        (3, ["got int"]),
        (b"a b", ["got bytes"]),
        ({"train": ["a b"], "test": ["a"]}, ["'train', 'test'", "a split"]),
        (torch.tensor([A, B]), ["the shape [2]", "pass [ids]"]),
        ([], ["texts: ", "got none"]),
        (["", " "], ["got none that is not blank"]),
        (["a", "b"], ["at least 2 tokens", "got 2 of one token"]),
        (["a b", 3.5], ["texts[1]: ", "got float"]),
        (["a b", None], ["texts[1]: ", "got None", "leave out"]),
        ([b"a"], ["got bytes", "decode"]),
        ([A, B], ["texts[0]: ", "got int", "pass [ids]"]),
        ([["a", "b"]], ["texts[0]: ", "got a list of str", "each text as one item"]),
        ([[True, False]], ["got a list of bool"]),
        ([{"text": {"a": 1}}], ["texts[0], column 'text': ", "got dict"]),
        ([{"text": None, "messages": CHAT}], ["column 'text'", "got None"]),
        ([{"body": "a", "id": 1}], ["'text' or 'messages'", "columns 'body', 'id'", "text_column"]),
        (CHAT, ["columns 'role', 'content'", "pass [messages] for one"]),
        ([[{"text": "a"}]], ["texts[0], message 1: ", "{'text': 'a'}", "one by one"]),
        ([[CHAT[0], "b"]], ["texts[0], message 2: ", "got str"]),
        ([[{"from": "robot", "value": "a"}]], ["message 1", "human", "'robot'", "rename"]),
        ([torch.tensor([[A]])], ["texts[0]: ", "the shape [1, 1]"]),
        ([torch.tensor([1.0])], ["integers", "float32"]),
        ([np.array(["a"])], ["integers", "<U1"]),
        ([[A, -1]], ["from 0 to 31", "got -1"]),
        ([[A, 32]], ["from 0 to 31", "got 32"]),
        ([torch.tensor([1 << 40])], ["from 0 to 31"]),
        (["a \ud800"], ["texts[0]: ", "UTF-8", r"'\ud800' at character 2"]),
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
        ("x.txt", b"", ["x.txt: ", "got none"]),
        ("x.jsonl", b"\n\n", ["x.jsonl: ", "got none"]),
        ("x.txt", b"a\nb\n\xff c", ["x.txt, line 3: ", "UTF-8", "0xff"]),
        ("x.txt", b"a b\n" * 40_000 + b"\xe2\x82", ["line 40001", "0xe2"]),
        ("x.txt", "a b".encode("utf-16"), ["got UTF-16", "save the file as UTF-8"]),
        ("x.jsonl", b'"a"\n"\xff"', ["x.jsonl, line 2: ", "UTF-8", "0xff"]),
        ("x.jsonl", b'"a b"\n{"text"', ["x.jsonl, line 2: ", "JSON", "JSONDecodeError"]),
        ("x.jsonl", b"[" * 100_000, ["line 1", "RecursionError"]),
        ("x.jsonl", b'"a b"\n\n3', ["line 3", "got int"]),
        ("x.jsonl", b'"a b"\n{"body": ""}', ["line 2", "columns 'body'"]),
        ("x.jsonl", b'{"text": 3}', ["line 1, column 'text'", "got int"]),
        ("x.jsonl", b"a" * ((1 << 26) + 1), ["line 1", "64 MiB"]),
        ("x.json", b"[]", [".json;", "json.load"]),
        ("x.parquet", b"PAR1", ["from_parquet"]),
        ("x.jsonl.gz", b"not gzip", ["a gzip file", "BadGzipFile"]),
        (
            "x.txt.gz",
            gzip.compress(b"a b" * 99, mtime=0)[:-9],
            ["a gzip file", "EOFError", "cut off"],
        ),
    ],
)
def test_errors_of_files(tmp_path, name, content, parts):
    (path := tmp_path / name).write_bytes(content)
    message = error_of(path)
    for part in parts:
        assert part in message
    assert str(path) in message


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"max_tokens": 1}, "max_tokens"),
        ({"max_length": 1}, "max_length"),
        ({"max_length": 2.0}, "max_length"),
        ({"held_out": -1}, "held_out"),
        ({"held_out": True}, "held_out"),
        ({"text_column": None}, "text_column"),
        ({"chat_template": "x"}, "chat_template"),
        ({"tokenizer": "gpt2"}, "AutoTokenizer.from_pretrained"),
        ({"tokenizer": None}, "texts[0]: expected token ids, since there is no tokenizer"),
        ({"tokenizer": words(None), "chat_template": True}, "chat_template=True"),
        ({"text_column": "body"}, "expected a column 'body', got the columns 'messages'"),
        ({"chat_template": False}, "since chat_template=False, got a list of messages"),
        ({"tokenizer": words(None)}, "texts[1], column 'messages': expected a tokenizer with"),
        ({"tokenizer": words("{{ raise_exception('no turns') }}")}, "TemplateError: no turns"),
    ],
)
def test_errors_of_options(options, part):
    assert part in error_of(["a b", {"messages": CHAT}], **options)


def test_what_needs_a_tokenizer(tmp_path):
    class Processor:
        tokenizer = TOKENIZER

    assert "pass its tokenizer" in error_of(["a"], Processor())
    (path := tmp_path / "x.txt").write_text("a b")
    assert "there is no tokenizer" in error_of(path, None)


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
        assert one.digest == two.digest
        assert (one.texts, one.tokens) == (two.texts, two.tokens) or max_tokens == total
        assert one.complete == two.complete


@given(CORPORA, st.integers(2, 12), st.integers(2, 100))
def test_reading_stops_at_max_tokens(corpus, max_length, max_tokens):
    found = read(corpus, max_length=max_length, max_tokens=max_tokens)
    total = sum(len(w) for text in corpus for w in windows_of(text, max_length))
    assert found.tokens in ({max_tokens, max_tokens - 1} if total >= max_tokens else {total})
    assert found.complete == (found.tokens < max_tokens - 1)
    assert min(map(len, found.windows)) >= 2
    # The last window is cut.
    found = read(["a b c", "b c d a"], max_tokens=5)
    assert (ids(found), found.complete) == ([[A, B, C], [B, C]], False)


def test_a_generator_without_an_end():
    read_so_far = []

    def forever():
        for number in itertools.count():
            read_so_far.append(number)
            yield [number % 20, number % 7, 3]

    found = read(forever(), max_tokens=300, held_out=30)
    assert found.tokens + sum(map(len, found.held_out)) == 300
    assert len(read_so_far) == 100
    assert not found.complete


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


def test_the_digest_knows_where_windows_end_and_parts_part():
    def digest(windows, held_out=()) -> str:
        tensors = [
            tuple(torch.tensor(w, dtype=torch.int32) for w in p) for p in (windows, held_out)
        ]
        return Corpus(*tensors, texts=1, tokens=1, complete=True).digest

    found = [
        digest([[1, 2], [3, 4]]), digest([[1, 2, 3, 4]]), digest([[1, 2]], [[3, 4]]),
        digest([[1, 2, 3], [4]]), digest([], [[1, 2], [3, 4]]), digest([[1, 2], [4, 3]]),
    ]  # fmt: skip
    assert len(set(found)) == len(found)


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

    # A long text is tokenised in part: its tokens are the same as in the whole.
    whole = tokenizer(text * 5000)["input_ids"]
    found = read([text * 5000], tokenizer, max_tokens=700, max_length=700)
    assert ids(found) == [whole[:700]]
