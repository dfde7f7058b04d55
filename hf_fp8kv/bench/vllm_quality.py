"""KL of a model's predictions in vLLM with stored K and V, against those with its 16-bit cache.

    python -m hf_fp8kv.bench.vllm_quality            # in the environment of `make vllm`

Each row is a dtype of `--kv-cache-dtype`. A text is one prompt; vLLM is asked for the
log-probabilities of its tokens, and what its model computes for them is recorded whole.
"""

import argparse
import os
from collections.abc import Sequence
from typing import Any

import torch

from ..utils.demo_model import model_path
from ..utils.terminal import make_table
from .quality import TEXTS, first_tokens

BASE = "auto"
DTYPES = (
    "fp8", "fp8_e5m2", "hf_fp8kv_e4m3", "hf_fp8kv_e3m4", "hf_fp8kv_e2m5", "hf_fp8kv_int8",
)  # fmt: skip


def predict(folder: str, texts: Sequence[list[int]], dtype: str, scales: str | None) -> Any:
    """Return the log-probabilities at each token of each text, `[tokens, vocabulary]`."""
    from vllm import LLM, SamplingParams

    config = {} if scales is None else {"hf_fp8kv": {"scales": scales}}
    length = max(map(len, texts))
    llm = LLM(
        folder, kv_cache_dtype=dtype, additional_config=config, dtype="bfloat16", max_num_seqs=1,
        max_model_len=length + 1, max_num_batched_tokens=length + 1, enforce_eager=True,
        kv_cache_memory_bytes=256 << 20, enable_prefix_caching=False,
    )  # fmt: skip
    recorded: list[torch.Tensor] = []

    def record(model: Any) -> None:
        compute = model.compute_logits

        def compute_logits(*args: Any, **kwargs: Any) -> Any:
            logits = compute(*args, **kwargs)
            if len(logits) > 1:  # not those of the next token alone
                recorded.append(logits.float().log_softmax(-1))
            return logits

        model.compute_logits = compute_logits

    llm.apply_model(record)
    sampling = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    llm.generate([{"prompt_token_ids": text} for text in texts], sampling, use_tqdm=False)
    llm.llm_engine.engine_core.shutdown()
    assert [len(x) for x in recorded] == [len(text) - 1 for text in texts]
    return torch.cat(recorded)


def measure(dtypes: Sequence[str], tokens: int, scales: str | None) -> list[dict[str, object]]:
    """Return the rows of the table: dtype, mean KL, its standard error, same most likely token."""
    from transformers import AutoTokenizer

    folder = str(model_path())
    found = first_tokens(AutoTokenizer.from_pretrained(folder), TEXTS, tokens)
    texts = [ids[0].tolist() for _, ids in found]
    base = predict(folder, texts, BASE, None)
    rows: list[dict[str, object]] = []
    for dtype in dtypes:
        static = scales if dtype.endswith("_static") else None
        other = predict(folder, texts, dtype, static)
        kl = (base.exp() * (base - other)).sum(-1)
        same = (base.argmax(-1) == other.argmax(-1)).float().mean()
        error = kl.std() / len(kl) ** 0.5
        rows.append(
            {
                "--kv-cache-dtype": dtype, "mean KL": f"{kl.mean():.2e}",
                "standard error": f"{error:.1e}", "same top-1": f"{100 * same:.1f} %",
            }
        )  # fmt: skip
    return rows


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description="KL in vLLM, by dtype of the KV cache")
    parser.add_argument("--dtypes", nargs="+", default=DTYPES)
    parser.add_argument("--tokens", type=int, default=512, help="of each of four texts")
    parser.add_argument("--scales", help="for dtypes that end with _static")
    chosen = parser.parse_args()
    # In this process, where the model can be reached.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm.platforms import current_platform

    # Once: with a second engine vLLM 0.32 fails at a module of llvmlite.
    current_platform.register_triton_kernel_overrides()
    type(current_platform).register_triton_kernel_overrides = classmethod(lambda _: None)
    from rich.console import Console

    Console().print(make_table(measure(chosen.dtypes, chosen.tokens, chosen.scales)))


if __name__ == "__main__":
    main()
