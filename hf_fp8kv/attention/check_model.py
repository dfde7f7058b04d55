"""Check whether each layer of a model runs fused, dense or stock, and why."""

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from ..cache.cache import FP8PagedCache
from ..cache.layer import FP8PagedLayer
from ..cache.paged_tensor import PagedKV
from ..errors import ConfigError, FP8KVError
from ..modeling.exact_states import describe_rounding
from ..modeling.model_support import (
    CACHE,
    caches_latents,
    describe_cache_replacement,
    find_base_model,
    find_refusal,
    with_cache,
    without_replacement_note,
)
from .capture import PRECISE_ERRORS, find_obstacle
from .latent import find_projections, reads_stored_latents, temporary_installs
from .switching import eval_mode, paged_attention, watched_attention

logger = logging.getLogger(__name__)

# Relative error of logits that a different order of sums, and codes that change with it, may cause.
LOGITS_TOLERANCE = 0.1
FUSED = "fused"
LATENT = "fused, latent"
DENSE = "dense"
STOCK = "stock"
REFUSED = "refused"


@dataclass(frozen=True)
class LayerReport:
    """The use of the cache by one layer of a model.

    Attributes:
        index: Index of the layer.
        kind: Class of the layer in the cache.
        path: "fused" if attention reads the stored bytes, "fused, latent" if it reads stored
            latents that the model would expand, "dense" if it reads decoded K and V, or "stock" for
            a layer of transformers in the model's dtype.
        reason: Reason for a path that is not fused, or "".
    """

    index: int
    kind: str
    path: str
    reason: str = ""


