"""A cache over several calls of `generate()`: only what it does not hold is computed."""

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, pipeline

from hf_fp8kv import ConfigError, FP8PagedCache, OutOfPagesError, disable, enable
from hf_fp8kv.attention.reuse import CHUNKS_BEGIN_EMPTY
from hf_fp8kv.cache.held_text import Text
from tests.helpers.assertions import assert_same
from tests.helpers.margins import wide_margins
from tests.helpers.serve_process import save_chat_model
from tests.helpers.tiny_models import tiny

pytestmark = pytest.mark.text

# Token 0 is padding: transformers takes it for that wherever it stands in a prompt.
GREEDY = {"max_new_tokens": 9, "do_sample": False, "pad_token_id": 0, "suppress_tokens": [0]}
STORED = {"prefill": "stored", "page_size": 8}
LEAST_MARGIN = 1e-5
# Windows of 8 tokens.
MODELS = ("gqa", "mha", "sliding", "sliding_and_full", "kv_sharing", "latent", "sparse", "hybrid")
ENDS_WITH_STATE = ("sliding", "sliding_and_full", "kv_sharing", "hybrid")


class Chat:
    """An enabled model whose calls are counted: the tokens that each computes."""

    def __init__(self, name: str, **keywords: Any) -> None:
        self.model, _ = tiny(name, max_position_embeddings=512)
        enable(self.model, **STORED)
        self.calls: list[int] = []
        self.model.register_forward_pre_hook(self._count, with_kwargs=True)
        self.cache = self.new_cache(**keywords)
        self.random = torch.Generator().manual_seed(5)

    def _count(self, _model: Any, _args: Any, kwargs: dict[str, Any]) -> None:
        if kwargs["input_ids"] is not None:
            self.calls.append(kwargs["input_ids"].shape[1])

    def new_cache(self, **keywords: Any) -> FP8PagedCache:
        return FP8PagedCache(self.model.config, **{**STORED, **keywords})

    def words(self, count: int, rows: int = 1) -> torch.Tensor:
        return torch.randint(2, 98, (rows, count), generator=self.random)

    def answer(self, ids: torch.Tensor, **keywords: Any) -> tuple[torch.Tensor, int]:
        """Return what the model says, as with a fresh cache, and the prompt's computed tokens."""
        held = self.cache.host_length()
        keywords = {**GREEDY, **keywords}
        self.calls.clear()
        said = self.model.generate(ids, past_key_values=self.cache, **keywords)
        computed = sum(self.calls) - keywords["max_new_tokens"] + 1
        if "num_beams" not in keywords:
            keywords["logits_processor"] = wide_margins(LEAST_MARGIN)
        expected = self.model.generate(ids, past_key_values=self.new_cache(), **keywords)
        assert_same(said, expected, f"{ids.shape[1]} tokens on a cache of {held}")
        for group in self.cache.groups.values():
            group.table.check()
        return said, computed


def expect_prefix(name: str, kept: int) -> int:
    """What of a prefix that is not all of the cache remains."""
    return 0 if name in ENDS_WITH_STATE else kept


@pytest.mark.parametrize("name", MODELS)
def test_six_turns_compute_their_new_tokens_only(name: str) -> None:
    chat = Chat(name)
    text = chat.words(21)
    for turn in range(6):
        said, computed = chat.answer(text)
        # The answer's last token was never put into the cache.
        assert computed == (21 if turn == 0 else 8), turn
        text = torch.cat([said, chat.words(7)], 1)
    assert chat.cache.memory_footprint()["reused"] == sum(29 + 16 * turn for turn in range(5))


@pytest.mark.parametrize("name", MODELS)
def test_another_text_goes_on_where_the_two_part(name: str) -> None:
    chat = Chat(name)
    said, _ = chat.answer(chat.words(37))
    # The end of the answer is another one, as where a template writes it again.
    edited = torch.cat([said[:, :-4], chat.words(6)], 1)
    said, computed = chat.answer(edited)
    window_is_there = name not in ("hybrid",)
    assert computed == (6 if window_is_there else edited.shape[1])
    # A word in the middle.
    said[0, 20] = (said[0, 20] + 1) % 90 + 2
    again, computed = chat.answer(said)
    assert computed == said.shape[1] - expect_prefix(name, 20)
    # The same prompt, and a shorter one: the last token has to be computed.
    _, computed = chat.answer(said)
    assert computed == said.shape[1] - expect_prefix(name, said.shape[1] - 1)
    _, computed = chat.answer(again[:, :30])
    assert computed == 30 - expect_prefix(name, 29)
    # Nothing in common.
    other = said.clone()
    other[0, 0] = (other[0, 0] + 1) % 90 + 2
    _, computed = chat.answer(other)
    assert computed == other.shape[1]


