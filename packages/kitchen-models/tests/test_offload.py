"""Offloading: quantized layers under the ways in which frameworks move weights about, and our own for blocks."""

import copy
import hashlib

import pytest
import torch

import kitchen_core
import kitchen_models as km
from kitchen_core import QuantizedLinear, installed_formats
from kitchen_core.errors import UnsupportedError
from kitchen_models import lora
from kitchen_models.offload import BlockOffload, signature

FORMATS = sorted(installed_formats())
GPU = pytest.mark.gpu
DEVICES = ["cpu", pytest.param("cuda", marks=GPU)]


class Block(torch.nn.Module):
    def __init__(self, size):
        super().__init__()
        self.norm = torch.nn.RMSNorm(size)
        self.fc1 = torch.nn.Linear(size, 2 * size)
        self.fc2 = torch.nn.Linear(2 * size, size, bias=False)
        self.register_buffer("offset", torch.randn(size))

    def forward(self, x):
        return x + self.fc2(torch.nn.functional.gelu(self.fc1(self.norm(x)))) + self.offset


def stack(format, count=10, size=256, whole=(0, 9), dtype=torch.bfloat16):
    """Blocks in one format, the first and the last left as they are."""
    torch.manual_seed(1)
    blocks = torch.nn.ModuleList([Block(size) for _ in range(count)]).to(dtype).eval()
    rules = {**{f"{number}.*": None for number in whole}, "*.fc*": format}
    km.quantize_(blocks, rules)
    return blocks


def run(blocks, x):
    with torch.no_grad():
        for block in blocks:
            x = block(x)
    return x


def hashes(module):
    return {
        name: hashlib.sha256(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, tensor in module.state_dict().items()
    }


def inputs(device="cpu", rows=5, size=256, seed=3):
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(seed)).to(device, torch.bfloat16)


def junk(device):
    """Allocate and fill what others would: freed memory must not be read again."""
    if device == "cuda":
        torch.cuda.empty_cache()
    for size in (1 << 12, 1 << 16, 1 << 20):
        torch.full((size,), float("nan"), device=device)


def ran_kernels(ran, device):
    """On a GPU a CUDA kernel of ours has run, in no layer the eager reference."""
    linears = [provider for op, provider in ran if op.endswith("_linear")]
    assert linears
    if device == "cuda":
        assert not any(provider.startswith("core/eager") for provider in linears), linears


# -------------------------------------------------------------------------------------------- what frameworks do to layers


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("format", FORMATS)
def test_group_offload_by_data_swap_twenty_rounds(format, device):
    """As diffusers does it: every parameter's and buffer's ``.data`` goes to the device, and back to the host tensor."""
    blocks = stack(format, count=3, whole=(0,))
    before, host = hashes(blocks), {n: t.data for n, t in [*blocks.named_parameters(), *blocks.named_buffers()]}
    x, results = inputs(device), set()
    for round in range(20):
        for tensor in [*blocks.parameters(), *blocks.buffers()]:
            tensor.data = tensor.data.to(device, copy=True)
        with kitchen_core.trace() as ran:
            y = run(blocks, x)
        ran_kernels(ran, device)
        results.add(hashlib.sha256(y.cpu().view(torch.uint8).numpy().tobytes()).hexdigest())
        for name, tensor in [*blocks.named_parameters(), *blocks.named_buffers()]:
            tensor.data = host[name]
        junk(device)
        assert hashes(blocks) == before, round
    assert len(results) == 1


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("format", FORMATS)
def test_whole_model_to_the_host_and_back_twenty_rounds(format, device):
    blocks = stack(format, count=3, whole=(0,)).to(device)
    x, before = inputs(device), hashes(blocks)
    y = run(blocks, x)
    for _ in range(20):
        blocks.to("cpu")
        junk(device)
        blocks.to(device)
        assert torch.equal(run(blocks, x), y)
        assert hashes(blocks) == before


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("format", FORMATS)
def test_sequential_offload_with_meta_placeholders(format, device):
    """As accelerate does it: parameters are replaced by ones on the meta device, and by real ones for each forward."""
    blocks = stack(format, count=3, whole=(0,))
    x, y = inputs(device), run(copy.deepcopy(blocks).to(device), inputs(device))
    weights = {name: tensor.clone() for name, tensor in blocks.state_dict().items()}

    def fill(module, prefix, to):
        for store in (module._parameters, module._buffers):
            for key, tensor in store.items():
                if tensor is not None:
                    made = weights[prefix + key].to(to)
                    store[key] = torch.nn.Parameter(made, requires_grad=False) if store is module._parameters else made

    leaves = {name: m for name, m in blocks.named_modules() if m._parameters or m._buffers}
    for name, module in leaves.items():
        fill(module, f"{name}.", "meta")
        module.register_forward_pre_hook(lambda m, a, n=name: fill(m, f"{n}.", device))
        module.register_forward_hook(lambda m, a, r, n=name: fill(m, f"{n}.", "meta"))
    assert all(p.is_meta for p in blocks.parameters())
    for _ in range(3):
        assert torch.equal(run(blocks, x), y)
        assert all(p.is_meta for p in blocks.parameters())
    quantized = [m for m in blocks.modules() if isinstance(m, QuantizedLinear)]
    assert quantized
    assert all((m.in_features, m.out_features) in ((256, 512), (512, 256)) for m in quantized)


