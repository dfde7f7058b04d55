"""Tests of a cache in several calls of `generate()`, which compute only tokens not yet stored."""

import copy
import pickle
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import accelerate
import pytest
import torch
from transformers import DynamicCache

from hf_fp8kv import ConfigError, FP8PagedCache, OutOfPagesError, disable, enable
from hf_fp8kv.prefix.generate import CHUNKS_NEED_EMPTY_CACHE
from tests.helpers.assertions import assert_same
from tests.helpers.margins import require_wide_margins
from tests.helpers.tiny_models import build_variant

pytestmark = pytest.mark.text

# Token 0 is padding. transformers treats it as padding anywhere in a prompt.
GREEDY = {"max_new_tokens": 9, "do_sample": False, "pad_token_id": 0, "suppress_tokens": [0]}
STORED = {"prefill": "stored", "page_size": 8}
MIN_MARGIN = 1e-5
# One model for each type of layer. Windows have 8 tokens.
MODELS = [
    "gqa", "sliding_and_full", "kv_sharing", "latent", "hybrid",
    pytest.param("sparse", marks=pytest.mark.full),
]  # fmt: skip


class Chat:
    def __init__(self, name: str, **keywords: Any) -> None:
        self.model, _ = build_variant(name, max_position_embeddings=512)
        enable(self.model, **STORED)
        self.call_lengths: list[int] = []
        self.model.register_forward_pre_hook(self._record_call, with_kwargs=True)
        self.cache = self.make_cache(**keywords)
        self.generator = torch.Generator().manual_seed(5)

    def _record_call(self, _model: Any, _args: Any, kwargs: dict[str, Any]) -> None:
        if kwargs["input_ids"] is not None:
            self.call_lengths.append(kwargs["input_ids"].shape[1])

    def make_cache(self, **keywords: Any) -> FP8PagedCache:
        return FP8PagedCache(self.model, **{**STORED, **keywords})

    def make_ids(self, num_tokens: int, rows: int = 1) -> torch.Tensor:
        return torch.randint(2, 98, (rows, num_tokens), generator=self.generator)

    def check_answer(self, ids: torch.Tensor, **keywords: Any) -> tuple[torch.Tensor, int]:
        """Compare an answer to a new cache's. Return it, and the number of computed tokens."""
        num_cached = self.cache.host_length()
        keywords = {**GREEDY, **keywords}
        self.call_lengths.clear()
        answer = self.model.generate(ids, past_key_values=self.cache, **keywords)
        num_computed = sum(self.call_lengths) - keywords["max_new_tokens"] + 1
        if "num_beams" not in keywords:
            keywords["logits_processor"] = require_wide_margins(MIN_MARGIN)
        expected = self.model.generate(ids, past_key_values=self.make_cache(), **keywords)
        assert_same(answer, expected, f"{ids.shape[1]} tokens on a cache of {num_cached}")
        return answer, num_computed

    def count_computed(self, ids: torch.Tensor, **keywords: Any) -> int:
        return self.check_answer(ids, **keywords)[1]


@pytest.fixture
def chat() -> Chat:
    return Chat("gqa")


@pytest.fixture
def answer(chat: Chat) -> torch.Tensor:
    """Return the answer to a prompt of 21 tokens, which `chat` has cached."""
    return chat.check_answer(chat.make_ids(21))[0]


def count_kept_tokens(name: str, num_shared: int) -> int:
    # These models cannot remove tokens, because some layers have a window or a state.
    return 0 if name in ("sliding_and_full", "kv_sharing", "hybrid") else num_shared


@pytest.mark.parametrize("name", MODELS)
def test_each_turn_computes_only_its_new_tokens(name: str) -> None:
    chat = Chat(name)
    ids = chat.make_ids(21)
    for expected in (21, 8, 8):  # the last token of an answer is not stored yet
        answer, num_computed = chat.check_answer(ids)
        assert num_computed == expected
        ids = torch.cat([answer, chat.make_ids(7)], 1)
    # The second prompt has 37 tokens, and the third 53.
    assert chat.cache.memory_footprint().reused_tokens == (37 - 8) + (53 - 8)