@pytest.mark.parametrize("name", ["sliding", "sliding_and_full"])
def test_windows_that_record_can_go_back(name: str) -> None:
    chat = Chat(name)
    chat.cache.activate_past_recording()
    said, _ = chat.answer(chat.words(37))
    said[0, 20] = (said[0, 20] + 1) % 90 + 2
    _, computed = chat.answer(said)
    assert computed == said.shape[1] - 20


@pytest.mark.parametrize("room", [None, 130])
@pytest.mark.parametrize("name", ["gqa", "sliding_and_full", "latent"])
def test_preallocated_and_chunked(name: str, room: int | None) -> None:
    chat = Chat(name, max_cache_len=room)
    how = {"prefill_chunk_size": 5, "disable_compile": True}
    said, computed = chat.answer(chat.words(21), **how)
    assert computed == 21
    said, computed = chat.answer(torch.cat([said, chat.words(12)], 1), **how)
    assert computed == (42 if CHUNKS_BEGIN_EMPTY else 13)
    _, computed = chat.answer(said[:, :-12], **how)
    kept = 0 if CHUNKS_BEGIN_EMPTY else expect_prefix(name, said.shape[1] - 13)
    assert computed == said.shape[1] - 12 - kept


@pytest.mark.parametrize("name", ["gqa", "mha", "sliding_and_full"])
def test_a_padded_batch(name: str) -> None:
    chat = Chat(name)
    ids, mask = chat.words(21, rows=3), torch.ones(3, 21, dtype=torch.long)
    ids[1, :5] = mask[1, :5] = 0
    said, _ = chat.answer(ids, attention_mask=mask)

    def grown(width: int, pads: int) -> tuple[torch.Tensor, torch.Tensor]:
        more = torch.cat([said, chat.words(width, rows=3)], 1)
        mask = torch.ones_like(more)
        mask[1, :pads] = 0
        return more, mask

    ids, mask = grown(7, 5)
    said, computed = chat.answer(ids, attention_mask=mask)
    assert computed == 8
    # What is padding is the same in number of tokens, but not in ids.
    ids, mask = grown(4, 5)
    ids[1, :5] = chat.words(5)[0]
    said, computed = chat.answer(ids, attention_mask=mask)
    assert computed == 5
    # A row with less padding has its tokens at other positions.
    ids, mask = grown(3, 4)
    said, computed = chat.answer(ids, attention_mask=mask)
    assert computed == ids.shape[1] - expect_prefix(name, 4)


def test_rows_in_another_order_and_number() -> None:
    chat = Chat("gqa")
    said, _ = chat.answer(chat.words(21, rows=3))
    more = torch.cat([said, chat.words(7, rows=3)], 1)
    said, computed = chat.answer(more[torch.tensor([2, 0, 2, 1])])
    assert computed == 8
    _, computed = chat.answer(torch.cat([said[1:2], chat.words(2)], 1))
    assert computed == 3
    said, _ = chat.answer(said[:1], num_beams=3)
    # One of the beams in the cache is the text, or has most of it in common.
    _, computed = chat.answer(torch.cat([said, chat.words(4)], 1))
    assert computed < 4 + GREEDY["max_new_tokens"]


def test_what_a_cache_was_told_follows_what_is_done_to_it() -> None:
    chat = Chat("gqa")
    said, _ = chat.answer(chat.words(21, rows=2))
    chat.cache.crop(-5)
    twin = chat.cache.fork()
    twin.reorder_cache(torch.tensor([1, 0]))
    assert chat.cache.text is not None
    assert twin.text is not None
    assert_same(chat.cache.text.ids, said[:, :24])
    assert_same(twin.text.ids, said[[1, 0], :24])
    chat.cache.batch_repeat_interleave(2)
    assert_same(chat.cache.text.ids, said[:, :24].repeat_interleave(2, 0))
    twin.reset()
    assert twin.text is None
    _, computed = chat.answer(torch.cat([said[:, :22], chat.words(4, rows=2)], 1)[[1, 0]])
    assert computed == 4


