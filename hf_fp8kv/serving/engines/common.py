"""The part of an engine's cache that does not depend on the engine: pages, steps, attention."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers.generation.continuous_batching.utils import (
    find_head_dim,
    find_num_key_value_heads,
)

from ... import ops
from ...errors import ConfigError
from ...modeling.model_support import ATTENTION, ENGINE
from ...ops import Pages
from ..attend import attend_layer, check_shapes
from ..config import LayerStorage, ServingConfig
from ..layout import EnginePages
from ..step import MIN_LENGTH_RATIO, EngineStep, LayerKind, LayerWork, decode_work


def sizes(config: Any) -> tuple[int, int]:
    """Return KV heads and head size, as engines find them in a text config. Raises ConfigError."""
    if getattr(config, "is_heterogeneous", False):
        raise ConfigError(
            f"expected layers that are alike, got a {type(config).__name__} with layers of "
            "several sizes; the engine has one size of page, use generate() with FP8PagedCache"
        )
    try:
        return int(find_num_key_value_heads(config)), int(find_head_dim(config))
    except ValueError:
        raise ConfigError(
            "expected a config with num_key_value_heads (or num_attention_heads) and head_dim (or "
            f"hidden_size), got {type(config).__name__}; continuous batching cannot run this model"
        ) from None


def peak_elements(config: Any) -> int:
    """Return how many numbers of the model's dtype a token of a step takes inside attention.

    Beside the hidden states, the queries and the new keys and values: the states before the norm,
    queries in the order of batches and their results in that order (both with padding), results in
    the engine's order, and keys in float32 when they are centered.
    """
    heads, dim = sizes(config)
    hidden: int = config.hidden_size
    queries: int = math.ceil((2 / MIN_LENGTH_RATIO + 1) * config.num_attention_heads * dim)
    return hidden + queries + 2 * heads * dim


class EngineCache:
    """The base of a cache for an engine, beside the engine's own class.

    A class for an engine says which kinds of layers there are and where their pages are. Each
    request of a step is recorded; the attention function then calls `attend_stored` for each layer.
    """

    chosen: ServingConfig  # by the user
    identity: str  # of model and options, for a store
    page_layout: EnginePages
    kinds: list[LayerKind]  # of the attention layers, in the engine's order
    storage: list[LayerStorage]  # of each layer, for this rank
    _kind_of: Mapping[int, int]  # by layer, the index into `kinds`
    _pages: Mapping[int, Pages]  # by layer, as the block tables count them
    backend: str  # one of `ops.BACKENDS`

    def prepare(
        self,
        chosen: ServingConfig,
        config: Any,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        """Lay out the pages and look up static numbers, before the engine plans its memory.

        `config` is that of the model's text part.

        Raises:
            ConfigError, ScaleError, BackendError: what was chosen does not fit the model.
        """
        self._config, (heads, dim), layers = config, sizes(config), config.num_hidden_layers
        heads //= chosen.options.tensor_parallel.size
        self.storage = chosen.layer_storage(layers, heads, dim, device)
        self.page_layout = EnginePages.of(chosen.options, layers, heads, dim, page_size, dtype)
        self.backend = ops.choose_backend(chosen.options.backend, torch.device(device))
        self._step = EngineStep([])
        self._batch: object = None
        self._work: dict[int, LayerWork] = {}
        self._last_layer = -1

    @staticmethod
    def bytes_per_token(config: Any, chosen: ServingConfig, dtype: torch.dtype) -> float:
        """Return what a token takes in the pages of a process, which has its rank's heads."""
        heads, dim = sizes(config)
        heads //= chosen.options.tensor_parallel.size
        layers = config.num_hidden_layers
        page = EnginePages.of(chosen.options, layers, heads, dim, 64, dtype)
        return page.bytes_per_page / page.slots * float(layers)

    def layer_pages(self, layer: int) -> Pages:
        """Return the pages of a layer."""
        return self._pages[layer]

    def record(self, batch: object, past: int, tokens: int, pages: Sequence[Sequence[int]]) -> None:
        """Record a request of the next step; `batch` is one object for all requests of a step."""
        if batch is not self._batch:
            self._batch, self._step = batch, EngineStep(self.kinds)
        self._step.add(past, tokens, pages)

    # What a step has to do is worked out on the host, from its requests: nothing to compile, and
    # another program for each number of requests if it were.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def attend_stored(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        engine: Mapping[str, Any],
        **attention: Any,
    ) -> torch.Tensor:
        """Store one layer's new keys and values, and return the attention, as `attend_layer` does.

        `engine` is what the engine passes to every layer: a "block_table" if the step is one.
        `attention` is scaling, softcap and sinks.
        """
        layer: int = module.layer_idx  # type: ignore[assignment]
        kind = self._kind_of[layer]
        if engine.get("block_table") is not None:
            work = self._decode_work(layer, kind, engine)
        else:
            work = self._step.work(kind, query.device)
        return attend_layer(
            query, key, value, work, self.layer_pages(layer), self.storage[layer], self.page_layout,
            self.backend, window=self.kinds[kind].window, **attention,
        )  # fmt: skip

    def _decode_work(self, layer: int, kind: int, engine: Mapping[str, Any]) -> LayerWork:
        """Return the work of a step in which every request decodes, from the engine's tensors.

        Nothing is read on the host, so that a CUDA graph can hold it. It is made once for the
        layers of a kind, and again in each run of the model: a graph must hold that, too.
        """
        if layer <= self._last_layer:
            self._work.clear()
        self._last_layer = layer
        if kind not in self._work:
            table = engine["block_table"][kind]
            ends = engine["cu_seq_lens_k"]
            ends = list(ends.values())[kind] if isinstance(ends, dict) else ends
            lengths = (ends[1:] - ends[:-1]).int()
            self._work[kind] = decode_work(table, lengths, self.page_layout.slots)
        return self._work[kind]

    def update(self, key_states: Any, value_states: Any, *_: Any, **__: Any) -> tuple[Any, Any]:
        """Return new keys and values for attention over pages, which stores them.

        Before transformers 5.24 only other attention functions call this. They get an error.
        """
        if self._config._attn_implementation != ATTENTION:
            raise ConfigError(
                "expected attn_implementation='fp8_paged', which reads the FP8 pages, got another "
                "attention; do not change the attention while the engine runs"
            )
        check_shapes(key_states, value_states, self.page_layout)
        # Layers that share these keys get no cache.
        setattr(key_states, ENGINE, self)
        return key_states, value_states
