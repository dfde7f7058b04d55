"""Tests of vLLM in separate processes, which load the plugin through its entry point."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import generate_expected, make_file_tier_config, make_scales

SCRIPT = """
import json, sys
from vllm import LLM, SamplingParams

def main(folder, scales, num_ranks, prompts, transfer_config):
    llm = LLM(
        folder, skip_tokenizer_init=True, dtype="float32", kv_cache_dtype="hf_fp8kv_static",
        additional_config={"hf_fp8kv": {"scales": scales}}, max_model_len=512, max_num_seqs=8,
        enforce_eager=True, kv_cache_memory_bytes=8 << 20, max_num_batched_tokens=128, seed=0,
        tensor_parallel_size=int(num_ranks), kv_transfer_config=json.loads(transfer_config),
        block_size=32,
    )
    sampling = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)
    inputs = [{"prompt_token_ids": ids} for ids in json.loads(prompts)]
    outputs = llm.generate(inputs, sampling, use_tqdm=False)
    print("TOKENS", json.dumps([list(output.outputs[0].token_ids) for output in outputs]))
    llm.llm_engine.engine_core.shutdown()

if __name__ == "__main__":
    main(*sys.argv[1:])
"""


@pytest.fixture(scope="module")
def block_folder(tmp_path_factory):
    return tmp_path_factory.mktemp("blocks")


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_ranks_give_the_tokens_of_one_process(
    load_model, prompts, tmp_path, block_folder, num_ranks
):
    # Each of two ranks has one of the two heads, which differ in scales and centers.
    #
    # Both runs offload blocks to the same folder. Two ranks must not read the blocks of one
    # process.
    pytest.importorskip("vllm")
    if num_ranks > (os.cpu_count() or 1):
        pytest.skip("vLLM needs a core for each rank")
    model, folder = load_model("llama")
    scales = make_scales("head", centered=True)
    scales.save_pretrained(tmp_path / "scales")
    (tmp_path / "script.py").write_text(SCRIPT)
    environment = os.environ | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "|".join(map(str, range(num_ranks))),
        "PYTHONPATH": os.pathsep.join(sys.path),  # for `tests.vllm.cpu_tiers`
    }
    arguments = [
        folder, str(tmp_path / "scales"), str(num_ranks), json.dumps(prompts),
        json.dumps(make_file_tier_config(block_folder)),
    ]  # fmt: skip
    process = subprocess.run(
        [sys.executable, tmp_path / "script.py", *arguments], env=environment, cwd=tmp_path,
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    token_lines = [line for line in process.stdout.splitlines() if line.startswith("TOKENS")]
    assert token_lines, process.stderr[-3000:]
    expected = generate_expected(model, prompts, scales=scales)
    assert json.loads(token_lines[0].removeprefix("TOKENS")) == expected
    assert len(list(block_folder.glob("*_r0"))) == num_ranks


def test_the_example_answers_three_prompts():
    pytest.importorskip("vllm")
    example = Path(__file__).parents[2] / "examples" / "vllm_serve.py"
    process = subprocess.run(
        [sys.executable, example, "--max-tokens", "512", "--new-tokens", "8"],
        env=os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}, capture_output=True, text=True,
        timeout=400, check=False,
    )  # fmt: skip
    pattern = r"^['\"].*: ['\"].*, (?:the same|different) tokens$"
    matches = re.findall(pattern, process.stdout, re.MULTILINE)
    assert len(matches) == 3, process.stdout[-2000:] + process.stderr[-2000:]
