"""Deterministic models: the results of a token depend only on its sequence, not on the call.

Matrix libraries use different code, with a different order of sums, for different numbers of rows.
Linear modules therefore compute blocks of `BLOCK_ROWS` rows, so that every product has one shape.
Attention over pages returns the same bits in any call (`AttentionSpec.deterministic`). Stored keys
and values are never recomputed, so a difference in the last bit cannot change a code.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ..attention import latent
from ..attention.check_model import LOGITS_TOLERANCE
from ..attention.deterministic import BLOCK_ROWS, check_padding, check_page_size, compute_in_blocks
from ..attention.switching import paged_attention
from ..cache.cache import FP8PagedCache
from ..cache.options import CacheOptions
from ..errors import ConfigError, FP8KVError
from ..modeling.methods import ModelAttribute, ModelMethod, remove_methods
from ..modeling.model_support import (
    ATTENTION,
    CACHE,
    DETERMINISTIC,
    EXPAND_METHOD,
    find_varying_rope,
    with_cache,
)

# Number of values in a block of an activation, few enough that torch uses a single thread. A vector
# register holds at most `_VECTOR_VALUES` values. torch has separate code for an incomplete vector.
_BLOCK_VALUES = 1 << 14
_VECTOR_VALUES = 64
# The owners that called `install_deterministic` for a model.
_OWNERS = ModelAttribute[set[str]]("_hf_fp8kv_deterministic_for")
_LINEAR_FORWARDS = (torch.nn.Linear.forward, Conv1D.forward)
# Classes of transformers that select experts, or hold the matrices of all experts.
_EXPERT_NAMES = re.compile("Router|Gate|Experts")
_ACTIVATION_MODULES = ("torch.nn.modules.activation", "transformers.activations")
_NOT_ELEMENTWISE = re.compile("Softmax|Softmin|LogSoftmax|Softmax2d|GLU|PReLU|MultiheadAttention")
# Elementwise functions with different code for the remainder of a vector.
_ELEMENTWISE_FUNCTIONS = frozenset(
    ("celu", "elu", "erf", "expm1", "gelu", "log1p", "log_sigmoid_forward", "mish", "sigmoid",
     "silu", "softplus")
)  # fmt: skip
_MATMULS = frozenset(("addmm", "baddbmm", "bmm", "mm"))


def check_deterministic(model: PreTrainedModel, stock_layers: Sequence[int] = ()) -> None:
    """Raise ConfigError if a model may not be deterministic. `stock_layers` are not in pages."""
    reason = ""
    if model.config.is_encoder_decoder:
        reason = "is an encoder-decoder"
    elif not model._can_set_attn_implementation():
        reason = "does not use transformers' attention registry"
    elif stock_layers:
        reason = f"has layers that are not stored in pages ({', '.join(map(str, stock_layers))})"
    elif model.dtype == torch.float64:
        reason = "has weights in float64"
    elif getattr(model.config, "index_topk", None) is not None:
        reason = "selects keys by products outside linear modules"
    elif rope_type := find_varying_rope(model.config):
        reason = f"has RoPE of the type {rope_type!r}, which depends on the longest sequence"
    for name, module in model.named_modules():
        if not reason and _has_matrices(module) and _find_forward(module) is None:
            reason = f"has products outside linear modules ({name}: {type(module).__name__})"
    if reason:
        raise ConfigError(
            "deterministic: expected a decoder whose layers are all stored, got "
            f"{type(model).__name__}, which {reason}. Leave deterministic out"
        )


def probe_deterministic(
    model: PreTrainedModel, options: CacheOptions, stock_layers: Sequence[int] = ()
) -> None:
    """Raise ConfigError if a model with these options is not deterministic.

    The model is run on 64 tokens at once, in chunks and in a batch. The results must be identical,
    and close to the result of the unchanged model. `stock_layers` are indices of unpaged layers.
    """
    options.check_stored("deterministic")
    check_page_size(options.page_size)
    check_deterministic(model, stock_layers)
    num_tokens = 64
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    ids = torch.arange(3 * num_tokens, device=model.device) * 37 + 11
    ids = ids.view(3, num_tokens) % vocab_size

    def compute_logits(num_sequences: int, chunk_sizes: list[int]) -> torch.Tensor:
        cache = FP8PagedCache(model.config, prefill="stored")
        chunks = ids[:num_sequences].split(chunk_sizes, 1)
        return torch.cat([model(chunk, **with_cache(model, cache)).logits[0] for chunk in chunks])

    training_modules = [module for module in model.modules() if module.training]
    name = type(model).__name__
    reason = ""
    try:
        with torch.no_grad(), paged_attention(model.eval()), latent.temporary_installs(model):
            latent.install_all(model)
            stock_logits = compute_logits(1, [num_tokens])
            install_deterministic(model, __name__)
            with FunctionWatch(num_tokens) as watch:
                logits = compute_logits(1, [num_tokens])
            error = (logits - stock_logits).float().norm()
            other_calls = ((1, [7] * 9 + [1]), (3, [1, 63]))
            if watch.found_name:
                reason = f"calls {watch.found_name} on all tokens at once, outside modules"
            elif not all(torch.equal(logits, compute_logits(*call)) for call in other_calls):
                reason = "has different logits in a larger batch or in chunks"
            elif error > LOGITS_TOLERANCE * stock_logits.float().norm():
                reason = "has different results if modules compute tokens in blocks"
    except FP8KVError:
        raise
    except Exception as error:
        raise ConfigError(
            f"deterministic: expected a model that can be run on {num_tokens} tokens, got {name}: "
            f"{type(error).__name__}: {error}. Leave deterministic out"
        ) from error
    finally:
        remove_deterministic(model, __name__)
        for module in training_modules:
            module.training = True
    if reason:
        raise ConfigError(
            "deterministic: expected a model whose results do not depend on batch and chunks, got "
            f"{name}, which {reason}. Leave deterministic out"
        )


def install_deterministic(model: PreTrainedModel, owner: str) -> None:
    """Make modules compute in blocks of a fixed size, and attention deterministic, for `owner`."""
    owners = _OWNERS.get(model) or set()
    # Set before any other change, so that `remove_deterministic` undoes an interrupted install.
    _OWNERS.set(model, owners)
    if not owners:
        # Latent attention multiplies by the weight of this projection without calling the module.
        absorbed_ids = {
            id(module.kv_b_proj)
            for module in model.modules()
            if hasattr(type(module), EXPAND_METHOD)
        }
        for module in model.modules():
            DETERMINISTIC.set(module, True)
            if id(module) not in absorbed_ids and (forward := _find_forward(module)):
                ModelMethod(module, "forward", forward).install()
        # PEFT calls `forward` and some trainers call the decoder, which skips hooks of the model.
        for target in {model, model.base_model}:
            target.register_forward_pre_hook(_check_call, with_kwargs=True)
    owners.add(owner)


def remove_deterministic(model: Any, owner: str) -> None:
    """Undo `install_deterministic` if no other owner is left."""
    owners = _OWNERS.get(model)
    if owners is None:
        return
    owners.discard(owner)
    if owners:
        return
    _OWNERS.remove(model)
    for module in model.modules():
        DETERMINISTIC.remove(module)
        for hook_id, hook in list(module._forward_pre_hooks.items()):
            if hook is _check_call:
                del module._forward_pre_hooks[hook_id]
                module._forward_pre_hooks_with_kwargs.pop(hook_id, None)
        if isinstance(vars(module).get("forward"), ModelMethod):
            remove_methods(module)


def _check_call(model: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
    """Raise ConfigError for a call that is not deterministic, before it changes anything.

    A padded call without a cache or position ids gets position ids that skip the padding.
    """
    if not DETERMINISTIC.is_set(model):  # suspended by `eval_mode`
        return None
    if torch.compiler.is_compiling():
        _refuse_compilation()
    for module in model.modules():
        if DETERMINISTIC.is_set(module):
            continue
        if _has_matrices(module) or _find_forward(module):
            raise ConfigError(
                "deterministic: expected the modules that enable() prepared, got a new "
                f"{type(module).__name__}. Call enable() after adapters are added"
            )
    if model.dtype == torch.float64:
        raise ConfigError("deterministic: expected 16 or 32 bits, got a model in float64")
    # A cache without layers is falsy, so compare with None.
    caches = [kwargs[name] for name in (CACHE, "past_key_values") if kwargs.get(name) is not None]
    mask: Any = kwargs.get("attention_mask")
    is_padded = isinstance(mask, Tensor) and mask.ndim == 2
    for cache in caches:
        if isinstance(cache, FP8PagedCache):
            name = str(model.config.get_text_config(decoder=True)._attn_implementation)
            if not name.startswith(ATTENTION):
                raise ConfigError(
                    f"deterministic: expected the attention {ATTENTION!r}, got {name!r}. Call "
                    "enable() again"
                )
            cache.options.check_stored("deterministic")
            check_page_size(cache.options.page_size)
            if is_padded:
                check_padding(mask.bool())
    if is_padded and not caches and kwargs.get("position_ids") is None:
        return args, {**kwargs, "position_ids": (mask.long().cumsum(1) - 1).clamp(min=0)}
    return None


def _find_forward(module: torch.nn.Module) -> Callable[..., Any] | None:
    """Return the function that replaces a module's `forward`, or None to keep it."""
    name = type(module).__name__
    is_leaf = not list(module.children())
    # A router may multiply by the weight of one of its submodules.
    modules = module.modules() if "Router" in name else [module]
    if _EXPERT_NAMES.search(name) and any(map(_has_matrices, modules)):
        return _forward_tokens
    if type(module).forward in _LINEAR_FORWARDS:
        return _forward_blocks
    # On a GPU, the order of sums in torch's reductions depends on the number of rows.
    if (
        is_leaf
        and "Norm" in name
        and any(not parameter.is_cpu for parameter in module.parameters())
    ):
        return _forward_blocks
    is_activation = type(module).__module__ in _ACTIVATION_MODULES
    is_elementwise = is_leaf and is_activation and not _NOT_ELEMENTWISE.fullmatch(name)
    return _forward_elementwise if is_elementwise else None


