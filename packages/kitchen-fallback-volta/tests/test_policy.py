"""Which kernel an INT8 linear takes: device class x dtype x options, on simulated devices, and what the user is told."""

import itertools
import logging
import threading
from dataclasses import replace

import pytest
import torch

from kitchen_core import UnsupportedError, explain, fallback, ops, registry, simulate, use
from kitchen_core.cli import main
from kitchen_core.devices import simulated_facts, simulating
from kitchen_core.explanation import option_words
from kitchen_core.registry import Kernel
from kitchen_core.testing import RELEASE_ARCHS, assert_equal, expect_kernel, pretend_built
from kitchen_fallback_volta import fp16_fallback, kernels, policy
from kitchen_fallback_volta._extension import EXTENSION

TORCH, WMMA, ROWWISE = "fallback-volta/torch", "fallback-volta/wmma", "fallback-volta/rowwise"
EAGER, COMPOSED = "core/eager", "core/composed"
OURS = "ours"  # the compiled kernel where the extension has code for the device, else the torch path
NOT_OURS = "another"  # whatever core or kitchen-int8 has for that device
BF16, FP16, FP32, INT8 = torch.bfloat16, torch.float16, torch.float32, torch.int8

# Device classes: what to simulate, and whether an INT8 linear should become an FP16 GEMM there.
VOLTA = [("sm_70", None), ("sm_70", "NVIDIA TITAN V"), ("sm_70", "Quadro GV100")]
OTHERS = [
    ("sm_60", None), ("sm_61", None),  # Pascal: no tensor cores
    ("sm_75", "NVIDIA GeForce GTX 1660 SUPER"), ("sm_75", "NVIDIA GeForce GTX 1650"), ("sm_75", "NVIDIA T1000 8GB"),
    ("sm_75", "NVIDIA GeForce MX450"), ("sm_75", "NVIDIA T400 4GB"),  # Turing without tensor cores
    ("sm_72", None), ("sm_75", "Tesla T4"), ("sm_75", "NVIDIA GeForce RTX 2080 Ti"),  # INT8 tensor cores from here on
    ("sm_80", None), ("sm_86", None), ("sm_89", None), ("sm_90", None), ("sm_100", None), ("sm_120", None),
]  # fmt: skip

# op, bits of the weight, dtype of x, output dtype, setting; the kernel that runs the GEMM on Volta
CALLS = [
    ("int8_linear", 8, BF16, BF16, None, OURS),
    ("int8_linear", 8, FP16, FP16, None, OURS),
    ("int8_linear", 8, BF16, FP32, None, OURS),  # the output dtype asked for does not matter
    ("int8_linear", 8, FP32, FP32, None, EAGER),
    ("int8_linear", 8, FP32, BF16, None, EAGER),
    ("int8_linear", 8, FP32, FP32, "fp32", OURS),
    ("int8_linear", 8, FP32, BF16, "fp32", OURS),
    ("int8_linear", 8, BF16, BF16, "1", OURS),
    ("int8_linear", 8, BF16, BF16, "fp32", OURS),
    ("int8_linear", 8, BF16, BF16, "0", EAGER),
    ("int8_linear", 8, BF16, BF16, "perhaps", EAGER),
    ("int8_scaled_mm", 8, INT8, BF16, None, OURS),
    ("int8_scaled_mm", 8, INT8, FP16, None, OURS),
    ("int8_scaled_mm", 8, INT8, FP32, None, EAGER),  # of codes alone, the output's dtype stands for x's
    ("int8_scaled_mm", 8, INT8, FP32, "fp32", OURS),
    ("int8_scaled_mm", 8, INT8, BF16, "0", EAGER),
    ("int8_swiglu_mlp", 8, BF16, BF16, None, OURS),
    ("int8_swiglu_mlp", 8, FP32, FP32, None, EAGER),
    ("int8_swiglu_mlp", 8, BF16, BF16, "0", EAGER),
    *((("w4a8_linear", bits, *rest)) for bits in (4, 6) for rest in (
        (BF16, BF16, None, OURS),
        (FP16, FP16, None, OURS),
        (BF16, FP32, None, OURS),
        (FP32, FP32, None, EAGER),
        (FP32, BF16, None, EAGER),
        (FP32, FP32, "fp32", OURS),
        (BF16, BF16, "0", EAGER),
    )),
    *(("w4a8_scaled_mm", bits, INT8, out, None, last) for bits in (4, 6) for out, last in ((BF16, OURS), (FP32, EAGER))),
]  # fmt: skip
OPTIONS = [(), ("bias",), ("bias", "input_act=swiglu", "residual")]

