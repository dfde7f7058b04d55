"""Compare bytes, speed and predictions of 8-bit pages and transformers' own cache (`make demo`).

    python examples/quickstart.py
    python examples/quickstart.py --model path/or/hub-id --dtype fp8

The model continues a long prompt with each cache, which gives the speed. The last 64 tokens of the
prompt are scored, which gives the KL. The default is the small demo model, which needs no Hub.
"""

import argparse
import pydoc_data.topics
import time

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

import hf_fp8kv


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", help="Folder or Hub id. Default: the demo model.")
    parser.add_argument("--dtype", help="Storage dtype of K and V. Default: fp8_e3m4.")
    parser.add_argument("--prompt-tokens", type=int, default=2000, help="Tokens of the prompt.")
    parser.add_argument("--new-tokens", type=int, default=24, help="Tokens of each answer.")
    args = parser.parse_args()
    name = args.model or hf_fp8kv.demo_model_path()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = "auto" if device == "cuda" else torch.float32  # 16 bits are slow on many CPUs
    tokenizer = AutoTokenizer.from_pretrained(name)
    # Line 1: attention that reads 8-bit pages. With other caches it is ordinary attention.
    model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, attn_implementation="fp8_paged")
    document = pydoc_data.topics.topics["typesseq"]
    ids = tokenizer(document, return_tensors="pt").input_ids[:, : args.prompt_tokens].to(device)
    model.to(device)
    dynamic_cache = DynamicCache(config=model.config)
    # Line 2: the cache.
    paged_cache = hf_fp8kv.FP8PagedCache(model.config, dtype=args.dtype)
    num_new = args.new_tokens  # fixed, so that times and bytes can be compared
    options = {"max_new_tokens": num_new, "min_new_tokens": num_new, "do_sample": False}
    logps, answers = [], []
    for cache in (dynamic_cache, paged_cache):
        with torch.no_grad():
            model(ids[:, :-64], past_key_values=cache)
            logps.append(model(ids[:, -64:], past_key_values=cache).logits.log_softmax(-1))
        start, prompt = time.perf_counter(), torch.cat([ids, logps[-1][:, -1:].argmax(-1)], dim=1)
        answer = model.generate(prompt, past_key_values=cache, **options)[0, ids.shape[1] :]
        speed = num_new / (time.perf_counter() - start)
        text = tokenizer.decode(answer)
        answers.append(f"{type(cache).__name__}, {speed:.1f} tokens per second: {text!r}")
    dense_bytes = sum(2 * (x.keys.numel() + x.values.numel()) for x in dynamic_cache.layers)
    pages = paged_cache.memory_footprint()
    kl = (logps[0].exp() * (logps[0] - logps[1])).sum(-1).mean()
    print(f"tokens held: {pages.tokens}\nin 16 bits: {dense_bytes:,} bytes")
    print(f"8-bit pages: {pages.used_bytes:,} bytes, {pages.used_bytes / dense_bytes:.3f} of it")
    print(f"mean KL divergence of the predictions: {kl:.1e}", *answers, sep="\n")


if __name__ == "__main__":
    main()
