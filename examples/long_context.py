"""Read a long document in little memory, with chunks, a budget of pages, and OutOfPagesError.

    python examples/long_context.py
    python examples/long_context.py --max-pages 200     # enough for the whole document

The model reads the document in chunks, so that attention never processes all tokens at once. The
error leaves the cache unchanged, so the script continues with the chunks that were read. It removes
some of their last tokens, to free pages for the final question and its answer.
"""

import argparse
import pydoc_data.topics

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_fp8kv import FP8PagedCache, OutOfPagesError, demo_model_path

NEW_TOKENS = 24  # tokens of the answer
PAGE_SIZE = 64  # tokens


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", help="Folder or Hub id. Default: the demo model.")
    parser.add_argument("--max-pages", type=int, default=64, help="Maximum number of pages.")
    parser.add_argument("--chunk", type=int, default=512, help="Tokens per call of the model.")
    args = parser.parse_args()
    name = args.model or demo_model_path()
    tokenizer = AutoTokenizer.from_pretrained(name)
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="fp8_paged")
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    document = tokenizer(pydoc_data.topics.topics["string-methods"], return_tensors="pt").input_ids
    question = tokenizer(
        "\n\nThe text above describes", return_tensors="pt", add_special_tokens=False
    ).input_ids
    cache = FP8PagedCache(model, max_pages=args.max_pages, page_size=PAGE_SIZE)
    try:
        for chunk in document.split(args.chunk, dim=1):
            model(chunk.to(model.device), cache=cache, logits_to_keep=1)
    except OutOfPagesError as error:
        print(f"out of pages: a chunk needs {error.needed}, {error.available} are left")
    num_read_tokens = cache.get_seq_length()
    max_read_tokens = max(args.max_pages * PAGE_SIZE - question.shape[1] - NEW_TOKENS, 0)
    if num_read_tokens > max_read_tokens:
        cache.crop(max_read_tokens - num_read_tokens)  # removes the last tokens and their pages
    num_read_tokens = min(num_read_tokens, max_read_tokens)
    print(f"read {num_read_tokens} of {document.shape[1]} tokens")
    ids = torch.cat([document[:, :num_read_tokens], question], dim=1).to(model.device)
    options = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False}
    output = model.generate(ids, cache=cache, **options)
    print(f"answer: {tokenizer.decode(output[0, ids.shape[1] :])!r}")
    page_bytes = cache.memory_footprint().total_bytes
    # PagedKV tensors have the shape and dtype of dense K and V, so `nbytes` are the dense bytes.
    dense_bytes = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    size = f"{page_bytes:,} bytes, {page_bytes / dense_bytes:.3f} of {dense_bytes:,} unquantized"
    print(f"{cache.budget.num_held} pages: {size}")


if __name__ == "__main__":
    main()
