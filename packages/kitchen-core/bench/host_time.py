"""Host time of one warm call: what kitchen adds to an op that does nothing.

Compares, at M = 1 and K = 64, medians of 10,000 calls: a bare ``Library`` op of int8_linear's schema whose implementation
returns a ready tensor; ``kitchen_core.int8_linear`` with a registered kernel that returns one; the same through
``F.linear`` on a QuantizedTensor, and through QuantizedLinear. Prints JSON. Also times ``import kitchen_core`` after
``import torch``, and listing plug-ins without torch.

    python packages/kitchen-core/bench/host_time.py [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time

import torch
import torch.nn.functional as F

from kitchen_core import Kernel, QuantizedLinear, QuantizedTensor, int8_linear, register

CALLS = 10_000
SCHEMA = (
    "noop(Tensor x, Tensor weight, Tensor weight_scale, Tensor? bias=None, ScalarType? out_dtype=None, "
    "int convrot_groupsize=0, str input_act='none', Tensor? input_act_weight=None, float input_act_eps=0.0, "
    "Tensor? residual=None, Tensor? residual_scale=None) -> Tensor"
)


def median_us(call, calls: int = CALLS) -> float:
    """Median time of one call in microseconds, after a tenth as many to warm up."""
    for _ in range(calls // 10):
        call()
    times = []
    for _ in range(calls):
        start = time.perf_counter_ns()
        call()
        times.append(time.perf_counter_ns() - start)
    return statistics.median(times) / 1000


def import_ms(code: str, repeats: int = 7) -> float:
    """Median milliseconds that a fresh interpreter reports for the last statement of ``code``."""
    runs = [
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True) for _ in range(repeats)
    ]
    return statistics.median(float(run.stdout.split()[-1]) for run in runs)


TIMED = "import time; t = time.perf_counter(); {}; print((time.perf_counter() - t) * 1000)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out")
    options = parser.parse_args()
    torch.set_num_threads(1)

    out = torch.empty(1, 64)
    library = torch.library.Library("kitchen_bench", "DEF")
    library.define(SCHEMA)
    library.impl("noop", lambda *args: out, "CompositeExplicitAutograd")
    register(Kernel("int8_linear", "noop", lambda *args: out, lambda problem, facts: None, 1000, "bench"))

    x = torch.randn(1, 64)
    weight = QuantizedTensor.quantize(torch.randn(64, 64), "int8")
    layer = QuantizedLinear.from_linear(torch.nn.Linear(64, 64), "int8")
    noop = torch.ops.kitchen_bench.noop.default
    arguments = (x, weight.qdata, weight.scale, None, None, 64)
    with torch.inference_mode():
        rows = {
            "no-op Library op": median_us(lambda: noop(*arguments)),
            "int8_linear": median_us(lambda: int8_linear(*arguments)),
            "F.linear on a QuantizedTensor": median_us(lambda: F.linear(x, weight)),
            "QuantizedLinear": median_us(lambda: layer(x)),
        }
    rows |= {f"{name}, grad mode": median_us(call) for name, call in {
        "int8_linear": lambda: int8_linear(*arguments),
        "F.linear on a QuantizedTensor": lambda: F.linear(x, weight),
    }.items()}  # fmt: skip
    result = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": platform.processor() or platform.machine(),
        "median_us": {name: round(us, 2) for name, us in rows.items()},
        "added_us": {name: round(us - rows["no-op Library op"], 2) for name, us in rows.items()},
        "import_kitchen_core_after_torch_ms": round(
            import_ms("import torch; " + TIMED.format("import kitchen_core")), 1
        ),
        "list_plugins_ms": round(
            import_ms(TIMED.format("from kitchen_core.plugins import plugins; plugins('kitchen.formats')")), 1
        ),
    }
    print(json.dumps(result, indent=2))
    if options.out:
        with open(options.out, "w") as file:
            json.dump(result, file, indent=2)
            file.write("\n")


if __name__ == "__main__":
    main()
