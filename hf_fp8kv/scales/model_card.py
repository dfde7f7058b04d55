"""Write model cards (README.md) that describe scales. Existing cards are extended."""

import logging
from collections.abc import Sequence

import yaml
from huggingface_hub import ModelCard

from .formats import ScaleFormat
from .layer_scales import ScaleData

logger = logging.getLogger(__name__)

CARD_FILE = "README.md"
# Markers around the section, which is replaced when new scales are saved.
_SECTION_START = "<!-- hf_fp8kv: KV cache -->"
_SECTION_END = "<!-- hf_fp8kv: end -->"
_SGLANG_COMMAND = "python -m sglang.launch_server --model-path {0} --kv-cache-dtype fp8_e4m3"
# For each format, the command of a server that reads it. {0} is the folder or repository with the
# scales, {1} the model.
_COMMANDS_BY_FORMAT = {
    "hf_fp8kv": "vllm serve {1} --kv-cache-dtype hf_fp8kv_static "
    '--additional-config \'{{"hf_fp8kv": {{"scales": "{0}"}}}}\'',
    **dict.fromkeys(
        ("compressed-tensors", "autofp8", "modelopt", "quark"),
        "vllm serve {0} --kv-cache-dtype fp8",
    ),
    "tgi": "text-generation-launcher --model-id {0} --kv-cache-dtype fp8_e4m3fn",
    "vllm-json": _SGLANG_COMMAND.replace("{0}", "{1}")
    + " --quantization-param-path kv_cache_scales.json",
}


def make_card(
    scales: ScaleData,
    losses: Sequence[str],
    format: ScaleFormat,
    name: str,
    old_card: bytes,
    model: str,
    base_model: str | None,
) -> bytes:
    """Return the model card of scales, as bytes. The text and metadata of the old card are kept.

    Args:
        losses: Sentences about what the format loses.
        name: Name of the repository or folder.
        old_card: The existing card, or no bytes. It may have bytes that are not UTF-8.
        model: Repository or folder of the model, for the example.
        base_model: Repository of the base model, for the metadata.
    """
    section = _make_section(scales, losses, format, name, model)
    text = old_card.decode("utf-8", "surrogateescape")
    try:
        card = ModelCard(text if text.lstrip().startswith("---") else f"---\n{{}}\n---\n{text}")
    except (ValueError, TypeError, yaml.YAMLError) as error:
        logger.warning("%s: its metadata is not changed: %s", CARD_FILE, error)
        return _insert_section(text, section).encode("utf-8", "surrogateescape")
    tags = card.data.get("tags") or []
    tags = tags if isinstance(tags, list) else [tags]
    card.data["tags"] = list(dict.fromkeys([*tags, "fp8", "kv-cache", format.name]))
    if base_model and not card.data.get("base_model"):
        card.data["base_model"] = base_model
    card.text = _insert_section(card.text, section)
    return str(card).encode("utf-8", "surrogateescape")


def _insert_section(text: str, section: str) -> str:
    text_before, _, remainder = text.partition(_SECTION_START)
    _, end_marker, text_after = remainder.partition(_SECTION_END)
    if not end_marker:  # the card has no section, or the section has no end
        text_before = text
        text_after = "\n"
    return f"{text_before.rstrip()}\n\n{section}{text_after}".lstrip("\n")


def _make_section(
    scales: ScaleData, losses: Sequence[str], format: ScaleFormat, name: str, model: str
) -> str:
    granularity = scales.granularity + ", K centered" * scales.centered
    title = "Plan" if scales.is_dynamic else "Static scales"
    facts = [
        f"{title} for an FP8 KV cache: {len(scales.layers)} layers, per {granularity}",
        f"format `{format.name}`, values in the unit of E4M3 (`amax / 448`)",
    ]
    facts += losses
    if scales.weights_digest:
        facts.append(f"made for the weights with the digest `{scales.weights_digest}`")
    commands = [_COMMANDS_BY_FORMAT[format.name]]
    if scales.granularity == "tensor" and commands[0].startswith("vllm serve {0}"):
        commands.append(_SGLANG_COMMAND)  # SGLang reads one number for each side
    return "\n".join([
        _SECTION_START, "## FP8 KV cache", "", *(f"- {fact}" for fact in facts), "",
        "```python",
        "from transformers import AutoModelForCausalLM",
        "from hf_fp8kv import FP8PagedCache", "",
        f'model = AutoModelForCausalLM.from_pretrained("{model}", attn_implementation="fp8_paged")',
        f'cache = FP8PagedCache(model.config, scales="{name}")',
        "model.generate(**inputs, cache=cache)",
        "```", "",
        "```shell", *(command.format(name, model) for command in commands), "```",
        _SECTION_END,
    ])  # fmt: skip
