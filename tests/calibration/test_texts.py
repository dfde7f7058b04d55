"""Tests of `read_windows`: types of texts, files, errors, and windows."""

import itertools
import json
import string
import tracemalloc
from collections import Counter
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from hf_fp8kv.calibration.texts import read_windows
from hf_fp8kv.errors import ConfigError

LETTERS = list(string.ascii_lowercase)
WORDS = ["<s>", "<unk>", "user", "assistant", "system", ":", *LETTERS]
BOS, UNK, USER, ASSISTANT, SYSTEM, COLON = range(6)
A, B, C, D = range(6, 10)
TEMPLATE = "<s>{% for m in messages %}{{ m['role'] }}: {{ m['content'] }} {% endfor %}"
ALL_TOKENS = {"max_tokens": 1 << 20, "max_length": 1 << 10}


def make_tokenizer(
    template: str | None = TEMPLATE, *, bos: bool = False, by_letter: bool = False
) -> PreTrainedTokenizerFast:
    """Return a tokenizer of words or letters, for a model with a context of 4 tokens."""
    backend = Tokenizer(
        models.WordLevel({word: token for token, word in enumerate(WORDS)}, unk_token="<unk>")
    )
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    if by_letter:
        backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    if bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", BOS)]
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", model_max_length=4
    )
    tokenizer.chat_template = template
    return tokenizer


TOKENIZER = make_tokenizer()


def read_texts(texts, tokenizer=TOKENIZER, **options) -> list[torch.Tensor]:
    return read_windows(texts, tokenizer, **{**ALL_TOKENS, **options})


def list_window_ids(windows: list[torch.Tensor]) -> list[list[int]]:
    return [window.tolist() for window in windows]


CHAT = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b c"}]
CHAT_IDS = [BOS, USER, COLON, A, ASSISTANT, COLON, B, C]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a b c", [A, B, C]),
        ({"text": "a b c", "messages": None}, [A, B, C]),
        ({"id": 1, "messages": CHAT}, CHAT_IDS),
        (CHAT, CHAT_IDS),
        ([A, B, C], [A, B, C]),
        (torch.tensor([A, B, C]), [A, B, C]),
        (torch.tensor([A, B, C], dtype=torch.uint16), [A, B, C]),
        (np.array([A, B, C]), [A, B, C]),
        ([np.int64(A), B], [A, B]),
    ],
)
@pytest.mark.parametrize("make_collection", [list, tuple, iter])
def test_each_type_of_text_is_tokenized(make_collection, text, expected):
    with torch.device("meta"):  # a default device does not matter
        (window,) = read_texts(make_collection([text]))
    assert window.tolist() == expected
    assert (window.dtype, window.device.type) == (torch.int32, "cpu")
    assert window.untyped_storage().nbytes() == 4 * len(expected)  # not a view of the text


def test_columns_and_token_ids_are_read_unchanged():
    rows = [[A, B], [C, D]]
    assert list_window_ids(read_texts(torch.tensor(rows))) == rows
    texts = [{"body": "a b"}, {"body": "c d"}]
    assert list_window_ids(read_texts(texts, text_column="body")) == rows
    # Token ids need no tokenizer, and are copied.
    ids = torch.tensor([A, 1 << 30], dtype=torch.int32)
    windows = read_texts([ids], None)
    ids.zero_()
    assert list_window_ids(windows) == [[A, 1 << 30]]


def test_chat_template_makes_a_text_a_user_turn():
    assert list_window_ids(read_texts(["a b", CHAT], chat_template=True)) == [
        CHAT_IDS,
        [BOS, USER, COLON, A, B],
    ]
    assert list_window_ids(read_texts(["a b"], chat_template=False)) == [[A, B]]


def test_special_tokens_occur_once_per_text():
    windows = read_texts(["a b c d a", CHAT], make_tokenizer(bos=True), max_length=3)
    assert Counter(itertools.chain(*list_window_ids(windows)))[BOS] == 2


def test_blank_texts_are_skipped():
    windows = read_texts(["", "a b", " \n", [], {"text": ""}, {"messages": []}])
    assert list_window_ids(windows) == [[A, B]]


LINES = [
    '"a b c"',
    '{"text": "a b"}',
    "",
    json.dumps(CHAT),
    json.dumps({"messages": CHAT}),
    "[6, 7]",
]
LINE_IDS = [CHAT_IDS, CHAT_IDS, [A, B, C], [A, B], [A, B]]


@pytest.mark.parametrize(
    ("name", "newline", "bom"), [("x.jsonl", "\n", b""), ("x.JSONL", "\r\n", b"\xef\xbb\xbf")]
)
def test_each_json_line_is_a_text_or_a_conversation(tmp_path, name, newline, bom):
    path = tmp_path / name
    path.write_bytes(bom + newline.join(LINES).encode())
    assert list_window_ids(read_texts(path)) == list_window_ids(read_texts(str(path))) == LINE_IDS


@pytest.mark.parametrize(
    ("name", "newline", "bom"),
    [("x.txt", "\n", b""), ("x.TXT", "\r\n", b"\xef\xbb\xbf"), ("x.txt", "\r", b"")],
)
def test_a_text_file_is_one_text(tmp_path, name, newline, bom):
    (path := tmp_path / name).write_bytes(bom + newline.join(["a", "", "b b", "c d"]).encode())
    windows = read_texts(path, make_tokenizer(bos=True), max_length=4)
    assert list_window_ids(windows) == [[BOS, A, B, B], [C, D]]


