"""A process that answers a prompt with an adapter of PEFT, or with none, and a store in a folder.

    python -m tests.helpers.adapters FOLDER SEED

SEED makes the weights of the adapter, and 0 means no adapter. For each method it prints the number
of hits of two equal prompts, whether both answers are correct, the answer, and the number of pages
in the folder.
"""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

GREEDY = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "suppress_tokens": [0]}
PAGE = 8


def make_configs() -> dict[str, Callable[[], Any]]:
    """Return a config of one method of each mechanism by which PEFT changes a model."""
    import peft

    virtual = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 10}
    return {
        "LoRA": lambda: peft.LoraConfig(r=4, lora_alpha=32, target_modules=["k_proj", "v_proj"]),
        "prompt tuning": lambda: peft.PromptTuningConfig(**virtual),
        "p-tuning": lambda: peft.PromptEncoderConfig(**virtual, encoder_hidden_size=16),
        "prefix tuning": lambda: peft.PrefixTuningConfig(**virtual),
    }


def make_model(config: Any, seed: int) -> Any:
    import peft

    from tests.helpers.tiny_models import tiny

    model, _ = tiny("gqa", max_position_embeddings=512)
    if not seed:
        return model
    wrapped = peft.get_peft_model(model, config).eval()
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in wrapped.parameters():
            if parameter.requires_grad:
                parameter.normal_()
    return wrapped


def answer(folder: Path, make: Callable[[], Any]) -> dict[str, Any]:
    from hf_fp8kv import PrefixStore, enable

    ids = torch.randint(2, 98, (1, 60), generator=torch.Generator().manual_seed(1))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    model = enable(make(), prefill="stored", center_keys=False, page_size=PAGE)
    expected = model.generate(**inputs, **GREEDY)
    store = PrefixStore(folder)
    model = enable(make(), prefix_store=store, page_size=PAGE)
    right = True
    for _ in range(2):
        right = right and torch.equal(model.generate(**inputs, **GREEDY), expected)
        store.flush()
    return {
        "right": right, "hits": store.usage().hits, "said": expected.tolist(),
        "pages": len(list(folder.glob("*.safetensors"))),
    }  # fmt: skip


def main() -> None:
    folder, seed = Path(sys.argv[1]), int(sys.argv[2])
    os.environ["HF_HUB_OFFLINE"] = "1"
    torch.set_num_threads(1)
    result = {
        name: answer(folder / name, lambda make=make: make_model(make(), seed))
        for name, make in make_configs().items()
    }
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