# What the package was built with.
BUILDS = {
    "without a compiler": {"has_cuda": False, "archs": [], "nvcc": "", "reason": "no C++ compiler was found"},
    "for sm_70": {"has_cuda": True, "archs": ["70-real"], "nvcc": "", "reason": ""},
    "for 90a alone": {"has_cuda": True, "archs": ["90a-real"], "nvcc": "", "reason": ""},
}


@pytest.fixture(params=BUILDS)
def build(request, monkeypatch):
    """Each build in turn; gives what OURS means on a V100."""
    monkeypatch.setitem(EXTENSION.__dict__, "build_info", BUILDS[request.param])
    return WMMA if request.param == "for sm_70" else TORCH


@pytest.fixture
def compiled(monkeypatch):
    """The extension has sm_70 code."""
    monkeypatch.setitem(EXTENSION.__dict__, "build_info", BUILDS["for sm_70"])


@pytest.fixture
def not_compiled(monkeypatch):
    """The extension was not built."""
    monkeypatch.setitem(EXTENSION.__dict__, "build_info", BUILDS["without a compiler"])


@pytest.fixture
def setting(monkeypatch):
    """A function that sets or unsets the variable for one test."""

    def put(word):
        monkeypatch.delenv(policy.VARIABLE, raising=False)
        if word is not None:
            monkeypatch.setenv(policy.VARIABLE, word)

    put(None)
    return put


def chosen(op, dtype, out_dtype, options=(), m=1, **fields):
    found = explain(
        op, M=m, N=3072, K=3072, dtype=dtype, out_dtype=out_dtype, device="cuda:0", options=options, **fields
    )
    return found.chosen.id


def path(op, dtype, out_dtype, options=(), **fields):
    """The kernels of one call, outermost first: of a composition also the kernel of the op that it ends with, its GEMM."""
    own = tuple(word for word in options if word in option_words(op))
    found = explain(op, dtype=dtype, out_dtype=out_dtype, options=own, **fields).chosen
    if not found.calls:
        return [found.id]
    inner = found.calls[-1]
    with fallback.codes_of(out_dtype if dtype == INT8 else dtype, out_dtype):
        return [found.id, *path(inner, INT8 if inner.endswith("scaled_mm") else dtype, out_dtype, options, **fields)]


def call_id(call):
    op, bits, *rest, _ = call
    return "-".join([f"{op}{bits}", *(str(word).removeprefix("torch.") for word in rest)])


@pytest.mark.parametrize("call", CALLS, ids=call_id)
@pytest.mark.parametrize("device", [*VOLTA, *OTHERS], ids=lambda d: d[1] or d[0])
def test_dispatch_table(device, call, build, setting):
    """Device class x dtype x options, and how the package was built -> the kernel that multiplies."""
    op, bits, dtype, out_dtype, word, on_volta = call
    setting(word)
    with simulate(*device):
        for options, m in itertools.product(OPTIONS, (0, 1, 300, 8192)):
            shape = {"M": m, "N": 3072, "K": 3072, "group": 0 if bits == 8 else 16, "rotation": 256, "bits": bits}
            got = path(op, dtype, out_dtype, options=options, device="cuda:0", **shape)
            if device in VOLTA:
                assert got[-1] == (build if on_volta == OURS else on_volta)
            else:
                assert not {TORCH, WMMA} & set(got)


