"""Which kernel an INT8 linear takes: device class x dtype x options, on simulated devices, and what the user is told."""

import itertools
import logging
import threading
from dataclasses import replace

import pytest
import torch

from kitchen_core import UnsupportedError, explain, ops, registry, simulate, use
from kitchen_core.cli import main
from kitchen_core.devices import simulated_facts, simulating
from kitchen_core.registry import Kernel
from kitchen_core.testing import assert_equal, expect_kernel
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
    ("sm_75", "NVIDIA GeForce MX450"),  # Turing without tensor cores
    ("sm_72", None), ("sm_75", "Tesla T4"), ("sm_75", "NVIDIA GeForce RTX 2080 Ti"),  # INT8 tensor cores from here on
    ("sm_80", None), ("sm_86", None), ("sm_89", None), ("sm_90", None), ("sm_100", None), ("sm_120", None),
]  # fmt: skip

# op, dtype of x, output dtype, setting, kernel on Volta
CALLS = [
    ("int8_linear", BF16, BF16, None, OURS),
    ("int8_linear", FP16, FP16, None, OURS),
    ("int8_linear", BF16, FP32, None, OURS),  # the output dtype asked for does not matter
    ("int8_linear", FP32, FP32, None, COMPOSED),
    ("int8_linear", FP32, BF16, None, COMPOSED),
    ("int8_linear", FP32, FP32, "fp32", OURS),
    ("int8_linear", BF16, BF16, "1", OURS),
    ("int8_linear", BF16, BF16, "fp32", OURS),
    ("int8_linear", BF16, BF16, "0", COMPOSED),
    ("int8_linear", BF16, BF16, "perhaps", COMPOSED),
    ("int8_scaled_mm", INT8, BF16, None, OURS),
    ("int8_scaled_mm", INT8, FP16, None, OURS),
    ("int8_scaled_mm", INT8, FP32, None, EAGER),
    ("int8_scaled_mm", INT8, FP32, "fp32", OURS),
    ("int8_scaled_mm", INT8, BF16, "0", EAGER),
]
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


@pytest.mark.parametrize("call", CALLS, ids=lambda c: "-".join(str(w).removeprefix("torch.") for w in c[:4]))
@pytest.mark.parametrize("device", [*VOLTA, *OTHERS], ids=lambda d: d[1] or d[0])
def test_dispatch_table(device, call, build, setting):
    op, dtype, out_dtype, word, on_volta = call
    setting(word)
    expected = NOT_OURS if device not in VOLTA else build if on_volta == OURS else on_volta
    with simulate(*device):
        for options, m in itertools.product(OPTIONS, (0, 1, 300, 8192)):
            if op == "int8_scaled_mm":
                options = tuple(o for o in options if not o.startswith("input_act"))
            got = chosen(op, dtype, out_dtype, options, m, rotation=256)
            assert got == expected if expected != NOT_OURS else got not in (TORCH, WMMA)


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


@pytest.mark.parametrize("bits", [4, 6])
@pytest.mark.parametrize("device", [*VOLTA, *OTHERS], ids=lambda d: d[1] or d[0])
def test_dispatch_table_w4a8(device, bits, build, setting):
    """Both halves are composed, and the last op of the composition takes the path that its device deserves."""
    with simulate(*device):
        if device in VOLTA:
            fields = {"group": 16, "bits": bits, "rotation": 256}
            assert chosen("w4a8_linear", BF16, BF16, **fields) == COMPOSED
            assert chosen("w4a8_scaled_mm", INT8, BF16, **fields) == COMPOSED
            assert chosen("int8_scaled_mm", INT8, BF16) == build
            assert chosen("int8_swiglu_mlp", BF16, BF16) == COMPOSED  # of two int8_linear
        else:
            assert chosen("int8_scaled_mm", INT8, BF16) not in (TORCH, WMMA)


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
    assert len(CALLS) * len(OPTIONS) >= 45
    assert {c[0] for c in CALLS} == {k.op for k in kernels.TORCH_KERNELS} - {"int8_linear_fp16"}
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
        if op == "int8_scaled_mm" and "dtype" in fields:
            reason = "a float32 output stands for float32 activations"
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
        assert [r.message.count("slow path") for r in caplog.records] == [1, 1]
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


def test_missing_code_is_told_once_and_the_torch_path_runs(caplog, monkeypatch, not_compiled, setting):
    monkeypatch.setattr(registry, "_warned", set())
    with caplog.at_level(logging.WARNING, "kitchen"), simulate("sm_70"):
        for m in (1, 2, 3):
            assert registry.select(problem(M=m)).id == TORCH
    assert [r.message.count("kitchen-fallback-volta was installed without") for r in caplog.records] == [1]
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
                assert answers[WMMA] == answers[TORCH] == "switched off by fp16_fallback(False)"
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
def w4a8_on_cpu(on_cpu):
    """Twins of core's compositions of w4a8 too, so that the whole chain of a V100 runs on CPU tensors."""
    composed = [k for op in ("w4a8_linear", "w4a8_scaled_mm") for k in registry.kernels_of(op) if k.id == COMPOSED]
    twins = [Kernel(k.op, "twin", k.function, lambda p, f: None, 500, "composed-test") for k in composed]
    assert len(twins) == 2
    registry.register(*twins)
    yield on_cpu
    registry.unregister(*twins)


@pytest.mark.parametrize("bits", [4, 6])
def test_w4a8_profits(w4a8_on_cpu, bits):
    """Core's composition decodes the weight and calls int8_scaled_mm, which is ours."""
    x, weight = torch.randn(7, 256).to(BF16), ops.quantize_w4a8_weight(torch.randn(40, 256), 16, 256, bits)
    arguments = (x, *weight, torch.randn(40), None, 16, 256)
    with use(EAGER):
        expected = ops.w4a8_linear(*arguments)
    with registry.trace() as calls:
        assert_equal(ops.w4a8_linear(*arguments), expected)
    assert ("decode_w4a8_weight", EAGER) in calls
    assert calls[-1] == ("int8_scaled_mm", w4a8_on_cpu)
