"""What kitchen-int8 offers, and when: the records of its CUDA kernels."""

from __future__ import annotations

from kitchen_core.registry import Provider

provider = Provider(name="kitchen-int8")
