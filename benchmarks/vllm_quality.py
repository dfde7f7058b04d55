"""Measure the KL of predictions in vLLM with 8-bit caches, relative to vLLM's 16-bit cache.

This benchmark runs in the environment of `make vllm`. Each row is for a value of
`--kv-cache-dtype`. Some rows have scales that are calibrated on texts that are not scored. Each
scored text is one prompt. The log-probabilities of the prompt are requested, so that vLLM computes
the logits after each of its tokens. A hook records them, except those after the last token.
"""

import os
import pydoc_data.topics
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from hf_fp8kv import choose_plan, demo_model_path
from hf_fp8kv.calibration import calibrate

from .shared import Result, main

TOPICS: dict[str, str] = pydoc_data.topics.topics
SCORED_TOPICS = ("objects", "execmodel", "import", "customization")
# Topics that share a paragraph of at least this number of characters count as the same text.
MIN_PARAGRAPH_LENGTH = 80
BASE_DTYPE = "auto"
DTYPES = (
    "fp8", "fp8_e5m2", "hf_fp8kv_e4m3", "hf_fp8kv_e3m4", "hf_fp8kv_e2m5", "hf_fp8kv_int8",
)  # fmt: skip


class Variant(NamedTuple):
    """A measured cache: a value of `--kv-cache-dtype`, and its scales."""

    dtype: str
    scales: str  # description of the scales
    checkpoint: str
    options: dict[str, str]  # options of the plugin for vLLM


def split_topics(tokenizer: Any, length: int) -> tuple[list[list[int]], list[str]]:
    """Return the first `length` token ids of topics to score, and texts to calibrate on.

    No text to calibrate on shares a paragraph with a scored topic.
    """
    prompts = [
        tokenizer(TOPICS[name], truncation=True, max_length=length).input_ids
        for name in SCORED_TOPICS
    ]
    scored_paragraphs = set().union(*(_find_paragraphs(TOPICS[name]) for name in SCORED_TOPICS))
    return prompts, [
        text for _, text in sorted(TOPICS.items()) if not _find_paragraphs(text) & scored_paragraphs
    ]


def _find_paragraphs(text: str) -> set[str]:
    paragraphs = (" ".join(paragraph.split()) for paragraph in text.split("\n\n"))
    return {paragraph for paragraph in paragraphs if len(paragraph) >= MIN_PARAGRAPH_LENGTH}


def calibrate_variants(
    checkpoint: str, texts: list[str], tokenizer: Any, max_tokens: int, folder: Path
) -> list[Variant]:
    """Calibrate scales per tensor and per head, and choose a plan. Save them in `folder`."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16).eval()
    compute_scales = partial(calibrate, model, texts, tokenizer=tokenizer, max_tokens=max_tokens)
    tensor_path, head_path, plan_path = (str(folder / name) for name in ("tensor", "head", "plan"))
    # vLLM's own dtypes read scales from a copy of the checkpoint.
    compute_scales(granularity="tensor", center=False).save_pretrained(
        tensor_path, format="compressed-tensors", checkpoint=checkpoint
    )
    compute_scales(granularity="head").save_pretrained(head_path)
    choose_plan(model, texts, tokenizer=tokenizer).save_pretrained(plan_path)
    return [
        Variant("fp8", "static, per tensor", tensor_path, {}),
        Variant("hf_fp8kv_static", "static, per head, centers", checkpoint, {"scales": head_path}),
        Variant("hf_fp8kv", "chosen plan", checkpoint, {"plan": plan_path}),
    ]


def predict(variant: Variant, prompts: Sequence[list[int]]) -> Any:
    """Return the log-probabilities, `[tokens, vocabulary]`.

    They follow each token of each prompt except its last.
    """
    from vllm import LLM, SamplingParams

    length = max(map(len, prompts))
    llm = LLM(
        variant.checkpoint, kv_cache_dtype=variant.dtype, dtype="bfloat16", max_num_seqs=1,
        additional_config={"hf_fp8kv": variant.options}, max_model_len=length + 1,
        max_num_batched_tokens=length + 1, enforce_eager=True,
        kv_cache_memory_bytes=256 << 20, enable_prefix_caching=False,
    )  # fmt: skip
    logprobs: list[torch.Tensor] = []

    def record_logits(model: Any) -> None:
        stock_compute_logits = model.compute_logits

        def compute_logits(*args: Any, **kwargs: Any) -> Any:
            logits = stock_compute_logits(*args, **kwargs)
            if len(logits) > 1:  # logits of the prompt, not of the next token
                logprobs.append(logits.float().log_softmax(-1))
            return logits

        model.compute_logits = compute_logits

    llm.apply_model(record_logits)
    llm.generate(
        [{"prompt_token_ids": ids} for ids in prompts],
        SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False),
        use_tqdm=False,
    )
    llm.llm_engine.engine_core.shutdown()
    assert [len(rows) for rows in logprobs] == [len(ids) - 1 for ids in prompts]
    return torch.cat(logprobs)


def measure_vllm(
    *,
    dtypes: Sequence[str] = DTYPES,
    scored_tokens: int = 512,
    calibration_tokens: int = 2**13,
    progress: Callable[[str], None],
) -> Result:
    """Return rows with `dtype`, `scales`, `kl` (the mean), `kl_error` (of the mean) and `top1`.

    Args:
        dtypes: Values of `--kv-cache-dtype`.
        scored_tokens: Number of tokens of each of the four scored texts.
        calibration_tokens: Maximum number of tokens to calibrate on.
        progress: Function that is called with the name of each row.
    """
    from transformers import AutoTokenizer
    from vllm.platforms import current_platform

    # vLLM runs in this process, so that the hook reaches the model.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    # Registering again for a second engine fails in vLLM 0.32, in a module of llvmlite.
    current_platform.register_triton_kernel_overrides()
    type(current_platform).register_triton_kernel_overrides = classmethod(lambda _: None)
    checkpoint = str(demo_model_path())
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    prompts, texts = split_topics(tokenizer, scored_tokens)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        variants = [Variant(dtype, "scales of the dtype", checkpoint, {}) for dtype in dtypes]
        # Calibrate before vLLM starts, because vLLM changes classes of transformers.
        variants += calibrate_variants(
            checkpoint, texts, tokenizer, calibration_tokens, Path(folder)
        )
        progress(BASE_DTYPE)
        expected = predict(Variant(BASE_DTYPE, "", checkpoint, {}), prompts)
        for variant in variants:
            progress(f"{variant.dtype}, {variant.scales}")
            actual = predict(variant, prompts)
            kl = (expected.exp() * (expected - actual)).sum(-1)
            top1 = (expected.argmax(-1) == actual.argmax(-1)).float().mean()
            rows.append({
                "dtype": variant.dtype, "scales": variant.scales, "kl": float(kl.mean()),
                "kl_error": float(kl.std() / len(kl) ** 0.5), "top1": float(top1),
            })  # fmt: skip
    return {"rows": rows}


if __name__ == "__main__":
    main(__doc__, measure_vllm, {
        "--dtypes": {"nargs": "*", "help": "Values of --kv-cache-dtype."},
        "--tokens": {"type": int, "dest": "scored_tokens", "help": "Tokens of a scored text."},
        "--calibration-tokens": {
            "type": int, "help": "Maximum number of tokens to calibrate on.",
        },
    })  # fmt: skip
