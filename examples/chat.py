"""Chat with one cache. Each turn passes the whole conversation, but computes only new tokens.

    python examples/chat.py
    python examples/chat.py --model path/or/hub-id --questions "Who are you?" "Why?"

After `enable`, the cache stores its token ids. `generate()` continues after the tokens that the
prompt and the cache share, even if an answer was edited or a question is repeated.
"""

import argparse

from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_fp8kv import FP8PagedCache, demo_model_path, enable

QUESTIONS = ["Name a fruit.", "Name another fruit.", "And one more?"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", help="Folder or Hub id. Default: the demo model.")
    parser.add_argument("--questions", nargs="+", default=QUESTIONS, help="One for each turn.")
    parser.add_argument("--new-tokens", type=int, default=24, help="Maximum tokens of an answer.")
    args = parser.parse_args()
    name = args.model or demo_model_path()
    tokenizer = AutoTokenizer.from_pretrained(name)
    model = enable(AutoModelForCausalLM.from_pretrained(name).float())
    cache = FP8PagedCache(model)
    chat: list[dict[str, str]] = []
    for question in [*args.questions, args.questions[-1]]:
        if chat and chat[-2]["content"] == question:
            chat = chat[:-2]  # ask the last question again
        chat.append({"role": "user", "content": question})
        inputs = tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
        length = inputs.input_ids.shape[1]
        old_reused_tokens = cache.reused_tokens
        output = model.generate(
            **inputs, cache=cache, max_new_tokens=args.new_tokens, do_sample=False
        )
        answer = tokenizer.decode(output[0, length:], skip_special_tokens=True)
        num_reused = cache.reused_tokens - old_reused_tokens
        print(f"{question} {answer!r} ({length} tokens, {num_reused} of them reused)")
        chat.append({"role": "assistant", "content": answer})


if __name__ == "__main__":
    main()
