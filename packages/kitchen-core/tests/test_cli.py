"""`kitchen explain` and `kitchen doctor`: what they assume is said, and is what real calls ask for."""

import json
import subprocess
import sys

import pytest
import torch

from kitchen_core import UnsupportedError, doctor
from kitchen_core._environment import is_on
from kitchen_core.cli import main
from kitchen_core.devices import simulate
from kitchen_core.ops._define import problem_builders
from kitchen_core.testing.samples import SAMPLES
from kitchen_core.typical import TYPICAL_M, typical


@pytest.mark.parametrize("op", sorted(problem_builders()))
def test_a_typical_call_asks_what_a_real_one_does(op):
    """Some sample of the op has the same kinds of fields: dtypes, bits, and a group, rotation, rank or N where it has one."""
    fields = typical(op, M=17)

    def kinds(problem):
        exact = {
            name: problem.get(name, default) for name, default in (("dtype", None), ("out_dtype", None), ("bits", 8))
        }
        return exact | {name: bool(problem.get(name)) for name in ("M", "N", "K", "group", "rank")}

    samples = [sample for sample in SAMPLES if sample.op == op]
    real = [problem_builders()[op](*sample.make((17,), torch.bfloat16))._asdict() for sample in samples]
    assert kinds(fields) in [kinds(problem) for problem in real]
    assert any(set(fields.get("options", ())) <= set(problem["options"]) for problem in real)


def test_a_dtype_is_that_of_the_float_operands():
    half = torch.float16
    assert [typical("int8_linear", 1, half)[name] for name in ("dtype", "out_dtype")] == [half, half]
    assert [typical("int8_scaled_mm", 1, half)[name] for name in ("dtype", "out_dtype")] == [torch.int8, half]
    assert [typical("quantize_int8_rowwise", 1, half)[name] for name in ("dtype", "out_dtype")] == [half, torch.int8]


def explained(capsys, *arguments):
    assert main(["explain", *arguments]) == 0
    return capsys.readouterr().out


def test_explain_says_what_it_assumed(capsys):
    assert "assumed, as not given: M=1, N=3072, K=3072, rotation=256, bfloat16" in explained(capsys, "int8_linear")
    told = explained(capsys, "awq_linear", "--m", "64", "--group", "128", "--as", "sm_90")
    assert told.startswith("awq_linear: M=64 N=3072 K=3072, bfloat16 -> bfloat16, group=128, 4 bits")
    assert told.rstrip().endswith("assumed, as not given: N=3072, K=3072, bits=4, bfloat16")
    everything = ["-M", "2", "-N", "64", "-K", "128", "--rotation", "0", "--dtype", "float16", "--as", "sm_90"]
    assert "assumed" not in explained(capsys, "int8_linear", *everything)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_explain_says_that_it_answered_for_the_cpu(capsys):
    assert "the CPU (torch sees no GPU here; --as sm_90 pretends to have one)" in explained(capsys, "int8_linear")
    assert "the CPU" not in explained(capsys, "int8_linear", "--as", "sm_90")


def test_explain_as_json_says_the_same(capsys):
    found = json.loads(explained(capsys, "w4a8_linear", "-M", "8", "--json", "--as", "sm_80"))
    assert "M=8" in found["problem"]
    assert found["assumed"] == ["N=3072", "K=3072", "group=16", "rotation=256", "bits=4", "bfloat16"]


@pytest.mark.parametrize("words", [["-M", "-3"], ["-M", "many"], ["--dtype", "int8"], ["--grop", "3"]])
def test_nonsense_is_refused(words, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["explain", "int8_linear", *words])
    assert stopped.value.code == 2
    assert words[0].lstrip("-") in capsys.readouterr().err


@pytest.mark.parametrize("command", [["explain", "int8_linear"], ["doctor"]])
def test_a_name_without_an_architecture_is_refused(command, capsys):
    assert main([*command, "--name", "NVIDIA GeForce GTX 1660"]) == 2
    assert "give its architecture too, such as --as sm_75" in capsys.readouterr().err


def test_doctor_says_for_which_rows_a_reason_holds():
    cases = {
        "M=1": {"candidates": [{"kernel": "a", "reason": "no"}, {"kernel": "b", "reason": None}]},
        "M=4096": {"candidates": [{"kernel": "a", "reason": "no"}, {"kernel": "b", "reason": "too many rows"}]},
    }
    assert doctor._reasons(cases) == {"no": ["a"], "too many rows": ["b at M=4096"]}


def test_doctor_says_what_layer_it_asked_for():
    told = doctor.render(doctor.examine("sm_90"))
    assert all(f"M={m}" in told for m in TYPICAL_M)
    assert "a layer of N=3072, K=3072, bfloat16" in told


def test_doctor_names_a_gpu_that_torch_has_no_code_for(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_75", "sm_80", "sm_90a"])
    with simulate("sm_90"):
        assert not doctor.examine("sm_90")["problems"]
    assert not doctor.examine("sm_86")["problems"], "code of one major version serves its later minor ones"
    [problem] = doctor.examine("sm_70")["problems"]
    assert "has no code for sm_70, only for sm_75, sm_80, sm_90a" in problem
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["compute_80"])
    assert not doctor.examine("sm_120")["problems"], "PTX serves every later GPU"
    monkeypatch.setattr(torch.cuda, "get_arch_list", list)
    assert not doctor.examine("sm_70")["problems"], "a CPU build of torch says nothing of GPUs"


def test_doctor_names_plugins_that_are_not_there(monkeypatch):
    monkeypatch.setenv("KITCHEN_PLUGINS", "kitchen-core, kitchen-int9")
    [problem] = [p for p in doctor.examine("sm_90")["problems"] if "KITCHEN_PLUGINS" in p]
    assert "names kitchen-int9, and no plug-in or distribution here is called so" in problem


@pytest.mark.parametrize("name", ["KITCHEN_STRICT", "KITCHEN_CHECK_FINITE"])
def test_a_switch_is_0_or_1(name, monkeypatch):
    for word, on in (("", False), ("0", False), (" 1 ", True)):
        monkeypatch.setenv(name, word)
        assert is_on(name) is on
    monkeypatch.setenv(name, "true")
    with pytest.raises(UnsupportedError, match=rf"{name}='true' is not 0 or 1; correct or unset it"):
        is_on(name)
    importing = subprocess.run([sys.executable, "-c", "import kitchen_core.ops"], capture_output=True, text=True)
    assert (importing.returncode != 0) == (name == "KITCHEN_CHECK_FINITE"), "the one that is read at import"
    assert importing.returncode == 0 or "is not 0 or 1" in importing.stderr
