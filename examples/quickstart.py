"""The two lines that change, and the memory they save.

    python examples/quickstart.py
    python examples/quickstart.py --model path/or/hub-id --dtype fp8

One prompt is continued twice, with transformers' own cache and with FP8 pages; then the sizes of
both caches are printed. The default is the small demo model, which does not need the Hub.
"""

import argparse
import pydoc_data.topics

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

import hf_fp8kv


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", help="a folder or a Hub id; default: the demo model")
    parser.add_argument("--dtype", help="storage dtype of K and V; default: fp8_e3m4")
    parser.add_argument("--prompt-tokens", type=int, default=2000)
    parser.add_argument("--new-tokens", type=int, default=24)
    args = parser.parse_args()
    name = args.model or hf_fp8kv.demo_model_path()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(name)
    # Line 1: attention that reads FP8 pages. With any other cache it is ordinary attention.
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="fp8_paged").to(device)

    text = pydoc_data.topics.topics["typesseq"]
    inputs = tokenizer(text, return_tensors="pt").to(device)
    inputs = {key: value[:, : args.prompt_tokens] for key, value in inputs.items()}
    # As many tokens from both, whatever they say: their bytes are compared.
    new = args.new_tokens
    how = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False}

    usual = DynamicCache(config=model.config)
    before = model.generate(**inputs, **how, past_key_values=usual)
    # Line 2: the cache.
    paged = hf_fp8kv.FP8PagedCache(model.config, dtype=args.dtype)
    after = model.generate(**inputs, **how, past_key_values=paged)

    length = inputs["input_ids"].shape[1]
    usual_bytes = sum(layer.keys.nbytes + layer.values.nbytes for layer in usual.layers)
    size = paged.memory_footprint()
    print(f"DynamicCache: {tokenizer.decode(before[0, length:])!r}")
    print(f"FP8PagedCache: {tokenizer.decode(after[0, length:])!r}")
    print(f"tokens held: {size.tokens}")
    print(f"DynamicCache: {usual_bytes:,} bytes")
    print(f"FP8PagedCache: {size.total_bytes:,} bytes, {size.total_bytes / usual_bytes:.3f} of it")
    print(
        f"  of these, pages and scales in use: {size.used_bytes:,}; the rest is room to grow into"
    )


if __name__ == "__main__":
    main()
