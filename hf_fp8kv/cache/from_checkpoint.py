"""`FP8PagedCache.from_pretrained`: a cache with the static scales of a checkpoint."""

import os
from typing import Any, Self

from transformers import PreTrainedConfig

from ..errors import ConfigError
from ..modeling.layer_specs import read_config
from ..modeling.tensor_parallel import TensorParallel
from ..scales import KVScales


class FromCheckpoint:
    """The part of `FP8PagedCache` that reads a checkpoint."""

    @classmethod
    def from_pretrained(
        cls,
        repo_or_dir: str | os.PathLike[str],
        *,
        config: PreTrainedConfig | None = None,
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
        """Return a cache with the static scales of a checkpoint.

        Args:
            repo_or_dir: a local folder, or a repository of the Hub.
            config: the model's config; None: read from the same place.
            revision, token, cache_dir, local_files_only: as everywhere in transformers.
            force_download, subfolder, trust_remote_code: the same.
            strict: whether an incomplete set of scales is an error.
            cache_keywords: those of the constructor.

        Raises:
            ScaleError: there are no scales, or they cannot be used.
        """
        hub: dict[str, Any] = {
            "revision": revision, "cache_dir": cache_dir, "subfolder": subfolder or "",
            "token": token, "local_files_only": local_files_only, "force_download": force_download,
        }  # fmt: skip
        if "scales" in cache_keywords:
            raise ConfigError(
                "scales: expected none, since from_pretrained reads them from the checkpoint; use "
                "FP8PagedCache(config, scales=...) for others"
            )
        rank, size = TensorParallel.parse(cache_keywords.get("tensor_parallel"))
        scales = KVScales.from_pretrained(
            repo_or_dir, tp_rank=rank, tp_size=size, strict=strict, **hub
        )
        if config is None:
            config = read_config(repo_or_dir, trust_remote_code=trust_remote_code, **hub)
        return cls(config, scales=scales, **cache_keywords)  # type: ignore[call-arg]
