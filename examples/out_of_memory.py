"""Run out of memory with a long prompt, then read it in the same memory with 8-bit pages.

    python examples/out_of_memory.py
    python examples/out_of_memory.py --model path/or/hub-id --limit 300

A limit on the memory of this process stands for a full GPU, so the script needs Linux, but no GPU.
Without --model, it creates a small random model, whose keys and values take most of the memory.
"""

import argparse
import ctypes
import resource

import psutil
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import hf_fp8kv

CONFIG = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 16, "vocab_size": 1000}
CONFIG |= {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 128}
MIB = 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", help="Folder or Hub id. Default: a small random model.")
    parser.add_argument("--tokens", type=int, default=4000, help="Tokens of the prompt.")
    parser.add_argument("--limit", type=int, default=120, help="MiB beyond the loaded model.")
    args = parser.parse_args()
    # M_MMAP_THRESHOLD: the memory of larger tensors returns to the system when they are freed.
    ctypes.CDLL(None).mallopt(-3, 65536)
    torch.manual_seed(0)
    if args.model:
        model = AutoModelForCausalLM.from_pretrained(args.model)
    else:
        config = LlamaConfig(**CONFIG, max_position_embeddings=65536)
        model = LlamaForCausalLM(config).to(torch.bfloat16).eval()
    ids = torch.randint(10, 1000, (1, args.tokens))

    def try_prompt(title: str, prompt: torch.Tensor = ids, **options: int) -> None:
        try:
            output = model.generate(prompt, min_new_tokens=8, max_new_tokens=8, **options)
            result = f"{prompt.shape[1]:,} tokens read, {output.shape[1] - prompt.shape[1]} written"
        except (MemoryError, RuntimeError) as error:
            if not isinstance(error, MemoryError) and "can't allocate memory" not in str(error):
                raise
            result = "out of memory"
        print(f"{title}: {result}")

    chunk_options = {"prefill_chunk_size": 256}
    try_prompt("warm up, transformers", ids[:, :300])  # loads kernels and starts threads
    hf_fp8kv.enable(model)
    try_prompt("warm up, 8 bits", ids[:, :300], **chunk_options)
    hf_fp8kv.disable(model)

    _, hard_limit = old_limits = resource.getrlimit(resource.RLIMIT_DATA)
    data_limit = psutil.Process().memory_info().data + args.limit * MIB
    resource.setrlimit(resource.RLIMIT_DATA, (data_limit, hard_limit))
    try:
        try_prompt("transformers")
        try_prompt("transformers, in chunks", **chunk_options)
        hf_fp8kv.enable(model)
        try_prompt("8 bits, in chunks", **chunk_options)
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, old_limits)


if __name__ == "__main__":
    main()
