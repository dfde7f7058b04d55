"""Linear modules that compute a product of few rows as one of `ROWS` rows."""

import copy

import pytest
import torch
from transformers.pytorch_utils import Conv1D

from hf_fp8kv.attention.full_rows import ROWS, install_full_rows, remove_full_rows


class Recorder(torch.nn.Linear):
    """Records how many rows it computes."""

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        self.rows = states.shape[:-1].numel()
        return super().forward(states)


@pytest.mark.parametrize("module", [Recorder(8, 5), Recorder(8, 5, bias=False), Conv1D(5, 8)])
@pytest.mark.parametrize("shape", [(1, 1), (ROWS - 1,), (0,), (ROWS,), (3, ROWS)])
def test_results_and_gradients_stay(module: torch.nn.Module, shape: tuple[int, ...]) -> None:
    module = copy.deepcopy(module)
    states = torch.randn(*shape, 8, generator=torch.Generator().manual_seed(0))
    results = []
    for install in (remove_full_rows, install_full_rows):
        install(module)
        module.zero_grad()
        leaf = states.clone().requires_grad_()
        out = module(leaf)
        (out.sin() * torch.arange(5)).sum().backward()
        weights = [weight.grad for weight in module.parameters()]
        results.append([out, leaf.grad, *weights])
    torch.testing.assert_close(*results)
    if isinstance(module, Recorder):
        count = torch.Size(shape).numel()
        assert max(count, ROWS) <= module.rows < ROWS + count if count else module.rows == 0


def test_16_bit_modules_are_not_changed() -> None:
    for module in (Recorder(8, 5), Recorder(8, 5).bfloat16()):
        install_full_rows(module)
        module.bfloat16()(torch.ones(2, 8, dtype=torch.bfloat16))
        assert module.rows == 2
