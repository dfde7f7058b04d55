"""The inputs of a prompt besides its text, such as images, and the tokens that depend on them.

A prompt has a placeholder token for each feature vector of an image. Placeholders get a digest of
their image, so that a cache can be compared with a prompt that has images. transformers passes all
images of a prompt in the order of their placeholders.
"""

import hashlib
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedConfig

from ..modeling.methods import ModelMethod
from ..modeling.model_support import CACHE, has_cross_layers
from ..utils.digests import compute_digest

# Arguments of a model that do not change the keys and values of its tokens.
_NEUTRAL_ARGUMENTS = (
    "attention_mask", "position_ids", CACHE, "use_cache", "logits_to_keep", "return_dict",
    "output_attentions", "output_hidden_states", "output_router_logits",
)  # fmt: skip
# Arguments with a type of each token. In most multimodal models, 0 is text.
_TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids")
# Model types in which a prompt's tokens attend to later tokens of the prompt.
_BIDIRECTIONAL_PROMPTS = ("paligemma",)
# Model types in which the tokens of an image attend to later images of the prompt.
_JOINT_IMAGES = ("molmo2",)
_MODALITIES = ("image", "video", "audio", "speech")
# The argument with the features of each modality that `generate()` computes before the prefill,
# since transformers 5.24, and the attribute of the call's generation config with their inputs.
_ENCODER_OUTPUTS = "mm_encoder_outputs"
_ENCODER_INPUTS = "_hf_fp8kv_encoded_inputs"


def keep_encoder_inputs(
    method: ModelMethod,
    inputs: Any,
    model_kwargs: dict[str, Any],
    model_input_name: Any,
    config: Any,
) -> dict[str, Any]:
    """Prepare the encoder's arguments, but keep the images, which the model replaces by features.

    The last bits of an image's features depend on the number of images in a call. The prefill
    therefore compares the images instead of the features.
    """
    old_arguments = dict(model_kwargs)
    passed_features = dict(model_kwargs.get(_ENCODER_OUTPUTS) or {})
    arguments: dict[str, Any] = method.original_method(
        inputs, model_kwargs, model_input_name, config
    )
    if _ENCODER_OUTPUTS in arguments:
        encoder_inputs = {
            name: argument for name, argument in old_arguments.items() if name not in arguments
        }
        encoder_inputs[_ENCODER_OUTPUTS] = passed_features  # computed by the caller
        setattr(config, _ENCODER_INPUTS, encoder_inputs)
    return arguments


