"""INT8 linears as FP16 GEMMs on GPUs that have FP16 tensor cores but no INT8 ones."""

from kitchen_core.fallback import fp16_fallback

__all__ = ["fp16_fallback"]
