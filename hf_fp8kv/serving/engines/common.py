"""What the caches of all engines share: they store pages of ours, and attend to them."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch

from ... import ops
from ...errors import ConfigError
from ..attend import attend_layer
from ..config import LayerNumbers, ServingConfig
from ..layout import PageLayout, Stored
from ..step import EngineStep, LayerKind, LayerWork, decode_work

__all__ = ["EngineCache", "sizes", "tokens_in"]


def sizes(config: Any) -> tuple[int, int]:
    """Returns KV heads and head size of a model, as every engine finds them in the text's config.

    Raises:
        ConfigError: they are not in the config.
    """
    if getattr(config, "is_heterogeneous", False):
        raise ConfigError(
            f"expected layers that are alike, got a {type(config).__name__} with layers of "
            "several sizes; the engine has one size of page, use generate() with FP8PagedCache"
        )
    hidden, queries, heads, dim = (
        getattr(config, name, None)
        for name in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    )
    if dim is None and hidden and queries:
        dim = hidden // queries
    heads = queries if heads is None else heads
    if heads is None or dim is None:
        raise ConfigError(
            "expected a config with num_key_value_heads (or num_attention_heads) and head_dim (or "
            f"hidden_size), got {type(config).__name__}; continuous batching cannot run this model"
        )
    return int(heads), int(dim)


def tokens_in(kind: Any, kept: list[int], lengths: dict[str, int], size: int) -> int:
    """Returns the tokens in the blocks of one kind of layers; a block that is shared counts once.

    Args:
        kind: what has the block tables of these layers, and a window if they have one.
        kept: blocks that nobody uses and that are kept for reuse: full ones.
        lengths: tokens stored for each live request.
        size: tokens per page.
    """
    held = dict.fromkeys(kept, size)
    # Copies: the engine's thread goes on meanwhile.
    for request, blocks in list(kind.block_table.items()):
        left = min(lengths.get(request, 0), getattr(kind, "sliding_window", 2**62))
        for block in list(blocks):
            held[block] = max(held.get(block, 0), min(left, size))
            left = max(left - size, 0)
    return sum(held.values())


class EngineCache:
    """The part of an engine's cache that does not know the engine.

    A class for an engine derives from this and from the engine's own cache. It says which kinds of
    layers there are and where their pages, and tells `record` of every request of a step; the
    attention function then calls `attend_stored` for each layer.

    Attributes:
        settings: what the user chose, for this rank.
        page_layout: where the bytes of a page are.
        kinds: the kinds of attention layers, in the engine's order.
        numbers: the static numbers of each layer.
        backend: a key of `ops.BACKENDS`.
        prefix_hits: how often a request found its beginning in the cache.
        prefix_tokens: tokens that these did not have to compute.
    """

    settings: ServingConfig
    page_layout: PageLayout
    kinds: list[LayerKind]
    numbers: list[LayerNumbers]
    backend: str

    def _prepare(
        self, settings: ServingConfig, layers: int, heads: int, dim: int, device: torch.device | str
    ) -> None:
        """To be called before the engine plans its memory. Raises ScaleError or BackendError."""
        self.settings = settings
        self.numbers = settings.layers(layers, heads, dim, device)
        self.backend = ops.choose_backend(settings.options.backend, torch.device(device))
        self.prefix_hits = self.prefix_tokens = 0
        self._step = EngineStep([])
        self._batch: object = None
        self._tables: dict[int, LayerWork] = {}
        self._last_layer = -1

    @staticmethod
    def check(model: Any, settings: ServingConfig) -> None:
        """Raises ConfigError or ScaleError if no engine of this model can have these settings."""
        config = model.config.get_text_config()
        heads, dim = sizes(config)
        settings.layers(config.num_hidden_layers, heads // settings.options.tp_size, dim)
        ops.choose_backend(settings.options.backend, model.device)

    @staticmethod
    def has_block_table_steps(config: Any) -> bool:
        """Whether an engine of this model can hand a step as a block table: `_by_block_table`."""
        return False

    @staticmethod
    def bytes_per_token(config: Any, settings: ServingConfig, dtype: torch.dtype) -> float:
        """Returns what a token takes in the pages of a process: `heads` is split over its ranks.

        Args:
            config: of the model's text part.
            settings: what is stored.
            dtype: the model's.
        """
        heads, dim = sizes(config)
        heads //= settings.options.tp_size
        page = PageLayout.of(settings.options, heads, dim, 64, dtype)
        return page.bytes_per_page / page.slots * float(config.num_hidden_layers)

    def _settle(self) -> None:
        """To be called when the pages are there: they are zero before anybody writes to them.

        An engine has a stream of its own, which does not wait for that on which they were made.
        """
        device = self.stored(0).k.device
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    @abstractmethod
    def held(self, lengths: dict[str, int]) -> tuple[int, int, int, int]:
        """Returns bytes planned, bytes taken, bytes of a page of all layers, and tokens held.

        Args:
            lengths: tokens stored for each live request.
        """

    @abstractmethod
    def fits_alone(self, tokens: int) -> bool:
        """Whether one request may hold so many tokens, with all pages to itself."""

    def request_tokens(self) -> int:
        """Returns the most tokens that one request may hold; 0: not even one.

        One that outgrows all pages stops the engine: it has to be known before it is let in. With
        windows in all layers there is no such number, and a very large one is returned.
        """
        low, high = 0, 2**31 - 1
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.fits_alone(middle) else (low, middle - 1)
        return low

    @abstractmethod
    def kind_of(self, layer: int) -> int:
        """The index into `kinds` of a layer."""

    @abstractmethod
    def stored(self, layer: int) -> Stored:
        """The pages of a layer, as the block tables count them."""

    def record(self, batch: object, past: int, tokens: int, pages: Sequence[Sequence[int]]) -> None:
        """One request of the next step.

        Args:
            batch: an object that is the same for all requests of a step, and of no other.
            past: tokens that the request has stored.
            tokens: tokens of the step.
            pages: for each kind, the request's pages.
        """
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
        scaling: float,
        softcap: float,
        sinks: torch.Tensor | None,
        engine: Mapping[str, Any],
    ) -> torch.Tensor:
        """Stores one layer's new keys and values; returns the attention, `[1, N, Hq, D]`.

        Args:
            engine: what the engine tells every layer; a "block_table" if the step is one.
        """
        layer: int = module.layer_idx  # type: ignore[assignment]
        kind = self.kind_of(layer)
        if engine.get("block_table") is not None:
            calls = self._by_block_table(layer, kind, engine)
        else:
            calls = self._step.calls(kind, query.device)
        return attend_layer(
            query, key, value, calls, self.stored(layer), self.numbers[layer], self.page_layout,
            self.backend,
            window=self.kinds[kind].window, scaling=scaling, softcap=softcap, sinks=sinks,
        )  # fmt: skip

    def _by_block_table(self, layer: int, kind: int, engine: Mapping[str, Any]) -> LayerWork:
        """The calls of a step in which every request decodes, from tensors of the engine alone.

        Nothing is read on the host, so that a CUDA graph can hold it. It is made once for the
        layers of a kind, and again in each run of the model: a graph must hold that, too.
        """
        if layer <= self._last_layer:
            self._tables.clear()
        self._last_layer = layer
        if kind not in self._tables:
            table = engine["block_table"][kind]
            ends = engine["cu_seq_lens_k"]
            ends = list(ends.values())[kind] if isinstance(ends, dict) else ends
            lengths = (ends[1:] - ends[:-1]).int()
            self._tables[kind] = decode_work(table, lengths, self.page_layout.slots)
        return self._tables[kind]

    def search_prefix_match(self, request_id: str, prompt_ids: list[int]) -> int:
        """As the engine's own, and counted."""
        engine: Any = super()
        found = int(engine.search_prefix_match(request_id, prompt_ids))
        self.prefix_hits += found > 0
        self.prefix_tokens += found
        return found

    def update(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Only for attention that wants dense keys and values: there are none."""
        raise ConfigError(
            "expected attn_implementation='fp8_paged', which reads the FP8 pages, got a model that "
            "runs another attention on them; do not change the attention while the engine runs"
        )
