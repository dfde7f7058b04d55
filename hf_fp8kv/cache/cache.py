"""`FP8PagedCache`: the cache to pass to `generate()`."""

import copy
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch.utils._pytree import tree_leaves
from transformers import DynamicCache, PreTrainedConfig

from ..errors import ConfigError, FP8KVError, OutOfPagesError
from ..formats import LayerPlan, count_plans, summarize_plan
from ..modeling.exact_states import patch_kv_wrapper
from ..modeling.forward_state import forward_pass
from ..modeling.layer_specs import find_kv_sizes, read_config, release_states
from ..modeling.model_support import (
    caches_latents,
    check_config,
    find_base_model,
    find_generating_model,
)
from ..modeling.tensor_parallel import TensorParallel
from ..modeling.tensor_parallel import tensor_parallel as find_split
from ..ops.page_layout import make_page_layout
from ..scales import KVScales, describe_kv_scales
from ..utils.files import convert_read_errors
from ..utils.warn_once import warn_once
from . import plans, serialization
from .layer import FP8PagedLayer, parse_crop
from .options import CacheOptions
from .paged_layers import PagedLayers
from .paged_tensor import densify
from .plans import Plan
from .tokens import UNKNOWN, Tokens, can_crop

NOT_KEPT = "not kept"


@dataclass(frozen=True)
class MemoryFootprint:
    """Memory and contents of a cache.

    Attributes:
        pages_bytes: Size of the codes of K and V, including unused pages.
        scales_bytes: Size of dynamic and static scales, and of centers.
        tables_bytes: Size of block tables and lengths.
        host_bytes: Size of offloaded pages in host memory. All other memory is on the device.
        other_bytes: Size of the layers that transformers implements, and of indexers.
        total_bytes: Sum of the sizes above.
        used_bytes: Size of the pages, including dynamic scales, that hold tokens of this cache.
        fetched_bytes: Number of bytes that offloading has copied to the device.
        returned_bytes: Number of bytes that offloading has copied from the device.
        tokens: Number of stored tokens over all sequences.
        reused_tokens: Number of tokens that `generate()` found in the cache instead of computing
            them.
        restored_tokens: Number of tokens that came from a `PrefixStore`.
        layers_by_plan: Number of layers by storage plan, such as {"K fp8_e3m4, V fp8_e3m4": 30}.
    """

    pages_bytes: int
    scales_bytes: int
    tables_bytes: int
    host_bytes: int
    other_bytes: int
    total_bytes: int
    used_bytes: int
    fetched_bytes: int
    returned_bytes: int
    tokens: int
    reused_tokens: int
    restored_tokens: int
    layers_by_plan: dict[str, int]


