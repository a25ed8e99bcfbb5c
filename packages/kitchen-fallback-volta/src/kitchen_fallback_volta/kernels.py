"""What kitchen-fallback-volta offers, and when: the records of its kernels for GPUs without INT8 tensor cores."""

from __future__ import annotations

from kitchen_core.registry import Provider

provider = Provider(name="kitchen-fallback-volta")
