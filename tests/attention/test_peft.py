"""Tests of PEFT adapters with a prefix store. `make peft` runs them in an environment with PEFT."""

from pathlib import Path
from typing import Any

import pytest
import torch

from hf_fp8kv import PrefixStore, enable
from tests.helpers.recorded_graph import recorded_graphs
from tests.helpers.tiny_models import build_variant

pytestmark = [
    pytest.mark.full,
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning"),  # PEFT's own
]
GREEDY = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "suppress_tokens": [0]}
PAGE_SIZE = 8
VIRTUAL_TOKENS = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 10}
# One method for each way in which PEFT changes a model: the class of the config, and its fields.
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "LoRA": ("LoraConfig", {"r": 4, "lora_alpha": 32, "target_modules": ["k_proj", "v_proj"]}),
    "prompt tuning": ("PromptTuningConfig", VIRTUAL_TOKENS),
    "p-tuning": ("PromptEncoderConfig", {**VIRTUAL_TOKENS, "encoder_hidden_size": 16}),
    "prefix tuning": ("PrefixTuningConfig", VIRTUAL_TOKENS),
}


@pytest.mark.parametrize("is_wrapped", [True, False])
def test_captured_steps_follow_the_adapter(is_wrapped: bool) -> None:
    """Adapters are switched, turned off and merged between calls, each of which has a graph."""
    peft = pytest.importorskip("peft")
    ids = torch.randint(2, 98, (2, 20), generator=torch.Generator().manual_seed(1))
    keywords = {
        **GREEDY, "input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": 24,
        "eos_token_id": None, "output_logits": True, "return_dict_in_generate": True,
    }  # fmt: skip

    def run(**options: Any) -> list[Any]:
        base_model, _ = build_variant("gqa", max_position_embeddings=512)
        config = peft.LoraConfig(**METHODS["LoRA"][1], lora_dropout=0.1)
        model = peft.get_peft_model(base_model, config, "first")
        model.add_adapter("second", config)
        for name in ("first", "second"):
            model.set_adapter(name)
            randomize(model, seed=len(name))
        enable(model, dtype="fp8_e3m4", page_size=PAGE_SIZE, **options)
        caller = model.eval() if is_wrapped else base_model.eval()
        answers = []
        for name in ("first", "second", "first"):
            model.set_adapter(name)
            answers.append(caller.generate(**keywords))
        with model.disable_adapter():
            answers.append(caller.generate(**keywords))
        model.merge_adapter()
        answers.append(caller.generate(**keywords))
        return [torch.stack(answer.logits) for answer in answers]

    with recorded_graphs() as steps:
        actual = run(capture=True)
    assert all(map(torch.equal, actual, run()))
    assert [step.num_replays for step in steps] == [20] * 5, steps[-1].obstacle
    assert not torch.equal(actual[0], actual[1])
    assert not torch.equal(actual[0], actual[3])


@pytest.mark.parametrize("method", METHODS)
def test_a_store_changes_no_answer(method: str, tmp_path: Path) -> None:
    """Two adapters and a model without an adapter share a folder."""
    pytest.importorskip("peft")
    ids = torch.randint(2, 98, (1, 60), generator=torch.Generator().manual_seed(1))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **GREEDY}
    # Hits of a call, and files after it. LoRA changes weights, so its pages have other keys. The 60
    # tokens fill seven pages. Other methods add tokens, and their calls do not use the store.
    all_counts = [(1, 7), (1, 14), (1, 21)] if method == "LoRA" else [(0, 0), (1, 7), (0, 7)]
    answers: set[str] = set()
    for seed, counts in zip((1, 0, 2), all_counts, strict=True):
        model = enable(make_model(method, seed), prefill="stored", page_size=PAGE_SIZE)
        expected = model.generate(**inputs)
        store = PrefixStore(tmp_path)
        model = enable(make_model(method, seed), prefix_store=store, page_size=PAGE_SIZE)
        for _ in range(2):
            assert torch.equal(model.generate(**inputs), expected), seed
            store.flush()
        assert (store.usage().hits, len(list(tmp_path.glob("*.safetensors")))) == counts, seed
        answers.add(str(expected.tolist()))
    assert len(answers) == 3, "an adapter has no effect"


# Settings that change outputs and no tensor: the class of the config, its fields, and two settings.
@pytest.mark.parametrize(
    ("name", "fields", "first_settings", "second_settings"),
    [
        ("FourierFTConfig", {"n_frequency": 50}, {"random_loc_seed": 1}, {"random_loc_seed": 2}),
        ("HRAConfig", {"r": 4}, {"apply_GS": False}, {"apply_GS": True}),
        ("OFTConfig", {"oft_block_size": 8}, {"use_cayley_neumann": False},
         {"use_cayley_neumann": True}),
        ("VBLoRAConfig", {"r": 4, "num_vectors": 16, "vector_length": 16}, {"topk": 2},
         {"topk": 3}),
        ("LoraConfig", {"r": 4}, {"use_dora": False}, {"use_dora": True}),
    ],
    ids=str,
)  # fmt: skip
def test_settings_of_adapters_keep_pages_apart(
    name: str, fields: dict[str, Any], first_settings: Any, second_settings: Any, tmp_path: Path
) -> None:
    """Only the same adapter with the same settings finds the pages, in any process."""
    peft = pytest.importorskip("peft")
    ids = torch.randint(2, 98, (1, 60), generator=torch.Generator().manual_seed(1))
    store = PrefixStore(tmp_path)
    calls = [(first_settings, 0), (second_settings, 0), (first_settings, 1), (second_settings, 2)]
    for settings, num_hits in calls:
        base, _ = build_variant("gqa", max_position_embeddings=512)
        config = {"target_modules": ["q_proj", "o_proj"], **fields, **settings}
        model = randomize(peft.get_peft_model(base, getattr(peft, name)(**config)).eval(), seed=1)
        enable(model, prefix_store=store, page_size=PAGE_SIZE)
        model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **GREEDY)
        store.flush()
        assert store.usage().hits == num_hits


def randomize(model: Any, seed: int) -> Any:
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_()
    return model


def make_model(method: str, seed: int) -> Any:
    """Return a model with an adapter whose weights depend on the seed. Seed 0 adds no adapter."""
    import peft

    model, _ = build_variant("gqa", max_position_embeddings=512)
    if not seed:
        return model
    name, fields = METHODS[method]
    return randomize(peft.get_peft_model(model, getattr(peft, name)(**fields)).eval(), seed)