@pytest.mark.parametrize(("name", "rope_type"), [("phi3", "longrope"), ("gqa", "dynamic")])
def test_tokens_with_other_frequencies_of_rope_are_not_reused(name: str, rope_type: str) -> None:
    """The frequencies change past 40 tokens. Only Phi-3 then computes all tokens again."""
    is_phi = name == "phi3"
    rope: dict[str, Any] = {"rope_type": rope_type, "rope_theta": 1e4, "factor": 4.0}
    fields: dict[str, Any] = {"max_position_embeddings": 40, "rope_parameters": rope}
    if is_phi:
        original_length = {"original_max_position_embeddings": 40}
        long_factor = [float(factor) for factor in range(2, 10)]
        rope |= {"short_factor": [1.0] * 8, "long_factor": long_factor, **original_length}
        fields |= {"max_position_embeddings": 160, "sliding_window": None, **original_length}
    model = enable(build_variant(name, **fields)[0], dtype="model", page_size=8)
    ids = torch.randint(2, 98, (1, 80), generator=torch.Generator().manual_seed(5))
    options = {**GREEDY, "return_dict_in_generate": True}
    calls = ((20, 30, 20), (36, 60, 0), (50, 20, 0), (60, 52, 51 if is_phi else 0))
    for length, next_length, num_reused in calls:
        output = model.generate(ids[:, :length], **options)
        continued_ids = torch.cat([output.sequences, ids[:, :7]], 1)
        # The cache holds the prompt and 8 tokens of the answer.
        is_continued = length + 16 <= 40 or (is_phi and length + 8 > 40)
        next_calls = (
            (ids[:, :next_length], num_reused),
            (continued_ids, length + 8 if is_continued else 0),
        )
        for next_ids, expected in next_calls:
            cache = model.generate(ids[:, :length], **options).past_key_values
            answer = model.generate(next_ids, past_key_values=cache, **GREEDY)
            assert_same(answer, model.generate(next_ids, **GREEDY), (length, next_ids.shape))
            assert cache.memory_footprint().reused_tokens == expected, (length, next_ids.shape)


@pytest.mark.parametrize("name", MODELS)
def test_a_different_prompt_continues_after_the_common_prefix(name: str) -> None:
    chat = Chat(name)
    answer, _ = chat.check_answer(chat.make_ids(37))
    # The end of the answer differs, as if a chat template rewrote it.
    edited = torch.cat([answer[:, :-4], chat.make_ids(6)], 1)
    answer, num_computed = chat.check_answer(edited)
    assert num_computed == (edited.shape[1] if name == "hybrid" else 6)
    answer[0, 20] = (answer[0, 20] + 1) % 90 + 2
    repeated_answer, num_computed = chat.check_answer(answer)
    assert num_computed == answer.shape[1] - count_kept_tokens(name, 20)
    # The prompt is repeated, or shortened. The last token is always computed.
    num_kept = count_kept_tokens(name, answer.shape[1] - 1)
    assert chat.count_computed(answer) == answer.shape[1] - num_kept
    assert chat.count_computed(repeated_answer[:, :30]) == 30 - count_kept_tokens(name, 29)
    answer[0, 0] = (answer[0, 0] + 1) % 90 + 2
    assert chat.count_computed(answer) == answer.shape[1]


def test_windows_that_record_the_past_keep_the_common_prefix() -> None:
    chat = Chat("sliding_and_full")
    chat.cache.activate_past_recording()
    answer, _ = chat.check_answer(chat.make_ids(37))
    answer[0, 20] = (answer[0, 20] + 1) % 90 + 2
    assert chat.count_computed(answer) == answer.shape[1] - 20


@pytest.mark.parametrize(
    ("name", "max_cache_len"), [("gqa", None), ("sliding_and_full", 130), ("latent", 130)]
)
def test_preallocated_caches_and_chunks_reuse_tokens(name: str, max_cache_len: int | None) -> None:
    chat = Chat(name, max_cache_len=max_cache_len)
    options = {"prefill_chunk_size": 5, "disable_compile": True}
    answer, num_computed = chat.check_answer(chat.make_ids(21), **options)
    assert num_computed == 21
    answer, num_computed = chat.check_answer(torch.cat([answer, chat.make_ids(12)], 1), **options)
    assert num_computed == (42 if CHUNKS_NEED_EMPTY_CACHE else 13)
    num_tokens = answer.shape[1] - 12
    num_kept = 0 if CHUNKS_NEED_EMPTY_CACHE else count_kept_tokens(name, num_tokens - 1)
    assert chat.count_computed(answer[:, :-12], **options) == num_tokens - num_kept


