"""Run an encoder-decoder model with two caches, one for each kind of attention in the decoder.

    python examples/encoder_decoder.py
    python examples/encoder_decoder.py --model path/or/hub-id --text "translate to German: Hello"

Without --model, the script creates a small random BART, whose text is meaningless. It compares the
bytes of both caches with those of transformers' caches.
"""

import argparse

import torch
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    BartConfig,
    BartForConditionalGeneration,
)

from hf_fp8kv import enable

CONFIG = {"d_model": 256, "vocab_size": 1000, "encoder_layers": 2, "decoder_layers": 2}
CONFIG |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
CONFIG["init_std"] = 0.2  # large weights, so that the model does not repeat one token


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", help="Folder or Hub id. Default: a small random BART.")
    default_text = "translate English to German: How are you?"
    parser.add_argument("--text", default=default_text, help="Input, if --model is given.")
    args = parser.parse_args()
    if args.model:
        model = AutoModelForSeq2SeqLM.from_pretrained(args.model)
        inputs = dict(AutoTokenizer.from_pretrained(args.model)(args.text, return_tensors="pt"))
    else:
        torch.manual_seed(0)
        model = BartForConditionalGeneration(BartConfig(**CONFIG)).to(torch.bfloat16).eval()
        inputs = {"input_ids": torch.randint(10, 1000, (1, 500))}
    inputs.update(num_beams=1, return_dict_in_generate=True, max_length=251, min_length=251)

    default_output = model.generate(**inputs)
    tokens = default_output.sequences
    dtype = str(model.dtype).removeprefix("torch.")
    print(f"{tokens.shape[1]} tokens, {tokens.unique().numel()} of them distinct")
    enable(model)  # each later call creates two caches in FP8
    fp8_caches = model.generate(**inputs).cache
    for name in ("self_attention_cache", "cross_attention_cache"):
        layers = getattr(default_output.cache, name).layers
        stock_bytes = sum(layer.keys.nbytes + layer.values.nbytes for layer in layers)
        page_bytes = getattr(fp8_caches, name).memory_footprint().used_bytes
        ratio = f"{page_bytes / stock_bytes:.1%} of the bytes in {dtype}"
        print(f"{name}: {stock_bytes:,} bytes in {dtype}, {page_bytes:,} in FP8 ({ratio})")


if __name__ == "__main__":
    main()
