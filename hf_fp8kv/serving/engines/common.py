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
from ...ops import AttentionSpec, Pages
from ..attend import StoredLayer
from ..config import ServingConfig
from ..layout import EnginePages
from ..step import MIN_LENGTH_RATIO, EngineStep, LayerWork, decode_work


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
    """Return the number of values of the model's dtype that attention needs for a token of a step.

    These come in addition to the hidden states, the queries and the new keys and values: the states
    before the norm, queries and their results in the order of batches (with padding), results in
    the engine's order, and keys in float32 when they are centered.
    """
    heads, dim = sizes(config)
    hidden: int = config.hidden_size
    queries: int = math.ceil((2 / MIN_LENGTH_RATIO + 1) * config.num_attention_heads * dim)
    return hidden + queries + 2 * heads * dim


class EngineCache:
    """A base class for the cache of an engine, next to the engine's own class.

    A subclass for an engine sets the kinds of layers and their pages. It records each request of a
    step. Then the attention function calls `attend_stored` for each layer.
    """

    chosen: ServingConfig
    identity: str  # of model and options, for a prefix store
    page_layout: EnginePages
    windows: list[int | None]  # of each kind of layers, in the engine's order
    layers: dict[int, StoredLayer]  # by index
    _kind_of: Mapping[int, int]  # by layer, the index into `windows`
    backend: str  # one of `ops.BACKENDS`

    def prepare(
        self,
        chosen: ServingConfig,
        config: Any,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        """Lay out the pages and look up static scales, before the engine plans its memory.

        `add_layers` adds the pages, when they exist.

        `config` is the config of the model's text part.

        Raises:
            ConfigError, ScaleError, BackendError: The chosen options do not fit the model.
        """
        self._config, (heads, dim), layers = config, sizes(config), config.num_hidden_layers
        heads //= chosen.options.tensor_parallel.size
        self._storage = chosen.layer_storage(layers, heads, dim, device)
        self.page_layout = EnginePages.lay_out(chosen.options, layers, heads, dim, page_size, dtype)
        self.backend = ops.choose_backend(chosen.options.backend, torch.device(device))
        self._step = EngineStep([], page_size)
        self._batch: object = None
        self._work: dict[int, LayerWork] = {}
        self._last_layer = -1

    def add_layers(self, pages: Mapping[int, Pages]) -> None:
        """Add the pages of each layer, as the block tables count them."""
        self.layers = {
            index: StoredLayer(pages[index], storage, self.page_layout, self.backend)
            for index, storage in enumerate(self._storage)
        }

    def record(self, batch: object, past: int, tokens: int, pages: Sequence[Sequence[int]]) -> None:
        """Record a request of the next step. `batch` is one object for all requests of a step."""
        if batch is not self._batch:
            self._batch, self._step = batch, EngineStep(self.windows, self.page_layout.slots)
        self._step.add(past, tokens, pages)

    # The host plans a step from its requests. The compiler would find nothing to compile, and would
    # make a separate program for each number of requests.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def attend_stored(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        spec: AttentionSpec,
        engine: Mapping[str, Any],
    ) -> torch.Tensor:
        """Store one layer's new K and V, and return the attention. See `StoredLayer.attend`.

        `engine` has the keyword arguments that the engine passes to every layer. It contains a
        "block_table" if every request of the step decodes.
        """
        layer: int = module.layer_idx  # type: ignore[assignment]
        kind = self._kind_of[layer]
        if engine.get("block_table") is not None:
            work = self._decode_work(layer, kind, engine)
        else:
            work = self._step.work(kind, query.device)
        return self.layers[layer].attend(query, key, value, work, spec)

    def _decode_work(self, layer: int, kind: int, engine: Mapping[str, Any]) -> LayerWork:
        """Return the work of a step in which every request decodes, from the engine's tensors.

        The host reads no tensor, so that a CUDA graph can hold the step. All layers of a kind share
        the work of a run of the model. The next run makes it again, because a graph must hold that
        as well.
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
        self.page_layout.check_shapes(key_states, value_states)
        # Layers that share these keys get no cache.
        setattr(key_states, ENGINE, self)
        return key_states, value_states