def _has_matrices(module: torch.nn.Module) -> bool:
    """Return whether a module may multiply matrices. An embedding only looks up rows."""
    tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    has_matrices = isinstance(module, torch.nn.Linear | Conv1D) or any(
        tensor.ndim > 1 for tensor in tensors
    )
    return has_matrices and not isinstance(module, torch.nn.Embedding)


class FunctionWatch(TorchDispatchMode):
    """Detects functions that get all tokens at once, and whose bits depend on a tensor's size.

    Attributes:
        found_name: Name of the last such elementwise function or product, or "".
    """

    def __init__(self, num_tokens: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._num_tokens = num_tokens
        self.found_name = ""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = function.overloadpacket.__name__.rstrip("_")
        if name in _ELEMENTWISE_FUNCTIONS and args[0].shape[:-1].numel() >= self._num_tokens:
            self.found_name = name
        if name in _MATMULS:
            left, right = args[-2:]
            # RoPE multiplies single factors, and latent attention multiplies blocks of columns.
            is_exact = left.shape[-1] == 1 or right.shape[-1] == BLOCK_ROWS
            if left.shape[-2] >= self._num_tokens and not is_exact:
                self.found_name = name
        return function(*args, **(kwargs or {}))


def _forward_blocks(method: ModelMethod, states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Run the `forward` of a linear module or a norm, block by block."""
    if torch.compiler.is_compiling():
        _refuse_compilation()
    forward = method.original_method
    rows = states.reshape(-1, states.shape[-1])
    output = compute_in_blocks(lambda block: forward(block, *args, **kwargs), rows)
    return output.view(*states.shape[:-1], output.shape[-1])


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _refuse_compilation() -> None:
    """Raise ConfigError at run time, because Dynamo would drop a traced `raise`."""
    raise ConfigError(
        "deterministic: expected a model that is not compiled, got torch.compile, which changes "
        "the order of sums. Do not compile it, or leave deterministic out"
    )


def _forward_tokens(method: ModelMethod, states: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Run the `forward` of experts or of their router, token by token.

    The number of tokens that an expert receives depends on the call.
    """
    forward = method.original_method
    num_tokens = states.shape[:-1].numel()

    def compute_token(token: int) -> Any:
        def select_token(argument: Any) -> Any:
            # A bias of experts has one axis, whose size may equal the number of tokens.
            is_states = isinstance(argument, Tensor) and not isinstance(
                argument, torch.nn.Parameter
            )
            is_per_token = is_states and argument.ndim > 1 and len(argument) == num_tokens
            return argument[token : token + 1] if is_per_token else argument

        token_args, token_kwargs = tree_map(select_token, (args, kwargs))
        # The state is copied, because the alignment of memory affects the order of sums.
        state = states.reshape(num_tokens, -1)[token : token + 1].clone()
        return forward(state, *token_args, **token_kwargs)

    if not num_tokens:
        return forward(states, *args, **kwargs)
    outputs = [compute_token(token) for token in range(num_tokens)]
    return tree_map(lambda *token_outputs: torch.cat(token_outputs), *outputs)


def _forward_elementwise(method: ModelMethod, states: Tensor) -> Tensor:
    """Run the `forward` of an elementwise activation, in blocks of complete vectors."""
    forward = method.original_method
    values = states.reshape(-1)
    padded = torch.nn.functional.pad(values, (0, -len(values) % _VECTOR_VALUES))
    output = torch.cat([forward(block) for block in padded.split(_BLOCK_VALUES)])
    return output[: len(values)].view(states.shape)
