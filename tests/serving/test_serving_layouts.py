"""The engine of transformers: its parts and its bytes."""

import inspect
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from transformers.generation.continuous_batching import cache as stock
from transformers.generation.continuous_batching import continuous_api

from hf_fp8kv import ConfigError, serving
from hf_fp8kv.modeling.tensor_parallel import TensorParallel
from hf_fp8kv.serving import engines
from hf_fp8kv.serving.config import ServingConfig
from hf_fp8kv.serving.engines import flat_tensor
from hf_fp8kv.serving.engines.common import peak_elements
from tests.helpers.serving_tools import (
    are_exact,
    batched,
    batching,
    enable,
    greedy,
    head_scales,
    note_offloads,
    one_by_one,
    prompts,
)
from tests.helpers.tiny_models import tiny

pytestmark = pytest.mark.text

# Pages of 8 tokens, too few for all requests at a time.
PAGES = {"llama": 16, "gemma2": 24}
KINDS = ["sliding_attention", "full_attention", "full_attention"]


def a_cache(model: Any, **config: Any) -> Any:
    """Return the cache of a manager of the model, as the engine makes it."""
    manager = model.init_continuous_batching(greedy(), batching(**config))
    manager.warmup()
    return manager.batch_processor.cache


def planned(monkeypatch: pytest.MonkeyPatch, **config: Any) -> tuple[Any, Any, Any]:
    """Return a bfloat16 model, the cache of its manager, and the plan of the cache's memory."""
    handler, made = flat_tensor._MemoryHandler, []
    monkeypatch.setattr(
        flat_tensor, "_MemoryHandler", lambda *a, **b: made.append(handler(*a, **b)) or made[-1]
    )
    model = tiny("llama")[0].to(torch.bfloat16)
    serving.enable(model)
    cache = a_cache(model, **config)
    assert made[0].activation_dtype == torch.bfloat16
    return model, cache, made[0]


def keywords(**chosen: Any) -> ServingConfig:
    return ServingConfig.parse(dtype="fp8_e4m3", backend="torch", **chosen)


