"""The parts of a divided layer on one GPU, without ranks: bit for bit the whole layer's outputs."""

from functools import partial

import pytest
import torch
from torch import nn

from kitchen_core import QuantizedLinear, get_format, installed_formats
from kitchen_models.parallel import OUTPUTS, _part, check_split

CUDA = torch.cuda.is_available()
needs_gpu = pytest.mark.skipif(not CUDA, reason="needs an NVIDIA GPU; torch.cuda.is_available() is False here")
ROWS = (1, 2, 5, 8, 16, 17, 33, 64, 65, 128, 200, 256, 300, 512, 1000, 1024, 1500, 2048, 4096)


def parts_of(layer, count):
    """The linears that the ranks would run."""
    dims, n = check_split(layer, OUTPUTS, count), layer.out_features
    for part in range(count):
        tensors = {name: _part(t, dims[name], (1,), part, count) for name, t in layer.inner().items()}
        of = {"part": (part * (n // count), n)} if layer.format.takes_part else {}
        yield partial(
            layer.format.linear, tensors=tensors, config=layer.config, bias=layer.bias.chunk(count)[part], **of
        )


@needs_gpu
@pytest.mark.parametrize("shape", [(4096, 4096), (12288, 3072), (11008, 4096), (3072, 12288)], ids=str)
@pytest.mark.parametrize("format", sorted(installed_formats()))
@torch.no_grad()
def test_parts_are_the_whole(format, shape):
    torch.manual_seed(0)
    linear = nn.Linear(shape[1], shape[0], device="cuda", dtype=torch.bfloat16)
    layer = QuantizedLinear.from_linear(linear, get_format(format))
    for m in ROWS:
        x = torch.randn(m, shape[1], device="cuda", dtype=torch.bfloat16)
        x[:, 3] *= 20
        whole = layer(x)
        for count in (2, 4, 8):
            made = torch.cat([part(x) for part in parts_of(layer, count)], -1)
            assert torch.equal(made, whole), (
                f"M={m}, {count} parts: {int((made != whole).sum())} of {made.numel()} differ"
            )
