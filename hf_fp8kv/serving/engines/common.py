"""The part of an engine's cache that is independent of the engine: pages, steps and attention."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers.generation.continuous_batching.utils import (
    find_head_dim,
    find_num_key_value_heads,
)

from ... import ops
from ...cache.options import check_supported_page_size
from ...errors import ConfigError
from ...modeling.model_support import ATTENTION, ENGINE_ATTRIBUTE
from ...ops import AttentionSpec, Pages
from ..attend import StoredLayer
from ..config import ServingConfig, make_layer_storage
from ..layout import EngineLayout
from ..step import MIN_LENGTH_RATIO, EngineStep, LayerWork, make_decode_work


def read_kv_sizes(config: Any) -> tuple[int, int]:
    """Return KV heads and head size, as engines read them from a text config. Raise ConfigError."""
    if getattr(config, "is_heterogeneous", False):
        raise ConfigError(
            f"expected layers of one size, got a {type(config).__name__} with layers of several "
            "sizes. The engine reads one size. Use generate() with FP8PagedCache"
        )
    try:
        return int(find_num_key_value_heads(config)), int(find_head_dim(config))
    except ValueError:
        raise ConfigError(
            "expected a config with num_key_value_heads (or num_attention_heads) and head_dim (or "
            f"hidden_size), got {type(config).__name__}. Continuous batching cannot run this model"
        ) from None


def count_extra_values(config: Any) -> int:
    """Return the number of extra values per token of a step that attention needs in memory.

    The values have the model's dtype. The engine itself plans hidden states, queries, and new keys
    and values. The extra values are:

    * states before the norm
    * queries and attention outputs in the order of batches, with padding
    * attention outputs in the engine's order
    * keys in float32, if K is centered
    """
    num_heads, head_dim = read_kv_sizes(config)
    query_size = int(config.num_attention_heads) * head_dim
    num_query_values = math.ceil((2 / MIN_LENGTH_RATIO + 1) * query_size)
    return int(config.hidden_size) + num_query_values + 2 * num_heads * head_dim


class EngineCache:
    """A base class for an engine's cache. Its subclasses also inherit from the engine's class.

    The subclass for an engine sets the kinds of layers and their pages, and records each request of
    a step. Then the attention function calls `attend_stored` for each layer.
    """

    serving_config: ServingConfig
    identity: str  # digest of the model and the options, for a prefix store
    hash_key: bytes  # key of the hash that identifies blocks
    windows: list[int | None]  # window of each kind of layers, in the engine's order
    _window_indices: Mapping[int, int]  # index into `windows`, by layer index

    def prepare(
        self,
        serving_config: ServingConfig,
        config: Any,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        """Lay out the pages and look up static scales, before the engine plans its memory.

        `config` is the model's text config. `add_layers` adds the pages after their allocation.

        Raises:
            ConfigError, ScaleError, BackendError: The options do not fit the model.
        """
        check_supported_page_size(
            page_size,
            "the engine's page size",
            "Set ContinuousBatchingConfig(page_size=...), or block_size",
        )
        options = serving_config.options
        num_all_heads, head_dim = read_kv_sizes(config)
        num_heads = num_all_heads // options.tensor_parallel.size
        self._config = config
        options.check_layers(range(config.num_hidden_layers), config.num_hidden_layers)
        self._storages = [
            make_layer_storage(options, index, num_heads, head_dim, device)
            for index in range(config.num_hidden_layers)
        ]
        is_dynamic = options.has_dynamic_scales
        self.page_layouts = [
            EngineLayout(num_heads, head_dim, page_size, storage.plan, dtype, is_dynamic)
            for storage in self._storages
        ]
        self.page_size = page_size  # in tokens
        self.backend = ops.choose_backend(options.backend, torch.device(device))
        self._step = EngineStep([], page_size)
        self._step_id: object = None
        self._work_by_kind: dict[int, LayerWork] = {}
        self._last_index = -1  # layer index of the last call

    def add_layers(self, pages: Mapping[int, Pages]) -> None:
        """Add the pages of each layer, by its index, in the numbering of the block tables."""
        self.layers = {
            index: StoredLayer(pages[index], storage, self.page_layouts[index], self.backend)
            for index, storage in enumerate(self._storages)
        }

    def record(
        self, step_id: object, num_stored: int, num_new: int, pages: Sequence[Sequence[int]]
    ) -> None:
        """Record a request of the next step. All requests of a step have the same `step_id`."""
        if step_id is not self._step_id:
            self._step_id = step_id
            self._step = EngineStep(self.windows, self.page_size)
        self._step.add(num_stored, num_new, pages)

    # The host plans a step from its requests. The compiler would find nothing to compile, and make
    # a separate program for each number of requests.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def attend_stored(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        spec: AttentionSpec,
        kwargs: Mapping[str, Any],
    ) -> torch.Tensor:
        """Store one layer's new K and V, and return the attention. See `StoredLayer.attend`.

        `kwargs` are the keyword arguments that the engine passes to every layer. They contain a
        "block_table" if every request of the step decodes.
        """
        index: int = module.layer_idx  # type: ignore[assignment]
        kind = self._window_indices[index]
        if kwargs.get("block_table") is not None:
            work = self._plan_decoding(index, kind, kwargs)
        else:
            work = self._step.get_work(kind, query.device)
        return self.layers[index].attend(query, key, value, work, spec)

    def _plan_decoding(self, index: int, kind: int, kwargs: Mapping[str, Any]) -> LayerWork:
        """Return the work of a step in which every request decodes, from the engine's tensors.

        The host reads no tensor, so a CUDA graph can contain the step. All layers of a kind share
        the work within one run of the model. The next run computes it again, so that a graph also
        contains this computation.
        """
        if index <= self._last_index:
            self._work_by_kind.clear()
        self._last_index = index
        if kind not in self._work_by_kind:
            table = kwargs["block_table"][kind]
            starts = kwargs["cu_seq_lens_k"]  # a tensor, or a dict with a tensor for each kind
            if isinstance(starts, dict):
                starts = list(starts.values())[kind]
            lengths = (starts[1:] - starts[:-1]).int()
            self._work_by_kind[kind] = make_decode_work(table, lengths, self.page_size)
        return self._work_by_kind[kind]

    def update(self, key_states: Any, value_states: Any, *_: Any, **__: Any) -> tuple[Any, Any]:
        """Return new keys and values unchanged, because attention over pages stores them.

        Before transformers 5.24 only other attention functions call this. They get a ConfigError.
        """
        if self._config._attn_implementation != ATTENTION:
            raise ConfigError(
                "expected attn_implementation='fp8_paged', which reads the FP8 pages, got a "
                "different one. Do not change the attention while the engine runs"
            )
        self.page_layouts[0].check_shapes(key_states, value_states)
        # Layers that share these keys get no cache, so they find it as an attribute of the keys.
        setattr(key_states, ENGINE_ATTRIBUTE, self)
        return key_states, value_states
