"""The "tiled" backend: the reductions in eager PyTorch, block by block, on any device."""
