"""Files as attackers would make them: every reader of ours answers with an error of kitchen, in bounded time and memory.

Valid quantized files are taken apart and put together wrong: bytes, headers, markers, metadata, indices. Whatever comes out
is loaded, inspected and verified. KITCHEN_EXAMPLES is the number of files a reader and way of spoiling.
"""

import ast
import contextlib
import json
import os
import random
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import kitchen_models as km
from kitchen_core import FormatError, QuantizedLinear, get_format
from kitchen_core.errors import KitchenError
from kitchen_core.formats import marker_tensor, read_marker
from kitchen_core.known_formats import KNOWN_FORMATS

ROOT = Path(__file__).resolve().parent.parent
FORMATS = sorted(KNOWN_FORMATS)
EXAMPLES = int(os.environ.get("KITCHEN_EXAMPLES", "40"))
SECONDS = 20.0  # of one reader on one small file: a bound that only a runaway passes
HUGE = (-1, -(2**63), 2**31, 2**40, 2**62, 2**63 - 1, 2**64, 10**30)
VALUES = (None, True, False, 0, 1, -1, 3, 64, 255, 2**31, 10**400, 0.5, 1e308, "", "int8_tensorwise", "../x", "\x1b[2J", "NaN",
          [], [1], [[[]]], {}, {"format": {}}, {"a": [None]}, "w" * 5000)  # fmt: skip


@pytest.fixture(scope="module")
def samples(tmp_path_factory):
    """One small valid file of each format, as our writer makes it."""
    folder = tmp_path_factory.mktemp("samples")
    made = {}
    for name in FORMATS:
        model = nn.Sequential(nn.Linear(128, 96, dtype=torch.bfloat16), nn.Linear(64, 64))
        km.quantize_(model, f"0={name}, *=none")
        km.save(model, folder / f"{name}.safetensors")
        made[name] = folder / f"{name}.safetensors"
    return made


def read_everything(path):
    """Every reader on one file: fine, or an error of kitchen's; nothing else, and soon."""
    for reader in (km.inspect_file, km.load, lambda p: km.verify_files(p, p)):
        begun = time.monotonic()
        with contextlib.suppress(KitchenError):
            _use(reader(path))
        assert time.monotonic() - begun < SECONDS, f"{reader} took {time.monotonic() - begun:.1f} s"


def _use(found):
    """Layers that were taken must compute, or refuse: no index of theirs may lead outside of a tensor."""
    for layer in found.values() if isinstance(found, dict) else ():
        if isinstance(layer, QuantizedLinear) and layer.in_features * layer.out_features < 1 << 22:
            assert layer(torch.randn(2, layer.in_features)).shape == (2, layer.out_features)