class FP8PagedCache(DynamicCache):
    """A cache for `generate()` that stores keys and values in pages, in 8 bits by default.

    ```python
    model = AutoModelForCausalLM.from_pretrained(id, attn_implementation="fp8_paged")
    out = model.generate(**inputs, cache=FP8PagedCache(model))
    ```

    A model has a storage plan, which `choose_plan` chooses for the first cache or `enable`. Later
    caches use it until the weights change. A config alone has no plan, so K and V are stored as
    "fp8_e3m4", whose error is several times as large (docs/formats.md).

    Layers with full, sliding, chunked or indexed attention are paged. All other layers (linear,
    convolution, hybrid, dummy, or defined by a model) are transformers' layers, without changes.

    Args:
        config: The model, or its config. A model also determines the plan and `tensor_parallel`,
            unless they are given. The cache does not keep the model. For an encoder-decoder, the
            cache is for the decoder's self-attention. Make the cache of the cross-attention from
            the config. None means that layers are added as the model uses them, all with full
            attention.
        dtype: Format of K and V: "fp8_e3m4", "fp8_e4m3" (also "fp8" or "fp8_e4m3fn"),
            "fp8_e4m3fnuz", "fp8_e5m2", "fp8_e2m5", "int8", "int6", "int4", "model" for the model's
            dtype, or "adaptive" for the plan of the model. None means "adaptive" if a model is
            passed, and no other argument defines the storage. Otherwise, it means "fp8_e3m4", or
            "fp8_e4m3" if `scales` are given.
        key_dtype: Format of K, instead of `dtype`.
        value_dtype: Format of V, instead of `dtype`.
        plan: Storage plan, instead of the three arguments above: a `StoragePlan` (see
            `choose_plan`) or its path, a `LayerPlan` or a mapping from layers to them, or a
            description such as "fp8_e2m5 rotated" or ("int8 rotated", "fp8_e2m5 rotated"). Only
            a `StoragePlan` can have "centered" K, because it contains the centers.
        bits: Maximum average bits of a value in the plan, from 6 to 8, as for `choose_plan`. Fewer
            than 8 need the model. None means the bits of `enable`, or 8.
        scales: Static scales: a `KVScales`, a file, a folder, or a repository of the Hub. If they
            have a plan, leave out the arguments above. A number is a constant scale in the unit of
            the stored format (`real = stored * scale`). None means dynamic scales, one per token
            and head.
        page_size: Slots (tokens) per page, a power of two from 8 to 1024.
        max_cache_len: Number of tokens per sequence to preallocate at the first call, at constant
            addresses, for `torch.compile` and CUDA graphs. None means that the cache grows as
            tokens arrive.
        max_pages: Maximum number of pages in use, over all block tables and forks. None means no
            limit.
        skip_layers: Layers to keep in the model's dtype, as transformers' layers: indices or layer
            types such as "sliding_attention".
        prefill: With "exact", a call on an empty cache attends to its unrounded K and V, and only
            writes codes. With "stored", every call attends to stored K and V.
        backend: "auto", "torch", "cpu" or "triton".
        tensor_parallel: The part of the model's heads in this process, which
            `hf_fp8kv.tensor_parallel(model)` returns. None means one process.
        offloading: Whether to keep in host memory the pages of layers that are not computing. The
            pages of the next layer are fetched while a layer computes. A number means that the
            device keeps up to this number of pages per layer, and all other pages are offloaded.

    Raises:
        ConfigError, ScaleError, BackendError: An argument is invalid. The message names it.
    """

    config: PreTrainedConfig | None
    layers: list[Any]
    # With this attribute, `modeling/exact_states.py` passes unrounded K and V to this cache.
    takes_exact_states = True
    # The cached tokens as far as their ids are known, including the current step. `UNKNOWN` while
    # the cache changes, and None if the cache never received token ids.
    tokens: Tokens | None = None
    # The first tokens, if embeddings or images follow them. Otherwise None. If it is set, `tokens`
    # is None, or `UNKNOWN` after the pages change.
    known_prefix: Tokens | None = None
    # Number of tokens that the last step added to `tokens`, even if it did not complete.
    step_tokens = 0
    # Numbers of tokens that `generate` found in the cache, or in a store, over all sequences.
    reused_tokens = restored_tokens = 0
    # Whether the cache comes from a file or a pickle.
    is_restored = False
    # Whether some ids in `tokens` are assumed from a later prompt, not read from a call.
    has_assumed_prefix = False
    # Digest of the model and the options that computed the pages, or "".
    identity = ""
    # The result of `sample_model` for the model that filled the cache. None means that it is not
    # known. `NOT_KEPT` means that the caller does not keep the cache, so no later call reuses it.
    model_sample: str | None = None
    # Number of sequences for which an empty preallocated cache has memory, -1 if layers differ, or
    # 0 if the cache has tokens or no memory.
    _empty_batch = 0

    def __init__(
        self,
        config: PreTrainedConfig | torch.nn.Module | None = None,
        *,
        dtype: str | torch.dtype | None = None,
        key_dtype: str | torch.dtype | None = None,
        value_dtype: str | torch.dtype | None = None,
        plan: "Plan | str | os.PathLike[str] | tuple[str, str] | None" = None,
        bits: float | None = None,
        scales: "KVScales | str | os.PathLike[str] | float | None" = None,
        page_size: int = 64,
        max_cache_len: int | None = None,
        max_pages: int | None = None,
        skip_layers: Collection[int | str] = (),
        prefill: str = "exact",
        backend: str = "auto",
        tensor_parallel: TensorParallel | None = None,
        offloading: bool | int = False,
    ) -> None:
        keywords: dict[str, Any] = {
            "dtype": dtype,
            "key_dtype": key_dtype,
            "value_dtype": value_dtype,
            "scales": scales,
            "plan": plan,
            "tensor_parallel": tensor_parallel,
        }
        model_config: Any = config
        if isinstance(config, torch.nn.Module):
            model = find_generating_model(find_base_model(config))
            model_config = model.config
            keywords["tensor_parallel"] = tensor_parallel or find_split(model)
        if model_config is not None:
            check_config(model_config)
        if model_config is not config:
            keywords = plans.resolve_plan(model, {**keywords, "bits": bits})
        elif bits not in (None, 8):
            raise ConfigError(
                f"bits: expected 8 for a config, got {bits!r}. A plan for fewer bits is measured "
                "with the model, so pass the model"
            )
        decoder = None if model_config is None else model_config.get_text_config(decoder=True)
        options = CacheOptions.parse(
            page_size=page_size,
            max_cache_len=max_cache_len,
            max_pages=max_pages,
            prefill=prefill,
            backend=backend,
            offloading=offloading,
            is_latent=caches_latents(decoder),
            **keywords,
        )
        self._initialize(PagedLayers(options, decoder, options.make_budget()))
        self.layers = self._paged.build_layers(skip_layers)
        declared_scales = "" if model_config is None else describe_kv_scales(model_config)
        if declared_scales and options.has_dynamic_scales:
            warn_once(
                f"this checkpoint declares static KV scales ({declared_scales}), but this cache "
                "uses dynamic scales instead. FP8PagedCache.from_pretrained(...) or scales=... "
                "uses the static scales"
            )

    @classmethod
    def from_pretrained(
        cls,
        repo_or_dir: str | os.PathLike[str],
        *,
        config: PreTrainedConfig | torch.nn.Module | None = None,
        revision: str | None = None,
        token: str | bool | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        local_files_only: bool = False,
        force_download: bool = False,
        subfolder: str | None = None,
        trust_remote_code: bool = False,
        strict: bool = True,
        **cache_keywords: Any,
    ) -> Self:
        """Create a cache with the static scales of a checkpoint.

        Args:
            repo_or_dir: A local folder, or a repository of the Hub.
            config: The model, or its config. None means that it is read from `repo_or_dir`.
            revision, token, cache_dir, local_files_only: As in transformers' `from_pretrained`.
            force_download, subfolder, trust_remote_code: As in transformers' `from_pretrained`.
            strict: Whether to raise an error if some scales are missing.
            cache_keywords: Additional arguments of the constructor.

        Raises:
            ScaleError: The scales are missing or invalid.
        """
        hub_options: dict[str, Any] = {
            "revision": revision,
            "token": token,
            "cache_dir": cache_dir,
            "local_files_only": local_files_only,
            "force_download": force_download,
            "subfolder": subfolder or "",
        }
        if "scales" in cache_keywords:
            raise ConfigError(
                "scales: expected none, because from_pretrained reads them from the checkpoint. "
                "Call FP8PagedCache(config, scales=...) to use different scales"
            )
        tp_rank, tp_size = TensorParallel.parse(cache_keywords.get("tensor_parallel"))
        scales = KVScales.from_pretrained(
            repo_or_dir, tp_rank=tp_rank, tp_size=tp_size, strict=strict, **hub_options
        )
        if config is None:
            config = read_config(repo_or_dir, trust_remote_code=trust_remote_code, **hub_options)
        return cls(config, scales=scales, **cache_keywords)

    @classmethod
    def from_options(
        cls, config: PreTrainedConfig, options: CacheOptions, skip_layers: Collection[int]
    ) -> Self:
        """Create a cache with checked options."""
        cache = cls.__new__(cls)
        decoder = config.get_text_config(decoder=True)
        cache._initialize(PagedLayers(options, decoder, options.make_budget()))
        cache.layers = cache._paged.build_layers(skip_layers)
        return cache

    def _initialize(self, paged: PagedLayers) -> None:
        super().__init__()
        self.layer_class_to_replicate = None
        self._paged = paged
        self.paged_layers = paged.layers
        self.groups = paged.groups
        self.options = paged.options
        self.config = paged.config
        self.budget = paged.budget
        self.is_open_ended = paged.is_open_ended

    @property
    def stock_layers(self) -> list[Any]:
        """The layers that transformers implements."""
        return [layer for layer in self.layers if not isinstance(layer, FP8PagedLayer)]

    @property
    def plan(self) -> dict[int, LayerPlan]:
        """Storage plan of each paged layer, by index."""
        return {layer.index: layer.encoding.plan for layer in self.paged_layers}

    # -- the interface of transformers' caches -----------------------------------------------

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store new tokens of layer `layer_idx`, and return the keys and values to attend to.

        Keys are `[B, Hkv, T, Dk]` and values `[B, Hkv, T, Dv]`. The result is as in
        `FP8PagedLayer.update`, but dense under flex attention. After an error, a growing cache is
        as it was before the step. After errors of other libraries, a cache that is preallocated or
        has layers of transformers refuses tokens until `reset`.
        """
        is_compiling = torch.compiler.is_compiling()
        if self.is_open_ended:
            while len(self.layers) <= layer_idx:
                self.layers.append(self._paged.add_layer(len(self.layers), None))
        try:
            if layer_idx >= len(self.layers):
                raise ConfigError(
                    f"expected an index below {len(self.layers)}, the config's number of layers, "
                    f"got {layer_idx}. A cache belongs to one model. Create a new FP8PagedCache"
                )
            layer = self.layers[layer_idx]
            if not is_compiling and self._empty_batch:
                self._fit_batch(key_states)
            keys, values = layer.update(key_states, value_states, *args, **kwargs)
        except BaseException as error:
            self._undo_step(layer_idx, key_states.shape[-2], error)
            raise
        if is_compiling:
            uses_flex = getattr(self.config, "_attn_implementation", None) == "flex_attention"
        else:
            uses_flex = self._paged.end_layer(layer_idx, key_states.shape[2], keys)
        if uses_flex:
            # Flex attention is an operator of the compiler and does not accept tensor subclasses.
            return densify(keys), densify(values)
        return keys, values

    def update_conv_state(self, conv_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Store the new states of a convolution, `[B, C, T]`, as in transformers."""
        self._fit_batch(conv_states)
        return super().update_conv_state(conv_states, *args, **kwargs)

    def update_recurrent_state(self, recurrent_states: torch.Tensor, *args: Any, **kw: Any) -> Any:
        """Store the new state of a recurrent layer, `[B, ...]`, as in transformers."""
        self._fit_batch(recurrent_states)
        return super().update_recurrent_state(recurrent_states, *args, **kw)

    def update_indexer(self, indexer_key_states: torch.Tensor, layer_idx: int) -> torch.Tensor:
        """Store new keys of an indexer, `[B, T, D]`, as in transformers."""
        self._fit_batch(indexer_key_states)
        return super().update_indexer(indexer_key_states, layer_idx)

    def _fit_batch(self, states: torch.Tensor) -> None:
        """Drop the memory of an empty preallocated cache if the number of sequences changes."""
        # Compiled code has no guard on `_empty_batch`, so it does not depend on earlier resets.
        if not torch.compiler.is_compiling() and self._empty_batch:
            if self._empty_batch != states.shape[0]:
                self._paged.release()
                for layer in self.stock_layers:
                    release_states(layer)
            self._empty_batch = 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return the number of columns of the mask, and the position of the first column.

        Raise ConfigError if the call has no new tokens.
        """
        if isinstance(query_length, int) and query_length == 0:
            raise ConfigError(
                f"The prompt adds no tokens to the cache, which has {self.host_length()} tokens. "
                "Pass a longer prompt, or call crop, reset or enable(model)"
            )
        patch_kv_wrapper()  # called again, because the model may be newer than the cache
        try:
            columns, start = super().get_mask_sizes(query_length, layer_idx)
        except OutOfPagesError:
            if not self._paged.unreserve():
                raise
            columns, start = super().get_mask_sizes(query_length, layer_idx)
        forward_pass.request = self._paged.make_mask_request(query_length, columns, start)
        return columns, start

    def host_length(self) -> int:
        """Return the number of stored tokens. A preallocated cache synchronizes with the device."""
        return max(self._paged.read_lengths(), default=0)

    def _count_tokens(self) -> int:
        """Return `host_length()`, or the length of transformers' layers if it is 0."""
        return self.host_length() or int(self.get_seq_length())

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` tokens, and free the pages that no other token needs.

        Raises:
            ConfigError: A sliding window has lost tokens that would become visible. The cache is
                unchanged.
        """
        num_tokens = parse_crop(tokens_to_remove)
        stock_layers = self.stock_layers
        if self._count_tokens() <= num_tokens:
            self.reset()  # not every layer of transformers can crop all its tokens
            return
        self._paged.check_crop(num_tokens)
        # `can_crop` is False for convolution layers, which can be cropped if they record the past.
        are_croppable = (
            can_crop(layer, num_tokens)
            or (getattr(layer, "record_past", False) and layer.is_croppable)
            for layer in stock_layers
        )
        if num_tokens and not all(are_croppable):
            raise ConfigError(
                "crop: expected stock layers that record the past, got a layer with a sliding "
                "window or a state. Call activate_past_recording() before these tokens are written"
            )
        with self._track_tokens(lambda batch: batch.crop(num_tokens)):
            self._paged.crop(num_tokens)
            for layer in stock_layers:
                # Before transformers 5.24, layers without tokens raise an error in `crop`.
                is_initialized = getattr(layer, "is_initialized", True)
                is_initialized |= getattr(layer, "is_indexer_initialized", False)
                if is_initialized and (num_tokens or getattr(layer, "record_past", True)):
                    layer.crop(tokens_to_remove)

    def reset(self) -> None:
        """Remove all tokens. The next tokens may belong to any number of sequences.

        The layers remain. A preallocated cache keeps its addresses if the
        number of sequences is unchanged.
        """
        with self._track_tokens(lambda _: None):
            for layer in self.stock_layers:
                if self.options.is_preallocated:
                    layer.reset()
                else:
                    release_states(layer)
            self._paged.reset()
            self._empty_batch = self._count_sequences()
        self.tokens = None

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Replace sequence `i` with sequence `beam_idx[i]`.

        This moves page numbers, not page contents.

        Args:
            beam_idx: Indices of sequences, `[B]`, integers on any device.

        Raises:
            ConfigError: An index is out of range. The cache is unchanged.
        """
        self._select_sequences(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence `repeats` times in a row, without copying pages.

        Raises:
            ConfigError: `repeats` is not a whole number above 0.
        """
        if type(repeats) is not int or repeats < 1:
            raise ConfigError(f"repeats: expected a whole number above 0, got {repeats!r}")
        sequences = torch.arange(self._count_sequences(), device="cpu")
        self._select_sequences(sequences.repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep only the sequences `indices`, in this order, without copying pages.

        Args:
            indices: Indices of sequences or a bool mask, `[B]`, on any device.

        Raises:
            ConfigError: An index is out of range, or no sequence is left.
        """
        sequences = torch.as_tensor(indices, device="cpu")
        if batch := self._count_sequences():
            try:
                sequences = torch.arange(batch, device="cpu")[sequences]
            except IndexError as error:
                raise ConfigError(
                    f"indices: expected indices of {batch} sequences, or a mask of this length, "
                    f"got {sequences.tolist()} ({error})"
                ) from None
        self._select_sequences(sequences)

    def _select_sequences(self, sequences: torch.Tensor) -> None:
        """Select sequences by index. An empty cache has no sequences, so it does not change."""
        if self._empty_batch and not self._count_tokens():
            return
        with self._track_tokens(lambda batch: batch.select(sequences)):
            self._paged.select(sequences)
            for layer in self.stock_layers:
                # In layers with a recurrent state, K and V, only this method selects all three.
                layer.reorder_cache(sequences)

    def _count_sequences(self) -> int:
        """Return the number of sequences of all layers, 0 without memory, or -1 if they differ."""
        stock_batches = {len(tensor) for tensor in self._stock_tensors if tensor.ndim > 2}
        batches = (stock_batches | {self._paged.batch}) - {0}
        return -1 if len(batches) > 1 else next(iter(batches), 0)

    @property
    def _stock_tensors(self) -> list[torch.Tensor]:
        leaves = tree_leaves([vars(layer) for layer in self.stock_layers])
        return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]

    def _undo_step(self, index: int, num_tokens: int, error: BaseException) -> None:
        """Remove the tokens that layers before `index` stored in a failed step, if possible.

        Errors of this package are raised before a preallocated layer changes.
        """
        self._paged.undo_step(index, num_tokens)
        can_undo = not self.options.is_preallocated and not self.stock_layers
        if not isinstance(error, FP8KVError) and not can_undo:
            self._paged.mark_incomplete()
        if not self.options.is_preallocated:
            length = self.host_length() + num_tokens
            for layer in self.stock_layers:
                has_length = hasattr(layer, "get_seq_length")  # not if the layer shares keys
                if has_length and layer.get_seq_length() == length and can_crop(layer, num_tokens):
                    layer.crop(-num_tokens)

    @contextmanager
    def _track_tokens(self, change: Callable[[Tokens], Tokens | None]) -> Iterator[None]:
        """Apply `change` to `tokens` after the `with` block has changed the pages.

        An exception in the block makes `tokens` `UNKNOWN`, except a ConfigError, which is raised
        before any page changes. After errors of other libraries the pages are incomplete.
        """
        old_tokens = self.tokens
        self.tokens = UNKNOWN
        try:
            yield
        except ConfigError:
            self.tokens = old_tokens
            raise
        except BaseException as error:
            if not isinstance(error, FP8KVError):
                self._paged.mark_incomplete()
            raise
        self.tokens = UNKNOWN if self.known_prefix else old_tokens and change(old_tokens)
        self.known_prefix = None

    # -- forks, files, sizes -----------------------------------------------------------------

    def fork(self) -> "FP8PagedCache":
        """Return an independent cache with the same contents.

        Pages are shared and reference-counted, and a shared page is copied when a cache writes to
        it. A cache and its forks must therefore be used by one thread at a time. The pages of a
        preallocated cache and transformers' layers are copied.
        """
        fork = self._from_layers(self._paged.fork(), list(map(copy.deepcopy, self.stock_layers)))
        # Also copy `tokens`, attributes of subclasses, and attributes that a user has set.
        vars(fork).update({**vars(self), **vars(fork)})
        return fork

    @classmethod
    def _from_layers(
        cls,
        paged: PagedLayers,
        stock: Sequence[Any] = (),
        history: serialization.History | None = None,
    ) -> "FP8PagedCache":
        """Return a cache with the contents of growing layers and of layers of transformers.

        `history` comes with layers that were read from a file or a pickle.
        """
        cache = cls.__new__(cls)
        cache._initialize(paged.to_preallocated() if paged.options.is_preallocated else paged)
        cache.layers = cache._paged.merge_layers(stock)
        if not cache._count_tokens():
            cache._empty_batch = cache._count_sequences()
        if history is not None:
            cache.tokens, cache.model_sample, cache.identity = history
            cache.is_restored = True
        return cache

    def adopt(self, paged: PagedLayers) -> None:
        """Replace the layers of this empty cache by growing layers with its options and config."""
        self.take_contents(self._from_layers(paged))

    def take_contents(self, source: "FP8PagedCache") -> None:
        """Share the contents of `source`, a cache of the same config."""
        vars(self).update(vars(source))  # in one call, which interruptions do not split

    def __deepcopy__(self, memo: dict[int, Any]) -> "FP8PagedCache":
        memo[id(self)] = fork = self.fork()
        return fork

    def __copy__(self) -> "FP8PagedCache":
        return self.fork()

    def __reduce__(self) -> tuple[Any, ...]:
        state = (*serialization.pack(self._paged), self.options, self.stock_layers)
        return self._unpack, (self._get_history(), *state)

    @classmethod
    def _unpack(cls, history: serialization.History, *state: Any) -> "FP8PagedCache":
        return cls._from_layers(serialization.unpack(*state), state[-1], history)

    def _get_history(self) -> serialization.History:
        tokens = None if self.tokens is UNKNOWN else self.tokens
        return serialization.History(tokens, self.model_sample, self.identity)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Atomically write the pages in use to a safetensors file, and return its path.

        Raises:
            ConfigError: A layer of transformers has a state other than keys and values, or an error
                has interrupted the last step.
            OSError: The file cannot be written. An older file at `path` stays.
        """
        return serialization.save(self._paged, self.stock_layers, self._get_history(), path)

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], *, device: str | torch.device | None = None
    ) -> "FP8PagedCache":
        """Read a cache that `save` wrote, and place it on `device`. None means the CPU.

        The first new tokens of a layer move it to the device of the model's layer.

        Raises:
            ConfigError: `save` did not write the file, the file is missing or damaged, or the
                device is not available.
            OutOfPagesError: The pages exceed the file's `max_pages`.
        """
        if not Path(path).is_file():
            got = "a folder" if Path(path).is_dir() else "none"
            raise ConfigError(
                f"{path}: expected a file of FP8PagedCache.save, got {got}. Check the path"
            )
        try:
            torch.empty(0, device=device)
        except Exception as error:  # torch raises errors of many types
            raise ConfigError(
                f"device: expected a device of this machine, got {device!r}: {error}. Leave it out "
                "for the CPU"
            ) from error
        with convert_read_errors(path, "a whole file of FP8PagedCache.save", ConfigError):
            paged, stock_layers, history = serialization.load(path, device)
            return cls._from_layers(paged, stock_layers, history)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self.layers)} layers: {summarize_plan(self.plan)})"

    def count_bytes(self, num_tokens: int = 1) -> tuple[float, float] | None:
        """Return the bytes of the tokens of one sequence, in bf16 and in the pages of this cache.

        Paged layers count, each with the tokens in its window and without unused slots. Before the
        first token, the sizes of K and V are read from the config. None means that they are
        not known.
        """
        dense_bytes = stored_bytes = 0.0
        for layer in self.paged_layers:
            pool = layer.pool
            page_size = self.options.page_size
            plan = layer.encoding.plan
            sizes = None if self.config is None else find_kv_sizes(self.config, layer.index)
            if layer.pool.is_allocated:
                num_heads, k_dim, v_dim = pool.num_heads, pool.k_dim, pool.v_dim
            elif sizes is not None:
                num_model_heads, k_dim, v_dim = sizes
                num_heads = num_model_heads // self.options.tensor_parallel.size
            else:
                return None
            k_dtype, v_dtype = (side.find_dtype(torch.bfloat16) for side in plan)
            has_scales = self.options.has_dynamic_scales and not all(side.is_auto for side in plan)
            layout = make_page_layout(
                num_heads, page_size, k_dim, v_dim, k_dtype, v_dtype, has_scales
            )
            num_kept = min(num_tokens, layer.sliding_window or num_tokens)
            stored_bytes += num_kept * layout.size / page_size
            dense_bytes += torch.bfloat16.itemsize * num_kept * num_heads * (k_dim + v_dim)
        return (dense_bytes, stored_bytes) if dense_bytes else None

    def memory_footprint(self) -> MemoryFootprint:
        """Return the memory of the cache. A page that forks share counts for each of them."""
        sizes = self._paged.memory_footprint()
        sizes["other"] += sum(tensor.nbytes for tensor in self._stock_tensors)
        return MemoryFootprint(
            **{f"{kind}_bytes": size for kind, size in sizes.items()},
            total_bytes=sizes.total() - sizes["used"],
            fetched_bytes=self.budget.fetched_bytes,
            returned_bytes=self.budget.returned_bytes,
            layers_by_plan=count_plans(self.plan),
            tokens=self._paged.batch * self.host_length(),
            reused_tokens=self.reused_tokens,
            restored_tokens=self.restored_tokens,
        )