@pytest.mark.parametrize("text", ["x" * 8, "a b c d\n"])
def test_a_huge_file_is_read_only_as_far_as_needed(tmp_path, text):
    (path := tmp_path / "x.txt").write_text(text * 2**21)
    tracemalloc.start()
    windows = read_texts(path, make_tokenizer(by_letter=True), max_tokens=1000, max_length=128)
    assert tracemalloc.get_traced_memory()[1] < path.stat().st_size / 2
    tracemalloc.stop()
    assert 999 <= sum(map(len, windows)) <= 1000


# Each rule once. A pair of a name and bytes is a file.
@pytest.mark.parametrize(
    ("texts", "options", "fragments"),
    [
        ("a" * 9999, {}, ["a file or a list of texts, got 'aaa", "Pass [text] for one text"]),
        (Path(__file__).parent, {}, ["an existing file"]),
        ({"train": ["a b"], "test": ["a"]}, {}, ["'train'", "one split"]),
        (3, {}, ["a list of texts, got 3"]),
        ([], {}, ["texts: ", "got none"]),
        (["a", "b"], {}, ["at least 2 tokens", "got none"]),
        (["a b", None], {}, ["texts[1]: ", "got None", "leave out"]),
        ([["a", "b"]], {}, ["texts[0]: ", "got ['a', 'b']", "each text as one item"]),
        ([[True, False]], {}, ["got [True, False]"]),
        (CHAT, {}, ["'text' or 'messages', got the columns 'role', 'content'", "text_column"]),
        ([[{"text": "a"}]], {}, ["texts[0]: ", "{'text': 'a'}", "Rename"]),
        ([[A, -1]], {}, ["from 0 to 31", "got -1"]),
        (["a \ud800"], {}, ["texts[0]: ", "UTF-8", r"'a \ud800'"]),
        (["a b"], {"max_tokens": 1}, ["max_tokens"]),
        (["a b"], {"chat_template": "x"}, ["chat_template"]),
        (["a b"], {"tokenizer": "gpt2"}, ["AutoTokenizer.from_pretrained"]),
        (["a b"], {"tokenizer": None}, ["texts[0]: expected token ids without a tokenizer"]),
        ([CHAT], {"chat_template": False}, ["a text with chat_template=False, got a list"]),
        ([CHAT], {"tokenizer": make_tokenizer(None)}, ["expected a conversation that"]),
        (
            [CHAT],
            {"tokenizer": make_tokenizer("{{ raise_exception('no turns') }}")},
            ["TemplateError: no turns"],
        ),
        (("x.txt", "a b".encode("utf-16")), {}, ["x.txt: ", "Save the file as UTF-8"]),
        (("x.jsonl", b'"a"\n"\xff"'), {}, ["x.jsonl: ", "UTF-8", "0xff"]),
        (("x.jsonl", b'"a b"\n{"text"'), {}, ["x.jsonl, line 2: ", "JSON", "JSONDecodeError"]),
        (("x.jsonl.gz", b"not gzip"), {}, ["got .gz", "Rename"]),
    ],
)
def test_invalid_texts_are_refused(tmp_path, texts, options, fragments):
    if isinstance(texts, tuple):
        name, file_bytes = texts
        texts = tmp_path / name
        texts.write_bytes(file_bytes)
    with pytest.raises(ConfigError, match="expected") as error:
        read_texts(texts, **options)
    message = str(error.value)
    assert all(fragment in message for fragment in ("got", *fragments)), message
    assert len(message) < 500


LISTS_OF_TEXTS = st.lists(
    st.lists(st.integers(0, 3), min_size=1, max_size=30), min_size=1, max_size=12
).filter(lambda texts: any(len(text) > 1 for text in texts))


def split_windows(text: list[int], max_length: int) -> list[tuple[int, ...]]:
    """Return the expected windows of a text, which are consecutive and have at least two tokens."""
    windows = [tuple(text[i : i + max_length]) for i in range(0, len(text), max_length)]
    return [window for window in windows if len(window) > 1]


@given(texts=LISTS_OF_TEXTS, max_length=st.integers(2, 12))
def test_no_token_is_lost_or_added(texts, max_length):
    windows = list_window_ids(read_texts(texts, max_length=max_length))
    expected = Counter(window for text in texts for window in split_windows(text, max_length))
    assert Counter(map(tuple, windows)) == expected
    assert [len(window) for window in windows] == sorted(map(len, windows), reverse=True)


@given(st.data(), LISTS_OF_TEXTS, st.integers(2, 12))
def test_the_order_of_the_texts_does_not_matter(data, texts, max_length):
    permuted_texts = data.draw(st.permutations(texts))
    total = sum(len(window) for text in texts for window in split_windows(text, max_length))
    for max_tokens in (1 << 20, max(total, 2)):
        options = {"max_length": max_length, "max_tokens": max_tokens}
        expected = list_window_ids(read_texts(texts, **options))
        assert list_window_ids(read_texts(permuted_texts, **options)) == expected


@given(LISTS_OF_TEXTS, st.integers(2, 12), st.integers(2, 100))
def test_reading_stops_at_max_tokens(texts, max_length, max_tokens):
    windows = read_texts(texts, max_length=max_length, max_tokens=max_tokens)
    total = sum(len(window) for text in texts for window in split_windows(text, max_length))
    allowed_counts = (max_tokens, max_tokens - 1) if total >= max_tokens else (total,)
    assert sum(map(len, windows)) in allowed_counts
    assert min(map(len, windows)) >= 2
    # The last window is shortened.
    assert list_window_ids(read_texts(["a b c", "b c d a"], max_tokens=5)) == [[A, B, C], [B, C]]