@pytest.mark.parametrize("device", [*VOLTA, *OTHERS], ids=lambda d: d[1] or d[0])
def test_dispatch_table_of_the_quantizers(device, build, setting):
    """Compiled code serves V100s whatever the setting is: codes are the same on either path."""
    for word in (None, "0"):
        setting(word)
        with simulate(*device):
            for op in ("quantize_and_rotate_rowwise", "quantize_int8_rowwise", "quantize_int8_convrot_weight"):
                for dtype in (BF16, FP16, FP32):
                    got = chosen(op, dtype, INT8, rotation=256)
                    assert (got == ROWWISE) == (device in VOLTA and build == WMMA)


@pytest.mark.parametrize("sm", ["sm_60", "sm_61", "sm_70"])
def test_no_op_ends_in_code_that_the_gpu_cannot_run(sm, compiled, setting, monkeypatch):
    """Wheels as released, of every package: on an older GPU each op is served by core or by this package."""
    for name in ("int8", "w4a8", "svdquant", "awq"):
        package = pytest.importorskip(f"kitchen_{name}._extension")
        pretend_built(monkeypatch, package.EXTENSION, *RELEASE_ARCHS)
    registry.load_providers()
    seen = 0
    with simulate(sm):
        for op, dtype, m in itertools.product(registry._kernels, (BF16, FP16, FP32), (1, 64, 4096)):
            fields = {"M": m, "N": 3072, "K": 3072, "group": 64, "rank": 32, "rotation": 256, "bits": 4}
            found = explain(
                op, dtype=INT8 if op.endswith("scaled_mm") else dtype, out_dtype=dtype, device="cuda:0", **fields
            )
            assert found.chosen.provider in ("core", "fallback-volta"), str(found)
            seen += 1
    assert seen >= 20 * 9


@pytest.mark.parametrize("word", [None, "0", "1"])
@pytest.mark.parametrize("device", [*VOLTA, *OTHERS], ids=lambda d: d[1] or d[0])
@pytest.mark.parametrize("options", [(), ("bias", "fp16_activations")], ids=lambda o: "+".join(o) or "plain")
def test_int8_linear_fp16_runs_here_on_any_cuda_device(device, options, word, build, setting):
    setting(word)
    compiled = device in VOLTA and "fp16_activations" not in options
    with simulate(*device):
        for dtype in (BF16, FP16, FP32):
            assert chosen("int8_linear_fp16", dtype, dtype, options) == (build if compiled else TORCH)


def test_what_the_compiled_kernel_leaves_to_the_torch_path(compiled, setting):
    """Sums are int32 there, so K is limited; the torch path adds pieces in fp64."""
    with simulate("sm_70"):
        for op, dtype in (("int8_linear", BF16), ("int8_linear_fp16", BF16), ("int8_scaled_mm", INT8)):
            found = {
                k: explain(op, M=1, N=8, K=k, dtype=dtype, out_dtype=BF16, device="cuda:0") for k in (131_071, 131_072)
            }
            assert found[131_071].chosen.id == WMMA
            assert found[131_072].chosen.id == TORCH
            assert "sums in int32" in {c.kernel.id: c.reason for c in found[131_072].candidates}[WMMA]


def test_the_table_has_not_shrunk():
    assert len(VOLTA) + len(OTHERS) >= 18
    assert len(CALLS) * len(OPTIONS) >= 111
    assert {c[0] for c in CALLS} >= {k.op for k in kernels.TORCH_KERNELS} - {"int8_linear_fp16"}
    assert {(c[0], c[1]) for c in CALLS} >= {("w4a8_linear", 4), ("w4a8_linear", 6)}
    assert {k.op for k in kernels.WMMA_KERNELS} == {k.op for k in kernels.TORCH_KERNELS}


# ---------------------------------------------------------------------------------------------- in words


