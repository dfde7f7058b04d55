"""Measure the KL of predictions in vLLM with 8-bit caches, relative to vLLM's 16-bit cache.

This runs in the environment of `make vllm`. Each row is a value of `--kv-cache-dtype`. Some rows
have scales that are calibrated on other texts. A text is one prompt. vLLM returns log-probabilities
of its tokens, and a hook records all logits that the model computes for them.
"""

import os
import pydoc_data.topics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from hf_fp8kv import choose_plan, demo_model_path
from hf_fp8kv.calibration import calibrate
from hf_fp8kv.utils.environment import describe_run

from .shared import Result, main

TOPICS: dict[str, str] = pydoc_data.topics.topics
# The first topics to score. If more are needed, the shortest other topics follow.
FIRST_TOPICS = ("objects", "execmodel", "import", "customization")
# Topics that share a paragraph of at least this number of characters count as the same text.
_MIN_PARAGRAPH_LENGTH = 80
BASE_DTYPE = "auto"
DTYPES = (
    "fp8", "fp8_e5m2", "hf_fp8kv_e4m3", "hf_fp8kv_e3m4", "hf_fp8kv_e2m5", "hf_fp8kv_int8",
)  # fmt: skip
# Calibrated scales by dtype. vLLM's own dtypes read scales from a copy of the checkpoint.
CALIBRATIONS: dict[tuple[str, str], dict[str, Any]] = {
    ("fp8", "static, per tensor"): {"granularity": "tensor", "center": False},
    ("hf_fp8kv_static", "static, per head, centers"): {"granularity": "head"},
    ("hf_fp8kv_static", "static, per channel, measured plan"): {
        "granularity": "channel", "plan": "measured",
    },
}  # fmt: skip


def split_topics(
    tokenizer: Any, num_topics: int, length: int
) -> tuple[list[torch.Tensor], list[str]]:
    """Return the first tokens of topics to score, `[1, length]`, and texts to calibrate on.

    No text to calibrate on shares a paragraph with a scored topic.
    """
    paragraphs = {name: _find_paragraphs(text) for name, text in TOPICS.items()}
    topics = sorted(TOPICS.keys() - set(FIRST_TOPICS), key=lambda name: (len(TOPICS[name]), name))
    scored_texts: list[torch.Tensor] = []
    scored_parts: set[str] = set()
    for name in (*FIRST_TOPICS, *topics):
        ids = tokenizer(TOPICS[name], truncation=True, max_length=length, return_tensors="pt")
        is_new = not paragraphs[name] & scored_parts
        if len(scored_texts) < num_topics and is_new and ids.input_ids.shape[1] == length:
            scored_texts.append(ids.input_ids)
            scored_parts |= paragraphs[name]
    corpus = [TOPICS[name] for name in sorted(TOPICS) if not paragraphs[name] & scored_parts]
    return scored_texts, corpus


def _find_paragraphs(text: str) -> set[str]:
    parts = (" ".join(part.split()) for part in text.split("\n\n"))
    return {part for part in parts if len(part) >= _MIN_PARAGRAPH_LENGTH}


def make_scales(
    checkpoint: str, texts: Sequence[str], tokenizer: Any, tokens: int, folder: Path
) -> list[tuple[str, str, str, dict[str, str]]]:
    """Calibrate on `tokens` tokens. Return the dtype, name, checkpoint and options of rows."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16).eval()
    rows: list[tuple[str, str, str, dict[str, str]]] = []
    for number, ((dtype, name), options) in enumerate(CALIBRATIONS.items()):
        scales = calibrate(
            model, list(texts), tokenizer=tokenizer, max_tokens=tokens, held_out=0, **options
        )
        path = str(folder / str(number))
        if dtype == "fp8":
            scales.save_pretrained(path, format="compressed-tensors", checkpoint=checkpoint)
            rows.append((dtype, name, path, {}))
        else:
            scales.save_pretrained(path)
            rows.append((dtype, name, checkpoint, {"scales": path}))
    path = str(folder / "plan")
    choose_plan(model, list(texts), tokenizer=tokenizer).save_pretrained(path)
    return [*rows, ("hf_fp8kv", "chosen plan", checkpoint, {"plan": path})]


def predict(folder: str, texts: Sequence[list[int]], dtype: str, options: dict[str, str]) -> Any:
    """Return the log-probabilities at each token of each text, `[tokens, vocabulary]`."""
    from vllm import LLM, SamplingParams

    config = {"hf_fp8kv": options}
    length = max(map(len, texts))
    llm = LLM(
        folder, kv_cache_dtype=dtype, additional_config=config, dtype="bfloat16", max_num_seqs=1,
        max_model_len=length + 1, max_num_batched_tokens=length + 1, enforce_eager=True,
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
    sampling = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    llm.generate([{"prompt_token_ids": text} for text in texts], sampling, use_tqdm=False)
    llm.llm_engine.engine_core.shutdown()
    assert [len(x) for x in logprobs] == [len(text) - 1 for text in texts]
    return torch.cat(logprobs)


def measure_vllm(
    *,
    dtypes: Sequence[str] = DTYPES,
    tokens: int = 512,
    calibrated: int = 2**13,
    progress: Callable[[str], None],
) -> Result:
    """Return rows with `dtype`, `scales`, `kl` (the mean), `kl_error` (of the mean) and `top1`.

    Args:
        dtypes: Values of `--kv-cache-dtype`.
        tokens: Number of tokens of each of four texts, which are scored.
        calibrated: Maximum number of tokens to calibrate on. 0 leaves out calibrated rows.
        progress: Function that is called with the name of each row.
    """
    from transformers import AutoTokenizer
    from vllm.platforms import current_platform

    run = describe_run("vllm-quality")
    # vLLM runs in this process, so that the hook reaches the model.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    # This is done once, because with a second engine vLLM 0.32 fails at a module of llvmlite.
    current_platform.register_triton_kernel_overrides()
    type(current_platform).register_triton_kernel_overrides = classmethod(lambda _: None)
    checkpoint = str(demo_model_path())
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    scored_texts, corpus = split_topics(tokenizer, 4, tokens)
    texts = [ids[0].tolist() for ids in scored_texts]
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        variants: list[tuple[str, str, str, dict[str, str]]]
        variants = [(dtype, "as the dtype says", checkpoint, {}) for dtype in dtypes]
        if calibrated:  # this runs before vLLM, which changes classes of transformers
            variants += make_scales(checkpoint, corpus, tokenizer, calibrated, Path(temporary))
        progress(BASE_DTYPE)
        expected = predict(checkpoint, texts, BASE_DTYPE, {})
        for dtype, name, folder, options in variants:
            progress(f"{dtype}, {name}")
            actual = predict(folder, texts, dtype, options)
            kl = (expected.exp() * (expected - actual)).sum(-1)
            top1 = (expected.argmax(-1) == actual.argmax(-1)).float().mean()
            rows.append(
                {
                    "dtype": dtype, "scales": name, "kl": float(kl.mean()),
                    "kl_error": float(kl.std() / len(kl) ** 0.5), "top1": float(top1),
                }
            )  # fmt: skip
    settings = {"dtypes": list(dtypes), "tokens": tokens, "calibrated": calibrated}
    return {**run, "settings": settings, "rows": rows}


if __name__ == "__main__":
    numbers = {"--tokens": {"type": int}, "--calibrated": {"type": int}}
    main(__doc__, measure_vllm, {"--dtypes": {"nargs": "*"}, **numbers})
