"""Fixtures of vLLM on a CPU in this process. `make vllm` installs vLLM, without it tests skip."""

import functools
import gc
import os

import pytest
import torch

from hf_fp8kv import FP8PagedCache, KVScales, LayerScales

# Set before vLLM is imported. One process lets a test read the pages of the pool.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_CI_ENV", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

LENGTHS = (3, 7, 17, 63, 64, 65, 130, 300)
NEW_TOKENS = 12
LAYERS, HEADS, DIM = 2, 2, 32

SIZES = {
    "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": HEADS, "head_dim": DIM, "vocab_size": 256,
    "max_position_embeddings": 1024, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
# Features that each model adds to Llama: biases, a window, softcaps, or sinks (with a window in
# every second layer).
_MODELS = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "mistral": {"sliding_window": 40},
    "gemma2": {
        "sliding_window": 40, "attn_logit_softcapping": 0.5, "query_pre_attn_scalar": 32,
    },
    "gpt_oss": {"sliding_window": 40, "num_local_experts": 4, "num_experts_per_tok": 2},
}  # fmt: skip


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Return a function that returns a model and its folder for a key of `_MODELS`."""
    built = {}

    def make(name):
        if name not in built:
            from transformers import AutoConfig, AutoModelForCausalLM

            config = AutoConfig.for_model(name, **SIZES, **_MODELS[name])
            torch.manual_seed(1)
            model = AutoModelForCausalLM.from_config(config).float().eval()
            with torch.no_grad():
                for path, parameter in model.named_parameters():
                    if path.endswith("sinks"):
                        parameter.copy_(torch.linspace(-1, 2, len(parameter)))
                    elif parameter.ndim > 1:
                        parameter.mul_(3)  # tokens then depend on attention
                    elif path.endswith("post_attention_layernorm.weight") and name == "gemma2":
                        parameter.add_(5)  # otherwise tokens only depend on the previous token
                    elif name == "qwen2":
                        parameter.add_(torch.randn_like(parameter))
            folder = tmp_path_factory.mktemp(name)
            model.save_pretrained(folder)
            model.set_attn_implementation("fp8_paged")
            built[name] = model, str(folder)
        return built[name]

    return make


@pytest.fixture(scope="session")
def prompts():
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(3, 256, (n,), generator=generator).tolist() for n in LENGTHS]


def make_scales(granularity, *, centered=False, layers=LAYERS, heads=HEADS, model_type=None):
    """Return scales that differ between layers, heads, and K and V."""
    shape = {"tensor": (), "head": (heads, 1), "channel": (heads, DIM)}[granularity]
    generator = torch.Generator().manual_seed(3)

    def random(low, high, shape=shape):
        return low + (high - low) * torch.rand(shape, generator=generator)

    return KVScales(
        {
            index: LayerScales(
                random(0.01, 0.02), random(0.03, 0.05),
                random(-1, 1, (heads, DIM)) if centered else None,
            )
            for index in range(layers)
        },
        model_type=model_type,
    )  # fmt: skip


@functools.cache
def _override_kernels_once():
    """Make vLLM replace its Triton kernels now, and not again with each engine.

    vLLM searches all modules for them. If numba is imported, this fails at a module of llvmlite
    (vLLM 0.32), an object of which has any attribute. A serving process imports numba later.
    """
    from vllm.platforms import current_platform

    current_platform.register_triton_kernel_overrides()
    type(current_platform).register_triton_kernel_overrides = classmethod(lambda _: None)


@pytest.fixture
def serve():
    """Return a function that starts vLLM. Its memory is freed after the test."""
    pytest.importorskip("vllm")
    _override_kernels_once()
    from vllm import LLM

    running = []

    def start(folder, kv_cache_dtype, scales=None, plan=None, **options):
        named = {"scales": scales, "plan": plan}
        config = {"hf_fp8kv": {name: str(path) for name, path in named.items() if path}}
        options = {
            "kv_cache_dtype": kv_cache_dtype, "skip_tokenizer_init": True, "dtype": "float32",
            "max_model_len": 512,
            "max_num_seqs": 8, "enforce_eager": True, "kv_cache_memory_bytes": 8 << 20,
            # The longest prompts are prefilled in chunks, together with further requests.
            "max_num_batched_tokens": 128, "seed": 0, "block_size": 32,
        } | options  # fmt: skip
        llm = LLM(folder, additional_config=config, **options)
        running.append(llm)
        return llm

    yield start
    for llm in running:
        llm.llm_engine.engine_core.shutdown()
    running.clear()
    gc.collect()


def store_options(dtype, folder, layers=LAYERS):
    """Return options of FP8PagedCache equal to `dtype`, and the folder of static scales."""
    options = {} if dtype == "hf_fp8kv_static" else {"dtype": "fp8_e3m4"}
    if not dtype.endswith("static"):
        return options, None
    scales = make_scales("head", centered=True, layers=layers)
    scales.save_pretrained(folder)
    return options | {"scales": scales}, folder


def generate(llm, prompts, tokens=NEW_TOKENS):
    """Return vLLM's greedy tokens, and the number of cached prefix tokens of each prompt."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    out = llm.generate([{"prompt_token_ids": p} for p in prompts], sampling, use_tqdm=False)
    return [list(x.outputs[0].token_ids) for x in out], [x.num_cached_tokens for x in out]


def generate_here(model, prompts, tokens=NEW_TOKENS, **options):
    """Return the greedy tokens of transformers with `FP8PagedCache(prefill="stored")`."""
    result = []
    for prompt in prompts:
        cache = FP8PagedCache(model.config, prefill="stored", **options)
        ids = model.generate(
            torch.tensor([prompt]), past_key_values=cache, max_new_tokens=tokens, do_sample=False,
            eos_token_id=None,
        )  # fmt: skip
        result.append(ids[0, len(prompt) :].tolist())
    return result
