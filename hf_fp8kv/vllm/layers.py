"""The attention of vLLM's layers over pages in its pool: the same on every platform."""

from collections.abc import Mapping
from typing import Any

import torch
from vllm.model_executor.models.utils import extract_layer_index

from ..errors import ConfigError
from ..ops import choose_backend
from ..serving.attend import attend_layer
from ..serving.config import LayerStorage
from ..serving.layout import LayerPages, PageLayout
from ..serving.step import LayerWork
from .pages import check_block_size, view_pages
from .storage import ModelStorage


def refuse_unsupported(dtype: str, attn_type: str, alibi_slopes: object) -> None:
    """Raise ConfigError for a kind of attention that our pages are not for."""
    for what, present in (
        (f"attention of type {attn_type!r}", attn_type != "decoder"),
        ("ALiBi", alibi_slopes is not None),
    ):
        if present:
            raise ConfigError(
                f"--kv-cache-dtype {dtype}: expected causal attention without ALiBi, got {what}; "
                "serve this model with --kv-cache-dtype auto"
            )


def bind_layers(
    layers: Mapping[str, Any], vllm_config: Any, block_size: int, device: torch.device
) -> None:
    """Give each attention what its layer is stored with; vLLM calls this before it serves.

    Args:
        layers: vLLM's `Attention` modules by their names.
        vllm_config: of the model.
        block_size: tokens of a block of theirs.
        device: of the pool.

    Raises:
        ScaleError, ConfigError: scales or a plan that are not those of the model.
    """
    check_block_size(block_size)
    model_config = vllm_config.model_config
    config = model_config.hf_text_config
    indices = {name: extract_layer_index(name) for name in layers}
    for name, layer in layers.items():
        impl = layer.impl
        impl.model.check_layers(
            indices.values(), config.num_hidden_layers, getattr(config, "model_type", None)
        )
        impl.bound = BoundLayer(
            impl.model, indices[name], impl.num_kv_heads, impl.head_size, model_config.dtype,
            torch.device(device),
        )  # fmt: skip


class BoundLayer:
    """One layer: how it is stored, and the pages in vLLM's pool once they are there."""

    def __init__(
        self, model: ModelStorage, index: int, heads: int, dim: int, dtype: torch.dtype,
        device: torch.device,
    ) -> None:  # fmt: skip
        self._dynamic = model.dtype.dynamic
        self._storage: LayerStorage = model.layer(index, heads, dim, device)
        self._backend = choose_backend(model.backend, device)
        self._sizes = heads, dim, dtype
        self._pool: tuple[torch.Tensor, LayerPages, PageLayout] | None = None

    def _pages(self, kv_cache: torch.Tensor) -> tuple[LayerPages, PageLayout]:
        if self._pool is None or self._pool[0] is not kv_cache:
            heads, dim, dtype = self._sizes
            plan = self._storage.plan
            pages = view_pages(kv_cache, dim, plan, dynamic=self._dynamic, backend=self._backend)
            layout = PageLayout(heads, dim, kv_cache.shape[2], plan, dtype, self._dynamic)
            self._pool = kv_cache, pages, layout
        return self._pool[1:]

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        work: LayerWork,
        out: torch.Tensor,
        **attention: Any,
    ) -> None:
        """Store keys and values `[N, Hkv, D]`, and write the attention of queries `[N, Hq, D]`.

        `attention`: scaling, softcap, sinks and reach, as for `attend_layer`.
        """
        pages, layout = self._pages(kv_cache)

        def heads_first(x: torch.Tensor | None) -> torch.Tensor | None:
            return None if x is None else x.transpose(0, 1)[None]

        queries = heads_first(query)
        assert queries is not None
        attend_layer(
            queries, heads_first(key), heads_first(value), work, pages, self._storage, layout,
            self._backend, window=None, out=out.view(1, *query.shape), **attention,
        )  # fmt: skip