@pytest.mark.parametrize("device", DEVICES)
def test_accelerate_itself(device):
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed here")
    blocks = stack("int8", count=3, whole=(0,))
    model = torch.nn.Sequential(*blocks)
    x, y = inputs(device), run(copy.deepcopy(blocks).to(device), inputs(device))
    accelerate.cpu_offload(model, execution_device=torch.device(device), offload_buffers=True)
    assert any(p.is_meta for p in model.parameters())
    for _ in range(3):
        with torch.no_grad():
            assert torch.equal(model(x), y)


@GPU
@pytest.mark.parametrize("format", FORMATS)
def test_pinned_memory_and_copies_on_a_side_stream(format):
    """Data swaps as a streamed group offload does them, twenty rounds, the next block's copy beside the computation."""
    blocks = stack(format, count=4, size=512, whole=(0,))
    x = inputs("cuda", 64, 512)
    y = run(copy.deepcopy(blocks).cuda(), x)
    before = hashes(blocks)
    home = [[t.data.pin_memory() for t in [*b.parameters(), *b.buffers()]] for b in blocks]
    assert all(t.is_pinned() for tensors in home for t in tensors)
    side, main = torch.cuda.Stream(), torch.cuda.current_stream()
    for round in range(20):
        out = x
        ready = {}
        for number, block in enumerate(blocks):
            for ahead in (number, number + 1):
                if ahead < len(blocks) and ahead not in ready:
                    with torch.cuda.stream(side):
                        moved = [t.to("cuda", non_blocking=True) for t in home[ahead]]
                        ready[ahead] = moved, side.record_event()
            moved, event = ready[number]
            main.wait_event(event)
            for tensor, data in zip([*block.parameters(), *block.buffers()], moved, strict=True):
                data.record_stream(main)
                tensor.data = data
            with torch.no_grad(), kitchen_core.trace() as ran:
                out = block(out)
            if number:
                ran_kernels(ran, "cuda")
            for tensor, data in zip([*block.parameters(), *block.buffers()], home[number], strict=True):
                tensor.data = data
        assert torch.equal(out, y), round
        assert hashes(blocks) == before
        junk("cuda")


# ------------------------------------------------------------------------------------------------------ blocks of a model


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("ahead", [0, 1, 3])
@pytest.mark.parametrize("format", FORMATS)
def test_staging_buffers_of_equal_blocks(format, ahead, device):
    """Ten blocks, the first and the last in bf16: two kinds, whose buffers are theirs alone. Twenty rounds."""
    blocks = stack(format)
    x, y = inputs(device), run(copy.deepcopy(blocks).to(device), inputs(device))
    before = hashes(blocks)
    kinds = [signature(block) for block in blocks]
    assert len(set(kinds[1:9])) == 1
    assert kinds[0] == kinds[9] != kinds[1]
    assert all(name in dict(blocks[1].state_dict(keep_vars=True)) for name, _, _ in kinds[1])
    offload = BlockOffload(blocks, device, ahead)
    assert {kind: len(buffers) for kind, buffers in offload.buffers.items()} == {
        kinds[0]: min(ahead + 1, 2), kinds[1]: ahead + 1,
    }  # fmt: skip
    one = sum(t.nbytes for t in [*blocks[1].parameters(), *blocks[1].buffers()])
    full = sum(t.nbytes for t in [*blocks[0].parameters(), *blocks[0].buffers()])
    assert offload.device_bytes == (ahead + 1) * one + min(ahead + 1, 2) * full
    for round in range(20):
        with kitchen_core.trace() as ran:
            assert torch.equal(run(blocks, x), y), round
        ran_kernels(ran, device)
        assert all(t.device.type == "cpu" for t in blocks.parameters()), "at rest all is on the host"
        if round % 5 == 0:
            junk(device)
            assert hashes(blocks) == before
    assert torch.equal(run(list(blocks)[::-1], x), run(list(copy.deepcopy(blocks).to(device))[::-1], x)), "any order"
    offload.remove()
    assert hashes(blocks) == before
    assert torch.equal(run(blocks.to(device), x), y)


