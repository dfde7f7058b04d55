"""Run out of memory with a long prompt, then answer it in the same memory with 8-bit pages.

    python examples/out_of_memory.py
    python examples/out_of_memory.py --tokens 8000 --limit 192

A limit on the memory of this process stands for a full GPU, so the script needs Linux, but no GPU.
The model is in float32, in which CPUs are fast. The limit is too low even for a 16-bit cache.
"""

import argparse
import ctypes
import pydoc_data.topics
import resource

import psutil
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_fp8kv

MIB = 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", help="Folder or Hub id. Default: the demo model.")
    parser.add_argument("--tokens", type=int, default=4000, help="Tokens of the prompt.")
    parser.add_argument("--limit", type=int, default=96, help="MiB, besides the model.")
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(name := args.model or hf_fp8kv.demo_model_path())
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    text = pydoc_data.topics.topics["string-methods"] * 2
    ids = tokenizer(text, return_tensors="pt").input_ids[:, : args.tokens]

    def try_prompt(title: str, prompt: torch.Tensor = ids, **options: int) -> None:
        try:
            output = model.generate(prompt, max_new_tokens=8, do_sample=False, **options)
        except (MemoryError, RuntimeError) as error:
            if not isinstance(error, MemoryError) and "can't allocate memory" not in str(error):
                raise
            print(f"{title}: out of memory")
        else:
            answer = tokenizer.decode(output[0, prompt.shape[1] :])
            print(f"{title}: {prompt.shape[1]} tokens read, answer {answer!r}")

    chunks = {"prefill_chunk_size": 256}
    hf_fp8kv.enable(model)
    try_prompt("warm up", ids[:, :300], **chunks)  # loads kernels and starts threads
    hf_fp8kv.disable(model)

    ctypes.CDLL(None).mallopt(-3, MIB)  # M_MMAP_THRESHOLD: freed tensors return to the system
    _, hard_limit = old_limits = resource.getrlimit(resource.RLIMIT_DATA)
    limit = psutil.Process().memory_info().data + args.limit * MIB
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard_limit))
    try:
        try_prompt("generate()")
        try_prompt("prefill_chunk_size", **chunks)
        hf_fp8kv.enable(model)
        try_prompt("enable(model)")
        try_prompt("enable(model) and prefill_chunk_size", **chunks)
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, old_limits)


if __name__ == "__main__":
    main()
