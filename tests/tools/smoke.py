"""Check the installed package outside the repository: `python -I smoke.py` (`make dist`)."""

import sys
from importlib.metadata import distribution, version
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import hf_fp8kv


def main() -> None:
    package = Path(hf_fp8kv.__file__).parent
    assert "site-packages" in package.parts, package
    assert (package / "py.typed").is_file()
    paths = [str(path) for path in distribution("hf-fp8kv").files or ()]
    assert any(path.endswith("licenses/LICENSE") for path in paths), paths
    assert {path.partition("/")[0] for path in paths}.isdisjoint(("tests", "docs", "examples"))
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    prompt = torch.arange(1, 41)[None]
    expected = model.generate(prompt, max_new_tokens=8, do_sample=False)
    answers = {}
    for dtype in ("model", None):
        hf_fp8kv.enable(model, dtype)
        answers[dtype] = model.generate(prompt, max_new_tokens=8, do_sample=False)
        assert answers[dtype].shape == expected.shape
        assert hf_fp8kv.summary(model).footprint.tokens == expected.shape[1] - 1
    # Only pages in the model's dtype round no value.
    assert torch.equal(answers["model"], expected)
    print("hf_fp8kv", version("hf-fp8kv"), "in", package, "works", file=sys.stderr)


if __name__ == "__main__":
    main()
