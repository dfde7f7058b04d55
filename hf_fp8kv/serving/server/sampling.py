"""Temperature, top-k and top-p of each request by itself.

transformers' engine decides once whether it samples, and its server takes that from the first
request. Here the engine always samples, and each request's arguments are applied to its own logits:
a request that wants the most likely token keeps only that one, so sampling always returns it.
"""

from typing import Any

import torch
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper
from transformers.generation.continuous_batching import cb_logits_processors as stock
from transformers.generation.logits_process import TopPLogitsWarper

from ...errors import ConfigError

ALL_TOKENS = 1.0
_NEEDED = ("logits_processor", "tensors_required", "do_processing", "_retrieve_processors_kwargs")
_SAMPLERS = (
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    stock.ContinuousBatchingTemperatureLogitsWarper,
    stock.ContinuousBatchingTopKLogitsWarper,
    stock.ContinuousBatchingTopPLogitsWarper,
)


class _Temperature(stock.ContinuousBatchingTemperatureLogitsWarper):
    """Temperature of each request; zero means the most likely token."""

    def __init__(self) -> None:
        super().__init__(TemperatureLogitsWarper(1.0))

    def __call__(self, scores: torch.Tensor, tensor_arg: torch.Tensor) -> torch.Tensor:
        """Return scores `[B, V]`; `tensor_arg` `[>= B]` holds fp32 temperatures as int32."""
        temperature = tensor_arg[: scores.size(0)].view(torch.float32).unsqueeze(-1)
        greedy = temperature == 0
        best = scores.argmax(-1, keepdim=True)
        only = torch.full_like(scores, -torch.inf).scatter(-1, best, 0.0)
        return torch.where(greedy, only, scores / temperature.masked_fill(greedy, 1.0))


class _TopK(stock.ContinuousBatchingTopKLogitsWarper):
    """Top-k of each request; the number of all tokens means all of them."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__(TopKLogitsWarper(vocabulary))

    def __call__(self, scores: torch.Tensor, tensor_arg: torch.Tensor) -> torch.Tensor:
        """Return scores `[B, V]`; `tensor_arg` `[>= B]` holds int32."""
        if _skips(scores, tensor_arg[: len(scores)] >= self.top_k):
            return scores
        return super().__call__(scores, tensor_arg)


class _TopP(stock.ContinuousBatchingTopPLogitsWarper):
    """Top-p of each request; 1.0 means all tokens."""

    def __init__(self) -> None:
        # The class rejects 1.0, which is what a request without top_p has.
        super().__init__(TopPLogitsWarper(0.5))
        self.top_p = ALL_TOKENS

    def __call__(self, scores: torch.Tensor, tensor_arg: torch.Tensor) -> torch.Tensor:
        """Return scores `[B, V]`; `tensor_arg` `[>= B]` holds fp32 as int32."""
        if _skips(scores, tensor_arg[: len(scores)].view(torch.float32) >= ALL_TOKENS):
            return scores
        return super().__call__(scores, tensor_arg)


def _skips(scores: torch.Tensor, unused: torch.Tensor) -> bool:
    """Return whether no request uses a processor; on the CPU: a GPU would wait for the answer."""
    return scores.device.type == "cpu" and bool(unused.all())


def per_request_sampling(manager: Any, vocabulary: int) -> None:
    """Make a manager that was built with `do_sample=True`, and not started, sample each request.

    Raises ConfigError if this transformers builds its engine in another way.
    """
    processors = getattr(manager, "logit_processor", None)
    missing = [name for name in _NEEDED if not hasattr(processors, name)]
    if processors is None or missing:
        raise ConfigError(
            f"expected the logits processors of an engine with {', '.join(_NEEDED)}; this "
            "transformers has others. Tested with transformers 5.17 and 5.23: install one of them"
        )
    kept = [p for p in processors.logits_processor if not isinstance(p, _SAMPLERS)]
    ours = [_Temperature(), _TopK(vocabulary), _TopP()]
    processors.logits_processor = LogitsProcessorList([*kept, *ours])
    processors.tensors_required = len(ours)
    processors.do_processing = True
    processors._retrieve_processors_kwargs()


def request_sampling(body: dict[str, Any], config: Any, vocabulary: int) -> dict[str, Any]:
    """Return the sampling arguments of `add_request` for a request.

    A temperature above zero, top_p or top_k asks for sampling, whatever the model's own default is.
    """
    asked = any(body.get(name) is not None for name in ("temperature", "top_p", "top_k"))
    if body.get("temperature") == 0 or not (config.do_sample or asked):
        return {"temperature": 0.0, "top_k": vocabulary, "top_p": ALL_TOKENS}
    temperature = 1.0 if config.temperature is None else float(config.temperature)
    top_k = int(body.get("top_k", config.top_k) or 0)
    top_k = min(top_k, vocabulary) if top_k > 0 else vocabulary
    top_p = ALL_TOKENS if config.top_p is None else float(config.top_p)
    return {"temperature": temperature, "top_k": top_k, "top_p": top_p}