@pytest.mark.parametrize(
    ("device", "fields", "word", "reason"),
    [
        (("sm_61", None), {}, None, "has no FP16 tensor cores"),
        (("sm_75", "NVIDIA GeForce GTX 1660"), {}, None, "NVIDIA GeForce GTX 1660 has no FP16 tensor cores"),
        (("sm_72", None), {}, None, "sm_72 has INT8 tensor cores"),
        (("sm_90", None), {}, None, "sm_90 has INT8 tensor cores"),
        (("sm_70", None), {"dtype": FP32}, None, "float32 activations stay on the INT8 path; ask with"),
        (("sm_70", None), {}, "0", "switched off by KITCHEN_INT8_FP16_FALLBACK=0"),
        (("sm_70", None), {}, "no", "KITCHEN_INT8_FP16_FALLBACK='no' is not one of 0, 1, fp32"),
    ],
)
def test_every_refusal_has_a_reason_in_words(device, fields, word, reason, setting):
    setting(word)
    for op in ("int8_linear", "int8_scaled_mm"):
        with simulate(*device):
            answers = {c.kernel.id: c.reason for c in explain(op, N=8, K=8, device="cuda", **fields).candidates}
        assert reason in answers[TORCH]
        assert reason in answers[WMMA]


@pytest.mark.parametrize(
    ("info", "facts", "reason"),
    [
        ("without a compiler", {}, "installed without its CUDA extension: no C++ compiler was found; reinstall"),
        ("for 90a alone", {}, "was built for 90a, the device is Tesla V100"),
        ("for sm_70", {"driver_cuda": 11_080}, "needs a driver for CUDA 12.0 or newer, this one is for CUDA 11.8"),
        ("for sm_70", {"driver_cuda": 12_000}, None),
    ],
)
def test_the_extension_has_reasons_too(info, facts, reason, monkeypatch):
    monkeypatch.setitem(EXTENSION.__dict__, "build_info", BUILDS[info])
    answer = EXTENSION.why_not(replace(simulated_facts("sm_70"), **facts))
    assert answer is None if reason is None else reason in answer


def test_cpu_tensors_are_refused_and_a_forced_kernel_never_falls_through():
    x, weight = torch.zeros(3, 8), torch.zeros(4, 8, dtype=INT8)
    for op, kernel in itertools.product((ops.int8_linear, ops.int8_linear_fp16), (TORCH, WMMA)):
        with use(kernel), pytest.raises(UnsupportedError, match="the tensors are on cpu"):
            op(x, weight, torch.ones(4))


def test_explain_command_tells_the_story(capsys, build, setting):
    assert main(["explain", "int8_linear", "--as", "sm_70"]) == 0
    told = capsys.readouterr().out
    assert f"> {build}" in told
    assert "Tesla V100" in told
    assert main(["explain", "int8_linear", "--as", "sm_75", "--name", "NVIDIA GeForce GTX 1650"]) == 0
    assert "has no FP16 tensor cores" in capsys.readouterr().out


def test_doctor_tells_the_story(capsys, not_compiled, setting):
    setting("0")
    main(["doctor", "--as", "sm_70"])
    told = capsys.readouterr().out
    assert "no compiled kernels, the torch path serves: no C++ compiler was found" in told
    assert "KITCHEN_INT8_FP16_FALLBACK=0" in told
    assert f"{TORCH}: switched off" in told


def test_doctor_names_the_compiled_kernels(capsys, compiled, setting):
    main(["doctor", "--as", "sm_70"])
    assert "compiled kernels for 70" in capsys.readouterr().out


def test_doctor_names_the_torch_that_a_v100_needs(monkeypatch, setting):
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_75", "sm_90"])
    assert any('pip install "torch==2.10.*"' in line for line in kernels.doctor())
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_70", "sm_90"])
    assert not any("torch==" in line for line in kernels.doctor())


# ------------------------------------------------------------------------------- warnings, leaks, dispatch


def problem(op="int8_scaled_mm", **fields):
    base = {"device": torch.device("cuda:0"), "dtype": INT8, "out_dtype": BF16, "M": 1, "N": 8, "K": 8}
    return registry.Problem(op=op, **{**base, **fields})


