"""The "torch" backend: plain PyTorch, on any device."""
