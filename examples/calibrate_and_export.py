"""Calibrate a model's KV scales, and write them for other servers.

    python examples/calibrate_and_export.py
    python examples/calibrate_and_export.py --model path/to/folder --max-tokens 262144 --out scales

The texts are the help topics of Python, which suffice only for a demonstration. --model must be a
folder, because one of the two formats is written into a copy of that folder. `hf-fp8kv card MODEL
--scales FOLDER` measures the scales.
"""

import argparse
import pydoc_data.topics
import tempfile
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_fp8kv import FP8PagedCache, KVScales, calibrate, demo_model_path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, help="Folder. Default: the demo model.")
    parser.add_argument("--max-tokens", type=int, default=2048, help="Tokens to calibrate on.")
    parser.add_argument("--out", type=Path, help="New folder. Default: a temporary folder.")
    args = parser.parse_args()
    folder = args.model or demo_model_path()
    out = args.out or Path(tempfile.mkdtemp(prefix="hf_fp8kv-"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="fp8_paged")

    texts = list(pydoc_data.topics.topics.values())
    # Other servers support one scale per layer for K and one for V, and no centers.
    scales = calibrate(
        model, texts, tokenizer=tokenizer, max_tokens=args.max_tokens,
        granularity="tensor", center=False,
    )  # fmt: skip
    print(scales)

    # vllm-json has one scale for both K and V, so a warning reports that the two scales are merged.
    scales.save_pretrained(out / "json", format="vllm-json")
    scales.save_pretrained(out / "copy", format="compressed-tensors", checkpoint=folder)
    for name in ("json", "copy"):
        loaded_scales = KVScales.from_pretrained(out / name)
        k, v = loaded_scales.layers[0].k.item(), loaded_scales.layers[0].v.item()
        print(f"{out / name}: {loaded_scales.format}, layer 0: K {k:.4f}, V {v:.4f}")
    inputs = tokenizer("London is the capital of", return_tensors="pt")
    cache = FP8PagedCache(model.config, scales=out / "copy")
    answer = model.generate(**inputs, cache=cache, max_new_tokens=8, do_sample=False)
    print(repr(tokenizer.decode(answer[0])))


if __name__ == "__main__":
    main()
