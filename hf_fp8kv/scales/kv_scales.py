"""KVScales: static scales of a model's keys and values, one pair a layer, and their files.

Their direction and their unit are those of `LayerScales`. A layer without a scale never means 1.0:
it is a `ScaleError`.
"""

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack
from weakref import WeakKeyDictionary

import torch
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

from ..errors import ScaleError
from ..formats import summarize_plan
from ..utils.digests import digest_decoder
from ..utils.text import format_list
from ..utils.warn_once import warn_once
from . import save
from .card import CARD_FILE, make_card
from .checkpoint.checkpoint import HubOptions, translate_hub_errors
from .checkpoint.configs import text_config
from .formats.base import reduce_scales, to_json
from .layer_scales import KEEP_OUT, LayerScales, ScaleData, check_constant, check_ranks, scalar
from .load import read_checkpoint, read_file
from .request import Request

logger = logging.getLogger(__name__)

_STALE = (
    "static scales (%s) were made for other weights than %s has now. %s. Calibrate "
    "again (hf_fp8kv.calibrate), or use dynamic scales (scales=None); scales.made_for(model) tells "
    "at any time"
)
_HARM = ("What its K and V have grown to since saturates",
         "Nothing saturates, but their plan and centers may suit it no longer")  # fmt: skip


