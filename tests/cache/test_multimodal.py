"""Models that read images or audio, with a cache that is kept between calls of `generate()`.

Each answer must equal the answer of the same prompt without a cache. Tokens whose values changed
are computed again, and all tokens that a prompt shares with the cache are reused.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch

import hf_fp8kv
from hf_fp8kv import FP8PagedCache
from tests.helpers.tiny_multimodal import (
    KINDS,
    NAMES,
    Medium,
    Part,
    build_model,
    count_common_tokens,
    make_inputs,
    make_text,
    share_model,
)

NEW_TOKENS = 8
PAGE_SIZE = 8

pytestmark = pytest.mark.usefixtures("no_gradients")
each_type = pytest.mark.parametrize("name", NAMES)


class Turn(NamedTuple):
    """The rows of a prompt with the answers, and how many tokens of each row were reused."""

    rows: list[list[Part]]
    answers: list[list[int]]
    num_reused: int


def answer(model: Any, inputs: dict[str, Any], cache: Any = None) -> tuple[list[list[int]], Any]:
    """Return the greedy tokens of each row, and the cache that was used."""
    inputs = {key: x.clone() for key, x in inputs.items()}
    arguments = {} if cache is None else {"past_key_values": cache}
    output = model.generate(
        **inputs, **arguments, max_new_tokens=NEW_TOKENS, do_sample=False,
        return_dict_in_generate=True,
    )  # fmt: skip
    width = inputs["input_ids"].shape[1]
    return output.sequences[:, width:].tolist(), output.past_key_values


class Chat:
    """An enabled model with its kept cache. Each prompt is compared with a model without cache."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.model = hf_fp8kv.enable(build_model(name), dtype="model", page_size=PAGE_SIZE)
        self.cache: Any = None
        self.old_rows: list[list[Part]] = []

    def ask(self, *rows: list[Part], passes_media: bool = True, num_reused: int = -1) -> list[Any]:
        """Check the answers of a prompt and the number of reused tokens, and return the answers.

        Args:
            rows: The prompt.
            passes_media: Whether the enabled model gets the values of images or audio, too.
            num_reused: Number of tokens of each row that the cache has, at least. -1 means the
                tokens that the prompt has in common with the previous prompt and its answer.
        """
        inputs = make_inputs(self.name, list(rows))
        expected, _ = answer(share_model(self.name), inputs)
        if not passes_media:
            inputs = {key: inputs[key] for key in ("input_ids", "attention_mask")}
        old_reused = 0 if self.cache is None else self.cache.reused_tokens
        actual, self.cache = answer(self.model, inputs, self.cache)
        assert isinstance(self.cache, FP8PagedCache)
        assert actual == expected
        self._check_reuse(list(rows), (self.cache.reused_tokens - old_reused) // len(rows))
        self.old_rows = [[*row, tokens] for row, tokens in zip(rows, actual, strict=True)]
        return actual

    def _check_reuse(self, rows: list[list[Part]], num_reused: int) -> None:
        pairs = list(zip(self.old_rows, rows, strict=False))
        widths = {make_inputs(self.name, x)["input_ids"].shape[1] for x in (self.old_rows, rows)}
        # The last token of an answer is not in the cache, and the prompt's last token is computed.
        num_common = min(
            [
                min(count_common_tokens(self.name, old, new), self._count(old) - 1) 
                for old, new in pairs
            ],
            default=0,
        )