class TestChoice:
    def test_by_what_is_there_not_by_version(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(transformers, "__version__", "99.0")
        assert issubclass(engines.cache_class(None), flat_tensor.Cache)

    def test_a_function_that_makes_its_cache_in_another_way(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def other(self: Any) -> None:
            raise NotImplementedError

        model = tiny("llama", attn_implementation="sdpa")[0]
        for owner, name, lacks in (
            (continuous_api.ContinuousBatchingManager, "_create_batch_processor", "Cache in other"),
            (stock.PagedAttentionCache, "__init__", "MemoryHandler in other"),
        ):
            with monkeypatch.context() as changed:
                other.__qualname__ = "other"
                changed.setattr(owner, name, other)
                with pytest.raises(ConfigError, match=lacks) as caught:
                    serving.enable(model)
                for told in (transformers.__version__, "5.18 to 5.24", "FP8PagedCache"):
                    assert told in str(caught.value)
        # Nothing was changed: the model still has its own engine.
        manager = model.init_continuous_batching(greedy(), batching())
        assert type(manager) is continuous_api.ContinuousBatchingManager

    def test_a_class_that_is_gone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delitem(sys.modules, flat_tensor.__name__)
        monkeypatch.delattr(stock, "PagedAttentionMemoryHandler")
        with pytest.raises(ConfigError, match="PagedAttentionMemoryHandler"):
            serving.enable(tiny("llama")[0])


class TestGroups:
    @pytest.mark.parametrize(
        "kinds",
        [KINDS * 2, *(pytest.param(x, marks=pytest.mark.full) for x in (KINDS, KINDS[:2] * 2))],
        ids=len,
    )
    def test_kinds_in_any_order(self, kinds: list[str]) -> None:
        """Groups of one layer, of two, and two kinds with one group each."""
        model = tiny("gpt_oss", sliding_window=9, num_hidden_layers=len(kinds), layer_types=kinds)[
            0
        ]
        model.set_attn_implementation("fp8_paged")
        # With other prompts, a different order of sums moves a value to the next code.
        texts, scales = prompts(seed=0), head_scales(model)
        wanted = one_by_one(model, texts, scales=scales)
        assert not are_exact(model, texts, wanted)
        serving.enable(model, scales=scales)
        assert batched(model, texts, max_batch_tokens=16) == wanted


class TestBytes:
    def test_what_is_planned_is_what_is_there(self) -> None:
        for chosen in ({}, {"key_dtype": "auto"}, {"dtype": "auto"}, {"scales": 0.1}):
            model = tiny("llama")[0].to(torch.bfloat16)
            serving.enable(model, **chosen)
            cache = a_cache(model, pages=5)
            total, taken, page, tokens = cache.memory_usage({})
            layout = cache.page_layout
            assert (taken, tokens, page) == (0, 0, 2 * layout.bytes_per_page)
            assert total == 5 * page
            # The engine has two more sectors, for the padding of its own attention.
            memory = cache.layer_pages[0].block.untyped_storage()
            assert memory.nbytes() == total + 2 * cache.bytes_per_sector

    def test_one_more_sector_costs_its_bytes_and_an_index(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The plan has no mask and no dense copy. Each token of a step costs its own bytes."""
        model, cache, plan = planned(monkeypatch)
        sectors, tokens = cache.num_sectors, cache.max_batch_tokens
        cost = [plan.compute_memory_footprint(tokens, sectors + more) for more in (0, 1)]
        assert cost[1] - cost[0] == plan.bytes_per_sector + plan.tokens_per_sector * 8
        step = plan.compute_memory_footprint(tokens + 1, sectors) - cost[0]
        # Two bytes each: hidden states, 4 heads of queries, 2 of K and V, and our own buffers.
        ours = peak_elements(model.config)
        assert step >= 2 * (64 + 4 * 16 + 2 * 2 * 16 + ours)
        assert ours > 3 * 4 * 16

    def test_a_rank_has_its_heads_and_their_scales(self) -> None:
        model = tiny("llama")[0]
        scales = head_scales(model)
        helper = SimpleNamespace(
            tp_size=2, tp_local_rank=1, tp_all_reduce_min=lambda x: x,
            are_kv_heads_tp_ed=lambda: True,
        )  # fmt: skip
        config = batching()
        config.max_memory_percent = 0.5
        ranks = TensorParallel(1, 2)
        found = engines.cache_class(keywords(scales=scales, tensor_parallel=ranks))(
            config=model.config, continuous_batching_config=config, device="cpu",
            distributed_helper=helper, dtype=torch.float32,
        )  # fmt: skip
        assert found.page_layout.heads == 1
        assert found.layer_pages[0].k_codes.shape[1] == 1
        for layer in range(2):
            wanted = scales.layers[layer].k[1].expand(1, 16)
            assert torch.equal(found.storage[layer].k, wanted)


class TestOffloading:
    # Grid: each model and each format once.
    @pytest.mark.parametrize(
        ("name", "chosen"),
        [
            ("llama", {"dtype": "fp8_e5m2"}),
            ("gemma2", {"key_dtype": "auto", "value_dtype": "fp8_e5m2"}),
        ],
        ids=["8 bit", "K as it is"],
    )
    def test_requests_go_and_come_back(
        self, name: str, chosen: dict[str, str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Codes and dynamic scales must have the same bytes after they return to other blocks."""
        gone = note_offloads(monkeypatch)
        more = {"sliding_window": 24, "query_pre_attn_scalar": 1} if name == "gemma2" else {}
        model = tiny(name, **more)[0]
        texts = [text[:40] for text in prompts() if len(text) > 16]
        wanted = enable(model, texts, **chosen)
        found = batched(
            model,
            texts,
            page_size=8,
            pages=PAGES[name],
            max_batch_tokens=64,
            cpu_offload_space=0.01,
        )
        assert found == wanted
        assert any(gone)


def test_signatures_of_the_engine() -> None:
    """Our cache has the arguments of the methods that the engine calls."""
    ours: Any = engines.cache_class(keywords())
    for name in ("extend_read_and_write_indices", "search_prefix_match"):
        found = inspect.signature(getattr(ours, name)).parameters
        assert list(found) == list(
            inspect.signature(getattr(stock.PagedAttentionCache, name)).parameters
        )
