"""Models that read images or audio, with a cache that is kept between calls of `generate()`.

Each answer must equal the answer to the same prompt without a kept cache. Placeholders whose values
changed are computed again, and all other tokens that a prompt shares with the cache are reused.
"""

import functools
import itertools
import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.testing import assert_close
from transformers import MllamaConfig, MllamaForConditionalGeneration

import hf_fp8kv
from hf_fp8kv import FP8PagedCache
from tests.helpers.tiny_models import build_model as build_text_model
from tests.helpers.tiny_multimodal import (
    KINDS,
    NAMES,
    SPECIAL_TOKENS,
    Medium,
    Part,
    Token,
    build_model,
    get_shared_model,
    list_tokens,
    make_inputs,
    make_text,
)

NEW_TOKENS = 8
PAGE_SIZE = 8

pytestmark = pytest.mark.usefixtures("no_gradients")
# The types of the fast tier differ in their arguments, masks, positions and encoders. One test of
# the fast tier runs every type.
FAST_NAMES = ("llava", "qwen2_vl", "qwen3_vl", "gemma3", "idefics3", "qwen2_audio")


def types_by_tier(fast_names: tuple[str, ...] = FAST_NAMES) -> Any:
    names = [
        name if name in fast_names else pytest.param(name, marks=pytest.mark.full) for name in NAMES
    ]
    return pytest.mark.parametrize("name", names)


# The numbers of these texts are seeds. They are longer than a page, so that pages can be reused.
QUESTION, SECOND_QUESTION, THIRD_QUESTION = (make_text(seed, 11) for seed in (1, 2, 3))
INTRODUCTION, OTHER_INTRODUCTION = make_text(4, 10), make_text(5, 10)
IMAGE, OTHER_IMAGE, THIRD_IMAGE = Medium(1), Medium(2), Medium(3)


class Answer(NamedTuple):
    """The greedy tokens of each row, their logits `[B, NEW_TOKENS, vocabulary]`, and the cache."""

    tokens: list[list[int]]
    logits: torch.Tensor
    cache: Any


def generate(model: Any, inputs: dict[str, Any], cache: Any = None) -> Answer:
    arguments = {name: tensor.clone() for name, tensor in inputs.items()}
    if cache is not None:
        arguments["past_key_values"] = cache
    output = model.generate(
        **arguments, max_new_tokens=NEW_TOKENS, do_sample=False, output_logits=True,
        return_dict_in_generate=True, suppress_tokens=list(SPECIAL_TOKENS),
    )  # fmt: skip
    tokens = output.sequences[:, inputs["input_ids"].shape[1] :].tolist()
    return Answer(tokens, torch.stack(output.logits, dim=1), output.past_key_values)


@functools.cache
def _generate_with_new_cache(name: str, rows: str) -> Answer:
    def parse_part(part: Any) -> Part:
        return Medium(**part) if isinstance(part, dict) else part

    prompt = [list(map(parse_part, row)) for row in json.loads(rows)]
    return generate(get_shared_model(name), make_inputs(name, prompt))


def generate_with_new_cache(name: str, rows: list[list[Part]]) -> Answer:
    return _generate_with_new_cache(name, json.dumps(rows, default=vars))


class Chat:
    """An enabled model, and a cache that all its calls use."""

    def __init__(self, name: str, model: Any = None) -> None:
        self.name = name
        self.model = model or hf_fp8kv.enable(build_model(name), dtype="model", page_size=PAGE_SIZE)
        self.cache: Any = None
        self.old_rows: list[list[Part]] = []

    def ask(self, *rows: list[Part], passes_media: bool = True) -> list[list[Part]]:
        """Check the answers to a prompt and the number of reused tokens. Return rows with answers.

        Without `passes_media`, the enabled model only gets ids and mask.
        """
        prompt = list(rows)
        inputs = make_inputs(self.name, prompt)
        expected = generate_with_new_cache(self.name, prompt)
        if not passes_media:
            inputs = {key: inputs[key] for key in ("input_ids", "attention_mask")}
        old_reused = 0 if self.cache is None else self.cache.reused_tokens
        actual = generate(self.model, inputs, self.cache)
        self.cache = actual.cache
        assert isinstance(self.cache, FP8PagedCache)
        assert actual.tokens == expected.tokens
        # Equal tokens may hide a small change of an image.
        assert_close(actual.logits, expected.logits, atol=2e-4, rtol=0)
        num_reused = self.cache.reused_tokens - old_reused
        num_common = self.count_common_tokens(prompt)
        # No token whose id or values changed is reused.
        assert num_reused <= num_common * len(rows)
        kind = KINDS[self.name]
        must_crop = bool(self.old_rows) and num_common < len(self.list_old_tokens()[0])
        if kind.is_causal and (kind.can_crop or not must_crop):
            assert num_reused >= (num_common - PAGE_SIZE) * len(rows)
        answers: list[list[Part]] = [
            [*row, tokens] for row, tokens in zip(rows, expected.tokens, strict=True)
        ]
        self.old_rows = answers
        return answers

    def list_old_tokens(self) -> list[list[Token]]:
        return [tokens[:-1] for tokens in list_tokens(self.name, self.old_rows)]

    def count_common_tokens(self, rows: list[list[Part]]) -> int:
        """Return how many tokens of every row of a prompt are in the cache.

        The last token of an answer is not stored, and the last of a prompt is always computed.
        """
        if not self.old_rows:
            return 0
        old_tokens = self.list_old_tokens()
        counts = []
        for tokens in list_tokens(self.name, rows):
            counts.append(max(_count_equal(old, tokens[:-1]) for old in old_tokens))
        return min(counts)


