"""Make the names under which vLLM's connectors store blocks depend on the bytes of the blocks.

vLLM names stored blocks after the model, the dtype and the tokens. The bytes of pages also depend
on the plan, the scales and the weights, so connectors receive a model whose name ends with a
fingerprint of everything. Connectors that store blocks under other names are refused.
"""

import copy
from collections.abc import Mapping
from typing import Any

from ..errors import ConfigError
from ..utils.digests import compute_digest, sample_checkpoint
from .dtypes import DTYPES
from .storage import read_options

# These connectors compare the name of the model, or do not keep blocks after the process ends.
_SUPPORTED_CONNECTORS = (
    "LMCacheMPConnector",
    "MooncakeStoreConnector",
    "MultiConnector",
    "NixlConnector",
    "NixlPullConnector",
    "NixlPushConnector",
    "OffloadingConnector",
    "SimpleCPUOffloadConnector",
)


def check_connector(name: str | None, options: Mapping[str, Any]) -> None:
    """Raise ConfigError for a connector that may misread blocks, or read the wrong blocks.

    Args:
        name: Name of a connector, or None.
        options: The `kv_connector_extra_config` of the connector.
    """
    if name is not None and name not in _SUPPORTED_CONNECTORS:
        raise ConfigError(
            f"--kv-transfer-config: expected one of {', '.join(_SUPPORTED_CONNECTORS)}, which name "
            f"blocks after the model, got {name!r}. Blocks of other weights or plans would be read"
        )
    if name == "LMCacheMPConnector" and options.get("serde") != "none":
        raise ConfigError(
            "--kv-transfer-config: expected an LMCache server without serde, which would round "
            f"bytes as if they were numbers, got serde {options.get('serde')!r}. Start the server "
            'without it, and add "serde": "none" to kv_connector_extra_config'
        )
    if name == "MultiConnector":
        for child in options.get("connectors", ()):
            check_connector(child.get("kv_connector"), child.get("kv_connector_extra_config", {}))


def rename_model(config: Any, kv_cache_config: Any) -> Any:
    """Return vLLM's config for a connector, in which the model's name ends with a fingerprint.

    With a dtype of vLLM itself, it is `config`.
    """
    if config.cache_config.cache_dtype not in DTYPES:
        return config
    fingerprint = compute_digest(
        identify_bytes(config),
        [group.kv_cache_spec.block_size for group in kv_cache_config.kv_cache_groups],
        # vLLM's files have the blocks of all layers of the first rank, then of the second rank.
        # Even blocks that can be cut by heads are therefore only read by the same number of ranks.
        config.parallel_config.world_size,
        config.parallel_config.tensor_parallel_size,
    )[:16]
    config = copy.copy(config)
    config.model_config = copy.copy(config.model_config)
    config.model_config.model += f"-{fingerprint}"
    return config


def identify_bytes(config: Any) -> str:
    """Return a digest of everything that the bytes of a token depend on, except earlier tokens.

    It is the same in each process, and does not depend on their number or devices.

    Raises:
        ConfigError: The weights are neither files nor a repository with a commit.
    """
    model = config.model_config
    draft = getattr(config.speculative_config, "draft_model_config", None)
    num_ranks = config.parallel_config.tensor_parallel_size
    storages = set()
    for rank in range(num_ranks):  # scales in files for each rank may differ
        options = read_options(
            config.cache_config.cache_dtype,
            config.additional_config,
            model.model,
            tp_rank=rank,
            tp_size=num_ranks,
            revision=model.revision,
            engine=config.instance_id,
        )
        scales = getattr(options.scales, "digest", options.scales)
        storages.add(compute_digest(scales, str(options.plan)))
    return compute_digest(
        config.cache_config.cache_dtype,
        config.cache_config.kv_cache_dtype_skip_layers,
        config.load_config.load_format,
        sorted(storages),
        *map(_describe_weights, filter(None, (model, draft))),
    )


def _describe_weights(model: Any) -> list[object]:
    """Return facts about the weights of vLLM's `ModelConfig`, from its files or repository."""
    files = sample_checkpoint(model.model)
    commit = getattr(model.hf_config, "_commit_hash", None)
    if not files and commit is None:
        raise ConfigError(
            f"--kv-transfer-config: expected weights in a folder or a repository, after which "
            f"blocks are named, got {model.model!r}. Serve this model without a connector"
        )
    source = [files] if files else [model.model, commit]
    settings = [str(model.dtype), model.quantization, model.hf_overrides, model.hf_config_path]
    return [*settings, *source]
