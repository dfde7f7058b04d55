"""Wrappers of attention functions that return wrong results, for tests of checks."""

import torch


def five_percent_more(right):
    def wrong(*args, **kwargs):
        out = right(*args, **kwargs)
        return (out[0] * 1.05, *out[1:]) if isinstance(out, tuple) else out * 1.05

    return wrong


def one_not_written(right):
    def wrong(*args, **kwargs):
        out = right(*args, **kwargs)
        out[-1, -1, 0, 0] = torch.nan
        return out

    return wrong