@dataclass(frozen=True, eq=False, repr=False)
class KVScales(ScaleData):
    """The static scales of a model, in the unit of E4M3FN.

    Attributes:
        layers: the scales of each layer, in the order of the layers.
        format: what they were read from, one of `SCALE_FORMATS` or "trtllm".
        model_type: the model they were made for, as transformers names it, where the file says so.
        origin: the file, folder or repository they were read from.
        report: what their calibration found, where it is known.
        weights_digest: of the weights they were made for, where it is known.

    Raises:
        ScaleError: `layers` is empty, or not a dict of `LayerScales`.
    """

    def made_for(self, model: torch.nn.Module) -> bool | None:
        """Return whether the model has the weights that the scales were made for.

        A training step changes that. None: not known, since the scales come from a file without a
        digest, or the weights of the model are not whole in this process.
        """
        found = self.weights_digest and digest_decoder(model)
        return found == self.weights_digest if found else None

    @classmethod
    def uniform(cls, num_layers: int, k: float = 1.0, v: float = 1.0) -> "KVScales":
        """Return the same constants for every layer; raise ScaleError if one is no scale."""
        if isinstance(num_layers, bool) or not isinstance(num_layers, int) or num_layers < 1:
            raise ScaleError(f"num_layers: expected at least 1, got {num_layers!r}")
        k, v = check_constant(k, "k"), check_constant(v, "v")
        layer = LayerScales(scalar(k), scalar(v), source="uniform")
        return cls(dict.fromkeys(range(num_layers), layer), origin="uniform")

    @classmethod
    def from_file(
        cls,
        path: str | os.PathLike[str],
        *,
        tp_rank: int = 0,
        tp_size: int = 1,
        strict: bool = True,
    ) -> "KVScales":
        """Read one file: a `kv_cache_scales.json`, a safetensors file, or a safetensors index.

        Args:
            path: the file. A `config.json` beside a checkpoint's safetensors is read too.
            tp_rank: which rank's scales of a file with several; see docs/scales.md.
            tp_size: how many ranks the model runs on.
            strict: False turns missing layers, another model type and another number of ranks
                into a warning; the layers that are missing stay missing.

        Raises:
            ScaleError: whatever is wrong with the file.
        """
        return wrap_scales(read_file(Path(path), Request(tp_rank, tp_size, strict)))

    @classmethod
    def from_pretrained(
        cls,
        repo_or_dir: str | os.PathLike[str],
        *,
        tp_rank: int = 0,
        tp_size: int = 1,
        strict: bool = True,
        **hub_options: Unpack[HubOptions],
    ) -> "KVScales":
        """Read the scales of a checkpoint: a local folder, or a repository of the Hub.

        Looked for in this order: `kv_scales.safetensors`, in `kv_scales/` or beside the config, the
        scale tensors of the checkpoint, `kv_cache_scales.json`. Of a repository only the configs
        and the safetensors files that hold scales are fetched.

        Args:
            repo_or_dir: the folder, or the name of the repository.
            tp_rank, tp_size, strict: as in `from_file`.
            hub_options: revision, token, cache_dir, local_files_only, force_download and
                subfolder, as everywhere in transformers.

        Raises:
            ScaleError: whatever is wrong, also when there are no scales at all.
        """
        request = Request(tp_rank, tp_size, strict)
        return wrap_scales(read_checkpoint(os.fspath(repo_or_dir), request, **hub_options))

    def save_pretrained(
        self,
        folder: str | os.PathLike[str],
        *,
        format: str = "hf_fp8kv",
        checkpoint: str | os.PathLike[str] | None = None,
        weights: save.Weights = "copy",
        overwrite: bool = False,
        tp_size: int = 1,
        base_model: str | None = None,
    ) -> list[Path]:
        """Write the scales in a format, alone or into a checkpoint; return the paths.

        All files appear whole or not at all. "hf_fp8kv" holds every granularity and the centers
        exactly; what another format cannot hold is reduced to the largest scale, with a warning.

        Args:
            folder: where to; it is made when it is not there.
            format: one of `SCALE_FORMATS`.
            checkpoint: a folder with a checkpoint; `folder`, which must be new or empty, is then
                a copy of it with the scales. Its weights stay the same to the byte.
            weights: "link": the weights of the copy are hard links, on the same disk.
            overwrite: replaces the scales that are there, or those of `checkpoint` in its copy.
                In the folder of a model it adds the scales to that: its weights stay the same,
                and its `config.json` has every entry that it had.
            tp_size: for "vllm-json": for how many ranks; each gets the largest scale of the layer.
            base_model: the repository that `checkpoint` is of, for the card (README.md) of its
                copy, which says what the scales are and how to load them.

        Raises:
            ScaleError: when the format cannot be written, or not there.
        """
        chosen, target = save.find_format(format, tp_size), Path(folder)
        reduced, losses = reduce_scales(self, chosen)
        source = target if checkpoint is None else Path(checkpoint)
        whole = checkpoint is not None or bool(save.find_weights(save.list_files(source)))
        opened = save.open_place(
            target, chosen, chosen.files(reduced, tp_size), None if checkpoint is None else source,
            weights, overwrite=overwrite,
        )  # fmt: skip
        files = chosen.files(reduced, tp_size, opened)
        if opened is not None:
            types = [x.get("model_type") for x in (opened.config, text_config(opened.config))]
            if self.model_type is not None and self.model_type not in types and any(types):
                raise ScaleError(
                    f"{opened.origin}: expected a {self.model_type!r} model, which the scales are "
                    f"of, got {types[0]!r}; use the checkpoint that they were made for"
                )
            if opened.left_out:
                files = {"config.json": to_json(opened.config), **files}
        if opened is not None and whole:
            card = source / CARD_FILE
            files[CARD_FILE] = make_card(
                reduced, losses, chosen, target.resolve().name,
                card.read_bytes() if card.is_file() else b"", whole=True, base_model=base_model,
            )  # fmt: skip
        paths = save.write_files(source, target, files, opened, reduced, weights, tp_size)
        if losses := losses + chosen.missing_facts(self, opened):
            logger.warning("%s: written as %s: %s", target, format, "; ".join(losses))
        return paths

    def push_to_hub(
        self,
        repo_id: str,
        *,
        format: str = "hf_fp8kv",
        private: bool | None = None,
        token: str | bool | None = None,
        revision: str | None = None,
        commit_message: str = "Add scales of the KV cache",
        overwrite: bool = False,
        tp_size: int = 1,
        base_model: str | None = None,
    ) -> str:
        """Upload the scales alone, as `save_pretrained` writes them; return the commit's address.

        A card (README.md) says what they are and how to use them; one that is there is extended.

        Args:
            repo_id: is made when it is not there.
            private, token, revision, commit_message: as everywhere in huggingface-hub.
            format, overwrite, tp_size: as in `save_pretrained`.
            base_model: the repository of the model that the scales are for, for the card.

        Raises:
            ScaleError: when the format cannot be written, or not there.
        """
        chosen = save.find_format(format, tp_size)
        reduced, losses = reduce_scales(self, chosen)
        files = chosen.files(reduced, tp_size)
        api = HfApi(token=token)
        with translate_hub_errors(repo_id, "written"):
            api.create_repo(repo_id, private=private, exist_ok=True)
            if revision is not None:
                api.create_branch(repo_id, branch=revision, exist_ok=True)
            existing = api.list_repo_files(repo_id, revision=revision)
            save.check_place(repo_id, existing, files, overwrite=overwrite)
            weights = save.find_weights(existing)
            of_scales = {*files} & {*existing} - {"config.json"}
            of_model = weights or ("config.json" in existing and not of_scales)
            if "config.json" in files and of_model:
                raise ScaleError(
                    f"{repo_id}: expected a place without weights and their config.json, got "
                    f"{format_list([*weights, 'config.json'])}; choose another, or write the "
                    "scales into a copy of the checkpoint (checkpoint=) and upload that"
                )
            old = b""
            if CARD_FILE in existing:
                old = Path(api.hf_hub_download(repo_id, CARD_FILE, revision=revision)).read_bytes()
            card = make_card(
                reduced, losses, chosen, repo_id, old, whole=bool(weights), base_model=base_model
            )
            placed = {**save.place_files(existing, files), CARD_FILE: card}
            commit = api.create_commit(
                repo_id,
                [
                    CommitOperationDelete(n) if content is None else CommitOperationAdd(n, content)
                    for n, content in placed.items()
                ],
                commit_message=commit_message,
                revision=revision,
            )
        if losses := losses + chosen.missing_facts(self):
            logger.warning("%s: written as %s: %s", repo_id, format, "; ".join(losses))
        return str(commit.commit_url)

    def for_layer(
        self,
        index: int,
        *,
        num_kv_heads: int,
        k_head_dim: int,
        v_head_dim: int,
        tp_rank: int = 0,
        tp_size: int = 1,
    ) -> LayerScales:
        """Return the scales of one layer, spread out to `[Hkv, Dk]` and `[Hkv, Dv]`, contiguous.

        The result is kept: every new cache asks for it.

        Args:
            index: the layer.
            num_kv_heads, k_head_dim, v_head_dim: Hkv, Dk and Dv in this process.
            tp_rank: with scales of all ranks' heads, which rank's heads to take.
            tp_size: over how many ranks the model's heads are spread.

        Raises:
            ScaleError: the layer is missing, or the scales are of another number of heads or
                another head size.
        """
        check_ranks(tp_rank, tp_size)
        if index not in self.layers:
            raise ScaleError(
                f"scales ({self.origin}): expected layer {index}, got layers "
                f"{format_list(self.layers)}; use this model's scales, or {KEEP_OUT}"
            )
        layer, sizes = self.layers[index], (num_kv_heads, k_head_dim, v_head_dim, tp_rank, tp_size)
        kept = _SPREAD.setdefault(layer, {})
        if sizes in kept:
            return kept[sizes]

        def spread(tensor: torch.Tensor | None, dim: int, what: str) -> torch.Tensor | None:
            if tensor is None:
                return None
            what = f"{what} of layer {index} ({layer.source})"
            if tensor.ndim:
                tensor = tensor[_select_heads(len(tensor), num_kv_heads, tp_rank, tp_size, what)]
                if tensor.shape[1] not in (1, dim):
                    raise ScaleError(
                        f"{what}: expected a head size of {dim} or 1, got {tensor.shape[1]}; use "
                        "this model's scales"
                    )
            return tensor.expand(num_kv_heads, dim).clone(memory_format=torch.contiguous_format)

        kept[sizes] = LayerScales(
            spread(layer.k, k_head_dim, "K scale"), spread(layer.v, v_head_dim, "V scale"),
            spread(layer.k_center, k_head_dim, "center of K"), layer.source, layer.plan,
        )  # fmt: skip
        return kept[sizes]


