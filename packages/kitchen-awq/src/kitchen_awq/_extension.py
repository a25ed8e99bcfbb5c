"""The CUDA extension of this package."""

from kitchen_core.extension import CudaExtension

EXTENSION = CudaExtension("kitchen_awq")
