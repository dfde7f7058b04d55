"""Compare bits of logits and pages between batches, chunks and engines with `deterministic=True`.

Each model first reads a text alone and in one call. Then it reads the text again in combinations
that a seed determines, and all bits are compared. The calls are the calls of users, without added
padding or rounding.
"""

import operator
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    ContinuousBatchingConfig,
    GenerationConfig,
    PreTrainedModel,
)
from transformers.generation.continuous_batching.offloading_manager import OffloadingManager

from hf_fp8kv import FP8PagedCache, PrefixStore, disable, enable, serving
from hf_fp8kv.cli.shared import DEMO_NAME, load_model
from hf_fp8kv.modeling.model_support import with_cache
from hf_fp8kv.utils.environment import describe_run

from .shared import Result, main

Tensor = torch.Tensor
_STOCK_OFFLOAD = OffloadingManager.offload_requests
PAGE_SIZE, VOCABULARY = 64, 200
BLOCK_SIZE, ANSWER_TOKENS = 32, 24  # tokens of a block and of an answer in an engine
# Number of tokens of a text, and number of texts. Attention adds spans of 512 tokens.
SIZES, DEMO_SIZES = (600, 16), (512, 3)
# Number of positions at which log-probabilities of decode and prefill are compared, as in SGLang's
# issue 25790.
POSITIONS = 512
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
    """A model, its texts, and its results for the first text, which is read alone in one call."""

    def __init__(
        self, model: PreTrainedModel, rng: random.Random, tokens: int, num_texts: int
    ) -> None:
        self.model: Any = model
        self.rng, self.tokens, self.num_texts = rng, tokens, num_texts
        self.evictions = 0  # number of requests that engines evicted
        self.enable()
        self.texts = torch.randint(3, VOCABULARY, (num_texts, tokens)).to(model.device)
        self.windowed = any(layer.is_sliding for layer in self.make_cache().layers)
        self.logits, self.pages = self.read(self.texts[:1], [self.tokens])

    def enable(self, **keywords: Any) -> None:
        enable(self.model, deterministic=True, page_size=PAGE_SIZE, **keywords)

    def make_cache(self, **keywords: Any) -> FP8PagedCache:
        return FP8PagedCache(self.model.config, prefill="stored", page_size=PAGE_SIZE, **keywords)

    @torch.no_grad()
    def read(
        self, ids: Tensor, chunks: list[int], cache: Any = None, row: int = 0
    ) -> tuple[Tensor, list[Tensor]]:
        """Return logits `[T, V]`, and the keys and values of all layers, of a row of texts."""
        cache = self.make_cache() if cache is None else cache
        logits = [
            self.model(part, **with_cache(self.model, cache)).logits[row]
            for part in ids.split(chunks, 1)
        ]
        states = [x for layer in cache.layers for x in (layer.keys, layer.values)]
        return torch.cat(logits), [state.dense()[row] for state in states]

    def draw_chunks(self, tokens: int) -> list[int]:
        chunks: list[int] = []
        max_size = self.rng.choice([1, 8, 63, 64, 65, 200, 512])
        while sum(chunks) < tokens:
            # Single tokens take the longest, so there are at most 40 chunks before the last chunk.
            size = self.rng.randint(1, max_size) if len(chunks) < 40 else tokens
            chunks.append(min(size, tokens - sum(chunks)))
        return chunks

    def compare(self, result: tuple[Tensor, list[Tensor]], start: int = 0) -> tuple[int, int, int]:
        """Return the numbers of compared values, of different logits, and of different states."""
        logits, pages = result
        pairs = [
            # A window holds fewer tokens if the last calls were shorter.
            (page[:, -n:], expected[:, -n:])
            for page, expected in zip(pages, self.pages[: len(pages)], strict=True)
            if (n := min(page.shape[1], expected.shape[1]))
        ]
        num_compared = logits.numel() + sum(page.numel() for page, _ in pairs)
        different_logits = int((logits != self.logits[start:]).sum())
        different_states = sum(int((page != expected).sum()) for page, expected in pairs)
        return num_compared, different_logits, different_states

    # -- combinations ------------------------------------------------------------------------

    def batch(self) -> tuple[int, int, int]:
        """Read the text in a batch, in chunks."""
        order = self.rng.sample(range(1, self.num_texts), self.rng.randint(0, self.num_texts - 1))
        row = self.rng.randint(0, len(order))
        order.insert(row, 0)
        return self.compare(self.read(self.texts[order], self.draw_chunks(self.tokens), row=row))

    def fork(self) -> tuple[int, int, int]:
        """Continue a fork after the cache has continued with a different text."""
        start = self.rng.randint(1, self.tokens - 1)
        cache = self.make_cache()
        self.read(self.texts[:1, :start], self.draw_chunks(start), cache)
        branch = cache.fork()
        self.read(self.texts[1:2, :50], self.draw_chunks(50), cache)
        tail = self.texts[:1, start:]
        return self.compare(self.read(tail, self.draw_chunks(self.tokens - start), branch), start)

    def recompute(self) -> tuple[int, int, int]:
        """Remove the last tokens, and recompute them."""
        num_removed = self.rng.randint(1, 60)
        cache = self.make_cache()
        cache.activate_past_recording()  # type: ignore[no-untyped-call]
        self.read(self.texts[:1], self.draw_chunks(self.tokens), cache)
        cache.crop(-num_removed)
        tail = self.texts[:1, self.tokens - num_removed :]
        return self.compare(
            self.read(tail, self.draw_chunks(num_removed), cache), self.tokens - num_removed
        )

    def preallocated(self) -> tuple[int, int, int]:
        """Read the text with a cache of fixed size."""
        cache = self.make_cache(max_cache_len=self.tokens + self.rng.randint(0, 100))
        logits, pages = self.read(self.texts[:1], self.draw_chunks(self.tokens), cache)
        return self.compare((logits, [] if self.windowed else [x[:, : self.tokens] for x in pages]))

    def restart(self) -> tuple[int, int, int]:
        """Continue a cache that was saved to a file."""
        start = self.rng.randint(1, self.tokens - 1)
        cache = self.make_cache()
        self.read(self.texts[:1, :start], self.draw_chunks(start), cache)
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            path = cache.save(f"{folder}/cache.safetensors")
            copy = FP8PagedCache.load(path)
        tail = self.texts[:1, start:]
        return self.compare(self.read(tail, self.draw_chunks(self.tokens - start), copy), start)

    def prefix(self) -> tuple[int, int, int]:
        """Generate with a prefix store, first without and then with stored pages."""
        num_compared = num_different = 0
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            for length in sorted(self.rng.sample(range(PAGE_SIZE, self.tokens), 3)):
                store = PrefixStore(folder)
                self.enable(prefix_store=store)
                output = self.model.generate(
                    self.texts[:1, :length], max_new_tokens=1, output_logits=True,
                    return_dict_in_generate=True,
                )  # fmt: skip
                num_compared += output.logits[0].numel()
                num_different += int((output.logits[0][0] != self.logits[length - 1]).sum())
                store.flush()
        self.enable()
        return num_compared, num_different, 0

    def engine(self) -> tuple[int, int, int]:
        """Answer in an engine that evicts, recomputes and cancels decoding requests."""
        length, num_texts = self.rng.randint(1, self.tokens), self.rng.randint(1, self.num_texts)
        neighbors = [
            self.texts[i, : self.rng.randint(1, self.tokens)].tolist() for i in range(1, num_texts)
        ]
        own_ids = self.texts[0, :length].tolist()
        max_blocks = -(-(max(map(len, [own_ids, *neighbors])) + ANSWER_TOKENS) // BLOCK_SIZE)

        def offload(manager: OffloadingManager) -> bool:
            waiting_before = len(manager.scheduler.waiting_requests)
            has_offloaded: bool = _STOCK_OFFLOAD(manager)
            self.evictions += len(manager.scheduler.waiting_requests) - waiting_before
            return has_offloaded

        serving.enable(self.model, deterministic=True)
        config = GenerationConfig(max_new_tokens=ANSWER_TOKENS, do_sample=False, eos_token_id=-1)
        batching = ContinuousBatchingConfig(
            return_logprobs=True, max_batch_tokens=self.rng.choice([64, 100, 256]),
            page_size=BLOCK_SIZE, num_blocks=max_blocks + self.rng.randint(1, 12),
        )  # fmt: skip
        with (
            patch.object(OffloadingManager, "offload_requests", offload),
            self.model.continuous_batching_context_manager(
                generation_config=config, continuous_batching_config=batching
            ) as manager,
        ):
            requests = [
                manager.add_request(ids, max_new_tokens=ANSWER_TOKENS, streaming=number == 0)
                for number, ids in enumerate(neighbors)
            ]
            streamed_request = requests[0] if requests else None
            request = manager.add_request(own_ids, max_new_tokens=ANSWER_TOKENS)
            answer: Any = None
            while (answer is None or answer.request_id != request) and manager.is_running():
                answer = manager.get_result(timeout=1)
                if answer is not None and answer.request_id == streamed_request:
                    manager.cancel_request(streamed_request)
        serving.disable(self.model)
        self.enable()
        tokens = answer.generated_tokens
        ids = torch.tensor([own_ids + tokens], device=self.texts.device)
        logits, _ = self.read(ids[:, :-1], [ids.shape[1] - 1])
        rows = logits[length - 1 :].float().softmax(-1)
        expected = rows.gather(1, ids[0, length:, None]).log()[:, 0].tolist()
        return ANSWER_TOKENS, sum(x != y for x, y in zip(answer.logprobs, expected, strict=True)), 0

    @torch.no_grad()
    def decode(self) -> tuple[int, int, int]:
        """Compare log-probabilities of prefill and decode at each position."""
        ids = self.texts[:1, :POSITIONS]
        logits, _ = self.read(ids, [1] * POSITIONS)
        actual, expected = (x[:POSITIONS].float().log_softmax(-1) for x in (logits, self.logits))
        return actual.numel(), int((actual != expected).sum()), 0


def build_model(name: str, dtype: str, device: str) -> PreTrainedModel:
    """Return the demo model, or a small model with random weights."""
    if name == DEMO_NAME:
        demo_model: PreTrainedModel = load_model(None, device, dtype)[0]
        return demo_model
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **{**_SMALL_CONFIG, **MODELS[name]})
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    return model.to(device).eval()  # type: ignore[no-any-return]