_SPREAD: WeakKeyDictionary[LayerScales, dict[tuple[int, ...], LayerScales]] = WeakKeyDictionary()


def _select_heads(heads: int, wanted: int, tp_rank: int, tp_size: int, what: str) -> slice:
    if heads in (1, wanted):
        return slice(0, heads)
    if heads == wanted * tp_size:
        return slice(tp_rank * wanted, (tp_rank + 1) * wanted)
    # More ranks than heads: neighbouring ranks hold a copy of the same head.
    if wanted == 1 and tp_size % heads == 0:
        return slice(tp_rank * heads // tp_size, tp_rank * heads // tp_size + 1)
    total = "" if tp_size == 1 else f" (or {wanted * tp_size} of all {tp_size} ranks)"
    raise ScaleError(
        f"{what}: expected {wanted} heads{total}, got {heads}; use this model's scales, "
        "and the rank of this process (hf_fp8kv.tensor_parallel(model) returns it)"
    )


class StoragePlan(KVScales):
    """How each layer is stored: format, rotation and center of K. The cache finds the scales.

    `hf_fp8kv.choose_plan` makes one. It has the files, attributes and methods of `KVScales`.

    Raises:
        ScaleError: a layer without a plan, or with static scales.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.is_dynamic:
            raise ScaleError(
                f"plan ({self.origin}): expected layers without static scales, got {self!r}; pass "
                "these as scales"
            )

    def __repr__(self) -> str:
        return f"StoragePlan({summarize_plan(self.plan or {})}; {self.origin})"

    @classmethod
    def load(cls, place: str | os.PathLike[str]) -> "StoragePlan":
        """Return the plan in a file, a folder or a repository of the Hub.

        Raises:
            ScaleError: there is none, or there are static scales instead.
        """
        found = resolve(place)
        if not isinstance(found, StoragePlan):
            what = f"plan: expected a StoragePlan in {place}, got {found!r}"
            raise ScaleError(f"{what}. Pass static scales as `scales`")
        return found


def wrap_scales(data: ScaleData) -> KVScales:
    """Return the scales as `KVScales`, or as a `StoragePlan` if the cache finds them."""
    return (StoragePlan if data.is_dynamic else KVScales)(**vars(data))


def resolve(
    scales: KVScales | str | os.PathLike[str] | float | None, **options: Any
) -> KVScales | float | None:
    """Return what the argument `scales` of a cache stands for; raise ScaleError for anything else.

    None is dynamic scales, a number that constant for every layer, a string or path a file, a
    folder or a repository of the Hub, read with `options`, the keywords of `from_pretrained`.
    """
    if scales is None or isinstance(scales, KVScales):
        return scales
    if isinstance(scales, int | float):
        return check_constant(scales, "scales")
    if not isinstance(scales, str | os.PathLike):
        raise ScaleError(
            "scales: expected None, a number, KVScales, a path or a repository id, got "
            f"{type(scales).__name__}"
        )
    return KVScales.from_pretrained(scales, **options)


def warn_if_stale(model: torch.nn.Module, scales: KVScales | float | None) -> None:
    """Warn once if scales carry the digest of other weights than the model has."""
    if isinstance(scales, KVScales) and scales.made_for(model) is False:
        facts = scales.origin, type(model).__name__, _HARM[scales.is_dynamic]
        warn_once(logger, _STALE % facts)