def parts(path):
    """(header as a table, data) of a safetensors file."""
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def put(path, header, data, length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


# --------------------------------------------------------------------------------------------- ways of spoiling


def spoil_bytes(choice, path, target):
    raw = bytearray(path.read_bytes())
    for _ in range(choice(range(1, 6))):
        raw[choice(range(len(raw)))] = choice(range(256))
    target.write_bytes(raw[: choice((len(raw), len(raw), choice(range(len(raw)))))] + bytes(choice((0, 0, 9))))


def spoil_entries(choice, path, target):
    """Entries of the header: dtypes, shapes and offsets that fit each other or not; overlapping, huge, negative, missing."""
    header, data = parts(path)
    names = [n for n in header if n != "__metadata__"]
    for _ in range(choice((1, 1, 2, 3))):
        entry = header[choice(names)]
        what = choice(("dtype", "shape", "offsets", "swap", "value", "drop", "same numbers"))
        if what == "dtype":
            entry["dtype"] = choice(
                ("F32", "F16", "BF16", "I8", "U8", "F8_E4M3", "I64", "BOOL", "F4", "F64", "C64", "X")
            )
        elif what == "shape":
            entry["shape"] = [choice((*HUGE, 0, 1, 2, 64, 128)) for _ in range(choice((0, 1, 2, 3, 70)))]
        elif what == "offsets":
            entry["data_offsets"] = [choice((*HUGE, 0, 1, len(data))) for _ in range(choice((0, 1, 2, 3)))]
        elif what == "swap":
            other = header[choice(names)]
            entry["data_offsets"], other["data_offsets"] = other.get("data_offsets"), entry.get("data_offsets")
        elif what == "value":
            entry[choice(("dtype", "shape", "data_offsets", "more"))] = choice(VALUES)
        elif what == "drop":
            entry.pop(choice(("dtype", "shape", "data_offsets")), None)
        elif isinstance(entry.get("shape"), list):  # a shape of as many elements, so that only the format can object
            entry["shape"] = choice((entry["shape"][::-1], [1, *entry["shape"]], [*entry["shape"], 1]))
    put(target, header, data)


def spoil_names(choice, path, target):
    """Tensors missing, renamed, twice under two spellings, or beside others that do not belong."""
    header, data = parts(path)
    names = [n for n in header if n != "__metadata__"]
    name = choice(names)
    entry = header.pop(name)
    new = choice((name + ".weight", "0.weight", "weight", "", "\0", "\x1b[31m", "a" * 70000, "../../etc/passwd", name.upper(),
                  "0.weight_scale_2", "0.qweight", "0.comfy_quant"))  # fmt: skip
    header[new] = entry
    put(target, header, data)


def spoil_metadata(choice, path, target):
    header, data = parts(path)
    metadata = header.setdefault("__metadata__", {})
    key = choice([*metadata, "_quantization_metadata", "format", "kitchen"])
    old = metadata.get(key, "{}")
    bad = (
        *VALUES, json.dumps({"layers": {"0": choice(VALUES)}}), json.dumps({"layers": choice(VALUES)}),
        json.dumps({"format_version": choice(VALUES), "layers": {"0": {"format": choice(VALUES)}}}),
        "[" * 50000, '{"layers":' * 2000, old[: len(old) // 2], old.replace("int8", "int9"), '{"a":1,"a":2}',
    )  # fmt: skip
    if choice((True, True, False)):
        metadata[key] = choice(bad)
    else:
        header["__metadata__"] = choice(VALUES)
    put(target, header, data)


def spoil_markers(choice, path, target):
    """The JSON in a layer's comfy_quant tensor."""
    state = load_file(path)
    markers = [key for key in state if key.endswith("comfy_quant")]
    marker = read_marker(state[markers[0]])
    for _ in range(choice((1, 2))):
        marker[choice([*marker, "format", "group_size", "convrot_groupsize", "convrot", "params", "surprise"])] = (
            choice(VALUES)
        )
    spelled = json.dumps(marker).encode()
    text = choice(
        (spelled, spelled, spelled[:-3], b"[" * 20000, b"\xff\xfe", b"null", b"{}", b"", spelled + b"\0" * 100)
    )
    state[markers[0]] = torch.tensor(list(text), dtype=torch.uint8)
    if choice((True, False, False)):
        state[markers[0]] = state[markers[0]].to(choice((torch.int8, torch.float32, torch.int64)))
    save_file(state, target, {"format": "pt"})


def spoil_tensors(choice, path, target):
    """Tensors of another dtype or shape under the right names and a true marker."""
    state = load_file(path)
    key = choice([k for k in state if not k.endswith("comfy_quant")])
    t = state[key]
    others = (
        t[..., :0], t.flatten(), t.flatten()[: t.numel() // 2].clone(), t.repeat(*[2] * max(1, t.dim())), t.unsqueeze(0),
        t.view(torch.uint8) if t.dim() else t, torch.zeros(t.shape, dtype=choice((torch.float64, torch.int64, torch.bool))),
        torch.full(t.shape, float("nan")) if t.is_floating_point() else t,
    )  # fmt: skip
    state[key] = choice(others).contiguous()
    save_file(state, target, {"format": "pt"})


SPOILERS = (spoil_bytes, spoil_entries, spoil_names, spoil_metadata, spoil_markers, spoil_tensors)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("spoil", SPOILERS, ids=lambda f: f.__name__)
def test_a_spoiled_file_is_an_error_of_ours(name, spoil, samples, tmp_path):
    for example in range(EXAMPLES):
        target = tmp_path / f"{example}.safetensors"
        spoil(random.Random(f"{name} {spoil.__name__} {example}").choice, samples[name], target)
        try:
            read_everything(target)
        except Exception as error:
            raise AssertionError(f"{name}, {spoil.__name__}, example {example}: {error!r}") from error
        target.unlink()


@pytest.mark.parametrize("name", FORMATS)
def test_a_spoiled_state_dict_never_reaches_a_kernel(name):
    """load_state_dict of a module: what fits computes, what does not is refused; torch's own RuntimeError lists shapes."""
    made = QuantizedLinear.from_linear(nn.Linear(128, 96), name)
    choice = random.Random(name).choice
    for _ in range(3 * EXAMPLES):
        state = dict(made.state_dict())
        key = choice(list(state))
        t = state[key]
        state[key] = choice(
            (t[..., :0].clone(), t.flatten(), t.unsqueeze(0), t.to(torch.int32), t.double(), t[:1].clone())
        )
        fresh = QuantizedLinear(made.inner(), name, made.config, made.bias, torch.float32)
        with contextlib.suppress(KitchenError, RuntimeError):
            fresh.load_state_dict(state, strict=True, assign=choice((True, False)))
        with contextlib.suppress(KitchenError):
            assert fresh(torch.randn(2, 128)).shape == (2, 96)


@pytest.mark.parametrize("name", FORMATS)
def test_markers_of_any_json_are_a_config_or_an_error(name):
    format = get_format(name)
    made = QuantizedLinear.from_linear(nn.Linear(128, 96), name)
    shapes = {key: tuple(t.shape) for key, t in made.inner().items()}
    truth = format.marker(made.config)
    choice = random.Random(name).choice
    taken = 0
    for _ in range(20 * EXAMPLES):
        marker = {**truth, choice([*truth, "group_size", "convrot_groupsize", "rank", "bits"]): choice(VALUES)}
        with contextlib.suppress(KitchenError):
            config = format.config_from_marker(marker, shapes)
            format.check(made.inner(), config)
            taken += 1
    assert taken, "harmless values are taken"


def test_bombs_take_bounded_time_and_memory(tmp_path, samples):
    """In a process of its own, so that its largest resident set can be asked for."""
    header, data = parts(samples["int8_tensorwise"])
    bombs = {
        "deep": b"[" * 10_000_000,
        "wide": b"{" + b",".join(b'"%d":{}' % i for i in range(1_500_000)) + b"}",
        "commas": b'{"a":[' + b"0," * 15_000_000 + b"0]}",
        "digits": b'{"a":' + b"9" * 4_000_000 + b"}",
        "string": b'{"a":"' + b"x" * 60_000_000 + b'"}',
        "escapes": b'{"a":"' + b"\\u0041" * 5_000_000 + b'"}',
    }
    for name, text in bombs.items():
        put(tmp_path / f"{name}.safetensors", text, b"")
    put(tmp_path / "length.safetensors", header, data, 2**63)
    with open(tmp_path / "sparse.safetensors", "wb") as sparse:  # 1 TB of holes, an honest header
        entry = {"dtype": "I8", "shape": [2**20, 2**20], "data_offsets": [0, 2**40]}
        text = json.dumps({"0.weight": entry}).encode()
        sparse.write(struct.pack("<Q", len(text)) + text)
        with contextlib.suppress(OSError):
            sparse.truncate(8 + len(text) + 2**40)
    marker = {**header, "0.comfy_quant": {"dtype": "U8", "shape": [2**33], "data_offsets": [0, 2**33]}}
    with open(tmp_path / "marker.safetensors", "wb") as sparse:
        text = json.dumps({"0.comfy_quant": marker["0.comfy_quant"]}).encode()
        sparse.write(struct.pack("<Q", len(text)) + text)
        sparse.truncate(8 + len(text) + 2**33)
    script = (
        "import resource, sys, time, pathlib, kitchen_models as km\n"
        "from kitchen_core.errors import KitchenError\n"
        "usage = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10\n"
        "import torch, safetensors.torch\n"
        "for path in sorted(pathlib.Path(sys.argv[1]).glob('*.safetensors')):\n"
        "  begun, before = time.monotonic(), usage()\n"
        "  for reader in (km.inspect_file, km.load):\n"
        "    if path.stem == 'sparse' and reader is km.load: continue\n"
        "    try: reader(path)\n"
        "    except KitchenError as error: assert len(str(error)) < 4000, len(str(error))\n"
        "  print(path.stem, f'{time.monotonic() - begun:.1f}', usage() - before, flush=True)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, tmp_path], capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-3000:]
    found = {name: (float(seconds), int(mib)) for name, seconds, mib in map(str.split, done.stdout.splitlines())}
    assert set(found) == {*bombs, "length", "sparse", "marker"}
    assert max(seconds for seconds, _ in found.values()) < 60, found
    assert sum(mib for _, mib in found.values()) < 3000, found


def test_indices_and_shards(tmp_path, samples):
    (tmp_path / "a.safetensors").write_bytes(samples["int8_tensorwise"].read_bytes())
    header, _ = parts(samples["int8_tensorwise"])
    names = [n for n in header if n != "__metadata__"]
    index = tmp_path / "m.safetensors.index.json"
    choice = random.Random(1).choice
    for _ in range(2 * EXAMPLES):
        mapping = dict.fromkeys(names, "a.safetensors")
        mapping[choice(names)] = choice(
            (*VALUES, "b.safetensors", "/etc/passwd", "..\\a.safetensors", "a.safetensors\0")
        )
        table = choice(
            ({"weight_map": mapping}, {"weight_map": choice(VALUES)}, {"metadata": choice(VALUES)}, choice(VALUES))
        )
        index.write_text(json.dumps(table))
        read_everything(index)
    os.symlink("/etc/hostname", tmp_path / "link.safetensors")
    index.write_text(json.dumps({"weight_map": {"x": "link.safetensors"}}))
    with pytest.raises(FormatError):
        km.load(index)


def test_calibration_files(tmp_path):
    layer = nn.Sequential(nn.Linear(64, 32))
    calibrations = km.calibrate(layer, [torch.randn(40, 64)])
    km.save_calibration(calibrations, tmp_path / "c.safetensors")
    for example in range(2 * EXAMPLES):
        choice = random.Random(example).choice
        spoil = choice((spoil_bytes, spoil_entries, spoil_names, spoil_metadata))
        spoil(choice, tmp_path / "c.safetensors", tmp_path / "bad.safetensors")
        with contextlib.suppress(KitchenError):
            km.load_calibration(tmp_path / "bad.safetensors")


def test_rules_files(tmp_path):
    path = tmp_path / "rules.json"
    choice = random.Random(2).choice
    for _ in range(3 * EXAMPLES):
        rule = {choice(("layers", "match", "format", "options", "x")): choice(VALUES) for _ in range(3)}
        path.write_text(json.dumps(choice((rule, [rule], {"rules": [rule, choice(VALUES)]}, choice(VALUES)))))
        with contextlib.suppress(KitchenError):
            km.Rules.of(km.Rules.read(path))
    for text in ("", "[" * 100_000, "\xff", "a=b=c", '{"a":1,"a":2}'):
        path.write_text(text)
        with contextlib.suppress(KitchenError):
            km.Rules.of(km.Rules.read(path))


@pytest.mark.parametrize(
    "raw", [b"", b"\0", b"null", b"3", b'"x"', b"[" * 50000, b'{"a":' * 3000, b"{" + b" " * 100000, b"\xff" * 9]
)
def test_marker_bytes(raw):
    with contextlib.suppress(FormatError):
        assert isinstance(read_marker(torch.tensor(list(raw), dtype=torch.uint8)), dict)
    assert read_marker(marker_tensor({"format": "int8_tensorwise"})) == {"format": "int8_tensorwise"}


def test_no_reader_can_execute_anything():
    """No pickle, eval, exec or shell, and no torch.load that is not of weights only, in any package."""
    forbidden = {"eval", "exec", "compile", "__import__"}
    calls = []
    for path in sorted(ROOT.glob("packages/*/src/**/*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                names = [a.name for a in node.names] + [getattr(node, "module", None) or ""]
                if {"pickle", "marshal", "shelve", "dill", "joblib"} & {n.split(".")[0] for n in names}:
                    calls.append(f"{path}: import of {names}")
            if not isinstance(node, ast.Call):
                continue
            name = getattr(node.func, "id", "")
            attribute = getattr(node.func, "attr", "")
            if name in forbidden:
                calls.append(f"{path}:{node.lineno}: {name}()")
            if attribute == "load" and getattr(node.func.value, "id", "") == "torch":
                keywords = {k.arg: k.value for k in node.keywords}
                if not getattr(keywords.get("weights_only"), "value", False):
                    calls.append(f"{path}:{node.lineno}: torch.load without weights_only")
            if any(k.arg == "shell" and getattr(k.value, "value", False) for k in node.keywords):
                calls.append(f"{path}:{node.lineno}: shell=True")
    assert not calls
