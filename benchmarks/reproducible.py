"""Compare bits of logits and pages between batches, chunks and engines with `deterministic=True`.

Each model first reads a text alone and in one call. Then it reads the text again in combinations
of batches, chunks and caches that a seed determines, and all bits are compared. The calls are the
calls of users, without added padding or rounding.
"""

import itertools
import operator
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    ContinuousBatchingConfig,
    GenerationConfig,
    PreTrainedModel,
)

from hf_fp8kv import FP8PagedCache, PrefixStore, disable, enable, serving
from hf_fp8kv.modeling.model_support import with_cache
from hf_fp8kv_cli.shared import DEMO_NAME, load_model_and_tokenizer

from .shared import Result, main

Tensor = torch.Tensor
PAGE_SIZE = 64
VOCABULARY = 200
# Tokens of a page, and of an answer, in an engine.
ENGINE_PAGE_SIZE = 32
ANSWER_TOKENS = 24
# Number of tokens of a text, and number of texts. Attention sums spans of 512 tokens separately.
TEXT_SIZES = (600, 16)
DEMO_TEXT_SIZES = (512, 3)
# Number of positions at which log-probabilities of decode and prefill are compared, as in SGLang's
# issue 25790.
NUM_POSITIONS = 512
# Numbers of `compared` values, and of different `logits` and `pages` (keys and values).
Comparison = Counter[str]
_SMALL_CONFIG: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.2,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},  # GQA
    "mistral": {"sliding_window": 70},
    "gemma2": {"sliding_window": 70, "query_pre_attn_scalar": 32},  # softcap
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 70},  # sinks
    "deepseek_v3": {  # latents
        "num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": 48, "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 32, "v_head_dim": 32, "head_dim": 16, "first_k_dense_replace": 2,
        "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
        "moe_intermediate_size": 48,
    },
}  # fmt: skip