@pytest.fixture
def chat(name: str) -> Chat:
    return Chat(name)


def _count_equal(first_tokens: list[Any], second_tokens: list[Any]) -> int:
    equal = [first == second for first, second in zip(first_tokens, second_tokens, strict=False)]
    return equal.index(False) if False in equal else len(equal)


@pytest.mark.parametrize("name", NAMES)
def test_turns_after_an_image_reuse_it(chat):
    [history] = chat.ask([INTRODUCTION, IMAGE, QUESTION])
    [history] = chat.ask([*history, SECOND_QUESTION])
    [history] = chat.ask([*history, THIRD_QUESTION])
    chat.ask([*history[:-1], make_text(6, 3), QUESTION])  # another answer
    chat.ask([INTRODUCTION, IMAGE, QUESTION])


@types_by_tier()
def test_turns_without_the_values_of_an_image_reuse_it(chat, name):
    if not KINDS[name].is_causal:
        pytest.skip("later turns need the token types of the prompt")
    [history] = chat.ask([INTRODUCTION, IMAGE, QUESTION])
    [history] = chat.ask([*history, SECOND_QUESTION], passes_media=False)
    [history] = chat.ask([*history, THIRD_QUESTION], passes_media=False)
    edited = [*history[:-1], make_text(6, 3), QUESTION]
    # The image must be computed again if the prompt differs before it, or in a layer with a state.
    refused_prompts = [[OTHER_INTRODUCTION, *history[1:], SECOND_QUESTION]]
    if KINDS[name].can_crop:
        chat.ask(edited, passes_media=False)
    else:
        refused_prompts.append(edited)
    for prompt in refused_prompts:
        with pytest.raises(hf_fp8kv.ConfigError, match="expected the images of the prompt"):
            chat.ask(prompt, passes_media=False)
    chat.ask([*history, QUESTION])


@types_by_tier()
def test_an_exchanged_image_is_computed(chat, name):
    changed_image = Medium(OTHER_IMAGE.seed, KINDS[name].small_change)
    images = (IMAGE, OTHER_IMAGE, changed_image)
    answers = [generate_with_new_cache(name, [[INTRODUCTION, image, QUESTION]]) for image in images]
    first_logits = [answer.logits[0, 0] for answer in answers]
    for logits, other_logits in itertools.combinations(first_logits, 2):
        # Otherwise the turns below show nothing.
        assert (logits - other_logits).abs().max() > 1e-3
    [[_, _, *turn]] = chat.ask([INTRODUCTION, IMAGE, QUESTION])
    prompts = [
        [INTRODUCTION, OTHER_IMAGE, QUESTION],
        [INTRODUCTION, IMAGE, *turn, SECOND_QUESTION],
        [INTRODUCTION, OTHER_IMAGE, *turn, SECOND_QUESTION],
        [INTRODUCTION, changed_image, *turn, SECOND_QUESTION],
        [INTRODUCTION, QUESTION],
        [INTRODUCTION, IMAGE, QUESTION, OTHER_IMAGE, SECOND_QUESTION],
        [INTRODUCTION, IMAGE, QUESTION, THIRD_IMAGE, SECOND_QUESTION],
        [INTRODUCTION, IMAGE, QUESTION],
    ]
    for prompt in prompts:
        chat.ask(prompt)