@dataclass(frozen=True)
class ModelReport:
    """Result of `check_model`.

    Attributes:
        model: Class of the model.
        layers: A report for each layer. Empty if the model cannot use the cache.
        refusal: Reason why the model cannot use the cache, or "".
        probed: Whether the model was run. Otherwise, only its class and config were read.
        note: Additional information about the model, or "".
        capture_obstacle: Reason why `enable(model, capture=True)` does not capture its steps. "" if
            they can be captured, or if the model was not run.
    """

    model: str
    layers: tuple[LayerReport, ...]
    refusal: str = ""
    probed: bool = False
    note: str = ""
    capture_obstacle: str = ""

    @property
    def counts(self) -> dict[str, int]:
        """Number of layers by path."""
        return dict(Counter(layer.path for layer in self.layers))

    @property
    def path(self) -> str:
        """Path of the slowest paged layer, "stock" if no layer is paged, or "refused"."""
        if self.refusal:
            return REFUSED
        return next((path for path in (DENSE, FUSED, LATENT, STOCK) if path in self.counts), STOCK)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as a dictionary for JSON."""
        layers = [asdict(layer) for layer in self.layers]
        return {**asdict(self), "path": self.path, "counts": self.counts, "layers": layers}

    def __str__(self) -> str:
        if self.refusal:
            return f"{self.model}: refused: {self.refusal}"
        counts = ", ".join(f"{count} {path}" for path, count in self.counts.items())
        lines = [f"{self.model}: {len(self.layers)} layers: {counts}"]
        shown_reasons: set[tuple[str, str]] = set()
        for layer in self.layers:
            if layer.reason and (layer.path, layer.reason) not in shown_reasons:
                shown_reasons.add((layer.path, layer.reason))
                lines.append(f"  {layer.path} (layer {layer.index}, {layer.kind}): {layer.reason}")
        if self.note:
            lines.append(f"  note: {self.note}")
        if self.capture_obstacle:
            lines.append(f"  steps are not captured: {self.capture_obstacle}")
        return "\n".join(lines)


@without_replacement_note
def check_model(model: PreTrainedModel, *, probe: bool = True) -> ModelReport:
    """Report for each layer of a model whether it can read stored pages, or why not.

    Args:
        model: A model of transformers. It is not changed.
        probe: Whether to run the model on three tokens, to observe its attention. For
            encoder-decoder models, models with custom attention code, and models that fail, the
            report is based on the class and the config.

    Raises:
        ConfigError: `model` is not a PreTrainedModel.
    """
    model = find_base_model(model)
    model_class: type = type(model)
    class_name = model_class.__name__
    if refusal := find_refusal(model_class):
        return ModelReport(class_name, (), refusal)
    try:
        cache = FP8PagedCache(model.config, backend="torch")
    except FP8KVError as error:
        return ModelReport(class_name, (), str(error))
    uses_interface = model._can_set_attn_implementation()
    paths: dict[int, str] | None = None
    obstacle = ""
    if probe and uses_interface and not model.config.is_encoder_decoder:
        paths, obstacle = _probe_layers(model, cache)
    layers = tuple(
        _report_layer(index, layer, uses_interface, paths, model.config)
        for index, layer in enumerate(cache.layers)
    )
    notes = describe_rounding(model), describe_cache_replacement(model.config)
    return ModelReport(
        class_name,
        layers,
        probed=paths is not None,
        note=". ".join(filter(None, notes)),
        capture_obstacle=obstacle,
    )


def _report_layer(
    index: int, layer: Any, uses_interface: bool, paths: dict[int, str] | None, config: Any
) -> LayerReport:
    kind = type(layer).__name__
    path = DENSE
    reason = ""
    is_latent = caches_latents(config.get_text_config(decoder=True))
    if not isinstance(layer, FP8PagedLayer):
        path = STOCK
        reason = "not plain attention: a layer of transformers stores it, unquantized"
        if kind == "DummyLayer":
            reason = (
                "it stores nothing: no attention, or attention to another layer's keys and values"
            )
    elif not uses_interface:
        reason = (
            "the model has its own attention code and does not use transformers' attention registry"
        )
    elif paths is None:
        path = LATENT if is_latent else FUSED
    elif index not in paths:
        reason = "the model does not call the attention function it is set to use"
    elif paths[index] != DENSE:
        path = paths[index]
    elif is_latent:
        reason = (
            "the model expands its latents by more than a multiplication by weights (kv_b_proj)"
        )
    else:
        reason = "the model changes keys or values between the cache and attention"
    return LayerReport(index, kind, path, reason)


def _probe_layers(model: PreTrainedModel, cache: FP8PagedCache) -> tuple[Any, str]:
    """Run the model on a few tokens.

    Return the path of each layer, and why steps cannot be captured. (None, "") means an error.
    """
    paths: dict[int, str] = {}

    def record(module: Any, query: Any, key: Any, value: Any, kwargs: dict[str, Any]) -> None:
        is_stored = isinstance(key, PagedKV) and isinstance(value, PagedKV)
        path = FUSED if is_stored else DENSE
        if is_stored and reads_stored_latents(module):
            path = DENSE if find_projections(module, key) is None else LATENT
        index = module.layer_idx
        paths[index] = DENSE if paths.get(index) == DENSE else path

    try:
        ids = torch.ones((1, 2), dtype=torch.long, device=model.device)
        with (
            torch.no_grad(),
            eval_mode(model),
            temporary_installs(model),
            watched_attention(model, record),
        ):
            model(input_ids=ids, **with_cache(model, cache))
            paths.clear()
            model(input_ids=ids[:, :1], **with_cache(model, cache))
            # The attention also records the calls of `find_obstacle`.
            probed_paths = paths.copy()
            try:
                obstacle = find_obstacle(model, FP8PagedCache(model.config, backend="torch"))
            except Exception as error:
                obstacle = f"a step raises {type(error).__name__}: {error}".partition("\n")[0]
    except Exception as error:
        logger.info("%s could not be probed: %s", type(model).__name__, error)
        return None, ""
    return probed_paths, obstacle


def probe_preallocated(model: PreTrainedModel, make_cache: Callable[[int | None], Any]) -> None:
    """Raise ConfigError if a model has different results with a preallocated cache.

    A preallocated cache has positions without tokens. The code of some models treats the number of
    positions as the number of tokens, or uses the mask for more than attention. The model
    generates three tokens after two prompts, one with padding. A model that cannot generate from
    token ids is not checked.

    Args:
        model: The model.
        make_cache: Function that returns an empty cache in the model's dtype, for a number of
            tokens, or a growing cache for None.
    """
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    # Two prompts of 13 tokens. The factor and the offset spread their ids over the vocabulary.
    ids = (torch.arange(26, device=model.device).view(2, -1) * 37 + 11) % vocab_size
    mask = torch.ones_like(ids)
    ids[0, :3] = mask[0, :3] = 0
    generate: Any = model.generate

    def compute_logits(num_tokens: int | None) -> torch.Tensor:
        output = generate(
            input_ids=ids, attention_mask=mask, **{CACHE: make_cache(num_tokens)},
            max_new_tokens=3, do_sample=False, num_beams=1, pad_token_id=0, eos_token_id=None,
            output_logits=True, return_dict_in_generate=True, disable_compile=True,
        )  # fmt: skip
        return torch.stack(output.logits).float()

    reason = ""
    with eval_mode(model), paged_attention(model), torch.compiler.set_stance("force_eager"):
        try:
            reference = compute_logits(None)
        except Exception as error:
            logger.info("%s could not be probed: %s", type(model).__name__, error)
            return
        try:
            # Enough positions for 16 tokens, and many without tokens.
            errors = (compute_logits(64) - reference).norm(dim=-1) / reference.norm(dim=-1)
            if errors.max() > PRECISE_ERRORS.get(model.dtype, LOGITS_TOLERANCE):
                reason = f"has logits that differ by {errors.max():.1%}"
        except Exception as error:
            reason = f"raises {type(error).__name__}: {error}"
    if reason:
        raise ConfigError(
            "max_cache_len: expected a model that gives equal results with positions that hold no "
            f"tokens yet, got {type(model).__name__}, which {reason}. Leave max_cache_len out"
        )


def find_stock_layers(cache: FP8PagedCache) -> list[int]:
    """Return the indices of a cache's layers that are not paged."""
    return [index for index, layer in enumerate(cache.layers) if layer not in cache.paged_layers]
