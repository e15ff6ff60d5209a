"""The kernels in plain PyTorch, on any device: the definition that the others must equal."""
