"""Tests of vLLM in separate processes, which load the plugin through its entry point."""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_fp8kv import demo_model_path
from tests.helpers.margins import compute_greedy_deficit

from .conftest import generate_expected, make_file_tier, make_scales

# Maximum difference between the largest logit and a chosen token's logit, due to 8-bit pages. The
# answer to another prompt has a difference above 5.
MAX_DEFICIT = 1.0
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
    prompts = [{"prompt_token_ids": prompt} for prompt in json.loads(prompts)]
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
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
    """With two ranks, each has one of the two heads. The heads differ in scales and centers.

    Both runs offload blocks to the same folder. Two ranks must not read the blocks of one process.
    """
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
    arguments = [folder, str(tmp_path / "scales"), str(num_ranks), json.dumps(prompts)]
    arguments.append(json.dumps(make_file_tier(block_folder)))
    process = subprocess.run(
        [sys.executable, tmp_path / "script.py", *arguments], env=environment, cwd=tmp_path,
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    token_lines = [line for line in process.stdout.splitlines() if line.startswith("TOKENS")]
    assert token_lines, process.stderr[-3000:]
    expected = generate_expected(model, prompts, scales=scales)
    assert json.loads(token_lines[0].removeprefix("TOKENS")) == expected
    assert len([*block_folder.glob("*_r0")]) == num_ranks


def test_the_example_gives_greedy_answers():
    """The example calibrates the demo model, and vLLM starts the engine in a separate process.

    With 8-bit pages, CPUs may choose differently between two tokens with nearly equal logits. Each
    answer must therefore be greedy up to this rounding error, and must not fit another prompt.
    """
    pytest.importorskip("vllm")
    example = Path(__file__).parents[2] / "examples" / "vllm_serve.py"
    arguments = ["--max-tokens", "512", "--new-tokens", "8"]
    environment = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    process = subprocess.run(
        [sys.executable, example, *arguments], env=environment, capture_output=True, text=True,
        timeout=400, check=False,
    )  # fmt: skip
    pattern = r"^(['\"].*): (['\"].*), (?:the same|different) tokens$"
    matches = re.findall(pattern, process.stdout, re.MULTILINE)
    assert len(matches) == 3, process.stdout[-2000:] + process.stderr[-2000:]
    tokenizer = AutoTokenizer.from_pretrained(demo_model_path())
    model = AutoModelForCausalLM.from_pretrained(demo_model_path(), dtype=torch.float32)
    texts = [(ast.literal_eval(prompt), ast.literal_eval(answer)) for prompt, answer in matches]
    prompt_ids = [tokenizer(prompt).input_ids for prompt, _ in texts]
    answers = [
        tokenizer(prompt + answer).input_ids[len(ids) :]
        for (prompt, answer), ids in zip(texts, prompt_ids, strict=True)
    ]
    for index, (ids, answer) in enumerate(zip(prompt_ids, answers, strict=True)):
        assert 1 <= len(answer) <= 8
        assert compute_greedy_deficit(model, ids, answer) < MAX_DEFICIT
        assert compute_greedy_deficit(model, ids, answers[index - 1]) > 2 * MAX_DEFICIT