@pytest.mark.parametrize("name", ["gqa", "sliding_and_full"])
def test_a_padded_batch_reuses_tokens(name: str) -> None:
    chat = Chat(name)
    ids = chat.make_ids(21, rows=3)
    mask = torch.ones_like(ids)
    ids[1, :5] = mask[1, :5] = 0
    answer, _ = chat.check_answer(ids, attention_mask=mask)
    # The ids of the padding do not matter. A row with less padding has its tokens at different
    # positions.
    for num_new, num_padding, first_id in ((7, 5, 0), (4, 5, 3), (3, 4, 0)):
        ids = torch.cat([answer, chat.make_ids(num_new, rows=3)], 1)
        mask = torch.ones_like(ids)
        mask[1, :num_padding] = 0
        if first_id:
            ids[1, :5] = first_id
        answer, num_computed = chat.check_answer(ids, attention_mask=mask)
        num_kept = count_kept_tokens(name, 4) if num_padding == 4 else ids.shape[1] - num_new - 1
        assert num_computed == ids.shape[1] - num_kept


def test_rows_may_be_reordered_and_repeated(chat: Chat) -> None:
    answer, _ = chat.check_answer(chat.make_ids(21, rows=3))
    extended = torch.cat([answer, chat.make_ids(7, rows=3)], 1)
    answer, num_computed = chat.check_answer(extended[[2, 0, 2, 1]])
    assert num_computed == 8
    assert chat.count_computed(torch.cat([answer[1:2], chat.make_ids(2)], 1)) == 3
    answer, _ = chat.check_answer(answer[:1], num_beams=3)
    # One of the beams in the cache equals the prompt, or shares most of it.
    extended = torch.cat([answer, chat.make_ids(4)], 1)
    assert chat.count_computed(extended) < 4 + GREEDY["max_new_tokens"]


@pytest.mark.parametrize(
    ("change", "rows", "num_computed"),
    [
        (lambda cache: cache.crop(-2), [1, 0], 6),
        (lambda cache: cache.reorder_cache(torch.tensor([1, 0])), [1, 0], 4),
        (lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1], 4),
        (FP8PagedCache.reset, [0, 1], 28),
    ],
)
def test_the_cached_tokens_follow_cache_operations(
    chat: Chat, change: Any, rows: list[int], num_computed: int
) -> None:
    answer, _ = chat.check_answer(chat.make_ids(21, rows=2))
    chat.cache.crop(-5)  # 24 tokens remain
    extended = torch.cat([answer[:, :24], chat.make_ids(4, rows=2)], 1)
    for cache in (chat.cache.fork(), chat.cache):
        chat.cache = cache
        change(cache)
        assert chat.count_computed(extended[rows]) == num_computed


@torch.no_grad()
def test_tokens_of_direct_calls_are_computed_again(answer: torch.Tensor, chat: Chat) -> None:
    for num_removed, num_new in ((0, 4), (3, 4), (3, 3)):
        num_kept = chat.cache.host_length() - num_removed
        chat.cache.crop(-num_removed)
        chat.model(input_ids=chat.make_ids(num_new), past_key_values=chat.cache)
        extended = torch.cat([answer, chat.make_ids(7)], 1)
        answer, num_computed = chat.check_answer(extended)
        assert num_computed == extended.shape[1] - num_kept, "direct calls are not trusted"
    chat.cache.reset()
    chat.model(input_ids=extended[:, :20], past_key_values=chat.cache)
    with pytest.raises(ConfigError, match="the 20 tokens of the cache"):
        chat.check_answer(extended[:, :20])
    assert chat.cache.host_length() == 20
    assert chat.count_computed(extended[:, :37]) == 17
    # Layers have fewer tokens than the prompt if a library dropped tokens.
    for layer in chat.cache.layers:
        layer.crop(-3)
    assert chat.count_computed(extended[:, :30]) == 30


