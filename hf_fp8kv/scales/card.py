"""Model cards: the README.md of a checkpoint or repository with scales; an old one is extended."""

import logging
import re
from collections.abc import Sequence
from pathlib import Path

import yaml
from huggingface_hub import ModelCard

from .formats import ScaleFormat
from .layer_scales import ScaleData

logger = logging.getLogger(__name__)

CARD_FILE = "README.md"
# What is written lies between them, and is written anew with other scales.
_START, _END = "<!-- hf_fp8kv: KV cache -->", "<!-- hf_fp8kv: end -->"
_METADATA = re.compile(r"\A(---\r?\n.*?\n---(?:\r?\n|\Z))", re.DOTALL)
# How the copy of a checkpoint is served; {0} is its name.
_VLLM = "vllm serve {0} --kv-cache-dtype fp8"
_SGLANG = "python -m sglang.launch_server --model-path {0} --kv-cache-dtype fp8_e4m3"
_SERVERS = {
    "hf_fp8kv": {
        "vLLM, with the plugin of hf_fp8kv": "vllm serve {1} --kv-cache-dtype hf_fp8kv_static "
        '--additional-config \'{{"hf_fp8kv": {{"scales": "{0}"}}}}\''
    },
    **{
        name: {"vLLM": _VLLM, "SGLang": _SGLANG}
        for name in ("compressed-tensors", "autofp8", "modelopt", "quark")
    },
    "tgi": {"TGI": "text-generation-launcher --model-id {0} --kv-cache-dtype fp8_e4m3fn"},
    "vllm-json": {
        "SGLang": f"{_SGLANG.replace('{0}', '{1}')} --quantization-param-path kv_cache_scales.json"
    },
}


def read_card(path: Path) -> str:
    """Return the text of a card, empty without one; whatever its bytes are, they can be written."""
    return path.read_bytes().decode("utf-8", "surrogateescape") if path.is_file() else ""


def make_card(
    scales: ScaleData, losses: Sequence[str], format: ScaleFormat, name: str, old: str, *,
    whole: bool, base_model: str | None,
) -> bytes:  # fmt: skip
    """Return the card of scales under this name; what `old` says stays, but of older scales.

    Args:
        scales, losses: what `reduce_scales` returned.
        format: which they are written in.
        name: of the repository or folder.
        old: the card that there is, or "".
        whole: whether the model is there, too.
        base_model: the one on the Hub that the scales or the model were made from.
    """
    metadata = _METADATA.match(old)
    head, text = (metadata[1], old[metadata.end() :]) if metadata else ("", old)
    model = name if whole else base_model or "MODEL"
    section = _describe(scales, losses, format, name, model)
    before, _, rest = text.partition(_START)
    _, end, after = rest.partition(_END)
    if not end:  # there is no section, or nobody knows where it ends
        before, after = text, "\n"
    text = f"{before.rstrip()}\n\n{section}{after}".lstrip("\n")
    return (_extend_metadata(head, format, base_model) + text).encode("utf-8", "surrogateescape")


def _extend_metadata(head: str, format: ScaleFormat, base_model: str | None) -> str:
    """Return the metadata with the tags; what cannot be parsed stays as it is."""
    try:
        data = ModelCard(head or "---\n{}\n---\n").data
    except (ValueError, yaml.YAMLError) as error:
        logger.warning("%s: its metadata stays as it is: %s", CARD_FILE, error)
        return head if head.endswith("\n") else f"{head}\n"
    tags = data.get("tags") or []
    tags = tags if isinstance(tags, list) else [tags]
    data["tags"] = list(dict.fromkeys([*tags, "fp8", "kv-cache", format.name]))
    if base_model and not data.get("base_model"):
        data["base_model"] = base_model
    return f"---\n{data.to_yaml()}\n---\n"


def _describe(
    scales: ScaleData, losses: Sequence[str], format: ScaleFormat, name: str, model: str
) -> str:
    """Return the section: what the scales are, their recipe and error, and how to use them."""
    kinds = "/".join(sorted({layer.granularity for layer in scales.layers.values()}))
    about = f"{len(scales.layers)} layers, per {kinds}{', K centered' if scales.centered else ''}"
    facts = [f"{'Plan' if scales.is_dynamic else 'Static scales'} for an FP8 KV cache: {about}"]
    facts.append(f"format `{format.name}`, numbers in the unit of E4M3 (`amax / 448`)")
    report = scales.report
    if report is not None:
        versions = ", ".join(f"{package} {number}" for package, number in report.versions.items())
        facts.append(
            f"calibrated on {report.tokens} tokens of {report.texts} texts, margin "
            f"{report.margin:g}, {report.date[:10]}, with {versions}"
        )
        facts.append(report.centers)
        # What was measured is about the scales as they were before.
        measured = [] if losses else report.quality
        facts += [
            f"mean KL to the unquantised cache, {row.cache}: {row.kl:.2e} nats, same top token "
            f"{row.top1:.1%} ({row.tokens} held-out tokens)"
            for row in measured
            if row.cache != "unquantised"
        ]
    facts += losses
    if scales.weights_digest:
        facts.append(f"made for the weights with the digest `{scales.weights_digest}`")
    lines = [
        _START,
        "## FP8 KV cache",
        "",
        *(f"- {fact}" for fact in facts),
        "",
        "transformers:",
        "",
    ]
    lines += [
        "```python",
        "from transformers import AutoModelForCausalLM",
        "from hf_fp8kv import FP8PagedCache",
        "",
        f'model = AutoModelForCausalLM.from_pretrained("{model}", attn_implementation="fp8_paged")',
        f'cache = FP8PagedCache(model.config, scales="{name}")',
        "model.generate(**inputs, past_key_values=cache)",
        "```",
    ]
    for server, command in _SERVERS.get(format.name, {}).items():
        if server == "SGLang" and kinds != "tensor":
            continue  # it takes one number a side
        lines += ["", f"{server}:", "", "```shell", command.format(name, model), "```"]
    return "\n".join([*lines, _END])
