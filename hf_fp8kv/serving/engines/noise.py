"""Sampling with noise that depends only on the request, not on other requests of the step.

The next token has the largest sum of logit and noise. With Gumbel noise, it is a sample of the
softmax (Gumbel 1954). The noise is a function of a seed, the position and the token.
"""

import hashlib
from typing import Any

import torch
from transformers.generation.continuous_batching.cb_logits_processors import (
    ContinuousBatchingLogitsProcessor,
)


class NoiseLogitsWarper(ContinuousBatchingLogitsProcessor):
    """Samples tokens with noise that depends only on the request, instead of torch's generator.

    The noise of a request depends on its id and on the seed that the engine sets for torch. The
    argument of a step is a tensor of keys, one per row, so a CUDA graph can contain the sampling.
    The warper adds itself to the engine's `processors` as the last processor.
    """

    def __init__(self, processors: Any) -> None:
        processors.logits_processor.append(self)
        processors.tensors_required += 1
        processors.do_processing = True

    def install(self, model_runner: Any) -> None:
        """Sample the tokens of a new engine, whose ModelRunner is `model_runner`."""
        self._seed = torch.initial_seed()
        model_runner._sample = self._sample

    def fill_defaults(self, int32_tensor: torch.Tensor) -> None:
        """Fill in the key of padding rows."""
        int32_tensor.fill_(0)

    def prepare_tensor_args(self, requests_with_new_token: list[Any]) -> torch.Tensor:
        """Return the keys of a step's rows, `[B]`, int32."""
        keys = []
        for request in requests_with_new_token:
            state = request.state
            digest = hashlib.sha256(f"{self._seed} {state.request_id}".encode()).digest()
            # The engine has counted the tokens of this step, so this is the next token's position.
            keys.append(make_noise_key(int.from_bytes(digest[:8]), state.position_offset))
        return torch.tensor(keys, dtype=torch.int32, device="cpu")

    def __call__(self, scores: torch.Tensor, tensor_arg: torch.Tensor) -> torch.Tensor:
        """Store the keys. Return the scores unchanged, because the engine may report logprobs."""
        self._keys = tensor_arg[: len(scores)]
        return scores

    def _sample(self, scores: torch.Tensor, output_ids: torch.Tensor) -> None:
        """Write the tokens for scores `[1, B, V]` to the first row of `output_ids`.

        If there is a second row, write the log-probabilities of the tokens to it, as float32 bits.
        """
        probabilities = scores[0].softmax(-1)
        torch._assert_async(probabilities.isfinite().all(), "expected finite logits")
        noise = make_gumbel_noise(self._keys, scores.shape[2])
        tokens = (scores[0] + noise).argmax(-1, keepdim=True)
        output_ids[0, : len(tokens)] = tokens[:, 0]
        if len(output_ids) > 1:
            logprobs = probabilities.gather(1, tokens)[:, 0].log()
            output_ids[1, : len(tokens)] = logprobs.view(torch.int32)


def make_noise_key(seed: int, position: int) -> int:
    """Return a key for `make_gumbel_noise`: 31 bits of SplitMix64 (Steele et al. 2014), never 0."""
    mask = 2**64 - 1
    state = (seed * 0x9E3779B97F4A7C15 + (position + 1) * 0xD1342543DE82EF95) & mask
    state = ((state ^ state >> 30) * 0xBF58476D1CE4E5B9) & mask
    state = ((state ^ state >> 27) * 0x94D049BB133111EB) & mask
    return ((state ^ state >> 31) >> 33) or 1


def make_gumbel_noise(keys: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Return noise `[B, V]`, float32, which depends only on the key `[B]`, int32, and the token.

    A uniform number is 23 bits of the mixed key and token (finalizer of MurmurHash3) plus a half,
    divided by 2**23. More bits would round the largest number to 1, whose noise is infinite.
    No tensor is kept for the next call, which may use another stream or be part of a graph.
    """
    tokens = torch.arange(1, vocab_size + 1, dtype=torch.int32, device=keys.device)
    # The factor is 2^32 divided by the golden ratio, as int32.
    bits = keys[:, None] + _mix_bits(tokens * -1640531527)
    uniform = _mix_bits(bits).bitwise_right_shift_(9).bitwise_and_(0x7FFFFF).float()
    uniform.add_(0.5).mul_(2.0**-23)
    return uniform.log_().neg_().log_().neg_()


def _mix_bits(x: torch.Tensor) -> torch.Tensor:
    """Mix 32 bits in place, so that each bit depends on all bits: fmix32 of MurmurHash3."""
    x ^= (x >> 16) & 0xFFFF  # the mask clears the copies of the sign that a shift of int32 makes
    x *= -2048144789  # 0x85EBCA6B
    x ^= (x >> 13) & 0x7FFFF
    x *= -1028477387  # 0xC2B2AE35
    x ^= (x >> 16) & 0xFFFF
    return x