@torch.no_grad()
def test_tokens_that_a_cache_was_not_told() -> None:
    """Neither a wrong answer nor an exception where the prompt begins with what is there."""
    chat = Chat("gqa")
    said, _ = chat.answer(chat.words(21))
    more = torch.cat([said, chat.words(7)], 1)
    chat.model(input_ids=more[:, 29:33], past_key_values=chat.cache)  # by hand
    _, computed = chat.answer(more)
    assert computed == 37 - 33
    chat.cache.reset()
    chat.model(input_ids=more[:, :20], past_key_values=chat.cache)
    with pytest.raises(ConfigError, match="more than 20 tokens"):
        chat.answer(more[:, :20])
    assert chat.cache.host_length() == 20
    _, computed = chat.answer(more)
    assert computed == 17
    # Fewer tokens than the text has, as libraries leave that drop some.
    for layer in chat.cache.layers:
        layer.crop(-3)
    with pytest.raises(ConfigError, match="cannot tell"):
        chat.answer(more[:, :30])


def test_tokens_that_do_not_say_everything() -> None:
    chat = Chat("gqa")
    ids = chat.words(21)
    # Other positions.
    positions = torch.arange(3, 24)[None]
    chat.answer(ids, position_ids=positions)
    _, computed = chat.answer(ids)
    assert computed == 21
    # Embeddings.
    chat.cache.reset()
    embeds = chat.model.get_input_embeddings()(ids)
    with torch.no_grad():
        chat.model.generate(
            inputs_embeds=embeds, past_key_values=chat.cache, max_new_tokens=4, pad_token_id=0
        )
    assert chat.cache.text is None


def test_opting_out() -> None:
    chat = Chat("gqa", reuse_prefix=False)
    said, _ = chat.answer(chat.words(21))
    _, computed = chat.answer(torch.cat([said, chat.words(7)], 1))
    assert computed == 8
    assert chat.cache.text is None
    with pytest.raises(ConfigError, match="does not hold yet"):
        chat.model.generate(
            said[:, :4], attention_mask=torch.ones(1, 4), past_key_values=chat.cache, **GREEDY
        )
    assert not chat.cache.fork().reuse_prefix


@pytest.mark.parametrize("name", ["gqa", "sliding_and_full", "skipped"])
def test_a_failed_prompt_leaves_what_was_there(name: str) -> None:
    """And nobody takes it for the beginning of another text."""
    skipped = {"skip_layers": ["sliding_attention"]} if name == "skipped" else {}
    chat = Chat("gqa" if name == "gqa" else "sliding_and_full", max_pages=10, **skipped)
    said, _ = chat.answer(chat.words(21, rows=1 + (name == "gqa")))
    ids = torch.cat([said, chat.words(60, rows=len(said))], 1)
    with pytest.raises(OutOfPagesError):
        chat.model.generate(ids, past_key_values=chat.cache, **GREEDY)
    _, computed = chat.answer(ids[:, :31], max_new_tokens=5)
    assert computed == (31 if name == "skipped" else 2)
    with pytest.raises(OutOfPagesError):
        chat.model.generate(ids, past_key_values=chat.cache, **GREEDY)
    _, computed = chat.answer(chat.words(38, rows=len(said)), max_new_tokens=2)
    assert computed == 38


@pytest.mark.parametrize("name", ["gqa", "sliding_and_full"])
@pytest.mark.parametrize(
    ("call", "layer", "known"), [(1, 1, 0), (4, 0, 22), (4, 1, 0)], ids=["prompt", "step", "layers"]
)
def test_an_interrupted_chat(name: str, call: int, layer: int, known: int) -> None:
    """Somebody stops an answer, between two layers or before the first, and asks again."""
    calls: list[int] = []

    def interrupt(*_: Any) -> None:
        calls.append(1)
        if len(calls) == call:
            raise KeyboardInterrupt

    chat = Chat(name)
    ids = chat.words(21)
    said, _ = chat.answer(ids)
    chat.cache.reset()
    handle = chat.model.model.layers[layer].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        chat.model.generate(ids, past_key_values=chat.cache, **GREEDY)
    handle.remove()
    edited = torch.cat([said[:, :22], chat.words(10)], 1)  # one token less than is held
    _, computed = chat.answer(edited)
    assert computed == 32 - known
    _, computed = chat.answer(edited[:, :32])
    assert computed == 1 or name in ENDS_WITH_STATE