@types_by_tier(FAST_NAMES[::2])
def test_rows_of_a_batch_reuse_their_images(chat):
    first_row: list[Part] = [INTRODUCTION, IMAGE, QUESTION]
    second_row: list[Part] = [INTRODUCTION[:6], OTHER_IMAGE, QUESTION]  # padded on the left
    first_history, second_history = chat.ask(first_row, second_row)
    first_history, second_history = chat.ask(
        [*first_history, SECOND_QUESTION], [*second_history, SECOND_QUESTION]
    )
    chat.ask([*second_history, THIRD_QUESTION], [*first_history, THIRD_QUESTION])
    # The rows exchange their images.
    chat.ask([INTRODUCTION, OTHER_IMAGE, QUESTION], [INTRODUCTION[:6], IMAGE, QUESTION])
    chat.ask([INTRODUCTION, OTHER_IMAGE, QUESTION])


@types_by_tier(FAST_NAMES[1::2])
def test_chats_that_take_turns_do_not_mix(chat, name):
    second_chat = Chat(name, chat.model)
    [history] = chat.ask([INTRODUCTION, IMAGE, QUESTION])
    [second_history] = second_chat.ask([QUESTION])
    [history] = chat.ask([*history, SECOND_QUESTION])
    [second_history] = second_chat.ask([*second_history, IMAGE, SECOND_QUESTION])
    chat.ask([*history, THIRD_QUESTION])
    second_chat.ask([*second_history, THIRD_QUESTION])


@pytest.mark.parametrize("name", ["llava", "qwen2_vl"])
@pytest.mark.parametrize("medium", [IMAGE, OTHER_IMAGE], ids=["same", "other"])
def test_features_that_the_caller_computed_are_compared(name: str, medium: Medium) -> None:
    model = get_shared_model(name)

    def make_encoded(medium: Medium) -> dict[str, Any]:
        inputs = make_inputs(name, [[INTRODUCTION, medium, QUESTION]])
        arguments = {key: inputs[key] for key in ("image_grid_thw",) if key in inputs}
        pixels = inputs.pop("pixel_values")
        output = model.get_image_features(pixel_values=pixels, **arguments, return_dict=True)
        return {**inputs, "mm_encoder_outputs": {"image": output}}

    def ask(medium: Medium, cache: Any = None) -> tuple[list[int], Any]:
        output = enabled.generate(
            **make_encoded(medium), past_key_values=cache, max_new_tokens=NEW_TOKENS,
            do_sample=False, return_dict_in_generate=True, pad_token_id=0,
        )  # fmt: skip
        return output.sequences.tolist(), output.past_key_values

    enabled = hf_fp8kv.enable(build_model(name), dtype="model", page_size=PAGE_SIZE)
    _, cache = ask(IMAGE)
    assert ask(medium, cache)[0] == ask(medium)[0]


@pytest.mark.parametrize("restores", [False, True])
def test_a_preallocated_or_restored_cache_compares_images(restores: bool, tmp_path: Path) -> None:
    keywords = {} if restores else {"max_cache_len": 160}
    model = hf_fp8kv.enable(build_model("gemma3"), dtype="model", page_size=PAGE_SIZE, **keywords)
    first_inputs = make_inputs("gemma3", [[INTRODUCTION, IMAGE, QUESTION]])
    for rows in ([INTRODUCTION, OTHER_IMAGE, QUESTION], [INTRODUCTION, IMAGE, SECOND_QUESTION]):
        cache = generate(model, first_inputs).cache
        if restores:
            cache.save(tmp_path / "cache")
            cache = FP8PagedCache.load(tmp_path / "cache")
        actual = generate(model, make_inputs("gemma3", [rows]), cache)
        expected = generate_with_new_cache("gemma3", [rows])
        assert actual.tokens == expected.tokens
        assert_close(actual.logits, expected.logits, atol=2e-4, rtol=0)


def test_a_prompt_with_later_attention_is_computed_while_a_copy_exists() -> None:
    """PaliGemma makes a different mask if its cache is initialized."""
    chat = Chat("paligemma")
    chat.ask([INTRODUCTION, IMAGE, QUESTION], [INTRODUCTION, OTHER_IMAGE])
    _copy = chat.cache.fork()
    chat.ask([INTRODUCTION, IMAGE, SECOND_QUESTION], [INTRODUCTION, OTHER_IMAGE])


