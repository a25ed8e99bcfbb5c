"""What the ranks of test_parallel.py run, under torchrun: each writes what it computed to FOLDER/<rank>.pt.

Run on GPUs by the same name: ``torchrun --nproc-per-node 2 tests/parallel_worker.py FOLDER cuda``.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils._python_dispatch import TorchDispatchMode

from kitchen_core import QuantizedLinear, QuantizedTensor, installed_formats
from kitchen_core.errors import KitchenError
from kitchen_core.formats import canonical_name
from kitchen_core.testing import LINEAR_OPS
from kitchen_models.parallel import ColwiseParallel, RowwiseParallel, gathered, parallelize

N, K, ROWS = 256, 1024, 33
# Options that leave a K of 1024 in several blocks; w4a8's other layouts store other tensors.
CASES = {
    "int8": ("int8", {}),
    "int8 plain": ("int8", {"convrot_groupsize": 0}),
    "awq": ("awq", {"group_size": 64}),
    "svdquant": ("svdquant", {"rank": 16}),
    "w4a8": ("w4a8", {}),
    "w4a8 asymmetric": ("w4a8", {"levels": "asymmetric", "group_size": 32, "scale_dtype": "float32"}),
    "w6a8": ("w6a8", {}),
}


def cases():
    """Those whose package is installed."""
    return {name: case for name, case in CASES.items() if canonical_name(case[0]) in installed_formats()}


def layer(case, device="cpu", dtype=torch.bfloat16):
    """The whole quantized layer, the same on every rank."""
    format, options = CASES[case]
    generator = torch.Generator().manual_seed(3)
    linear = nn.Linear(K, N, dtype=dtype)
    with torch.no_grad():
        weight = torch.randn(N, K, generator=generator) * K**-0.5
        weight[:, :: K // 4] *= 6
        linear.weight.copy_(weight)
        linear.bias.copy_(torch.randn(N, generator=generator))
    return QuantizedLinear.from_linear(linear, format, **options).to(device)


def inputs(device="cpu", dtype=torch.bfloat16, rows=ROWS):
    """x [rows, K] with an outlier channel, residual [rows, N] and its scale [N]."""
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(rows, K, generator=generator)
    x[:, 5] *= 20
    residual, scale = torch.randn(rows, N, generator=generator), torch.rand(N, generator=generator)
    return tuple(t.to(device, dtype) for t in (x, residual, scale))


class Mlp(nn.Module):
    """Up, GELU, down: the pair that tensor parallelism is made for."""

    def __init__(self, case, device="cpu"):
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        up, down = (nn.Linear(k, n, dtype=torch.bfloat16) for k, n in ((K, 1024), (1024, 64)))
        with torch.no_grad():
            for parameter in (*up.parameters(), *down.parameters()):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 32)
        format, options = CASES[case]
        self.up, self.down = (QuantizedLinear.from_linear(each, format, **options).to(device) for each in (up, down))

    def forward(self, x):
        return self.down(torch.nn.functional.gelu(self.up(x), approximate="tanh"))


def parallel(module, style, mesh):
    """One layer under a style."""
    return parallelize(nn.ModuleDict({"layer": module}), mesh, {"layer": style})["layer"]


def share(tensor, rank, size):
    return tensor.chunk(size, -1)[rank].contiguous()


def part_given(columns, x):
    """The part_first and part_of that the layer's op is called with, by an op that is watched; None where it takes none."""
    name = LINEAR_OPS[columns.format.name]
    with WatchedOps() as seen:
        columns(x)
    ((schema, arguments),) = [(s, a) for s, a in seen.calls if s.name == f"kitchen::{name}"]
    given = dict(zip((argument.name for argument in schema.arguments), arguments, strict=False))
    return (given["part_first"], given["part_of"]) if given.get("part_of") is not None else None


