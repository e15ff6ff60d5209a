"""How do PyTorch's tensors and NumPy's arrays reach native ops?"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from jubako.kernels.cpu.library import BF16, F16, F32

DTYPES = {torch.float32: F32, torch.bfloat16: BF16}
"""What every op takes, by the numbers that ops know them by."""

ALL_DTYPES = DTYPES | {torch.float16: F16}
"""What some ops take."""


def pointer(tensor: torch.Tensor | None) -> int | None:
    """Where the tensor's elements begin; None of None."""
    return None if tensor is None else tensor.data_ptr()


def address(array: np.ndarray[Any, Any]) -> int:
    """Where the array's elements begin; quicker than `array.ctypes.data`."""
    first: int = array.__array_interface__["data"][0]
    return first
