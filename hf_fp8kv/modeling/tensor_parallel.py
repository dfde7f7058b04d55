"""Determine which KV heads of a tensor-parallel model are in this process.

The heads are determined from the model, not from torch.distributed, whose processes may also be
replicas of the whole model or stages of a pipeline.
"""

from typing import Any, NamedTuple

from transformers import PreTrainedModel

from ..errors import ConfigError
from .model_support import find_base_model, get_field

# Projections that compute keys, possibly fused with other projections, and the style of a plan that
# splits heads over processes. With any other style, each process gathers and caches all heads.
_KEY_PROJECTIONS = ("k_proj", "qkv_proj", "query_key_value", "kv_b_proj")
_SPLIT_STYLE = "colwise"


class TensorParallel(NamedTuple):
    """The rank of this process among the `size` processes that share a model's KV heads."""

    rank: int = 0
    size: int = 1

    @classmethod
    def parse(cls, argument: object) -> "TensorParallel":
        """Check the argument `tensor_parallel` of a cache. None means one process."""
        if not isinstance(argument, TensorParallel | None):
            raise ConfigError(
                "tensor_parallel: expected the result of hf_fp8kv.tensor_parallel(model), got "
                f"{argument!r}. Leave it out for one process"
            )
        return argument or cls()


def tensor_parallel(model: PreTrainedModel) -> TensorParallel:
    """Return the rank of this process among those that share the model's KV heads.

    ```python
    model = AutoModelForCausalLM.from_pretrained(id, tp_plan="auto")
    cache = FP8PagedCache(model.config, scales=scales, tensor_parallel=tensor_parallel(model))
    ```

    The result is rank 0 of 1 if this process has the whole model, or if the plan keeps all KV heads
    in every process. `enable` and `serving.enable` call this function.

    Raises:
        ConfigError: The model is not a model of transformers, or its number of KV heads cannot be
            split over its processes.
    """
    model = find_base_model(model)
    mesh: Any = getattr(model, "_device_mesh", None)
    if mesh is None or "tp" not in mesh.mesh_dim_names:
        return TensorParallel()
    mesh = mesh["tp"]
    if mesh.size() == 1 or not _splits_heads(model):
        return TensorParallel()
    check_divides(model.config.get_text_config(decoder=True), mesh.size())
    return TensorParallel(mesh.get_local_rank(), mesh.size())


def _splits_heads(model: Any) -> bool:
    """Return whether the plan of the decoder splits KV heads. An image encoder is ignored."""
    decoder = model.get_decoder()
    prefix = next((f"{name}." for name, module in model.named_modules() if module is decoder), ".")
    return any(
        name.rpartition(".")[2] in _KEY_PROJECTIONS and style == _SPLIT_STYLE
        for name, style in (model.tp_plan or {}).items()
        if name.startswith(prefix.removeprefix("."))
    )


def count_kv_heads(config: Any, index: int) -> int | None:
    """Return the number of KV heads of a layer of the whole model, or None if it is not known."""
    return count_heads(config, index, "num_key_value_heads") or count_heads(config, index)


def count_heads(config: Any, index: int, field: str = "num_attention_heads") -> int | None:
    """Return the number of heads of a layer, from a field of the config, or None if not known."""
    if getattr(config, "is_heterogeneous", False):
        config = config.per_layer_config[index]
    num_heads = get_field(config, field)
    if isinstance(num_heads, list | tuple):
        num_heads = num_heads[index] if index < len(num_heads) else None
    return num_heads if isinstance(num_heads, int) else None


def check_divides(config: Any, size: int) -> None:
    """Raise ConfigError unless the KV heads of every layer can be split over `size` processes."""
    num_layers = get_field(config, "num_hidden_layers")
    indices = range(num_layers if isinstance(num_layers, int) else 1)
    counts = {count_kv_heads(config, index) for index in indices}
    for num_heads in sorted(count for count in counts if count and count % size):
        divisors = [str(n) for n in range(1, num_heads + 1) if num_heads % n == 0]
        raise ConfigError(
            f"tensor_parallel: expected a number of processes that divides the {num_heads} KV "
            f"heads of the model ({getattr(config, 'model_type', type(config).__name__)}), got "
            f"{size}. Use {' or '.join(divisors)}, or one process with device_map='auto'"
        )


def check_split(index: int, num_heads: int, num_model_heads: int | None, size: int) -> None:
    """Raise ConfigError if a layer has all KV heads although `size` processes should share them.

    This process has `num_heads` KV heads of the layer, and the whole model `num_model_heads`.
    """
    if size > 1 and num_heads == num_model_heads:
        raise ConfigError(
            f"tensor_parallel: expected {num_heads // size} of the model's {num_heads} KV heads, "
            f"got all of them in layer {index}, because the model is not split. Pass the result of "
            "hf_fp8kv.tensor_parallel(model)"
        )
