"""Streams, threads, graphs, devices, memory and sizes, for every format's linear and every op, on a GPU.

Results are compared with the reference in plain PyTorch on the same GPU (INT8-grid formats to the bit), large ones with
float64 in sampled rows. Every test asserts that a kernel of a package ran, not the reference.
"""

import contextlib
import copy
import hashlib
import subprocess
import threading

import pytest
import torch
from torch import nn

from kitchen_core import QuantizedLinear, UnsupportedError, get_format, ops, registry, trace, use
from kitchen_core.known_formats import KNOWN_FORMATS
from kitchen_core.reference.svdquant import residual_weight
from kitchen_core.registry import EAGER
from kitchen_core.testing import LINEAR_OPS, assert_close, assert_equal, tolerance
from kitchen_core.testing.samples import SAMPLES, filled

pytestmark = pytest.mark.gpu

FORMATS = sorted(KNOWN_FORMATS)
INT8_GRID = ("int8_tensorwise", "asym_w4a8_int8", "w6a8_int8")
BF16 = torch.bfloat16
OFFLINE = ("quantize_w4a8_weight",)  # its reference asks for numbers on the host: quantizing a weight is offline work
SPIN = 2_000_000  # cycles of a spinning kernel: about a millisecond


def weight_of(name, n, k, device="cuda", **options):
    """(tensors, config) of a weight of any size: random codes and plausible scales, without quantizing one."""
    format = get_format(name)
    options = {"rank": 32, **options} if name == "svdquant_w4a4" else options
    config = format.config_for(n, k, **options)
    shapes = format.quantize(torch.empty(n, k, device="meta", dtype=BF16), config)
    return {key: filled(key, t, k, device) for key, t in shapes.items() if t is not None}, config


def module(name, n=512, k=512, device="cuda"):
    tensors, config = weight_of(name, n, k, device)
    return QuantizedLinear(tensors, name, config, torch.randn(n, device=device, dtype=BF16), BF16)


def rows(m, k=512, seed=0, device="cuda"):
    return torch.randn(m, k, device=device, generator=torch.Generator(device).manual_seed(seed)).to(BF16)


@contextlib.contextmanager
def kernels_ran(op):
    """Within the block the op runs, on kernels of a package or on a composition of them."""
    with trace() as calls:
        yield
    ran = {kernel for called, kernel in calls if called == op}
    assert ran, calls
    assert EAGER not in ran, calls


def check(name, made, x, what=""):
    """The layer against the reference on the same GPU: to the bit on the INT8 grid, within the derived bound elsewhere."""
    with kernels_ran(LINEAR_OPS[name]):
        y = made(x)
    with use(EAGER):
        want = made(x)
    assert y.shape == (*x.shape[:-1], made.out_features)
    if name in INT8_GRID:
        assert torch.equal(y, want), f"{name} {what}: {(y != want).sum().item()} of {y.numel()} differ"
        return y
    k = x.shape[-1]
    dense = made.dequantize(torch.float32).abs()
    size = x.float().abs().reshape(-1, k) @ dense.T + made.bias.float().abs() if made.bias is not None else None
    t = tolerance(x.dtype, k, name)
    assert_close(
        y.reshape(size.shape), want.reshape(size.shape), relative=2 * t.relative, absolute=t.accumulation * size,
        what=f"{name} {what}",
    )  # fmt: skip
    return y


# ------------------------------------------------------------------------------------------------------- streams