@pytest.mark.parametrize("device", DEVICES)
def test_a_model_that_starts_on_the_device_goes_back_there(device):
    blocks = stack("w4a8", count=4, whole=()).to(device)
    x, before = inputs(device), hashes(blocks)
    y = run(blocks, x)
    offload = BlockOffload(blocks, device)
    assert all(p.device.type == "cpu" for p in blocks.parameters())
    assert torch.equal(run(blocks, x), y)
    offload.remove()
    assert all(p.device.type == device for p in blocks.parameters())
    assert hashes(blocks) == before


@pytest.mark.parametrize("device", DEVICES)
def test_blocks_of_different_formats_and_a_lora(device):
    blocks = torch.nn.ModuleList([stack(name, count=1, whole=())[0] for name in ("int8", "w4a8", "int8", "awq")])
    names = [f"{n}.fc1" for n in range(4)]
    state = {f"{n}.lora_A.weight": torch.randn(8, 256) / 16 for n in names}
    state |= {f"{n}.lora_B.weight": torch.randn(512, 8) / 16 for n in names}
    plain = run(copy.deepcopy(blocks).to(device), inputs(device))
    lora.attach(blocks, state)
    x, y = inputs(device), run(copy.deepcopy(blocks).to(device), inputs(device))
    offload = BlockOffload(blocks, device)
    assert len(offload.buffers) == 3
    for _ in range(3):
        assert torch.equal(run(blocks, x), y)
    offload.remove()
    lora.remove(blocks)
    assert torch.equal(run(blocks.to(device), x), plain)


def test_an_error_in_a_block_leaves_it_on_the_host():
    blocks = stack("int8", count=2, whole=())
    before = hashes(blocks)
    offload = BlockOffload(blocks, "cpu")
    with pytest.raises(kitchen_core.errors.KitchenError):
        blocks[0].fc1(torch.randn(2, 100).bfloat16())
    with pytest.raises(RuntimeError):
        blocks[0](torch.randn(2, 100).bfloat16())
    assert all(
        h.data_ptr() == t.data_ptr() for h, t in zip(offload.blocks[0].home, offload.blocks[0].held, strict=True)
    )
    offload.remove()
    assert hashes(blocks) == before


def test_what_cannot_be_offloaded_is_said(monkeypatch):
    blocks = stack("int8", count=2, whole=())
    blocks[1].norm = blocks[0].norm
    with pytest.raises(UnsupportedError, match=r"two blocks share 'norm\.weight'"):
        BlockOffload(blocks, "cpu")
    with pytest.raises(UnsupportedError, match="on the meta device"):
        BlockOffload([torch.nn.Linear(2, 2, device="meta")], "cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(
        UnsupportedError, match=r"run on cuda:0: torch sees no CUDA device here; `kitchen doctor` says why"
    ):
        BlockOffload([], "cuda:0")
    with pytest.raises(UnsupportedError, match="ahead counts the blocks"):
        BlockOffload(blocks[:1], "cpu", ahead=-1)


def _merge(blocks):
    layer = blocks[1].fc1
    layer.requantize_(2 * layer.dequantize(torch.float32))


def _attach(blocks):
    down, up = torch.randn(4, 256), torch.randn(512, 4)
    lora.attach(blocks, {"1.fc1.lora_A.weight": down, "1.fc1.lora_B.weight": up})


def _load(blocks):
    state = blocks[1].state_dict()
    blocks[1].load_state_dict({**state, "norm.weight": 2 * state["norm.weight"]})


def _replace(blocks):
    blocks[1].fc2 = torch.nn.Linear(512, 256, dtype=torch.bfloat16)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("change", [_merge, _attach, _load, _replace])
def test_a_change_while_offloaded_is_neither_lost_nor_run_by_half(change, device):
    blocks = stack("int8", count=3, whole=()).to(device)
    x = inputs(device)
    offload = BlockOffload(blocks, device)
    before = run(blocks, x)
    change(blocks)
    wanted = hashes(blocks)
    for _ in range(2):
        with pytest.raises(
            UnsupportedError, match=r"was changed while it was offloaded.*remove\(\), which keeps the change"
        ):
            run(blocks, x)
    assert hashes(blocks) == wanted
    offload.remove()
    assert hashes(blocks) == wanted
    assert {t.device.type for t in [*blocks.parameters(), *blocks.buffers()]} == {device}
    y = run(blocks, x)
    assert not torch.equal(y, before)
    again = BlockOffload(blocks, device)
    assert torch.equal(run(blocks, x), y)
    again.remove()