@torch.no_grad()
def test_tokens_with_different_positions_or_embeddings_are_not_reused(chat: Chat) -> None:
    ids = chat.make_ids(21)
    positions = torch.arange(3, 24)[None]
    chat.check_answer(ids, position_ids=positions)
    assert chat.count_computed(ids) == 21
    # Embeddings follow known tokens, and a later prompt does not contain them.
    embeds = chat.model.get_input_embeddings()(chat.make_ids(60))
    chat.model.generate(inputs_embeds=embeds, past_key_values=chat.cache, **GREEDY)
    assert chat.count_computed(chat.make_ids(90)) == 90
    chat.cache.reset()
    chat.model.generate(inputs_embeds=embeds[:, :21], past_key_values=chat.cache, **GREEDY)
    with pytest.raises(ConfigError, match="the 29 tokens of the cache"):
        chat.check_answer(ids)
    # `generate()` passes no positions to Bloom.
    bloom_chat = Chat("bloom")
    bloom_chat.check_answer(ids, position_ids=positions)
    bloom_chat.check_answer(ids, num_beams=2, num_return_sequences=2)


def test_reuse_prefix_can_be_disabled(answer: torch.Tensor, chat: Chat) -> None:
    enable(chat.model, reuse_prefix=False, **STORED)
    assert chat.count_computed(torch.cat([answer, chat.make_ids(7)], 1)) == 8
    with pytest.raises(ConfigError, match="adds no tokens"):
        chat.model.generate(
            answer[:, :4], attention_mask=torch.ones(1, 4), past_key_values=chat.cache, **GREEDY
        )


@pytest.mark.parametrize("name", ["gqa", "sliding_and_full", "skipped"])
def test_a_failed_prompt_keeps_the_tokens_before(name: str) -> None:
    skipped = {"skip_layers": ["sliding_attention"]} if name == "skipped" else {}
    chat = Chat("gqa" if name == "gqa" else "sliding_and_full", max_pages=10, **skipped)
    answer, _ = chat.check_answer(chat.make_ids(21, rows=2 if name == "gqa" else 1))
    ids = torch.cat([answer, chat.make_ids(60, rows=len(answer))], 1)
    with pytest.raises(OutOfPagesError):
        chat.model.generate(ids, past_key_values=chat.cache, **GREEDY)
    num_computed = 31 if name == "skipped" else 2
    assert chat.count_computed(ids[:, :31], max_new_tokens=5) == num_computed
    with pytest.raises(OutOfPagesError):
        chat.model.generate(ids, past_key_values=chat.cache, **GREEDY)
    assert chat.count_computed(chat.make_ids(38, rows=len(answer)), max_new_tokens=2) == 38


# A prompt or a step is interrupted before the first layer or between layers. In models with layers
# of transformers, a step is interrupted after or before a paged layer.
@pytest.mark.parametrize(
    ("name", "keywords", "call_number", "layer_index", "num_known"),
    [
        ("gqa", {}, 1, 1, 0), ("gqa", {}, 4, 0, 22), ("gqa", {}, 4, 1, 0),
        ("sliding_and_full", {}, 4, 0, 22), ("sliding_and_full", {}, 4, 1, 0),
        ("hybrid", {}, 4, 1, 0), ("gqa", {"skip_layers": [0]}, 3, 1, 0),
        ("gqa", {"skip_layers": [1]}, 4, 1, 0),
    ],
)  # fmt: skip
def test_an_interrupted_chat_continues_correctly(
    name: str, keywords: dict[str, Any], call_number: int, layer_index: int, num_known: int
) -> None:
    chat = Chat(name, **keywords)
    ids = chat.make_ids(21)
    answer, _ = chat.check_answer(ids)
    chat.cache.reset()
    interrupt = mock.Mock(side_effect=[None] * (call_number - 1) + [KeyboardInterrupt])
    handle = chat.model.model.layers[layer_index].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        chat.model.generate(ids, past_key_values=chat.cache, **GREEDY)
    handle.remove()
    edited = torch.cat([answer[:, :22], chat.make_ids(10)], 1)  # the cache has one more token
    assert chat.count_computed(edited) == 32 - num_known


@pytest.mark.parametrize("is_filled_by_drafts", [False, True])
def test_assisted_decoding_compares_the_prompt(chat: Chat, is_filled_by_drafts: bool) -> None:
    """Prompts that continue, edit, shorten or repeat a chat, before or after assisted decoding."""
    ids = chat.make_ids(6).repeat(1, 5)
    drafts = {**GREEDY, "prompt_lookup_num_tokens": 4}
    keywords = drafts if is_filled_by_drafts else GREEDY
    filled_cache = chat.cache
    answer = chat.model.generate(ids, past_key_values=filled_cache, **keywords)
    continued = torch.cat([answer, chat.make_ids(5)], 1)
    edited = continued.clone()
    edited[:, 20] = edited[:, 20] % 90 + 2
    prompts = [continued, edited, chat.make_ids(70), chat.make_ids(9), ids]
    for prompt in prompts:
        chat.cache = copy.deepcopy(filled_cache)
        if is_filled_by_drafts:
            chat.check_answer(prompt)
        assert_same(
            chat.model.generate(prompt, past_key_values=chat.cache, **drafts),
            chat.model.generate(prompt, past_key_values=chat.make_cache(), **GREEDY),
        )