class Reader:
    """A model, its texts, and its outputs for the first text, which is read alone in one call.

    The methods without arguments that return a `Comparison` read the first text again, in
    different calls, and compare the outputs.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        rng: random.Random,
        num_tokens: int,
        num_texts: int,
        plan: str = "",
    ) -> None:
        self.model: Any = model
        self.storage: dict[str, Any] = {"plan": plan} if plan else {}
        self.rng = rng
        self.num_tokens = num_tokens
        self.num_texts = num_texts
        self.enable_pages()
        self.texts = torch.randint(3, VOCABULARY, (num_texts, num_tokens)).to(model.device)
        self.has_windows = any(layer.is_sliding for layer in self.make_cache().layers)
        self.logits, self.states = self.read(self.texts[:1], [num_tokens])

    def enable_pages(self, **keywords: Any) -> None:
        enable(self.model, deterministic=True, page_size=PAGE_SIZE, **self.storage, **keywords)

    def make_cache(self, **keywords: Any) -> FP8PagedCache:
        options = {"page_size": PAGE_SIZE, **self.storage, **keywords}
        return FP8PagedCache(self.model, prefill="stored", **options)

    @torch.no_grad()
    def read(
        self, ids: Tensor, chunk_sizes: list[int], cache: Any = None, row: int = 0
    ) -> tuple[Tensor, list[Tensor]]:
        """Read `ids` `[B, T]` in chunks. Return logits `[T, V]`, keys and values of a row."""
        cache = self.make_cache() if cache is None else cache
        logits = [
            self.model(chunk, **with_cache(self.model, cache)).logits[row]
            for chunk in ids.split(chunk_sizes, 1)
        ]
        handles = [handle for layer in cache.layers for handle in (layer.keys, layer.values)]
        return torch.cat(logits), [handle.dense()[row] for handle in handles]

    def draw_chunk_sizes(self, num_tokens: int) -> list[int]:
        sizes: list[int] = []
        max_size = self.rng.choice([1, 8, 63, 64, 65, 200, 512])
        while sum(sizes) < num_tokens:
            # Single tokens take the longest, so there are at most 40 chunks before the last chunk.
            size = self.rng.randint(1, max_size) if len(sizes) < 40 else num_tokens
            sizes.append(min(size, num_tokens - sum(sizes)))
        return sizes

    def compare(self, outputs: tuple[Tensor, list[Tensor]], start: int = 0) -> Comparison:
        """Compare logits from token `start` on, and keys and values, with the first outputs."""
        logits, states = outputs
        comparison = compare_logits(logits, self.logits[start:])
        for actual, expected in zip(states, self.states[: len(states)], strict=True):
            # A window holds fewer tokens if the last calls were shorter.
            if count := min(actual.shape[1], expected.shape[1]):
                comparison["compared"] += actual[:, -count:].numel()
                comparison["pages"] += int((actual[:, -count:] != expected[:, -count:]).sum())
        return comparison

    # -- combinations ------------------------------------------------------------------------

    def read_in_batch(self) -> Comparison:
        order = self.rng.sample(range(1, self.num_texts), self.rng.randint(0, self.num_texts - 1))
        row = self.rng.randint(0, len(order))
        order.insert(row, 0)
        chunk_sizes = self.draw_chunk_sizes(self.num_tokens)
        return self.compare(self.read(self.texts[order], chunk_sizes, row=row))

    def read_head(self) -> tuple[FP8PagedCache, int]:
        """Read a random number of tokens. Return the cache and the number."""
        num_read = self.rng.randint(1, self.num_tokens - 1)
        cache = self.make_cache()
        self.read(self.texts[:1, :num_read], self.draw_chunk_sizes(num_read), cache)
        return cache, num_read

    def compare_tail(self, cache: FP8PagedCache, start: int) -> Comparison:
        """Read the tokens from `start` on with a cache that stores the previous tokens."""
        chunk_sizes = self.draw_chunk_sizes(self.num_tokens - start)
        return self.compare(self.read(self.texts[:1, start:], chunk_sizes, cache), start)

    def continue_fork(self) -> Comparison:
        """Continue a fork after the cache has continued with a different text."""
        cache, start = self.read_head()
        fork = cache.fork()
        self.read(self.texts[1:2, :50], self.draw_chunk_sizes(50), cache)
        return self.compare_tail(fork, start)

    def recompute_tail(self) -> Comparison:
        num_removed = self.rng.randint(1, 60)
        cache = self.make_cache()
        cache.activate_past_recording()  # type: ignore[no-untyped-call]
        self.read(self.texts[:1], self.draw_chunk_sizes(self.num_tokens), cache)
        cache.crop(-num_removed)
        return self.compare_tail(cache, self.num_tokens - num_removed)

    def read_preallocated(self) -> Comparison:
        cache = self.make_cache(max_cache_len=self.num_tokens + self.rng.randint(0, 100))
        chunk_sizes = self.draw_chunk_sizes(self.num_tokens)
        logits, states = self.read(self.texts[:1], chunk_sizes, cache)
        # Windows of a preallocated cache are rings, so only logits are compared.
        states = [] if self.has_windows else [state[:, : self.num_tokens] for state in states]
        return self.compare((logits, states))

    def continue_loaded(self) -> Comparison:
        cache, start = self.read_head()
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            loaded_cache = FP8PagedCache.load(cache.save(f"{folder}/cache.safetensors"))
        return self.compare_tail(loaded_cache, start)

    def reuse_prefixes(self) -> Comparison:
        """Generate with a prefix store, first without and then with stored pages."""
        comparison = Comparison()
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            for length in sorted(self.rng.sample(range(PAGE_SIZE, self.num_tokens), 3)):
                store = PrefixStore(folder)
                self.enable_pages(prefix_store=store)
                output = self.model.generate(
                    self.texts[:1, :length], max_new_tokens=1, output_logits=True,
                    return_dict_in_generate=True,
                )  # fmt: skip
                comparison += compare_logits(output.logits[0][0], self.logits[length - 1])
                store.flush()
        self.enable_pages()
        return comparison

    def serve_in_engine(self) -> Comparison:
        """Answer in an engine that evicts, recomputes and cancels decoding requests."""
        length = self.rng.randint(1, self.num_tokens)
        prompt = self.texts[0, :length].tolist()
        other_prompts = [
            text[: self.rng.randint(1, self.num_tokens)].tolist()
            for text in self.texts[1 : self.rng.randint(1, self.num_texts)]
        ]
        max_length = max(map(len, [prompt, *other_prompts])) + ANSWER_TOKENS

        serving.enable(self.model, deterministic=True, **self.storage)
        config = GenerationConfig(max_new_tokens=ANSWER_TOKENS, do_sample=False, eos_token_id=-1)
        batching = ContinuousBatchingConfig(
            return_logprobs=True, max_batch_tokens=self.rng.choice([64, 100, 256]),
            page_size=ENGINE_PAGE_SIZE,
            num_blocks=-(-max_length // ENGINE_PAGE_SIZE) + self.rng.randint(1, 12),
        )  # fmt: skip
        with self.model.continuous_batching_context_manager(
            generation_config=config, continuous_batching_config=batching
        ) as manager:
            other_requests = [
                manager.add_request(ids, max_new_tokens=ANSWER_TOKENS, streaming=index == 0)
                for index, ids in enumerate(other_prompts)
            ]
            streamed_request = other_requests[0] if other_requests else None
            request = manager.add_request(prompt, max_new_tokens=ANSWER_TOKENS)
            answer: Any = None
            while (answer is None or answer.request_id != request) and manager.is_running():
                answer = manager.get_result(timeout=1)
                if answer is not None and answer.request_id == streamed_request:
                    manager.cancel_request(streamed_request)
        serving.disable(self.model)
        self.enable_pages()
        ids = torch.tensor([prompt + answer.generated_tokens], device=self.texts.device)
        logits, _ = self.read(ids[:, :-1], [ids.shape[1] - 1])
        probabilities = logits[length - 1 :].float().softmax(-1)
        expected = probabilities.gather(1, ids[0, length:, None]).log()[:, 0].cpu()
        return compare_logits(torch.tensor(answer.logprobs, dtype=expected.dtype), expected)

    @torch.no_grad()
    def decode_tokens(self) -> Comparison:
        """Compare log-probabilities of prefill and decode at each position."""
        logits, _ = self.read(self.texts[:1, :NUM_POSITIONS], [1] * NUM_POSITIONS)
        actual, expected = (
            row[:NUM_POSITIONS].float().log_softmax(-1) for row in (logits, self.logits)
        )
        return compare_logits(actual, expected)


def compare_logits(actual: Tensor, expected: Tensor) -> Comparison:
    return Comparison(compared=actual.numel(), logits=int((actual != expected).sum()))


def build_model(name: str, dtype: str, device: str) -> PreTrainedModel:
    """Return the demo model, or a small model with random weights."""
    if name == DEMO_NAME:
        return load_model_and_tokenizer(None, device, dtype)[0]  # type: ignore[no-any-return]
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **{**_SMALL_CONFIG, **MODELS[name]})
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    return model.to(device).eval()  # type: ignore[no-any-return]


@torch.no_grad()
def measure_cost(dtype: str, device: str, turns: int = 7) -> list[dict[str, Any]]:
    """Return rows with the seconds of calls with and without determinism, and their ratio."""
    model: Any = build_model(DEMO_NAME, dtype, device)
    # torch.cpu.synchronize does nothing.
    synchronize = getattr(torch, model.device.type).synchronize
    ids = torch.randint(3, VOCABULARY, (8, 512), device=device)
    batching = ContinuousBatchingConfig(max_batch_tokens=256, num_blocks=512)
    config = GenerationConfig(max_new_tokens=8, do_sample=False, eos_token_id=-1)

    def read(ids: Tensor, cache: Any) -> None:
        model(ids, **with_cache(model, cache))

    def serve(_cache: Any) -> None:
        model.generate_batch(
            [row[:64].tolist() for row in ids], generation_config=config,
            continuous_batching_config=batching, progress_bar=False,
        )  # fmt: skip

    # The timed function, and the number of texts that a cache stores before the call.
    calls: dict[str, tuple[Callable[[Any], None], int]] = {
        "prefill of 512 tokens": (partial(read, ids[:1]), 0),
        "decode step": (partial(read, ids[:1, :1]), 1),
        "decode step, 8 texts": (partial(read, ids[:, :1]), 8),
        "8 requests in an engine": (serve, 0),
    }
    # Seconds of a call without (False) and with (True) determinism.
    seconds: dict[tuple[str, bool], list[float]] = {
        case: [] for case in itertools.product(calls, (False, True))
    }
    for turn in range(turns * 2 + 2):
        is_deterministic = turn % 2 == 1
        enable(model, deterministic=is_deterministic, prefill="stored")
        serving.enable(model, deterministic=is_deterministic, probe=False)
        for name, (call, batch) in calls.items():
            cache = FP8PagedCache(model.config, prefill="stored")
            if batch:
                model(ids[:batch, :256], **with_cache(model, cache))
            synchronize()
            start = time.perf_counter()
            call(cache)
            synchronize()
            if turn > 1:  # the first turns warm up
                seconds[name, is_deterministic].append(time.perf_counter() - start)
    return [
        {
            "call": name, "dtype": dtype,
            "seconds": round(statistics.median(seconds[name, False]), 4),
            "deterministic": round(statistics.median(seconds[name, True]), 4),
            "ratio": round(statistics.median(
                map(operator.truediv, seconds[name, True], seconds[name, False])), 2),
        }
        for name in calls
    ]  # fmt: skip


def measure_reproducibility(
    *,
    seed: int = 0,
    combinations: int = 600,
    cost: bool = False,
    models: str = "",
    dtypes: str = "float32,bfloat16",
    device: str = "cpu",
    plan: str = "",
    progress: Callable[[str], None],
) -> Result:
    """Return a row for each model, dtype and kind of combination.

    `compared` is the number of compared values. `logits` and `pages` are numbers of values that
    differ. `costs` has the rows of `measure_cost` if `cost` is True.
    """
    rows = []
    full_names = {name.split("-")[0]: name for name in (*MODELS, DEMO_NAME)}
    short_names = models.split(",") if models else list(full_names)
    model_names = [full_names[name] for name in short_names]
    cases = list(itertools.product(model_names, dtypes.split(",")))
    for index, (name, dtype) in enumerate(cases):
        torch.manual_seed(seed)
        model = build_model(name, dtype, device)
        sizes = DEMO_TEXT_SIZES if name == DEMO_NAME else TEXT_SIZES
        reader = Reader(model, random.Random(f"{seed} {name} {dtype}"), *sizes, plan)
        compare_by_kind = {
            "batch": reader.read_in_batch, "fork": reader.continue_fork,
            "recompute": reader.recompute_tail, "preallocated": reader.read_preallocated,
            "restart": reader.continue_loaded,
        }  # fmt: skip
        if not reader.has_windows:
            compare_by_kind["prefix"] = reader.reuse_prefixes
            if name != "deepseek_v3":
                compare_by_kind["engine"] = reader.serve_in_engine
        kinds = list(compare_by_kind)
        # The demo model takes far longer, so it gets half the number, and each kind at least once.
        num_draws = combinations // len(cases) // (2 if name == DEMO_NAME else 1)
        counts = Counter(kinds + reader.rng.choices(kinds, k=max(0, num_draws - len(kinds) - 1)))
        compare_by_kind["decode"] = reader.decode_tokens
        counts["decode"] = 1
        for kind, count in counts.items():
            progress(f"{index / len(cases):.0%} {name}, {dtype}, {kind}")
            start = time.perf_counter()
            total = sum((compare_by_kind[kind]() for _ in range(count)), Comparison())
            rows.append({
                "model": name, "dtype": dtype, "kind": kind, "combinations": count,
                "compared": total["compared"], "logits": total["logits"], "pages": total["pages"],
                "seconds": round(time.perf_counter() - start, 1),
            })  # fmt: skip
        disable(model)
    cost_dtypes = dtypes.split(",") if cost else []
    costs = [row for dtype in cost_dtypes for row in measure_cost(dtype, device)]
    return {"rows": rows, "costs": costs}


if __name__ == "__main__":
    main(
        __doc__, measure_reproducibility,
        {
            "--seed": {"type": int, "help": "Seed of texts and combinations."},
            "--models": {"help": "Some of llama, mistral, gemma2, gpt_oss, deepseek_v3, SmolLM2."},
            "--dtypes": {"help": "float32, bfloat16, or both."},
            "--device": {"help": "Device of the models, for example cuda. Default: cpu."},
            "--plan": {"help": "Storage plan, such as 'int6 rotated'. Default: the model's."},
            "--cost": {"action": "store_true", "help": "Measure the cost in time."},
            "--combinations": {"type": int, "help": "Number over all models and dtypes."},
        },
    )  # fmt: skip