@pytest.mark.parametrize("call", [3, 4, 5])
@pytest.mark.parametrize(
    ("name", "keywords"),
    [("hybrid", {}), ("gqa", {"skip_layers": [0]}), ("gqa", {"skip_layers": [1]})],
    ids=str,
)
def test_an_interrupted_chat_with_layers_of_transformers(
    name: str, keywords: dict[str, Any], call: int
) -> None:
    """One of the two layers has stored the last token of what is then told, the other has not."""
    calls: list[int] = []

    def interrupt(*_: Any) -> None:
        calls.append(1)
        if len(calls) == call:
            raise KeyboardInterrupt

    chat = Chat(name, **keywords)
    ids = chat.words(21)
    said, _ = chat.answer(ids)
    chat.cache.reset()
    handle = chat.model.model.layers[1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        chat.model.generate(ids, past_key_values=chat.cache, **GREEDY)
    handle.remove()
    more = torch.cat([said, chat.words(5)], 1)
    _, computed = chat.answer(more)
    assert computed == more.shape[1]


def test_every_step_of_other_decoding_is_told() -> None:
    """Drafts that are thrown away are not part of the text."""
    chat = Chat("gqa")
    text = chat.words(6).repeat(1, 5)
    said, _ = chat.answer(text)
    chat.cache.reset()
    drafted = chat.model.generate(
        text, past_key_values=chat.cache, prompt_lookup_num_tokens=4, **GREEDY
    )
    assert_same(drafted, said)
    known = chat.cache.text
    assert known is None or torch.equal(known.ids, said[:, : known.length])


def test_enabling_adds_two_methods_and_disabling_removes_them() -> None:
    model, inputs = tiny("gqa")
    before = dict(vars(model))
    enable(model, **STORED)
    for again in range(2):
        twin = pickle.loads(pickle.dumps(model)) if again else copy.deepcopy(model)
        cache = FP8PagedCache(twin.config, **STORED)
        twin.generate(**inputs, past_key_values=cache, **GREEDY)
        assert cache.text is not None, "the copy's own methods"
        for name in ("_prefill", "prepare_inputs_for_generation"):
            assert vars(twin)[name]._model() is twin
    enable(model, **STORED)
    disable(model)
    assert vars(model).keys() == before.keys()
    stock = DynamicCache(config=model.config)
    model.generate(**inputs, past_key_values=stock, **GREEDY)


@pytest.fixture
def writer(tmp_path: Any) -> Iterator[Any]:
    folder = save_chat_model(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = enable(AutoModelForCausalLM.from_pretrained(folder).eval(), **STORED)
    yield pipeline("text-generation", model=model, tokenizer=tokenizer)
    disable(model)


def test_a_chat_in_a_pipeline(writer: Any) -> None:
    calls: list[int] = []
    writer.model.register_forward_pre_hook(
        lambda _model, _args, kwargs: calls.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    cache = FP8PagedCache(writer.model.config, **STORED)
    how = {"max_new_tokens": 12, "max_length": None, "do_sample": False}
    said: list[list[dict[str, str]]] = [[], []]
    computed = []
    for turn in range(6):
        for mine, keywords in zip(said, ({"past_key_values": cache}, {}), strict=True):
            mine.append({"role": "user", "content": f"and {turn}?"})
            calls.clear()
            mine[:] = writer(mine, **how, **keywords)[0]["generated_text"]
            computed.append(sum(calls) - 11)
        assert said[0] == said[1]
    # The whole text each time, or the answer's last letter and what the template adds.
    assert computed[:2] == [11, 11]
    assert computed[-1] > 125
    assert max(computed[2::2]) <= 1 + len(";u:and 5?;a:")


def test_texts_agree_in_ids_positions_and_padding() -> None:
    ids = torch.arange(24).view(2, 12)
    plain = Text(ids)
    assert plain.match(Text(ids)) == ([0, 1], 12)
    assert plain.match(Text(ids[:, :7])) == ([0, 1], 7)
    assert plain.match(Text(ids.flip(0))) == ([1, 0], 12)
    counted = torch.arange(12)[None]
    assert plain.match(Text(ids, None, counted)) == ([0, 1], 0), "positions of one alone"
    placed = Text(ids, None, counted[:, :5])
    assert placed.match(Text(ids, None, counted)) == ([0, 1], 12), "later ones count on"
    assert placed.match(Text(ids, None, counted + (counted > 8))) == ([0, 1], 9)
    turned = counted.expand(3, 2, 12)
    assert Text(ids, None, turned[..., :5]).match(Text(ids, None, turned)) == ([0, 1], 12)
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[1, :3] = 0
    assert plain.match(Text(ids, mask)) == ([0, 1], 0)
    other = ids.clone()
    other[1, :3] = 90
    assert Text(ids, mask).match(Text(other, mask)) == ([0, 1], 12), "padding has any id"
    assert Text(ids, mask).crop(10).match(Text(ids, mask)) == ([0, 1], 2)