class WatchedOps(TorchDispatchMode):
    """The schemas and positional arguments of the ops that ran."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.calls.append((op._schema, args))
        return op(*args, **(kwargs or {}))


def state_of(module):
    return {key: value.detach().cpu() for key, value in module.state_dict().items()}


def check_case(case, mesh, rank, size, device):
    """Everything that is asserted of one case, as tensors on the CPU."""
    x, residual, scale = inputs(device)
    made = {}
    columns = parallel(layer(case, device), ColwiseParallel(), mesh)
    made["colwise"] = columns(x)
    made["colwise part"] = part_given(columns, x)
    own = parallel(layer(case, device), ColwiseParallel(bit_equal=False), mesh)
    made["colwise own order"], made["colwise part of own order"] = own(x), part_given(own, x)
    made["colwise one row"] = columns(x[:1])
    made["colwise fused"] = columns(
        x, input_act="gelu_tanh", residual=share(residual, rank, size), residual_scale=share(scale, rank, size)
    )
    made["colwise shared activation"] = columns(columns.quantize_activation(x))
    made["colwise bytes"] = torch.tensor(sum(t.nbytes for t in columns.inner().values()))
    made["colwise gathered"] = state_of(gathered(columns))
    replicated = parallel(layer(case, device), ColwiseParallel(output_layouts=Replicate()), mesh)
    made["colwise replicated"] = replicated(x)
    tensor = parallel(layer(case, device), ColwiseParallel(use_local_output=False), mesh)(
        DTensor.from_local(x, mesh, [Replicate()], run_check=False)
    )
    made["colwise dtensor"] = tensor.full_tensor()
    rows = parallel(layer(case, device), RowwiseParallel(), mesh)
    made["rowwise"] = rows(share(x, rank, size))
    made["rowwise one row"] = rows(share(x[:1], rank, size))
    made["rowwise fused"] = rows(share(x, rank, size), input_act="gelu_tanh", residual=residual, residual_scale=scale)
    made["rowwise shared activation"] = rows(rows.quantize_activation(share(x, rank, size)))
    made["rowwise bytes"] = torch.tensor(sum(t.nbytes for t in rows.inner().values()))
    made["rowwise gathered"] = state_of(gathered(rows))
    made["rowwise weight"] = rows.dequantize(torch.float32).full_tensor()
    made["rowwise from replicated"] = parallel(layer(case, device), RowwiseParallel(input_layouts=Replicate()), mesh)(x)
    scattered = parallel(layer(case, device), RowwiseParallel(output_layouts=Shard(0)), mesh)
    made["rowwise scattered"] = scattered(share(x[:32], rank, size))
    whole, divided = Mlp(case, device), Mlp(case, device)
    made["mlp whole"] = whole(x)
    made["mlp"] = parallelize(divided, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})(x)
    return {k: v.detach().cpu() if isinstance(v, torch.Tensor) else v for k, v in made.items()}


def gradients(case, mesh, rank, size):
    """Of x and of a residual through the MLP, on one device and on all; and of the rank's part of x through one layer."""
    made = {}
    whole, divided = Mlp(case), Mlp(case)
    parallelize(divided, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    for name, module in (("whole", whole), ("divided", divided)):
        x = inputs()[0].requires_grad_()
        module(x).float().square().sum().backward()
        made[f"x {name}"] = x.grad
    x, residual, scale = (t.requires_grad_() for t in inputs())
    rows = parallel(layer(case), RowwiseParallel(), mesh)
    part = share(x.detach(), rank, size).requires_grad_()
    rows(part, residual=residual, residual_scale=scale.detach()).float().sum().backward()
    made["part"], made["residual"] = part.grad, residual.grad
    one = x.detach().clone().requires_grad_()
    layer(case)(one, residual=residual.detach(), residual_scale=scale.detach()).float().sum().backward()
    made["part of one"] = share(one.grad, rank, size)
    return made


def compiled(case, mesh):
    """The divided MLP as one graph."""
    divided = parallelize(Mlp(case), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    x = inputs()[0]
    return torch.equal(torch.compile(divided, fullgraph=True, backend="eager")(x), divided(x))


def said(call):
    """The message of the refusal."""
    try:
        call()
    except KitchenError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"


def refusals(mesh):
    """What each refusal says, and that a refused plan changes nothing."""

    def quantized(n, k, format, **options):
        return QuantizedLinear.from_linear(nn.Linear(k, n, dtype=torch.bfloat16), format, **options)

    made = {}
    layers = {
        "rotation": quantized(64, 768, "int8", convrot_groupsize=256),
        "group": quantized(64, 192, "awq", group_size=64),
        "svdquant": quantized(64, 192, "svdquant", rank=4),
        "outputs": quantized(63, 128, "int8"),
        "one group a row": quantized(64, 128, "awq", group_size=-1),
    }
    for name, made_layer in layers.items():
        style = ColwiseParallel() if name == "outputs" else RowwiseParallel()
        model = nn.ModuleDict({"fine": quantized(64, 128, "int8", convrot_groupsize=64), name: made_layer})
        made[name] = said(lambda m=model, s=style, n=name: parallelize(m, mesh, {"fine": ColwiseParallel(), n: s}))
        assert type(model["fine"]) is QuantizedLinear, "a refused plan changes no layer"
        made[f"{name}, torch"] = said(lambda m=made_layer, s=style: s._apply(m, mesh))
    rows = parallel(quantized(64, 128, "int8", convrot_groupsize=64), RowwiseParallel(), mesh)
    made["whole rows"] = said(lambda: rows(torch.zeros(1, 64).bfloat16(), "rms_norm", torch.ones(64), 1e-6))
    made["twice"] = said(lambda: RowwiseParallel()._apply(rows, mesh))
    made["requantize"] = said(lambda: rows.requantize_(torch.zeros(64, 128)))
    made["moved"] = said(lambda: rows.to("meta"))
    made["no module"] = said(lambda: parallelize(nn.ModuleDict({"a": rows}), mesh, {"b": RowwiseParallel()}))
    shared = quantized(64, 128, "int8", convrot_groupsize=64)
    model = nn.ModuleDict({"a": shared, "b": shared})
    made["shared"] = said(lambda: parallelize(model, mesh, {"*": ColwiseParallel()}))
    assert type(shared) is QuantizedLinear
    plain = nn.Linear(128, 64, dtype=torch.bfloat16)
    plain.weight = nn.Parameter(QuantizedTensor.quantize(plain.weight.detach(), "int8"), requires_grad=False)
    for style in (ColwiseParallel(), RowwiseParallel()):
        made[f"tensor, {type(style).__name__}"] = said(
            lambda s=style: parallelize(nn.ModuleDict({"a": plain}), mesh, {"a": s})
        )
        made[f"tensor, torch, {type(style).__name__}"] = said(lambda s=style: s._apply(plain, mesh))
    held = plain.weight
    made["instead"] = parallel(
        QuantizedLinear(held.inner(), held.format, held.config, plain.bias, held.dtype), ColwiseParallel(), mesh
    ).extra_repr()
    made["half"] = str(rows.half().compute_dtype)
    made["repr"] = repr(rows)
    plain = parallelize(nn.ModuleDict({"a": nn.Linear(8, 8)}), mesh, {"a": ColwiseParallel()})["a"]
    made["plain"] = str(plain.weight.placements[0])
    return made


@torch.no_grad()
def main(folder, device):
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    if device == "cuda":
        torch.cuda.set_device(rank)
    mesh = init_device_mesh(device, (size,))
    where = f"cuda:{rank}" if device == "cuda" else "cpu"
    made = {case: check_case(case, mesh, rank, size, where) for case in cases()}
    if device == "cpu":
        made["refusals"] = refusals(mesh)
        made["compiled"] = {case: compiled(case, mesh) for case in cases()}
        with torch.enable_grad():
            made["gradients"] = {case: gradients(case, mesh, rank, size) for case in cases()}
    torch.save(made, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
