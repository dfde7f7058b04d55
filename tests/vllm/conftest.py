"""Fixtures of vLLM on a CPU in this process. Tests are skipped unless `make vllm` installs vLLM."""

import functools
import gc
import os

import pytest
import torch

from hf_fp8kv import FP8PagedCache, KVScales, LayerScales

# These are set before vLLM is imported. With one process, a test can read the pages of the pool.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_CI_ENV", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

PROMPT_LENGTHS = (3, 7, 17, 63, 64, 65, 130, 300)
NUM_NEW_TOKENS = 12
NUM_LAYERS = 2
NUM_HEADS = 2  # KV heads
HEAD_DIM = 32

MODEL_SIZES = {
    "hidden_size": 128, "intermediate_size": 128, "vocab_size": 256, "head_dim": HEAD_DIM,
    "num_hidden_layers": NUM_LAYERS, "num_attention_heads": 4, "num_key_value_heads": NUM_HEADS,
    "max_position_embeddings": 1024, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
# The models add features to Llama: biases, a window, softcaps, or sinks with a window in every
# second layer.
_MODEL_OPTIONS = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "mistral": {"sliding_window": 40},
    "gemma2": {
        "sliding_window": 40, "attn_logit_softcapping": 0.5, "query_pre_attn_scalar": 32,
    },
    "gemma2_deep": {
        "sliding_window": 40, "attn_logit_softcapping": 0.5, "query_pre_attn_scalar": 32,
        "num_hidden_layers": 6,
    },
    "gpt_oss": {"sliding_window": 40, "num_local_experts": 4, "num_experts_per_tok": 2},
}  # fmt: skip


@pytest.fixture(scope="session")
def load_model(tmp_path_factory):
    """Return a function that returns the model of a name in `_MODEL_OPTIONS`, and its folder."""
    cached_models = {}

    def load_cached_model(name):
        if name not in cached_models:
            from transformers import AutoConfig, AutoModelForCausalLM

            options = MODEL_SIZES | _MODEL_OPTIONS[name]
            config = AutoConfig.for_model(name.removesuffix("_deep"), **options)
            torch.manual_seed(1)
            model = AutoModelForCausalLM.from_config(config).float().eval()
            with torch.no_grad():
                for parameter_name, parameter in model.named_parameters():
                    if parameter_name.endswith("sinks"):
                        parameter.copy_(torch.linspace(-1, 2, len(parameter)))
                    elif parameter.ndim > 1:
                        parameter.mul_(3)  # otherwise tokens would not depend on attention
                    elif "gemma2" in name and "post_attention_layernorm" in parameter_name:
                        parameter.add_(5)  # otherwise tokens depend only on the previous token
                    elif name == "qwen2":
                        parameter.add_(torch.randn_like(parameter))
            folder = tmp_path_factory.mktemp(name)
            model.save_pretrained(folder)
            model.set_attn_implementation("fp8_paged")
            cached_models[name] = model, str(folder)
        return cached_models[name]

    return load_cached_model


@pytest.fixture(scope="session")
def prompts():
    generator = torch.Generator().manual_seed(2)
    return [
        torch.randint(3, 256, (length,), generator=generator).tolist() for length in PROMPT_LENGTHS
    ]


def make_scales(
    granularity, *, centered=False, num_layers=NUM_LAYERS, num_heads=NUM_HEADS, model_type=None
):
    """Return scales that differ between layers, between heads, and between K and V."""
    shape = {"tensor": (), "head": (num_heads, 1), "channel": (num_heads, HEAD_DIM)}[granularity]
    generator = torch.Generator().manual_seed(3)

    def draw(low, high, shape=shape):
        return low + (high - low) * torch.rand(shape, generator=generator)

    layers = {}
    for index in range(num_layers):
        k, v = draw(0.01, 0.02), draw(0.03, 0.05)
        k_center = draw(-1, 1, (num_heads, HEAD_DIM)) if centered else None
        layers[index] = LayerScales(k, v, k_center)
    return KVScales(layers, model_type=model_type)


@functools.cache
def _override_kernels_once():
    """Make vLLM replace its Triton kernels now, and not again for each engine.

    vLLM searches all modules for these kernels. In vLLM 0.32 this fails if numba is imported,
    because an object of llvmlite has every attribute. A serving process imports numba later.
    """
    from vllm.platforms import current_platform

    current_platform.register_triton_kernel_overrides()
    type(current_platform).register_triton_kernel_overrides = classmethod(lambda _: None)


@pytest.fixture
def start_engine():
    """Return a function that starts a vLLM engine. Its memory is freed after the test."""
    pytest.importorskip("vllm")
    _override_kernels_once()
    from vllm import LLM

    engines = []

    def start(folder, kv_cache_dtype, scales=None, plan=None, backend=None, **options):
        plugin_options = {"scales": scales, "plan": plan, "backend": backend}
        config = {name: str(value) for name, value in plugin_options.items() if value}
        default_options = {
            "kv_cache_dtype": kv_cache_dtype, "skip_tokenizer_init": True, "dtype": "float32",
            "max_model_len": 512,
            "max_num_seqs": 8, "enforce_eager": True, "kv_cache_memory_bytes": 8 << 20,
            # The longest prompts are prefilled in chunks, together with other requests.
            "max_num_batched_tokens": 128, "seed": 0, "block_size": 32,
        }  # fmt: skip
        llm = LLM(folder, additional_config={"hf_fp8kv": config}, **default_options | options)
        engines.append(llm)
        return llm

    yield start
    for llm in engines:
        llm.llm_engine.engine_core.shutdown()
    engines.clear()
    gc.collect()


def make_file_tier_config(folder):
    """Return the config of a connector that offloads blocks to host memory and then to `folder`."""
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "CPUTieringSpec",
            "spec_module_path": "tests.vllm.cpu_tiers",
            "cpu_bytes_to_use": 16 << 20,
            "secondary_tiers": [{"type": "fs", "root_dir": str(folder)}],
        },
    }


def make_cache_options(dtype, folder, num_layers=NUM_LAYERS):
    """Return the options of FP8PagedCache for `dtype`, and the folder of static scales or None."""
    options = {} if dtype == "hf_fp8kv_static" else {"dtype": "fp8_e3m4"}
    if not dtype.endswith("static"):
        return options, None
    scales = make_scales("head", centered=True, num_layers=num_layers)
    scales.save_pretrained(folder)
    return options | {"scales": scales}, folder


def generate(llm, prompts, num_tokens=NUM_NEW_TOKENS):
    """Return the greedy tokens of vLLM, and the number of cached prefix tokens of each prompt."""
    from vllm import SamplingParams

    sampling = SamplingParams(
        temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False
    )
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
    answers = [list(output.outputs[0].token_ids) for output in outputs]
    return answers, [output.num_cached_tokens for output in outputs]


def generate_expected(model, prompts, num_tokens=NUM_NEW_TOKENS, **options):
    """Return the greedy tokens of transformers with `FP8PagedCache(prefill="stored")`."""
    answers = []
    for prompt in prompts:
        cache = FP8PagedCache(model.config, prefill="stored", **options)
        ids = model.generate(
            torch.tensor([prompt]), past_key_values=cache, max_new_tokens=num_tokens,
            do_sample=False, eos_token_id=None,
        )  # fmt: skip
        answers.append(ids[0, len(prompt) :].tolist())
    return answers
