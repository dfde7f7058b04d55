"""Compare bytes, speed and predictions of 8-bit pages and transformers' own cache.

    python examples/quickstart.py
    python examples/quickstart.py --model path/or/hub-id --dtype fp8

The script times how fast the model continues a long prompt with each cache. It also compares the
predictions for the last 64 tokens of the prompt. The default is a small model, which needs no Hub.
"""

import argparse
import pydoc_data.topics
import time

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from hf_fp8kv import FP8PagedCache, demo_model_path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", help="Folder or Hub id. Default: the demo model.")
    parser.add_argument("--dtype", help="adaptive (the default), fp8, int8, ...")
    parser.add_argument("--prompt-tokens", type=int, default=2000, help="Tokens of the prompt.")
    parser.add_argument("--new-tokens", type=int, default=24, help="Tokens of each answer.")
    args = parser.parse_args()

    name = args.model or demo_model_path()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = "auto" if device == "cuda" else torch.float32  # 16 bits are slow on many CPUs
    tokenizer = AutoTokenizer.from_pretrained(name)
    document = pydoc_data.topics.topics["typesseq"]  # a long text that comes with Python
    ids = tokenizer(document, return_tensors="pt").input_ids[:, : args.prompt_tokens].to(device)
    model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype).to(device)

    dynamic_cache = DynamicCache(config=model.config)
    paged_cache = FP8PagedCache(model, dtype=args.dtype)
    # All answers have the same length, so that times and bytes can be compared.
    lengths = {"max_new_tokens": args.new_tokens, "min_new_tokens": args.new_tokens}
    log_probs = []
    report_lines = []
    # "fp8_paged" attention reads 8-bit pages.
    for cache, attention in ((dynamic_cache, "sdpa"), (paged_cache, "fp8_paged")):
        model.set_attn_implementation(attention)
        with torch.no_grad():
            model(ids[:, :-64], cache=cache)
            logits = model(ids[:, -64:], cache=cache).logits
        log_probs.append(logits.log_softmax(-1))
        prompt = torch.cat([ids, logits[:, -1:].argmax(-1)], dim=1)  # with the first new token
        start = time.perf_counter()
        output = model.generate(prompt, cache=cache, do_sample=False, **lengths)
        speed = args.new_tokens / (time.perf_counter() - start)
        text = tokenizer.decode(output[0, ids.shape[1] :])
        report_lines.append(f"{type(cache).__name__}, {speed:.1f} tokens per second: {text!r}")

    num_values = sum(layer.keys.numel() + layer.values.numel() for layer in dynamic_cache.layers)
    stock_bytes = 2 * num_values  # in 16 bits, even if the model runs in float32
    footprint = paged_cache.memory_footprint()
    ratio = footprint.used_bytes / stock_bytes
    stock_log_probs, paged_log_probs = log_probs
    kl = (stock_log_probs.exp() * (stock_log_probs - paged_log_probs)).sum(-1).mean()

    print(f"tokens held: {footprint.tokens}\nin 16 bits: {stock_bytes:,} bytes")
    print(f"8-bit pages: {footprint.used_bytes:,} bytes, {ratio:.3f} of the 16-bit size")
    print(f"mean KL divergence of the predictions: {kl:.1e}", *report_lines, sep="\n")


if __name__ == "__main__":
    main()