def test_a_slow_path_is_told_once_per_device(caplog, monkeypatch, compiled, setting):
    monkeypatch.setattr(registry, "_warned", set())
    with caplog.at_level(logging.WARNING, "kitchen"):
        for device in ("sm_61", "sm_61", "sm_60", "sm_61"):
            with simulate(device):
                for m in (1, 2, 3):
                    registry.select(problem(M=m))
        assert [r.message.count("a slow path is taken") for r in caplog.records] == [1, 1]
        caplog.clear()
        with simulate("sm_70"):
            registry.select(problem())
        assert not caplog.records, "the compiled kernel is what sm_70 has: no slow path"
        setting("0")
        with simulate("sm_70"):
            for m in (1, 2):
                assert registry.select(problem(M=m)).id == EAGER
    assert len(caplog.records) == 1
    assert "switched off by KITCHEN_INT8_FP16_FALLBACK=0" in caplog.records[0].message


def test_missing_code_is_told_once_a_device_and_the_torch_path_runs(caplog, monkeypatch, not_compiled, setting):
    """One lack, one warning, whichever of its ops comes first; another GPU hears of it again."""
    monkeypatch.setattr(registry, "_warned", set())
    for count, name in ((1, None), (2, "Tesla V100S-PCIE-32GB"), (2, None)):
        with caplog.at_level(logging.WARNING, "kitchen"), simulate("sm_70", name):
            for m in (1, 2, 3):
                assert registry.select(problem(M=m)).id == TORCH
                assert registry.select(problem("int8_linear", dtype=BF16, M=m)).id == TORCH
        assert len(caplog.records) == count
    assert [r.message.count("kitchen-fallback-volta was installed without") for r in caplog.records] == [1, 1]
    assert all("said once for ops of fallback-volta on this GPU" in r.message for r in caplog.records)
    monkeypatch.setenv("KITCHEN_STRICT", "1")
    with simulate("sm_70"), pytest.raises(UnsupportedError, match="would take the slow path fallback-volta/torch"):
        registry.select(problem())


def test_fp16_fallback_for_a_block(compiled, setting):
    """Goes before the variable, holds in its own thread alone, and leaves no remembered choice behind."""
    other = {}

    def elsewhere():
        with simulate("sm_70"):
            other["chosen"] = registry.select(problem()).id

    with simulate("sm_70"):
        for word in (None, "0", "fp32"):
            setting(word)
            with fp16_fallback(False):
                assert registry.select(problem()).id == EAGER
                answers = {c.kernel.id: c.reason for c in explain("int8_linear", N=8, K=8, device="cuda").candidates}
                assert answers[WMMA] == answers[TORCH] == "switched off by the caller (fp16_fallback)"
                with fp16_fallback(True):
                    assert registry.select(problem()).id == WMMA
                    assert registry.select(problem(out_dtype=FP32)).id == EAGER
                with fp16_fallback(True, fp32_activations=True):
                    assert registry.select(problem(out_dtype=FP32)).id == WMMA
                assert chosen("int8_linear_fp16", BF16, BF16) == WMMA, "called by name"
        setting(None)
        with fp16_fallback(False):
            thread = threading.Thread(target=elsewhere)
            thread.start()
            thread.join()
        assert registry.select(problem()).id == WMMA
    assert other == {"chosen": WMMA}
    x, weight = torch.randn(3, 8), torch.ones(4, 8, dtype=INT8)
    with fp16_fallback(False):
        before = dict(registry._selected)
        ops.int8_linear(x, weight, torch.ones(4))
        assert registry._selected == before


def test_simulated_devices_never_leak(compiled, setting):
    seen = {}
    with simulate("sm_70"):
        assert registry.select(problem()).id == WMMA
        assert problem() not in registry._selected
        other = threading.Thread(target=lambda: seen.setdefault("simulating", simulating()))
        other.start()
        other.join()
        with simulate("sm_61"):
            assert registry.select(problem()).id == EAGER
        assert registry.select(problem()).id == WMMA
    assert seen == {"simulating": False}
    assert not simulating()
    with simulate("sm_75", "NVIDIA GeForce GTX 1650"):
        assert registry.select(problem()).id not in (TORCH, WMMA)
    x, weight = torch.randn(3, 8), torch.ones(4, 8, dtype=INT8)
    with expect_kernel("int8_linear", EAGER):
        ops.int8_linear(x, weight, torch.ones(4))


