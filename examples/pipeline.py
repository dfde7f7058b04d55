"""Run a pipeline with an FP8 cache, which needs only `enable(model)` and `disable(model)`.

    python examples/pipeline.py
    python examples/pipeline.py --model path/or/hub-id --dtype fp8

The prompts differ in length, so the batch is padded on the left. `disable` restores the model. The
last line of the output names the cache that the model then uses.
"""

import argparse

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

from hf_fp8kv import demo_model_path, disable, enable

PROMPTS = [
    "London is the capital of",
    "Water boils at",
    "The three primary colours are red, yellow and",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", help="Folder or Hub id. Default: the demo model.")
    parser.add_argument("--dtype", help="fp8_e3m4 (the default), fp8_e4m3, int8, ...")
    parser.add_argument("--new-tokens", type=int, default=12, help="Tokens of each answer.")
    args = parser.parse_args()
    name = args.model or demo_model_path()

    tokenizer = AutoTokenizer.from_pretrained(name, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(name)
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    model.generation_config.max_length = None  # the checkpoint's value would cause a warning

    def describe_cache() -> str:
        inputs = tokenizer(PROMPTS[0], return_tensors="pt").to(model.device)
        output = model.generate(**inputs, max_new_tokens=2, return_dict_in_generate=True)
        return f"{type(output.past_key_values).__name__} with {model.config._attn_implementation}"

    enable(model, dtype=args.dtype)
    print(f"after enable: {describe_cache()}")
    generator = pipeline("text-generation", model=model, tokenizer=tokenizer)
    options = {"max_new_tokens": args.new_tokens, "do_sample": False}
    for answer in generator(PROMPTS, batch_size=len(PROMPTS), **options):
        print(f"  {answer[0]['generated_text']!r}")
    disable(model)
    print(f"after disable: {describe_cache()}")


if __name__ == "__main__":
    main()