@torch.no_grad()
def measure_cost(dtype: str, device: str, turns: int = 7) -> list[dict[str, Any]]:
    """Return the seconds of calls of the demo model with and without determinism, and ratios."""
    model: Any = build_model(DEMO_NAME, dtype, device)
    # torch.cpu.synchronize has the same signature and does nothing.
    synchronize = torch.cuda.synchronize if model.device.type == "cuda" else torch.cpu.synchronize
    ids = torch.randint(3, VOCABULARY, (8, 512), device=device)
    batching = ContinuousBatchingConfig(max_batch_tokens=256, num_blocks=512)
    config = GenerationConfig(max_new_tokens=8, do_sample=False, eos_token_id=-1)

    def prefill(cache: Any) -> None:
        model(ids[:1], **with_cache(model, cache))

    def decode(cache: Any, rows: int = 1) -> None:
        model(ids[:rows, :1], **with_cache(model, cache))

    def serve(_cache: Any) -> None:
        model.generate_batch(
            [row[:64].tolist() for row in ids], generation_config=config,
            continuous_batching_config=batching, progress_bar=False,
        )  # fmt: skip

    calls = {
        "prefill of 512 tokens": prefill, "decode step": decode,
        "decode step, 8 texts": lambda cache: decode(cache, 8), "8 requests in an engine": serve,
    }  # fmt: skip
    seconds: dict[str, list[list[float]]] = {name: [[], []] for name in calls}
    for turn in range(turns * 2 + 2):
        deterministic = bool(turn % 2)
        enable(model, deterministic=deterministic, prefill="stored")
        serving.enable(model, deterministic=deterministic, probe=False)
        for name, call in calls.items():
            cache = FP8PagedCache(model.config, prefill="stored")
            if "decode" in name:
                model(ids[: 8 if "8" in name else 1, :256], **with_cache(model, cache))
            synchronize()
            start = time.perf_counter()
            call(cache)
            synchronize()
            if turn > 1:  # the first turns warm up
                seconds[name][deterministic].append(time.perf_counter() - start)
    return [
        {
            "call": name, "dtype": dtype, "seconds": round(statistics.median(stock_seconds), 4),
            "deterministic": round(statistics.median(our_seconds), 4),
            "ratio": round(statistics.median(map(operator.truediv, our_seconds, stock_seconds)), 2),
        }
        for name, (stock_seconds, our_seconds) in seconds.items()
    ]  # fmt: skip