@pytest.fixture
def on_cpu():
    """Twins of our records that any device may take: the same functions, run by the dispatcher on CPU tensors."""
    twins = [
        Kernel(k.op, "twin", k.function, lambda p, f: None, 500, "fallback-volta-test") for k in kernels.TORCH_KERNELS
    ]
    registry.register(*twins)
    yield twins[0].id
    registry.unregister(*twins)


def test_public_ops_through_the_dispatcher(on_cpu):
    x, (weight, scale) = torch.randn(2, 5, 128), ops.quantize_int8_convrot_weight(torch.randn(24, 128), 64)
    for op in ("int8_linear", "int8_linear_fp16"):
        function = getattr(ops, op)
        with use(EAGER):
            expected = function(x, weight, scale, None, BF16, 64, "gelu_tanh")
        with expect_kernel(op, on_cpu):
            assert_equal(function(x, weight, scale, None, BF16, 64, "gelu_tanh"), expected)
        torch._dynamo.reset()
        compiled = torch.compile(lambda *a, f=function: f(*a), fullgraph=True, backend="aot_eager")
        assert_equal(compiled(x, weight, scale, None, BF16, 64, "gelu_tanh"), expected)


def test_gradients_flow_through_int8_linear(on_cpu):
    weight, scale = ops.quantize_int8_convrot_weight(torch.randn(24, 128), 64)
    grads = []
    for forced in (EAGER, on_cpu):
        x = torch.linspace(-1, 1, 256).reshape(2, 128).requires_grad_()
        with use(forced):
            ops.int8_linear(x, weight, scale, convrot_groupsize=64).square().sum().backward()
        grads.append(x.grad)
    assert_equal(grads[1], grads[0])


@pytest.fixture
def volta_on_cpu(setting):
    """CPU tensors choose as on a V100 without compiled code: twins of the torch path that ask its policy, and compositions."""
    facts = simulated_facts("sm_70")
    twins = [
        Kernel(k.op, "twin", k.function, lambda p, f, k=k: k.supports(p, facts), 500, "fallback-volta-test")
        for k in kernels.TORCH_KERNELS
    ]
    for op in ("int8_linear", "int8_swiglu_mlp", "w4a8_linear", "w4a8_scaled_mm"):
        [composed] = [k for k in registry.kernels_of(op) if k.id == COMPOSED]
        twins.append(
            Kernel(op, "twin", composed.function, lambda p, f: None, 400, "composed-test", calls=composed.calls)
        )
    registry.register(*twins)
    yield twins[0].id
    registry.unregister(*twins)


def arguments_of(op, bits, dtype, out_dtype):
    """Arguments for a small call of an op of CALLS."""
    x = torch.randn(5, 64)
    codes, x_scale = ops.quantize_int8_rowwise(x)
    if bits == 8:
        weight, down = (ops.quantize_int8_convrot_weight(torch.randn(n, 64), 64) for n in (128, 24))
        if op == "int8_swiglu_mlp":
            return (x.to(dtype), *weight, *down, None, None, out_dtype, 64, 64)
        return (codes, x_scale, *down, None, out_dtype) if dtype == INT8 else (x.to(dtype), *down, None, out_dtype, 64)
    weight = ops.quantize_w4a8_weight(torch.randn(24, 64), 16, 64, bits)
    return (
        (codes, x_scale, *weight, None, out_dtype, 16)
        if dtype == INT8
        else (x.to(dtype), *weight, None, out_dtype, 16, 64)
    )


def gemms(calls):
    """The kernels that multiplied, of a trace."""
    return {kernel for name, kernel in calls if name in ("int8_linear", "int8_scaled_mm") and "composed" not in kernel}