class PromptMedia:
    """The images and other inputs of a prompt besides its text.

    Args:
        model_config: The model's config.
        ids: Token ids of the whole prompt, `[B, N]`.
        arguments: Keyword arguments of the model. `drop` changes them.
        generation_config: The generation config of the call.

    Attributes:
        image_digests: Digest of the image of each token, `[B, N]`, int64, 0 for text. None means
            that the prompt is only text.
        placeholders: Whether a token is a placeholder, `[B, N]`.
        is_comparable: Whether keys and values depend only on earlier tokens and their images.
    """

    def __init__(
        self,
        model_config: PreTrainedConfig,
        ids: Tensor,
        arguments: dict[str, Any],
        generation_config: Any,
    ) -> None:
        self._arguments = arguments
        self.placeholders = _find_placeholders(model_config, ids, _MODALITIES)
        self.image_digests: Tensor | None = None
        self._token_types = {
            name: arguments[name] for name in _TOKEN_TYPES if arguments.get(name) is not None
        }
        # A model without placeholders may embed every type (GPT-2), or let the tokens of a type
        # attend to later tokens.
        has_typed_text = (
            any(_has_typed_text(types, self.placeholders) for types in self._token_types.values())
            if _list_placeholder_ids(model_config, _MODALITIES)
            else bool(self._token_types)
        )
        self._passed_arguments = {
            name: argument
            for name, argument in arguments.items()
            if name not in (*_NEUTRAL_ARGUMENTS, *_TOKEN_TYPES) and not _is_empty(argument)
        }
        encoder_outputs: dict[str, Any] = self._passed_arguments.pop(_ENCODER_OUTPUTS, {})
        self._encoder_outputs = {
            modality: output for modality, output in encoder_outputs.items() if output is not None
        }
        self._output_masks = {
            modality: _find_placeholders(model_config, ids, (modality,))
            for modality in self._encoder_outputs
        }
        # Without inputs of the encoder, the caller has computed the features.
        encoder_inputs = getattr(generation_config, _ENCODER_INPUTS, self._encoder_outputs)
        inputs = {
            name: argument
            for name, argument in (self._passed_arguments | encoder_inputs).items()
            if not _is_empty(argument)
        }
        self._starts: list[int] = []  # first column of each image
        has_images = bool(inputs) and bool(self.placeholders.any())
        if has_images:
            self.image_digests = self._digest_images(ids, inputs)
        text_config = model_config.get_text_config(decoder=True)
        obstacles = (
            has_typed_text,
            model_config.model_type in _BIDIRECTIONAL_PROMPTS,
            has_images and model_config.model_type in _JOINT_IMAGES,
            # With cross-attention, the text before an image depends on whether images follow.
            has_images and has_cross_layers(text_config),
            inputs and not has_images,
            "inputs_embeds" in inputs,  # embeddings replace the ids of all tokens
            # A chunk may divide an image whose tokens attend to each other.
            inputs and generation_config.prefill_chunk_size and self._token_types,
        )
        self.is_comparable = not any(obstacles)

    def _digest_images(self, ids: Tensor, inputs: dict[str, Any]) -> Tensor:
        """Find the tokens of each image, and return their digests, `[B, N]`."""
        tensors = {
            name: argument
            for name, argument in inputs.items()
            if isinstance(argument, Tensor) and argument.ndim
        }
        constants = {name: argument for name, argument in inputs.items() if name not in tensors}
        self._sizes = self._find_sizes(list(tensors.values()))
        images_by_name = {
            name: _divide(tensor, self._sizes) or [tensor] for name, tensor in tensors.items()
        }
        token_types = {
            name: types.long().cpu()
            for name, types in self._token_types.items()
            if types.shape == ids.shape
        }
        token_digests = torch.zeros_like(ids)
        placeholders_by_image = self.placeholders.nonzero().cpu().split(self._sizes)
        for index, image_placeholders in enumerate(placeholders_by_image):
            rows, columns = image_placeholders.unbind(1)
            start = int(columns.min())
            stop = int(columns.max()) + 1
            self._starts.append(start)
            hashes = {name: _hash_values(images[index]) for name, images in images_by_name.items()}
            for name, types in token_types.items():
                image_types = types[rows, columns]
                # Types decide whether the tokens of an image attend to each other. 0 means no type.
                if image_types.any():
                    hashes[name] = _hash_values(image_types)
            digest = compute_digest(constants, hashes)
            # A digest is several numbers, which are assigned to consecutive tokens in turn.
            words = torch.from_numpy(np.frombuffer(bytes.fromhex(digest), "<i8").copy())
            word_indices = torch.arange(stop - start) % len(words)
            token_digests[rows[0] : rows[-1] + 1, start:stop] = words[word_indices].to(ids.device)
        return token_digests

    def _find_sizes(self, tensors: list[Tensor]) -> list[int]:
        """Return the number of placeholders of each image, or of all images together.

        The images of a prompt are its runs of placeholders, or have the sizes of their features.
        """
        is_start = self.placeholders.clone()
        is_start[:, 1:] &= ~self.placeholders[:, :-1]
        run_of_placeholder = is_start.flatten().cumsum(0)[self.placeholders.flatten()]
        num_placeholders = len(run_of_placeholder)
        _, run_sizes = run_of_placeholder.unique(return_counts=True)
        candidates: list[list[int]] = [run_sizes.tolist()]
        first_row = torch.zeros(1, dtype=torch.int64)
        for modality, output in self._encoder_outputs.items():
            num_vectors = int(self._output_masks[modality].sum())
            if _select_vectors(output, num_vectors, first_row) is None:
                return [num_placeholders]
            images = output.get("pooler_output") if isinstance(output, dict) else None
            if images is not None and all(isinstance(image, Tensor) for image in images):
                candidates.append([image.shape[:-1].numel() for image in images])
        for sizes in candidates:
            divides_inputs = all(_divide(tensor, sizes) is not None for tensor in tensors)
            # Inputs that the model receives are divided by `drop`.
            divides_passed = all(
                isinstance(argument, Tensor) and argument.ndim and _list_lengths(argument, sizes)
                for argument in self._passed_arguments.values()
            )
            if sum(sizes) == num_placeholders and divides_inputs and divides_passed:
                return sizes
        return [num_placeholders]

    def has_images_after(self, num_tokens: int) -> bool:
        """Return whether an image begins after the first `num_tokens` tokens of each row."""
        return self.image_digests is not None and bool(self.image_digests[:, num_tokens:].any())

    def drop(self, num_tokens: int) -> None:
        """Remove the images in the first `num_tokens` tokens of each row from the arguments.

        `num_tokens` does not divide an image.
        """
        kept_images = [index for index, start in enumerate(self._starts) if start >= num_tokens]
        if len(kept_images) == len(self._starts):
            return
        for name, tensor in self._passed_arguments.items():
            if kept_images:
                images = tensor.split(_list_lengths(tensor, self._sizes))
                self._arguments[name] = torch.cat([images[index] for index in kept_images])
            else:
                del self._arguments[name]
        outputs: dict[str, Any] = {}
        for modality, mask in self._output_masks.items():
            vector_indices = mask.flatten().cumsum(0).view_as(mask) - 1
            kept_indices = vector_indices[:, num_tokens:][mask[:, num_tokens:]]
            if len(kept_indices):
                output = self._encoder_outputs[modality]
                outputs[modality] = _select_vectors(output, int(mask.sum()), kept_indices)
        if self._encoder_outputs:
            self._arguments[_ENCODER_OUTPUTS] = outputs


