"""Tiny tensors gain nothing from a second thread, and lose much when processes share the cores."""

import torch

torch.set_num_threads(1)
