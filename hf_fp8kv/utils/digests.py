"""Compute digests that identify weights and files."""

import functools
import hashlib
import json
import re
import uuid
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import pad

from ..errors import ConfigError
from .files import WEIGHT_SUFFIXES

_WORDS_PER_CHECKSUM = 1 << 20  # number of four-byte words
# Random ids of models whose weights cannot be sampled.
_model_ids: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
_cached_digests: weakref.WeakKeyDictionary[Any, tuple[object, str]] = weakref.WeakKeyDictionary()


def compute_digest(*facts: object) -> str:
    """Return the SHA-256 of JSON values and tensors: 64 hexadecimal digits."""
    text = json.dumps(facts, sort_keys=True, default=_describe_value)
    return hashlib.sha256(text.encode()).hexdigest()


def _describe_value(value: object) -> str:
    """Return the dtype, shape and digest of a tensor, or `str(value)` without an address."""
    if not isinstance(value, torch.Tensor):
        return re.sub(r" at 0x[0-9a-f]+", "", str(value))
    flat_bytes = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return f"{value.dtype}{list(value.shape)}{hashlib.sha256(flat_bytes.numpy().data).hexdigest()}"


def is_whole(tensor: torch.Tensor) -> bool:
    """Return whether this process has the whole tensor: it is not on disk, split or empty."""
    is_local = not tensor.is_meta and not hasattr(tensor, "placements")
    return is_local and tensor.layout == torch.strided and tensor.numel() > 0