def _list_placeholder_ids(config: Any, modalities: tuple[str, ...]) -> list[int]:
    names = [f"{modality}_token_{end}" for modality in modalities for end in ("id", "index")]
    ids = [getattr(config, name, None) for name in names]
    return [token_id for token_id in ids if isinstance(token_id, int)]


def _find_placeholders(config: Any, ids: Tensor, modalities: tuple[str, ...]) -> Tensor:
    token_ids = _list_placeholder_ids(config, modalities)
    return torch.isin(ids, torch.tensor(token_ids, dtype=ids.dtype, device=ids.device))


def _has_typed_text(token_types: Tensor, placeholders: Tensor) -> bool:
    """Return whether tokens other than placeholders have a type other than 0."""
    if token_types.shape == placeholders.shape:
        token_types = token_types.masked_fill(placeholders.to(token_types.device), 0)
    return bool(token_types.any())


def _is_empty(argument: Any) -> bool:
    """Return whether an argument has no effect: None, False, or a container of such values."""
    if isinstance(argument, Tensor):
        return argument.numel() == 0
    if isinstance(argument, dict):
        return all(map(_is_empty, argument.values()))
    if isinstance(argument, list | tuple):
        return all(map(_is_empty, argument))
    return argument is None or argument is False


def _list_lengths(tensor: Tensor, sizes: list[int]) -> list[int]:
    """Return the length of each image along the first axis, or [] if it is not known."""
    if len(tensor) == len(sizes):
        return [1] * len(sizes)
    length, remainder = divmod(len(tensor), sum(sizes))  # several patches for each placeholder
    return [] if remainder or tensor.ndim > 3 else [length * size for size in sizes]


def _divide(tensor: Tensor, sizes: list[int]) -> list[Tensor] | None:
    """Return the part of a tensor for each image, or None if it is not known."""
    if len(sizes) == 1:
        return [tensor]
    if lengths := _list_lengths(tensor, sizes):
        return list(tensor.split(lengths))
    if tensor.ndim < 4:
        return None
    # `[B, images, ...]`, in which rows with fewer images are padded with zeros.
    images = tensor.flatten(0, 1)
    images = images[images.flatten(1).any(1)]
    return list(images.split(1)) if len(images) == len(sizes) else None


def _hash_values(tensor: Tensor) -> str:
    """Return the dtype and a hash of a tensor without zeros at the end, which may be padding."""
    flat_bytes = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    contents = flat_bytes.numpy().tobytes().rstrip(b"\0")
    return f"{tensor.dtype} {hashlib.sha256(contents).hexdigest()}"


def _select_vectors(output: Any, num_vectors: int, rows: Tensor) -> Any:
    """Return the features at `rows` of encoded features, in the same containers.

    Features of several layers are in a list. Entries of a dictionary that do not have `num_vectors`
    vectors are not changed. None means that no entry has this number of vectors.
    """
    if isinstance(output, dict):
        selected = {
            name: _select_vectors(entry, num_vectors, rows) for name, entry in output.items()
        }
        changes = {name: entry for name, entry in selected.items() if entry is not None}
        return type(output)(**{**output, **changes}) if changes else None
    is_tensor = isinstance(output, Tensor)
    parts = [output] if is_tensor else output
    if not isinstance(parts, list | tuple) or not parts:
        return None
    if all(isinstance(part, Tensor) and part.ndim for part in parts):
        vectors = torch.cat([part.reshape(-1, part.shape[-1]) for part in parts])
        if len(vectors) == num_vectors:
            vectors = vectors[rows.to(vectors.device)]
            return vectors[None] if is_tensor else [vectors]
    layers = [None if is_tensor else _select_vectors(part, num_vectors, rows) for part in parts]
    return None if any(layer is None for layer in layers) else layers