@pytest.mark.parametrize("name", FORMATS)
def test_200_tries_on_side_streams_behind_a_spinning_kernel(name):
    """x is written late on the stream that the call is made on: a launch on any other stream would read what was before."""
    made = module(name)
    sizes = (1, 7, 16, 100, 300)
    inputs = {m: [rows(m, seed=i) for i in range(4)] for m in sizes}
    wanted = {m: [made(x) for x in xs] for m, xs in inputs.items()}
    late = {m: torch.zeros_like(inputs[m][0]) for m in sizes}
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(4)]
    for attempt in range(200):
        m, i, stream = sizes[attempt % 5], attempt % 4, streams[attempt % 4]
        late[m].zero_()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(SPIN // 10)
            late[m].copy_(inputs[m][i])
            y = made(late[m])
            late[m].zero_()
        stream.synchronize()
        assert torch.equal(y, wanted[m][i]), f"try {attempt}, M={m}"


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    ("m", "n", "k"),
    [
        (4096, 16, 7392),
        (4096, 32, 10944),
        (8192, 128, 8192),
        (2048, 16, 29568),
        (64, 16, 29568),
        (16, 136, 65536),
        (33, 12288, 3072),
        (64, 12288, 3072),
        (300, 12288, 3072),
        (300, 3072, 12288),
        (96, 5504, 4096),
    ],
)
def test_the_same_bits_in_1000_calls(name, m, n, k):
    """Few outputs and long sums: copies into a ring of stages come late and out of order, and a kernel must not notice."""
    k = k // 64 * 64 if name == "svdquant_w4a4" else k
    made, x = (_awq(n, k, 32) if name == "awq_w4a16" else module(name, n, k)), rows(m, k)
    first = check(name, made, x, f"N={n} K={k} M={m}")
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for attempt in range(1000):
        wrong += (made(x) != first).any()
        if attempt % 2:
            torch.cuda.synchronize()
    assert wrong.item() == 0, f"{name} N={n} K={k} M={m}: {wrong.item()} of 1000 calls differ"


def every_op():
    """(name, call) for a sample of every op, on the GPU."""
    for sample in SAMPLES:
        torch.manual_seed(1)
        arguments = [a.cuda() if isinstance(a, torch.Tensor) else a for a in sample.make((17,), BF16)]
        op = getattr(torch.ops.kitchen, sample.op).default
        yield str(sample), lambda op=op, arguments=arguments: op(*arguments)


def test_a_call_waits_for_nothing_and_runs_beside_a_busy_default_stream():
    """Nothing of ours is on stream 0, and no call waits: the default stream spins all the while."""
    side = torch.cuda.Stream()
    for name, call in every_op():
        if name.startswith(OFFLINE):
            continue
        call()
        with torch.cuda.stream(side):
            call()
        torch.cuda.synchronize()
        spun = torch.cuda.Event()
        torch.cuda._sleep(100 * SPIN)
        spun.record()
        with torch.cuda.stream(side):
            call()
            done = torch.cuda.Event()
            done.record()
        done.synchronize()
        assert not spun.query(), f"{name}: the default stream was done before, so the call waited for it"
        torch.cuda.synchronize()


def warm_ops():
    """As ``every_op``, each called three times before."""
    for name, call in every_op():
        if name.startswith(OFFLINE):
            continue
        for _ in range(3):
            call()
        torch.cuda.synchronize()
        yield name, call


def test_a_warm_call_neither_waits_nor_allocates_from_the_driver():
    """torch's allocator does not, in this process; that our extensions never do is asserted by ``test_device_memory.py``."""
    for name, call in warm_ops():
        before = torch.cuda.memory_stats()["num_device_alloc"]
        torch.cuda.set_sync_debug_mode("error")
        try:
            torch.cuda._sleep(20 * SPIN)
            spun = torch.cuda.Event()
            spun.record()
            call()
            waited = spun.query()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert not waited, f"{name}: the call came back after the spinning kernel before it"
        torch.cuda.synchronize()
        assert torch.cuda.memory_stats()["num_device_alloc"] == before, name