# Types change the embeddings of GPT-2, and the attention within an image of Gemma 3. Prompts of
# PaliGemma attend to later tokens even without types.
@pytest.mark.parametrize(
    ("name", "turns_with_types"),
    [("gpt2", [0]), ("gpt2", [1]), ("gemma3", [0]), ("gemma3", [1]), ("paligemma", [])],
)
def test_token_types_are_compared(name: str, turns_with_types: list[int]) -> None:
    is_text = name == "gpt2"
    model = build_text_model(name)[0] if is_text else build_model(name)
    hf_fp8kv.enable(model, dtype="model", page_size=PAGE_SIZE)
    cache = FP8PagedCache(model.config, dtype="model", page_size=PAGE_SIZE)
    for turn, text in enumerate((QUESTION, SECOND_QUESTION)):
        if is_text:
            ids = torch.tensor([[*INTRODUCTION, *text]]) % 90
            inputs = {"input_ids": ids, "token_type_ids": torch.zeros_like(ids)}
        else:
            inputs = make_inputs(name, [[INTRODUCTION, IMAGE, text]])
        if turn not in turns_with_types:
            del inputs["token_type_ids"]
        actual = generate(model, inputs, cache)
        assert_close(actual.logits, generate(model, inputs).logits, atol=2e-4, rtol=0)


def test_text_before_an_image_with_cross_attention_is_computed() -> None:
    """In Mllama, text without an image skips the layers with cross-attention."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 3}
    vision_config = {
        **sizes, "num_global_layers": 1, "attention_heads": 2, "image_size": 16, "patch_size": 8,
        "max_num_tiles": 2, "intermediate_layers_indices": [0], "vision_output_dim": 128,
        "supported_aspect_ratios": [[1, 1], [1, 2], [2, 1]],
    }  # fmt: skip
    text_config = {
        **sizes, "vocab_size": 200, "num_attention_heads": 4, "num_key_value_heads": 2,
        "cross_attention_layers": [1], "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
    }  # fmt: skip
    image_token = 199
    config = MllamaConfig(
        vision_config=vision_config, text_config=text_config, image_token_index=image_token
    )
    torch.manual_seed(0)
    model = MllamaForConditionalGeneration(config).eval()
    for parameter in model.parameters():  # the gates of cross-attention are 0 at first
        parameter.copy_(torch.randn(parameter.shape) * parameter.shape[-1] ** -0.5)
    hf_fp8kv.enable(model, dtype="model", page_size=PAGE_SIZE)
    ids = torch.tensor([[*INTRODUCTION, image_token, *QUESTION]])
    text_ids = ids[:, : len(INTRODUCTION)]
    sees_image = (ids == image_token).cumsum(1)[:, :, None, None]
    inputs = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "pixel_values": torch.randn(1, 1, 2, 3, 16, 16),
        "aspect_ratio_ids": torch.tensor([[1]]),
        "aspect_ratio_mask": torch.tensor([[[1, 0]]]),
        "cross_attention_mask": torch.cat([sees_image, torch.zeros_like(sees_image)], -1),
    }
    text_inputs = {"input_ids": text_ids, "attention_mask": torch.ones_like(text_ids)}
    actual = generate(model, inputs, generate(model, text_inputs).cache)
    assert_close(actual.logits, generate(model, inputs).logits, atol=2e-4, rtol=0)


@types_by_tier(FAST_NAMES[::2])
def test_text_is_reused_up_to_the_first_difference(chat):
    [[_, reply]] = chat.ask([QUESTION])
    [history] = chat.ask([QUESTION, reply, SECOND_QUESTION])
    chat.ask([*history, THIRD_QUESTION])
    chat.ask([QUESTION, [*reply[:4], *make_text(6, 4)], SECOND_QUESTION])
    chat.ask([make_text(7, 45)])
    chat.ask([make_text(8, 16)])
    chat.ask([make_text(8, 16)])


@types_by_tier(FAST_NAMES[1::2])
def test_the_second_of_two_images_is_exchanged_or_added(chat):
    chat.ask([INTRODUCTION, IMAGE, QUESTION, OTHER_IMAGE, SECOND_QUESTION])
    chat.ask([INTRODUCTION, IMAGE, QUESTION, THIRD_IMAGE, SECOND_QUESTION])
    chat.ask([INTRODUCTION, OTHER_IMAGE, QUESTION, IMAGE, SECOND_QUESTION])
    [history] = chat.ask([INTRODUCTION, IMAGE, QUESTION])
    [history] = chat.ask([*history, OTHER_IMAGE, SECOND_QUESTION])
    [history] = chat.ask([*history, THIRD_QUESTION])
    chat.ask([INTRODUCTION, IMAGE, *history[2:], QUESTION])
