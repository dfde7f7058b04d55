"""Log each warning once per process."""

import logging

import torch

logger = logging.getLogger("hf_fp8kv")
_logged_messages: set[str] = set()


def warn_once(message: str) -> None:
    """Log a warning, unless this process has logged it before or torch is compiling."""
    if not torch.compiler.is_compiling() and message not in _logged_messages:
        _logged_messages.add(message)
        logger.warning(message)