def measure_reproducibility(
    *,
    seed: int = 0,
    combinations: int = 600,
    cost: bool = False,
    models: str = "",
    dtypes: str = "float32,bfloat16",
    device: str = "cpu",
    progress: Callable[[str], None],
) -> Result:
    """Return a row for each model, dtype and kind of combination.

    `compared` is the number of compared values. `logits` and `pages` are numbers of different
    values, and `evicted` is the number of requests that an engine computed again. `costs` has the
    results of `measure_cost` if `cost` is True.
    """
    run, rows = describe_run("reproducible"), []
    full_names = {name.split("-")[0]: name for name in (*MODELS, DEMO_NAME)}
    names = [full_names[name] for name in (models.split(",") if models else full_names)]
    cases = [(name, dtype) for name in names for dtype in dtypes.split(",")]
    num_per_case = combinations // max(1, len(cases))
    for index, (name, dtype) in enumerate(cases):
        torch.manual_seed(seed)
        model = build_model(name, dtype, device)
        sizes = DEMO_SIZES if name == DEMO_NAME else SIZES
        reader = Reader(model, random.Random(f"{seed} {name} {dtype}"), *sizes)
        kinds = [Reader.batch, Reader.fork, Reader.recompute, Reader.preallocated, Reader.restart]
        if not reader.windowed:
            kinds += [Reader.prefix] + ([] if name == "deepseek_v3" else [Reader.engine])
        # The demo model takes far longer, so it gets half the number, and each kind at least once.
        total = num_per_case // 2 if name == DEMO_NAME else num_per_case
        counts = Counter(kinds + reader.rng.choices(kinds, k=max(0, total - len(kinds) - 1)))
        for kind, count in [*counts.items(), (Reader.decode, 1)]:
            progress(f"{index / len(cases):.0%} {name}, {dtype}, {kind.__name__}")
            start, reader.evictions = time.perf_counter(), 0
            compared, logits, pages = map(
                sum, zip(*(kind(reader) for _ in range(count)), strict=True)
            )
            rows.append({
                "model": name, "dtype": dtype, "kind": kind.__name__, "combinations": count,
                "compared": compared, "logits": logits, "pages": pages, "evicted": reader.evictions,
                "seconds": round(time.perf_counter() - start, 1),
            })  # fmt: skip
        disable(model)
    settings = {"seed": seed, "threads": torch.get_num_threads(), "device": device}
    costs = [row for dtype in dtypes.split(",") if cost for row in measure_cost(dtype, device)]
    return {**run, "settings": settings, "rows": rows, "costs": costs}


if __name__ == "__main__":
    main(
        __doc__, measure_reproducibility,
        {
            "--seed": {"type": int, "help": "Seed of texts and combinations."},
            "--models": {"help": "Some of llama, mistral, gemma2, gpt_oss, deepseek_v3, SmolLM2."},
            "--dtypes": {"help": "float32, bfloat16, or both."},
            "--device": {"help": "Device of the models, for example cuda. Default: cpu."},
            "--cost": {"action": "store_true", "help": "Measure the cost in time."},
            "--combinations": {"type": int, "help": "Number of combinations of all models."},
        },
    )  # fmt: skip
