"""Tensor parallelism over two GPUs through NCCL: what test_parallel.py asks of two CPU ranks, of the CUDA kernels."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kitchen_core.testing import assert_close

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
import parallel_worker  # noqa: E402 - what the ranks run
from parallel_worker import ROWS, N  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs"),
]
CASES = list(parallel_worker.cases())
ROUNDING_NOISE = 1 + 2 / math.sqrt(2 * ROWS * N)  # as in test_parallel.py


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What two ranks computed: a dict a rank."""
    folder = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "NCCL_NVLS_ENABLE": "0"}
    ran = subprocess.run(
        [*command, str(HERE / "parallel_worker.py"), str(folder), "cuda"],
        capture_output=True, text=True, timeout=300, env=environment,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-4000:]
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2)]


def error(y, exact):
    return float((y.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_two_gpus_against_one(case, ranks):
    layer = parallel_worker.layer(case, "cuda")
    x, residual, scale = parallel_worker.inputs("cuda")
    first, second = (made[case] for made in ranks)
    exact = x.double() @ layer.dequantize(torch.float32).double().T + layer.bias.double()

    whole = layer(x)
    joined = torch.cat([first["colwise"], second["colwise"]], -1).cuda()
    assert torch.equal(joined, whole)
    for key, made in (
        ("colwise one row", layer(x[:1])),
        ("colwise shared activation", layer(layer.quantize_activation(x))),
        ("colwise fused", layer(x, input_act="gelu_tanh", residual=residual, residual_scale=scale)),
    ):
        joined = torch.cat([first[key], second[key]], -1).cuda()
        if key == "colwise fused" and case == "awq":  # x in fp32, above 16 rows of it: cuBLAS
            assert_close(joined, made, absolute=2.0**-8 * made.abs().max(), what=key)
        else:
            assert torch.equal(joined, made), key
    for made in (first, second):
        assert torch.equal(made["colwise replicated"].cuda(), whole)
        assert torch.equal(made["colwise dtensor"].cuda(), whole)

    for key in ("rowwise", "rowwise fused", "rowwise from replicated", "rowwise one row"):
        assert torch.equal(first[key], second[key]), f"{key}: all ranks have the sum"
    assert error(first["rowwise"].cuda(), exact) <= error(whole, exact) * ROUNDING_NOISE
    scattered = torch.cat([first["rowwise scattered"], second["rowwise scattered"]]).cuda()
    assert error(scattered, exact[:32]) <= error(layer(x[:32]), exact[:32]) * ROUNDING_NOISE
    h = torch.nn.functional.gelu(x.float(), approximate="tanh").double()
    exact = residual.double() + scale.double() * (h @ layer.dequantize(torch.float32).double().T + layer.bias.double())
    one = layer(x, input_act="gelu_tanh", residual=residual, residual_scale=scale)
    assert error(first["rowwise fused"].cuda(), exact) <= error(one, exact) * ROUNDING_NOISE


@pytest.mark.parametrize("case", CASES)
def test_gathering_gives_the_layer_back(case, ranks):
    wanted = {key: value.detach().cpu() for key, value in parallel_worker.layer(case).state_dict().items()}
    for made in ranks:
        for way in ("colwise", "rowwise"):
            found = made[case][f"{way} gathered"]
            assert found.keys() == wanted.keys()
            for key, value in wanted.items():
                assert torch.equal(found[key].reshape(-1).view(torch.uint8), value.reshape(-1).view(torch.uint8)), key