def save_and_load(cache: FP8PagedCache, path: Path) -> FP8PagedCache:
    return FP8PagedCache.load(cache.save(path / "cache.safetensors"))


def pickle_and_unpickle(cache: FP8PagedCache, _: Path) -> Any:
    return pickle.loads(pickle.dumps(cache))


@pytest.mark.parametrize("restore", [save_and_load, pickle_and_unpickle])
def test_a_restored_cache_is_compared_with_the_prompt(
    chat: Chat, restore: Any, tmp_path: Path
) -> None:
    answer, _ = chat.check_answer(chat.make_ids(21, rows=2))
    filled_cache = chat.cache
    continued = torch.cat([answer, chat.make_ids(7, rows=2)], 1)
    edited = torch.cat([answer[:, :12], chat.make_ids(20, rows=2)], 1)
    new_ids = chat.make_ids(40, rows=2)
    prompts = ((continued, 8), (edited, 20), (continued[[1, 0]], 8), (new_ids, 40))
    for prompt, num_computed in prompts:
        chat.cache = restore(filled_cache, tmp_path)
        assert chat.count_computed(prompt) == num_computed


@pytest.mark.parametrize("restore", [save_and_load, pickle_and_unpickle])
@torch.no_grad()
def test_a_restored_cache_without_ids_is_refused(chat: Chat, restore: Any, tmp_path: Path) -> None:
    ids = chat.make_ids(30)
    chat.model(input_ids=ids[:, :20], past_key_values=chat.cache)
    chat.cache = restore(chat.cache, tmp_path)
    with pytest.raises(ConfigError, match="the ids of its tokens"):
        chat.check_answer(ids)
    assert chat.cache.host_length() == 20
    enable(chat.model, reuse_prefix=False, **STORED)
    assert chat.count_computed(ids) == 10


@pytest.mark.parametrize("restore", [save_and_load, pickle_and_unpickle])
def test_a_cropped_cache_of_unknown_tokens_is_restored(restore: Any, tmp_path: Path) -> None:
    """GPT-2 embeds token types, so its tokens are not comparable."""
    model, _ = build_variant("gpt2")
    enable(model, **STORED)
    cache = FP8PagedCache(model, **STORED)
    ids = torch.randint(2, 98, (1, 20))
    model.generate(ids, token_type_ids=torch.zeros_like(ids), past_key_values=cache, **GREEDY)
    cache.crop(-3)
    restored = restore(cache, tmp_path)
    assert restored.host_length() == cache.host_length() == 25
    with pytest.raises(ConfigError, match="the ids of its tokens"):
        model.generate(ids, past_key_values=restored, **GREEDY)


@torch.no_grad()
def change_weights(model: Any) -> None:
    for weight in model.parameters():
        weight.data.mul_(1.01)


def change_rope(model: Any) -> None:
    model.model.rotary_emb.inv_freq.mul_(0.9)