@pytest.mark.parametrize("call", CALLS, ids=call_id)
def test_calls_take_the_path_of_the_table(call, volta_on_cpu, setting):
    """Not explained but called, on CPU tensors with a V100's policy; the bits are the reference's whatever runs."""
    op, bits, dtype, out_dtype, word, on_volta = call
    arguments = arguments_of(op, bits, dtype, out_dtype)
    with use(EAGER):
        expected = getattr(ops, op)(*arguments)
    setting(word)
    registry._selected.clear()  # the variable is read when a kernel is first chosen for a problem
    with registry.trace() as calls:
        got = getattr(ops, op)(*arguments)
    assert_equal(got, expected)
    assert got.dtype == out_dtype
    assert gemms(calls) == {volta_on_cpu if on_volta == OURS else EAGER}


@pytest.mark.parametrize("word", [None, "0", "fp32"])
@pytest.mark.parametrize("compiled_graph", [False, True], ids=["eager", "fullgraph"])
def test_fp16_fallback_of_a_call(word, compiled_graph, volta_on_cpu, setting):
    """int8_linear(..., fp16_fallback=): goes before the variable and the block, holds for that call alone, in a graph too."""
    setting(word)
    registry._selected.clear()
    x, *rest = arguments_of("int8_linear", 8, BF16, BF16)

    def kernel_of(asked):
        def call(x):
            return ops.int8_linear(x, *rest, fp16_fallback=asked)

        torch._dynamo.reset()
        run = torch.compile(call, fullgraph=True, backend="aot_eager") if compiled_graph else call
        with registry.trace() as calls:
            assert_equal(run(x), expected)
        [kernel] = gemms(calls)
        return kernel

    with use(EAGER):
        expected = ops.int8_linear(x, *rest)
    usual = EAGER if word == "0" else volta_on_cpu
    assert kernel_of(None) == usual
    assert kernel_of(False) == EAGER
    assert kernel_of(True) == volta_on_cpu
    assert kernel_of(None) == usual, "nothing is left behind"
    with fp16_fallback(False):
        assert kernel_of(None) == EAGER
        assert kernel_of(True) == volta_on_cpu


def test_fp16_fallback_of_a_call_with_a_gradient(volta_on_cpu):
    _, *rest = arguments_of("int8_linear", 8, BF16, BF16)
    for asked, kernel in ((False, EAGER), (None, volta_on_cpu)):
        x = torch.randn(5, 64, dtype=BF16, requires_grad=True)
        with registry.trace() as calls:
            ops.int8_linear(x, *rest, fp16_fallback=asked).sum().backward()
        assert x.grad.isfinite().all()
        assert kernel in {name for _, name in calls}


def test_fp16_fallback_of_a_call_checks_its_arguments(volta_on_cpu):
    x, weight, scale, *_ = arguments_of("int8_linear", 8, BF16, BF16)
    with pytest.raises(UnsupportedError, match="weight must be"):
        ops.int8_linear(x, weight.float(), scale, fp16_fallback=False)
    for wrong in ("0", 0, "off"):
        with pytest.raises(UnsupportedError, match="must be True, False or None"):
            ops.int8_linear(x, weight, scale, fp16_fallback=wrong)
        with pytest.raises(UnsupportedError, match="takes True or False"):
            fp16_fallback(wrong)
    with pytest.raises(UnsupportedError, match="drop one of the two"):
        fp16_fallback(False, fp32_activations=True)


@pytest.mark.parametrize("bits", [4, 6])
def test_w4a8_profits(volta_on_cpu, bits):
    """Core's composition decodes the weight and calls int8_scaled_mm, which is ours."""
    x, weight = torch.randn(7, 256).to(BF16), ops.quantize_w4a8_weight(torch.randn(40, 256), 16, 256, bits)
    arguments = (x, *weight, torch.randn(40), None, 16, 256)
    with use(EAGER):
        expected = ops.w4a8_linear(*arguments)
    with registry.trace() as calls:
        assert_equal(ops.w4a8_linear(*arguments), expected)
    assert ("decode_w4a8_weight", EAGER) in calls
    assert calls[-1] == ("int8_scaled_mm", volta_on_cpu)
