"""Small models and files that the tests of kitchen-models share."""

import argparse
import json
import struct

import pytest
import torch
from safetensors.torch import save_file

import kitchen_models as km
import kitchen_models.commands as commands
from kitchen_core import installed_formats

torch.set_num_threads(1)  # the layers are small: more threads only wait for each other


def layer_shapes():
    """Layers as a transformer has them: widths that 256 divides and that it does not, and some to leave alone."""
    return {
        "embed.weight": (100, 128),
        "blocks.0.attn.q.weight": (128, 128),
        "blocks.0.attn.q.bias": (128,),
        "blocks.0.mlp.fc1.weight": (256, 128),
        "blocks.0.mlp.fc2.weight": (128, 256),
        "blocks.0.mlp.fc2.bias": (128,),
        "blocks.0.norm.weight": (128,),
        "blocks.0.tiny.weight": (8, 128),
        "conv.weight": (16, 3, 3, 3),
        "lm_head.weight": (100, 128),
    }


class Mlp(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = torch.nn.Linear(128, 256, bias=False)
        self.fc2 = torch.nn.Linear(256, 128)


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = torch.nn.Module()
        self.attn.q = torch.nn.Linear(128, 128)
        self.mlp = Mlp()
        self.norm = torch.nn.RMSNorm(128)
        self.tiny = torch.nn.Linear(128, 8, bias=False)

    def forward(self, x):
        x = x + self.attn.q(self.norm(x))
        return x + self.mlp.fc2(torch.relu(self.mlp.fc1(x))) + self.tiny(x).mean()


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(100, 128)
        self.blocks = torch.nn.ModuleList([Block()])
        self.conv = torch.nn.Conv2d(3, 16, 3, bias=False)
        self.lm_head = torch.nn.Linear(128, 100, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.lm_head(x)


@pytest.fixture
def model():
    return Model().eval()


@pytest.fixture(params=sorted(installed_formats()))
def quantized(request, model):
    """The model in each format."""
    km.quantize_(model, request.param)
    return model


@pytest.fixture
def int8(model):
    """The model in int8."""
    km.quantize_(model, "int8")
    return model


@pytest.fixture
def source(tmp_path, model):
    """The model's weights as a float32 file."""
    path = tmp_path / "source.safetensors"
    state = {key: value.detach().contiguous() for key, value in model.state_dict().items()}
    assert {key: tuple(value.shape) for key, value in state.items()} == layer_shapes()
    save_file(state, path, metadata={"format": "pt", "author": "nobody"})
    return path


@pytest.fixture
def assert_branch():
    """Check that fp32 ``y`` is ``plain + scale (x down^T) up^T``, as exactly as any order of its sums allows.

    With u = 2^-24 and the standard bound of sums, the two products err by at most (K + R) u times those of magnitudes; the
    scale and the two roundings between them add 3 u. What is added to may be the first of the last sum's R + 1 terms.
    """

    def check(y, plain, x, down, up, scale=1.0):
        x, down, up, plain = (t.detach().double() for t in (x, down, up, plain))
        rank, inner = down.shape
        sums = scale * (x.abs() @ down.abs().t() @ up.abs().t())
        bound = 2.0**-24 * ((inner + rank + 3) * sums + (rank + 1) * (plain.abs() + sums))
        error = (y.detach().double() - plain - scale * (x @ down.t() @ up.t())).abs()
        assert (error <= bound).all(), f"{float((error / bound).max()):.2f} of the bound"

    return check


@pytest.fixture
def write_raw():
    """Make a safetensors file by hand: ``table`` is the header (an object, or the bytes themselves)."""

    def write(path, table, data=b"", length=None):
        header = table if isinstance(table, bytes) else json.dumps(table).encode()
        path.write_bytes(struct.pack("<Q", len(header) if length is None else length) + header + data)
        return path

    return write


@pytest.fixture
def kitchen():
    """Run a subcommand as the ``kitchen`` command does; returns its exit code."""

    def run(*words):
        parser = argparse.ArgumentParser(prog="kitchen")
        subparsers = parser.add_subparsers()
        for add in (
            commands.inspect_command,
            commands.quantize_command,
            commands.verify_command,
            commands.report_command,
            commands.demo_command,
        ):
            add(subparsers)
        options = parser.parse_args([str(word) for word in words])
        return options.func(options) or 0

    return run