def why_not_alone():
    """Why the GPU's free memory may be another process's doing; None where nvidia-smi sees one process there, this one."""
    command = ["nvidia-smi", "--query-compute-apps=gpu_uuid,pid", "--format=csv,noheader"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return f"free memory is the whole GPU's, and nvidia-smi does not tell who is on it: {error}"
    uuid = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
    seen = sum(uuid in line for line in told.splitlines())
    return None if seen == 1 else f"free memory is the whole GPU's, and nvidia-smi sees {seen} processes on it, not 1"


def test_a_warm_call_leaves_the_gpus_free_memory_as_it_was():
    """Whoever took it: allocations past torch's too."""
    torch.zeros(1, device="cuda")  # this process is on the GPU
    reason = why_not_alone()
    if reason is not None:
        pytest.skip(reason)
    for name, call in warm_ops():
        free = torch.cuda.mem_get_info()[0]
        call()
        torch.cuda.synchronize()
        left = torch.cuda.mem_get_info()[0]
        if left != free and why_not_alone() is not None:
            pytest.skip(f"{name}: free memory changed, and another process came to the GPU")
        assert left == free, name


@pytest.mark.parametrize("name", FORMATS)
def test_two_threads_with_their_own_streams_share_a_module(name):
    made = module(name)
    inputs = [rows((1, 16, 130)[i % 3], seed=i) for i in range(12)]
    wanted = [made(x) for x in inputs]
    torch.cuda.synchronize()
    problems = []

    def work(offset):
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for i in range(100):
                    at = (i + offset) % 12
                    y = made(inputs[at])
                    torch.cuda.current_stream().synchronize()
                    if not torch.equal(y, wanted[at]):
                        problems.append((offset, i))
        except Exception as error:  # a thread's error would be lost
            problems.append(error)

    threads = [threading.Thread(target=work, args=(offset,)) for offset in (0, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems


# -------------------------------------------------------------------------------------------------------- graphs


def test_every_op_is_captured_with_no_call_before_and_replays_with_new_inputs():
    torch.mm(rows(16, 16), rows(16, 16))  # torch's handle of cuBLAS, which cannot be made within a capture
    for sample in SAMPLES:
        if sample.op in OFFLINE:
            continue
        op = getattr(torch.ops.kitchen, sample.op).default
        calls = []
        for seed in (1, 2, 3):
            torch.manual_seed(seed)
            calls.append([a.cuda() if isinstance(a, torch.Tensor) else a for a in sample.make((19,), BF16)])
        static = [a.clone() if isinstance(a, torch.Tensor) else a for a in calls[0]]
        registry._selected.clear()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = op(*static)
        result = result if isinstance(result, tuple) else (result,)
        for arguments in calls:
            for to, given in zip(static, arguments, strict=True):
                if isinstance(to, torch.Tensor):
                    to.copy_(given)
            graph.replay()
            want = op(
                *[a.clone() if isinstance(a, torch.Tensor) else a for a in arguments]
            )  # apart, as the static ones
            for got, expected in zip(result, want if isinstance(want, tuple) else (want,), strict=True):
                assert_equal(got.float(), expected.float(), str(sample))


@pytest.mark.parametrize("name", FORMATS)
def test_two_sizes_in_one_pool(name):
    made, pool, graphs = module(name), torch.cuda.graph_pool_handle(), {}
    for m in (3, 300):
        x = torch.zeros(m, 512, dtype=BF16, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            y = made(x)
        graphs[m] = (graph, x, y)
    for seed in range(5):
        for m, (graph, x, y) in graphs.items():
            x.copy_(rows(m, seed=seed))
            graph.replay()
            assert torch.equal(y, made(x)), f"M={m}"


@pytest.mark.parametrize("name", FORMATS)
def test_cudagraphs_of_torch_compile_are_not_skipped(name):
    made, x = module(name), rows(16)
    torch._dynamo.reset()
    compiled = torch.compile(made, fullgraph=True, backend="cudagraphs")
    with torch.no_grad():
        for seed in range(4):
            x.copy_(rows(16, seed=seed))
            assert torch.equal(compiled(x), made(x))


# ------------------------------------------------------------------------------------------------------ memory


@contextlib.contextmanager
def new_memory_is_spoiled():
    """Whatever torch allocates without setting it holds NaN, or the largest integer."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(4, device="cuda").isnan().all()
    assert (torch.empty(4, dtype=torch.int32, device="cuda") == 2**31 - 1).all()
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("n", "k"), [(16, 7392), (1536, 7392), (512, 512), (3072, 3072), (136, 192)])
def test_results_do_not_depend_on_what_memory_held(name, n, k):
    k = k // 64 * 64 if name == "svdquant_w4a4" else k
    made = _awq(n, k, 32) if name == "awq_w4a16" else module(name, n, k)
    for m in (1, 2, 5, 16, 17, 64, 65, 128, 255, 300, 1024, 4096):
        x = rows(m, k)
        want = made(x)
        with new_memory_is_spoiled(), kernels_ran(LINEAR_OPS[name]):
            y = made(x)
        assert torch.equal(y, want), f"{name} N={n} K={k} M={m}: {(y != want).sum()} of {y.numel()} differ"


def test_no_op_leaves_a_part_of_its_result_unset():
    for name, call in every_op():
        if name.startswith(OFFLINE):
            continue
        want = call()
        with new_memory_is_spoiled():
            got = call()
        for a, b in zip(*(r if isinstance(r, tuple) else (r,) for r in (got, want)), strict=True):
            assert_equal(a.float(), b.float(), name)


# ------------------------------------------------------------------------------------------------ offload, settings


def state_hash(made):
    digest = hashlib.sha256()
    for key, tensor in sorted(made.state_dict().items()):
        digest.update(key.encode())
        digest.update(tensor.contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return digest.hexdigest()


@pytest.mark.parametrize("name", FORMATS)
def test_away_and_back_20_times_with_junk_in_between(name):
    made, x = module(name), rows(16)
    y, before = made(x), state_hash(made)
    for round in range(20):
        made.to("cpu", non_blocking=bool(round % 2))
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        junk = [torch.full((1 << 20,), float("nan"), device="cuda") for _ in range(8)]
        made.to("cuda", non_blocking=bool(round % 2))
        assert torch.equal(made(x), y), f"round {round}"
        assert state_hash(made) == before
        del junk


@pytest.mark.parametrize("name", FORMATS)
def test_data_swapped_as_offloaders_do(name):
    made, x = module(name, device="cpu"), rows(16)
    on_gpu = copy.deepcopy(made).cuda()(x)
    for _ in range(3):
        home = {key: t.data for key, t in (*made.named_parameters(), *made.named_buffers())}
        for _, tensor in (*made.named_parameters(), *made.named_buffers()):
            tensor.data = tensor.data.cuda()
        assert torch.equal(made(x), on_gpu)
        for key, tensor in (*made.named_parameters(), *made.named_buffers()):
            tensor.data = home[key]
        with pytest.raises(UnsupportedError, match="is on cpu, x is on cuda:0"):
            made(x)


@pytest.mark.parametrize("name", FORMATS)
def test_precision_switches_of_the_process_change_no_result(name):
    made = module(name)
    wanted = [made(rows(m)) for m in (1, 16, 300)]
    matmul = torch.backends.cuda.matmul
    switches = ("allow_tf32", "allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction")
    before = {s: getattr(matmul, s) for s in switches}
    try:
        for switch in switches:
            setattr(matmul, switch, True)
        for m, want in zip((1, 16, 300), wanted, strict=True):
            assert torch.equal(made(rows(m)), want), f"M={m}"
    finally:
        for switch, value in before.items():
            setattr(matmul, switch, value)


# -------------------------------------------------------------------------------------------------------- devices


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
class TestSecondDevice:
    @pytest.mark.parametrize("sample", SAMPLES, ids=str)
    def test_every_op_runs_where_its_tensors_are(self, sample):
        torch.manual_seed(1)
        given = sample.make((17,), BF16)
        torch.cuda.set_device(0)
        held = torch.cuda.memory_stats(0)["allocation.all.allocated"]
        op = getattr(torch.ops.kitchen, sample.op).default
        with trace() as ran_on_1:
            on_1 = op(*[a.to("cuda:1") if isinstance(a, torch.Tensor) else a for a in given])
        torch.cuda.synchronize(1)
        assert torch.cuda.current_device() == 0
        assert torch.cuda.memory_stats(0)["allocation.all.allocated"] == held, "something was allocated on cuda:0"
        with trace() as ran_on_0:
            on_0 = op(*[a.to("cuda:0") if isinstance(a, torch.Tensor) else a for a in given])
        assert ran_on_1 == ran_on_0
        for a, b in zip(*(r if isinstance(r, tuple) else (r,) for r in (on_1, on_0)), strict=True):
            assert a.device.index == 1
            assert_equal(a.float().cpu(), b.float().cpu())

    @pytest.mark.parametrize("name", FORMATS)
    def test_alternating_streams_graphs_and_mixed_operands(self, name):
        made = {d: module(name, device="cpu").to(f"cuda:{d}") for d in (0, 1)}
        made[1].load_state_dict(made[0].state_dict())
        for m in (1, 16, 300):
            x = rows(m)
            want = made[0](x)
            for _ in range(5):
                with kernels_ran(LINEAR_OPS[name]):
                    on_1 = made[1](x.to("cuda:1"))
                assert torch.equal(on_1.cpu(), want.cpu())
                assert torch.equal(made[0](x), want)
        with torch.cuda.device(1):
            x = rows(16).to("cuda:1")
            stream, graph = torch.cuda.Stream(1), torch.cuda.CUDAGraph()
            with torch.cuda.stream(stream):
                made[1](x)
            torch.cuda.synchronize(1)
            with torch.cuda.graph(graph, stream=stream):
                y = made[1](x)
        graph.replay()
        torch.cuda.synchronize(1)
        assert torch.equal(y, made[1](x))
        with pytest.raises(UnsupportedError, match="is on cuda:1, x is on cuda:0"):
            made[1](rows(4))


# ---------------------------------------------------------------------------------------------------------- sizes


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("n", [22473, 51865, 51866, 17, 7, 1])
def test_any_number_of_outputs(name, n):
    made = module(name, n, 256)
    for m in (1, 2, 5, 9, 16, 33, 64, 255):
        check(name, made, rows(m, 256), f"N={n} M={m}")


@pytest.mark.parametrize("n", [1, 7, 22473])
@pytest.mark.parametrize("k", [1, 7, 22473])
def test_int8_of_odd_widths(n, k):
    made = module("int8_tensorwise", n, k)
    for m in (1, 33):
        check("int8_tensorwise", made, rows(m, k), f"N={n} K={k} M={m}")


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("k", [7392, 10944, 29568])
def test_widths_that_no_tile_divides(name, k):
    """Whatever is chosen runs for every number of rows."""
    for n in (16, 32, 1536):
        k_here = k if name != "svdquant_w4a4" or k % 64 == 0 else k // 64 * 64
        made = module(name, n, k_here) if name != "awq_w4a16" else _awq(n, k_here, 32)
        for m in (1, 255, 256, 4096) if n < 1536 else (1, 256):
            check(name, made, rows(m, k_here), f"N={n} K={k_here} M={m}")


def _awq(n, k, group):
    tensors, config = weight_of("awq_w4a16", n, k, group_size=group)
    return QuantizedLinear(tensors, "awq_w4a16", config, torch.randn(n, device="cuda", dtype=BF16), BF16)


@pytest.mark.parametrize("dtype", [torch.float16, BF16], ids=str)
def test_awq_by_cublas_rounds_once_with_a_residual(dtype):
    for m in (1, 2, 8, 64):
        for n in (8, 64, 520):
            tensors, config = weight_of("awq_w4a16", n, 320)
            x, residual = rows(m, 320).to(dtype), rows(m, n, seed=1).to(dtype)
            with use("awq/dequantized"):
                y = get_format("awq_w4a16").linear(x, tensors, config, residual=residual)
            dense = get_format("awq_w4a16").dequantize(tensors, config, dtype).double()
            exact = x.double() @ dense.T + residual.double()
            sums = (320 + 4) * 2.0**-24 * (x.double().abs() @ dense.abs().T)
            half = torch.finfo(dtype).eps / 2
            assert ((y.double() - exact).abs() <= half * (exact.abs() + sums) + sums + 2.0**-25).all(), f"M={m} N={n}"


@pytest.mark.parametrize("name", ["awq_w4a16", "asym_w4a8_int8", "w6a8_int8"])
@pytest.mark.parametrize("k", [32, 64, 96, 160, 192])
def test_slices_of_k_are_whole_tiles_and_groups(name, k):
    for group in (16, 32):
        tensors, config = weight_of(name, 136, k, group_size=group)
        made = QuantizedLinear(tensors, name, config, torch.randn(136, device="cuda", dtype=BF16), BF16)
        for m in range(1, 17):
            check(name, made, rows(m, k), f"K={k} group={group} M={m}")


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("m", [16384, 36864, 65536, 131072, 8_400_000])
def test_very_many_rows(name, m):
    """Up to more than 65,535 blocks of any tile, in sampled rows."""
    made = module(name, 64, 64)
    x = rows(m, 64)
    with kernels_ran(LINEAR_OPS[name]):
        y = made(x)
    sample = torch.cat((torch.arange(64), torch.arange(m - 64, m), torch.randint(0, m, (256,)))).cuda()
    assert torch.isfinite(y).all()
    _sampled(name, made, x[sample], y[sample])


def _sampled(name, made, x, y):
    """Some rows of a large result against the reference of these rows."""
    with use(EAGER):
        want = made(x)
    if name in INT8_GRID:
        assert torch.equal(y, want), name
        return
    size = x.float().abs() @ made.dequantize(torch.float32).abs().T + made.bias.float().abs()
    t = tolerance(x.dtype, x.shape[-1], name)
    assert_close(y, want, relative=2 * t.relative, absolute=t.accumulation * size, what=name)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("m", "n", "k"), [(65552, 32768, 64), (32784, 16, 65536)], ids=["M*N", "M*K"])
def test_results_and_activations_of_more_than_2_to_31_elements(name, m, n, k):
    assert max(m * n, m * k) > 2**31
    made = module(name, n, k)
    x = torch.empty(m, k, dtype=BF16, device="cuda")
    for first in range(0, m, 8192):
        x[first : first + 8192] = rows(min(8192, m - first), k, seed=first)
    with kernels_ran(LINEAR_OPS[name]):
        y = made(x)
    sample = torch.tensor([0, 1, 127, 128, m // 2, 2**31 // max(n, k), m - 129, m - 2, m - 1], device="cuda")
    _sampled(name, made, x[sample], y[sample])
    _against_float64(name, made, x[sample[-3:]], y[sample[-3:]])


def _against_float64(name, made, x, y):
    """Within half a step of the activation grid (AWQ: of nothing) of a float64 product with the dense weight."""
    dense = made.dequantize(torch.float32).double()
    exact = x.double() @ dense.T + made.bias.double()
    size = x.double().abs() @ dense.abs().T + made.bias.double().abs()
    t = tolerance(x.dtype, x.shape[-1], name)
    bound = t.relative * exact.abs() + t.accumulation * size
    if name in INT8_GRID:
        # whatever the rotation, a row's absmax is at most the l1 norm of a block, and a rotated weight keeps its l2 norm
        step = x.double().unflatten(-1, (-1, 64)).abs().sum(-1).amax(-1, keepdim=True) / 127
        bound = bound + 0.5 * step * dense.norm(dim=-1) * x.shape[-1] ** 0.5
    elif name == "svdquant_w4a4":
        # half a step of the largest |x / smooth| of a group, times the 4-bit part of the weight in that basis
        tensors = made.inner()
        smoothed = x.double() / tensors["smooth_factor"].double()
        half = smoothed.unflatten(-1, (-1, 64)).abs().amax(-1).repeat_interleave(64, -1) / 14
        part = residual_weight(tensors["qdata"], tensors["scale"], tensors["smooth_factor"]).double()
        bound = bound + half @ (part * tensors["smooth_factor"].double()).abs().T * (1 + 2.0**-16)
    else:  # the weight is rounded to x's dtype
        bound = bound + 2.0**-8 * size
    assert ((y.double() - exact).abs() <= bound).all(), name


@pytest.mark.parametrize("name", FORMATS)
def test_weights_of_more_than_2_to_31_elements(name):
    n, k = 131072, 16448
    made = module(name, n, k)
    for m in (1, 16):
        x = rows(m, k)
        with kernels_ran(LINEAR_OPS[name]):
            y = made(x)
        columns = torch.cat(
            (torch.arange(64), torch.arange(n - 64, n), torch.tensor([2**31 // k + i for i in range(-8, 8)]))
        )
        tensors = {key: _columns(name, key, t, columns.cuda(), n) for key, t in made.inner().items()}
        part = QuantizedLinear(tensors, name, made.config, made.bias[columns.cuda()], BF16)
        _sampled(name, part, x, y[:, columns.cuda()])


def _columns(name, key, tensor, columns, n):
    """A weight's tensor for some of its outputs: the dim of N is the first, or the second of scales per group."""
    if tensor.dim() and tensor.shape[0] == n:
        return tensor[columns].contiguous()
    if tensor.dim() == 2 and tensor.shape[1] == n:
        return tensor[:, columns].contiguous()
    return tensor


@pytest.mark.parametrize("k", [131056, 131072, 262144])
def test_sums_at_and_beyond_the_int32_bound(k):
    """All codes at their extremes, so that every sum is the largest: exact on each side of the bound, or refused by name."""
    n, m = 24, 5
    x = torch.ones(m, k, device="cuda")
    weight = torch.full((n, k), -128, dtype=torch.int8, device="cuda")
    y = ops.int8_linear(x, weight, torch.ones(1, device="cuda"), out_dtype=torch.float32)
    assert_equal(
        y, torch.full((m, n), float(torch.tensor(-128.0 * 127 * k) * (torch.tensor(1.0) / 127)), device="cuda")
    )


@pytest.mark.parametrize("name", FORMATS)
def test_quantizing_a_large_weight_on_the_gpu(name):
    """[131072, 16384] has 2^31 elements: quantized in pieces, or within a memory that a plain size error would name."""
    if name == "svdquant_w4a4":
        pytest.skip("its singular vectors need fp32 copies of the whole; the format pages say so")
    n, k = 131072, 16384
    weight = torch.empty(n, k, dtype=BF16, device="cuda")
    for first in range(0, n, 16384):
        weight[first : first + 16384] = rows(16384, k, seed=first)
    format = get_format(name)
    config = format.config_for(n, k)
    tensors = format.quantize(weight, config)
    last = torch.arange(n - 32, n, device="cuda")
    part = {key: _columns(name, key, t, last, n) for key, t in tensors.items() if t is not None}
    dense = format.dequantize(part, config)
    w = weight[last].float()
    crest = (w.abs().amax(-1) / w.square().mean(-1).sqrt()).max()  # of a row; groups and rotations have less
    levels = {"int8_tensorwise": 127, "w6a8_int8": 31}.get(name, 7)
    assert (dense - w).norm() / w.norm() < crest / (levels * 12**0.5)


def test_the_cost_of_low_rank_branches():
    """Printed, for docs/reports.md: the INT8 layer alone, with one and with four branches of rank 32, and bf16."""
    made = module("int8_tensorwise", 4096, 4096)
    dense = nn.Linear(4096, 4096, device="cuda", dtype=BF16)
    x = rows(4096, 4096)
    pairs = [(rows(32, 4096, i).T.contiguous(), rows(32, 4096, 9 + i)) for i in range(4)]

    def with_branches(count):
        y = made(x)
        for down, up in pairs[:count]:
            y = y.addmm_(x @ down, up)
        return y

    found = {"bf16": lambda: dense(x), **{f"int8 + {c}": lambda c=c: with_branches(c) for c in (0, 1, 4)}}
    with torch.no_grad():
        for what, call in found.items():
            for _ in range(5):
                call()
            events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            events[0].record()
            for _ in range(50):
                call()
            events[1].record()
            torch.cuda.synchronize()
            print(f"branches: {what}: {events[0].elapsed_time(events[1]) / 50 * 1000:.1f} us")
    with kernels_ran("int8_linear"):
        with_branches(4)
