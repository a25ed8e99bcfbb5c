"""What every package's launch code says to its extension in the same words: dtypes as numbers, pointers, the stream."""

from __future__ import annotations

import torch

DTYPE_CODES = {
    torch.float32: 0,
    torch.float16: 1,
    torch.bfloat16: 2,
}  # DType of shared_cuda/include/kitchen/common/dtype.h


def pointer(tensor: torch.Tensor | None, elements: int = 0) -> int:
    """The address of a tensor, ``elements`` behind its first; 0 for None."""
    return 0 if tensor is None else tensor.data_ptr() + elements * tensor.element_size()


def current_stream(device: int) -> int:
    """The stream on which torch works on a CUDA device, as an address (torch.cuda.current_stream takes 3 us, for an object)."""
    return torch._C._cuda_getCurrentRawStream(device)
