"""Ask several questions about a document that the model reads once, with `cache.fork()`.

    python examples/fork_chat.py
    python examples/fork_chat.py --model path/or/hub-id --questions "Who?" "When?"

The document is the system prompt of a chat. A fork shares all pages. Its first new token copies the
last page if the page is partly filled. With prefill="stored", in float32, forks and separate caches
give the same answers.
"""

import argparse
import pydoc_data.topics
import time

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_fp8kv import FP8PagedCache, demo_model_path

QUESTIONS = ["What is a slice?", "What is a tuple?"]


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", help="Folder or Hub id. Default: the demo model.")
    parser.add_argument("--questions", nargs="+", default=QUESTIONS, help="One for each fork.")
    parser.add_argument("--characters", type=int, default=8000, help="Characters of the document.")
    args = parser.parse_args()
    name = args.model or demo_model_path()
    tokenizer = AutoTokenizer.from_pretrained(name)
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="fp8_paged").float()

    def generate_answer(ids: torch.Tensor, cache: FP8PagedCache) -> str:
        output = model.generate(ids, cache=cache, max_new_tokens=16, do_sample=False)
        return tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)

    system = {"role": "system", "content": pydoc_data.topics.topics["typesseq"][: args.characters]}
    chats = [[system, {"role": "user", "content": question}] for question in args.questions]
    options = {"add_generation_prompt": True, "return_dict": True, "return_tensors": "pt"}
    prompts = [tokenizer.apply_chat_template(chat, **options).input_ids for chat in chats]
    ids_by_position = zip(*(prompt[0].tolist() for prompt in prompts), strict=False)
    are_equal = [len(set(ids)) == 1 for ids in ids_by_position]
    num_shared = [*are_equal[:-1], False].index(False)  # leaves at least one token
    generate_answer(prompts[0][:, :64], FP8PagedCache(model))  # warm up

    start = time.perf_counter()
    cache = FP8PagedCache(model, prefill="stored")
    model(prompts[0][:, :num_shared], cache=cache, logits_to_keep=1)
    print(f"shared: {num_shared} tokens in {cache.budget.num_held} pages")
    forks = [cache.fork() for _ in prompts]
    answers = [generate_answer(ids, fork) for ids, fork in zip(prompts, forks, strict=True)]
    fork_seconds = time.perf_counter() - start

    start = time.perf_counter()
    caches = [FP8PagedCache(model, prefill="stored") for _ in prompts]
    separate_answers = list(map(generate_answer, prompts, caches))
    separate_seconds = time.perf_counter() - start

    for question, answer in zip(args.questions, answers, strict=True):
        print(f"{question} {answer!r}")
    print(f"the same answers without forks: {answers == separate_answers}")
    separate_pages = sum(separate_cache.budget.num_held for separate_cache in caches)
    print(f"pages: {cache.budget.num_held} with forks, {separate_pages} without")
    print(f"seconds: {fork_seconds:.1f} with forks, {separate_seconds:.1f} without")


if __name__ == "__main__":
    main()