def _list_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return every parameter and buffer by name. Shared tensors have several names."""
    parameters = model.named_parameters(remove_duplicate=False)
    return dict([*parameters, *model.named_buffers(remove_duplicate=False)])


def _sample_tensors(tensors: dict[str, torch.Tensor]) -> list[bytes]:
    """Return up to 8 values of each tensor in this process, as one bytes object per device."""
    samples: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in filter(is_whole, tensors.values()):
        # An odd step spreads the values over the columns of a matrix.
        step = -(-tensor.numel() // 8) | 1
        if tensor.is_contiguous():
            sample = tensor.detach().flatten()[::step]
        else:  # flatten() would copy the whole tensor
            indices = torch.arange(0, tensor.numel(), step, device=tensor.device)
            sample = tensor.detach()[torch.unravel_index(indices, tensor.shape)]
        samples.setdefault(tensor.device, []).append(sample.contiguous().view(torch.uint8))
    return [
        torch.cat(device_samples).cpu().numpy().tobytes() for device_samples in samples.values()
    ]


def can_sample(model: torch.nn.Module) -> bool:
    """Return whether this process has all weights: none is offloaded, split or packed."""
    is_packed = any(name.endswith("_packed_params") for name, _ in model.named_modules())
    weights = _list_weights(model).values()
    return not is_packed and all(is_whole(weight) or not weight.numel() for weight in weights)


def digest_sampled_weights(model: torch.nn.Module, ignored_suffixes: tuple[str, ...] = ()) -> str:
    """Return a digest of the names, shapes and dtypes of all tensors, and of 8 values of each.

    If some weights cannot be read (offloaded, split or packed), each model has a different digest.
    """
    weights = _list_weights(model).items()
    tensors = {name: tensor for name, tensor in weights if not name.endswith(ignored_suffixes)}
    layouts = [(name, tensor.shape, str(tensor.dtype)) for name, tensor in tensors.items()]
    model_id = "" if can_sample(model) else _model_ids.setdefault(model, uuid.uuid4().hex)
    return compute_digest(layouts, [sample.hex() for sample in _sample_tensors(tensors)], model_id)


def sample_checkpoint(path: str) -> dict[str, str]:
    """Return digests of a folder's config and files of weights, by name, or {} without weights.

    The digest of a file of weights includes 64 bytes of each tensor. `path` may also be a file.
    """
    root = Path(path)
    candidates = root.iterdir() if root.is_dir() else [root]
    files = [file for file in candidates if file.is_file() and file.stat().st_size]
    samples = {file.name: _sample_file(file) for file in files if file.suffix in WEIGHT_SUFFIXES}
    configs = {
        file.name: compute_digest(file.read_text()) for file in files if file.name == "config.json"
    }
    return samples and samples | configs


def _sample_file(path: Path) -> str:
    """Return a digest of the size of a file of weights, and of bytes spread over it."""
    contents = np.memmap(path, mode="r")
    part_size = -(-len(contents) // 1024)
    spans = [(start, start + part_size) for start in range(0, len(contents), part_size)]
    header: dict[str, Any] = {}
    if path.suffix == ".safetensors":
        data_start = 8 + int.from_bytes(contents[:8].tobytes(), "little")
        header = json.loads(contents[8:data_start].tobytes())
        header.pop("__metadata__", None)
        offsets = [entry["data_offsets"] for entry in header.values()]
        spans = [(data_start + start, data_start + stop) for start, stop in offsets]
    # An odd step reads low and high bytes of values.
    samples = [contents[start : stop : (stop - start) // 64 | 1] for start, stop in spans]
    return compute_digest(len(contents), header, [sample.tobytes().hex() for sample in samples])


def digest_weights(model: torch.nn.Module, dtype: torch.dtype | None = None) -> str:
    """Return a digest of every parameter and buffer: names, shapes, dtypes and all bytes.

    With `dtype`, float16, float32 and float64 are first rounded to it, so the original dtype has no
    effect. LoRA adapters of PEFT that are still zero are ignored.

    The digest is cached until weights change. Later calls compare torch's version counters,
    addresses and shapes. The counters do not include writes through `.data` or in inference mode,
    so later calls also compare 8 values of each tensor. A merged adapter or different weights
    change these values. An edit of single values may not change them.

    Raises:
        ConfigError: Some weights, or parts of them, are not in this process.
    """
    tensors = _list_weights(model)
    state: list[object] = [dtype, *_sample_tensors(tensors)]
    state += [
        (
            name,
            id(tensor),
            tensor.data_ptr(),
            -1 if tensor.is_inference() else tensor._version,
            tensor.shape,
            tensor.dtype,
        )
        for name, tensor in tensors.items()
    ]
    cached_state, cached_digest = _cached_digests.get(model, (None, ""))
    if cached_state == state:
        return cached_digest
    if missing_names := [name for name, tensor in tensors.items() if not is_whole(tensor)]:
        raise ConfigError(
            f"model: expected all weights in this process, got {missing_names[0]!r} on no device, "
            "or as a part. Load the whole model into one process, or do not use a prefix store"
        )
    zero_names = _find_zero_adapters(tensors)
    digest = compute_digest(
        [
            (name.replace(".base_layer.", "."), tensor.shape, *_compute_checksums(tensor, dtype))
            for name, tensor in tensors.items()
            if name not in zero_names
        ]
    )
    _cached_digests[model] = (state, digest)
    return digest


def _find_zero_adapters(tensors: dict[str, torch.Tensor]) -> set[str]:
    """Return the names of all lora_A and lora_B whose product is zero, because lora_B is zero.

    An adapter of a layer with other tensors, such as a magnitude of DoRA, changes the layer even
    if lora_B is zero.
    """
    adapters: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for name in tensors:
        layer_name, _, suffix = name.partition(".lora_")
        kind, _, adapter = suffix.partition(".")
        if kind:
            adapters.setdefault((layer_name, adapter.partition(".")[0]), []).append((kind, name))
    zero_names: set[str] = set()
    for adapter_tensors in adapters.values():
        kinds = {kind for kind, _ in adapter_tensors}
        if kinds in ({"A", "B"}, {"embedding_A", "embedding_B"}) and not any(
            tensors[name].any() for kind, name in adapter_tensors if kind.endswith("B")
        ):
            zero_names.update(name for _, name in adapter_tensors)
    return zero_names


def _compute_checksums(tensor: torch.Tensor, dtype: torch.dtype | None) -> tuple[str, list[int]]:
    """Return the dtype and the checksums of a tensor's bytes, computed on its device.

    A checksum is the sum of 32-bit words times odd factors, modulo 2 ** 64. A single changed word
    always changes it. Several changed words change it with a probability of at least 1 - 2 ** -32.
    """
    values = tensor.detach().reshape(-1)
    factors = _make_odd_factors(tensor.device)
    if dtype is not None and values.dtype in (torch.float16, torch.float32, torch.float64):
        values = values.to(dtype)
    checksums = []
    for chunk in values.split(4 * _WORDS_PER_CHECKSUM // values.itemsize):
        words = pad(chunk.view(torch.uint8), (0, -chunk.nbytes % 4)).view(torch.int32)
        checksums.append(int((words * factors[: len(words)]).sum()))
    return str(values.dtype), checksums


@functools.cache
def _make_odd_factors(device: torch.device) -> torch.Tensor:
    random_bytes = bytearray(hashlib.shake_128(b"hf_fp8kv").digest(8 * _WORDS_PER_CHECKSUM))
    with torch.inference_mode(False):
        return torch.frombuffer(random_bytes, dtype=torch.int64).to(device) | 1


def digest_decoder(model: torch.nn.Module) -> str | None:
    """Return the digest of a model's decoder in bfloat16, inside any wrappers, or None.

    The digest is the same for float32 and bfloat16. It does not include the output embeddings,
    because K and V do not depend on them. None means that some weights are not in this process, or
    that the model has no decoder.
    """
    mesh = getattr(model, "_device_mesh", None)
    wrapper: Any = next(
        (module for module in model.modules() if hasattr(module, "get_decoder")), None
    )
    if wrapper is None or (mesh is not None and mesh.size() > 1):  # transformers splits parameters
        return None
    try:
        return digest_weights(wrapper.get_decoder() or wrapper, torch.bfloat16)[:16]
    except ConfigError:
        return None