@pytest.mark.parametrize(
    ("change", "restore"),
    [(change_weights, None), (change_weights, save_and_load), (change_rope, pickle_and_unpickle)],
)
def test_tokens_of_a_different_model_are_computed_again(
    answer: torch.Tensor, chat: Chat, change: Any, restore: Any, tmp_path: Path
) -> None:
    """The second model has the same shapes, and may be the same object."""
    if restore is not None:
        chat.cache = restore(chat.cache, tmp_path)
    change(chat.model)
    extended = torch.cat([answer, chat.make_ids(7)], 1)
    assert chat.count_computed(extended) == extended.shape[1]
    # Now the second model has filled the cache.
    extended = torch.cat([extended, chat.make_ids(5)], 1)
    assert chat.count_computed(extended) == 5


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
@pytest.mark.parametrize(
    "hide_weights",
    [
        partial(
            torch.ao.quantization.quantize_dynamic,
            qconfig_spec={torch.nn.Linear}, dtype=torch.qint8,
        ),
        partial(accelerate.cpu_offload, execution_device="cpu"),
    ],
)  # fmt: skip
@torch.no_grad()
def test_models_whose_weights_cannot_be_read_are_distinguished(hide_weights: Any) -> None:
    model, _ = build_variant("gqa", max_position_embeddings=512)
    different_model = copy.deepcopy(model)
    for name, weight in different_model.named_parameters():
        weight.mul_(1.0 if "embed" in name else 1.5)
    model, different_model = (
        enable(hide_weights(each_model), **STORED) for each_model in (model, different_model)
    )
    cache = FP8PagedCache(model, **STORED)
    for each_model, num_reused in ((model, 0), (model, 27), (different_model, 27)):
        each_model.generate(torch.arange(2, 30)[None], past_key_values=cache, **GREEDY)
        assert cache.reused_tokens == num_reused  # of all calls


def test_models_with_sparse_weights_can_generate() -> None:
    model, inputs = build_variant("gqa")
    module = model.model.layers[0].mlp.down_proj
    module.weight = torch.nn.Parameter(module.weight.detach().to_sparse(), requires_grad=False)
    ids = inputs["input_ids"][:1]
    output = enable(model, **STORED).generate(ids, return_dict_in_generate=True, **GREEDY)
    answer = model.generate(ids, past_key_values=output.past_key_values, **GREEDY)
    assert answer.shape[1] == ids.shape[1] + 9


def test_new_tokens_after_a_different_model_are_refused(answer: torch.Tensor, chat: Chat) -> None:
    """The tokens of another model cannot be computed again without their ids."""
    change_weights(chat.model)
    with pytest.raises(ConfigError, match="a cache that this model has filled"):
        chat.model.generate(
            chat.make_ids(3), attention_mask=torch.ones(1, 29 + 3, dtype=torch.int64),
            past_key_values=chat.cache, **GREEDY,
        )  # fmt: skip
    assert chat.cache.host_length() == 29
    assert chat.count_computed(answer) == answer.shape[1]


@torch.no_grad()
@pytest.mark.parametrize("max_new_tokens", [1, 4])
def test_a_cache_of_a_different_model_is_refused_without_enable(max_new_tokens: int) -> None:
    """Attention over pages compares the weights of the first layer."""
    model, inputs = build_variant(
        "gqa", max_position_embeddings=512, attn_implementation="fp8_paged"
    )
    cache = FP8PagedCache(model)
    ids = inputs["input_ids"][:1]
    greedy = {**GREEDY, "max_new_tokens": max_new_tokens}
    answer = model.generate(ids, past_key_values=cache, **greedy)
    extended = torch.cat([answer, ids], 1)
    expected = model.generate(extended, past_key_values=cache.fork(), **greedy)
    different_model = copy.deepcopy(model)
    change_weights(different_model)
    with pytest.raises(ConfigError, match="the model that has filled this cache"):
        different_model.generate(extended, past_key_values=cache, **greedy)
    # No token of the refused call was stored.
    assert_same(copy.deepcopy(model).generate(extended, past_key_values=cache, **greedy), expected)
    cache.reset()
    different_model.generate(extended, past_key_values=cache, **greedy)


def test_a_reloaded_model_reuses_tokens(answer: torch.Tensor, chat: Chat, tmp_path: Path) -> None:
    chat.model.save_pretrained(tmp_path)
    reloaded = enable(type(chat.model).from_pretrained(tmp_path), **STORED)
    extended = torch.cat([answer, chat.make_ids(7)], 1)
    reloaded.generate(extended, past_key_values=chat.cache, **GREEDY)
    assert chat.cache.reused_tokens == answer.shape[1] - 1


def test_copies_of_an_enabled_model_reuse_tokens() -> None:
    model, inputs = build_variant("gqa")
    enable(model, **STORED)
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    disable(model)
    model.generate(**inputs, past_key_values=DynamicCache(config=model.config), **GREEDY)
    del model
    for copied_model in copies:
        cache = FP8PagedCache(copied_model, **STORED)
        for _ in range(2):
            copied_model.generate(**inputs, past_key_values=cache, **GREEDY)
        assert cache.reused_tokens == inputs["input_ids"][:, 1:].numel()
