"""Converting between dialects: every form packed here by index formulas, read; what we write, read by a strict reader here."""

import hashlib
import itertools
import json
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import kitchen_models as km
from kitchen_core import get_format
from kitchen_core.errors import FormatError, KitchenError
from kitchen_core.formats import marker_tensor
from kitchen_core.layouts import tile_packed
from kitchen_models import staging
from kitchen_models.foreign import Hints
from kitchen_models.targets import TARGETS

N, K, R, G = 128, 256, 16, 64
F16, BF16 = torch.float16, torch.bfloat16


def normal(*shape, seed=0, dtype=BF16):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def whole(low, high, *shape, seed=0):
    return np.random.default_rng(seed).integers(low, high, shape)


def grid(*sizes):
    return np.meshgrid(*(np.arange(size) for size in sizes), indexing="ij")


# ------------------------------------------------------------------------- packers: nothing of ours, index by index


def words(positions, nibbles, codes, count, dtype=np.uint32):
    """Words of which word ``positions`` has ``codes`` in nibble ``nibbles``."""
    made = np.zeros(count, dtype=np.uint64)
    np.bitwise_or.at(
        made, positions.ravel(), (codes & 15).astype(np.uint64).ravel() << (4 * nibbles.ravel()).astype(np.uint64)
    )
    return made.astype(dtype)


def scatter(positions, values):
    made = torch.zeros(values.numel(), dtype=values.dtype)
    made[torch.from_numpy(positions.ravel())] = values.reshape(-1)
    return made


def nunchaku_codes(codes):
    n, k = grid(*codes.shape)
    nt, a, b, c = n // 128, n % 128 // 16, n % 16 // 8, n % 8
    kt, d, e, f = k // 64, k % 64 // 32, k % 32 // 8, k % 8
    word = ((((nt * (codes.shape[1] // 64) + kt) * 8 + a) * 8 + c) * 4 + e) * 4 + 2 * b + d
    made = words(word, f, codes, codes.size // 8)
    return torch.from_numpy(made.view(np.int8).reshape(codes.shape[0], -1).copy())


def nunchaku_inside(n):
    return n // 128 * 128 + n % 128 // 16 * 16 + n % 8 // 2 * 4 + n % 16 // 8 * 2 + n % 2


def nunchaku_vector(values):
    return scatter(nunchaku_inside(np.arange(values.numel())), values)


def nunchaku_scales(scales):
    groups, outputs = scales.shape
    g, n = grid(groups, outputs)
    return scatter((n // 128 * groups + g) * 128 + nunchaku_inside(n) % 128, scales).reshape(groups, outputs)


def nunchaku_down(down):
    k, r = grid(*down.shape)
    rank = down.shape[1]
    lane = 4 * (r % 8) + k % 8 // 2
    flat = ((k // 16 * (rank // 16) + r // 16) * 32 + lane) * 8 + 4 * (r % 16 // 8) + 2 * (k % 16 // 8) + k % 2
    return scatter(flat, down).reshape(down.shape)


def nunchaku_up(up):
    n, r = grid(*up.shape)
    rank = up.shape[1]
    lane = 4 * (n % 8) + r % 8 // 2
    flat = ((n // 16 * (rank // 16) + r // 16) * 32 + lane) * 8 + 4 * (n % 16 // 8) + 2 * (r % 16 // 8) + r % 2
    return scatter(flat, up).reshape(up.shape)


def gemv_codes(codes, dtype):
    n, k = grid(*codes.shape)
    word = n // 4 * codes.shape[1] + 64 * (k // 64) + 16 * (n % 4) + 8 * (k % 64 // 32) + k % 8
    made = words(word, k % 32 // 8, codes, codes.size // 4, np.uint16)
    return torch.from_numpy(made.view(dtype).reshape(codes.shape[0] // 4, -1).copy())


def autoawq_words(codes):
    """[rows, N] -> int32 [rows, N/8], columns 0 2 4 6 1 3 5 7 of each eight in nibbles 0..7."""
    row, n = grid(*codes.shape)
    made = words(
        row * (codes.shape[1] // 8) + n // 8, np.array([0, 4, 1, 5, 2, 6, 3, 7])[n % 8], codes, codes.size // 8
    )
    return torch.from_numpy(made.view(np.int32).reshape(codes.shape[0], -1).copy())


def plain_words(codes):
    """[rows, columns] -> int32 [rows, columns/8], column i of each eight in nibble i."""
    row, n = grid(*codes.shape)
    made = words(row * (codes.shape[1] // 8) + n // 8, n % 8, codes, codes.size // 8)
    return torch.from_numpy(made.view(np.int32).reshape(codes.shape[0], -1).copy())


def nibble_bytes(codes):
    pairs = (codes[:, 0::2] & 15) | (codes[:, 1::2] & 15) << 4
    return torch.from_numpy(pairs.astype(np.uint8).view(np.int8).copy())


# ------------------------------------------------------------------------------------------- layers in every dialect


def svdquant_layer(seed=0):
    """(canonical tensors under comfy's keys, bias, nunchaku v2 tensors), of one layer."""
    codes = whole(-8, 8, N, K, seed=seed)
    scale, bias, smooth = (
        normal(K // 64, N, seed=seed).abs() / 8,
        normal(N, seed=seed + 1),
        normal(K, seed=seed + 2).abs() + 0.5,
    )
    down, up = normal(K, R, seed=seed + 3) / 8, normal(N, R, seed=seed + 4) / 8
    ours = {
        "weight": nibble_bytes(codes), "weight_scale": scale, "proj_down": down, "proj_up": up, "smooth_factor": smooth,
        "bias": bias,
    }  # fmt: skip
    theirs = {
        "qweight": nunchaku_codes(codes), "wscales": nunchaku_scales(scale), "smooth_factor": nunchaku_vector(smooth),
        "smooth_factor_orig": nunchaku_vector(smooth), "proj_down": nunchaku_down(down), "proj_up": nunchaku_up(up),
        "bias": nunchaku_vector(bias),
    }  # fmt: skip
    return ours, theirs


def awq_numbers(n=N, k=K, g=G, seed=0, dtype=F16):
    """(codes 0..15 [n, k], integer zeros [k/g, n], scales [k/g, n])"""
    return (
        whole(0, 16, n, k, seed=seed),
        whole(1, 16, k // g, n, seed=seed + 1),
        normal(k // g, n, seed=seed, dtype=dtype).abs() / 8,
    )


def comfy_awq(codes, zeros, scales):
    z = ((8 - torch.from_numpy(zeros).double()) * scales.double()).to(scales.dtype)
    return {"weight": nibble_bytes(codes), "weight_scale": scales, "weight_zeros": z}


def padded(tensor, rows):
    return torch.nn.functional.pad(tensor, (0, 0, 0, rows - tensor.shape[0]))


def awq_layer(dialect, seed=0, dtype=F16):
    """(canonical tensors under comfy's keys, the dialect's tensors, its quantization_config)"""
    codes, zeros, scales = awq_numbers(seed=seed, dtype=dtype)
    config = {"quant_method": "awq", "bits": 4, "group_size": G}
    if dialect == "autoawq":
        stored = {"qweight": autoawq_words(codes.T), "qzeros": autoawq_words(zeros), "scales": scales}
        config["version"] = "gemm"
    elif dialect == "autoawq-gemv":
        points = np.pad(zeros, ((0, 16 - K // G), (0, 0)))
        stored = {
            "qweight": plain_words(codes),
            "qzeros": plain_words(points.T),
            "scales": padded(scales, 16).t().contiguous(),
        }
        config["version"] = "gemv"
    elif dialect == "autoawq-gemv-fast":
        negative = -(torch.from_numpy(zeros).float() * scales.float()).to(dtype)
        stored = {"qweight": gemv_codes(codes, np.int16), "qzeros": padded(negative, 16), "scales": padded(scales, 16)}
        config["version"] = "gemv_fast"
    elif dialect in ("gptq", "gptq_v2"):
        points = zeros - (dialect == "gptq")
        stored = {
            "qweight": plain_words(codes).reshape(N, K // 8).t().contiguous(), "qzeros": plain_words(points), "scales": scales,
            "g_idx": (torch.arange(K) // G).int(),
        }  # fmt: skip
        config |= {"quant_method": "gptq", "checkpoint_format": dialect}
    else:
        stored = {
            "weight_packed": plain_words(codes), "weight_scale": scales.t().contiguous(), "weight_shape": torch.tensor([N, K]),
            "weight_zero_point": ct_points(zeros),
        }  # fmt: skip
        config = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    return comfy_awq(codes, zeros, scales), stored, config


def ct_points(zeros):
    """[groups, N] -> int32 [N/8, groups], eight outputs a word."""
    g, n = grid(*zeros.shape)
    made = words(n // 8 * zeros.shape[0] + g, n % 8, zeros, zeros.size // 8)
    return torch.from_numpy(made.view(np.int32).reshape(zeros.shape[1] // 8, zeros.shape[0]).copy())


AWQ_DIALECTS = ["autoawq", "autoawq-gemv", "autoawq-gemv-fast", "gptq", "gptq_v2", "compressed-tensors"]


def write(path, layers, metadata=None, **plain):
    state = {
        f"{name}.{key}": tensor.contiguous().clone() for name, layer in layers.items() for key, tensor in layer.items()
    }
    save_file({**state, **plain}, path, metadata)
    return path


def same(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(
        a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8)
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------- a strict reader of ours


def strict_read(path):
    """A reader of the public layout that shares no code with ours and guesses nothing: {layer: (marker, tensors)}.

    As SGLang asks: every integer weight has a marker tensor and the header's entry, both the same, with all fields.
    """
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    strings = header.pop("__metadata__")
    assert all(isinstance(value, str) for value in strings.values())
    assert strings["format"] == "pt"
    table = json.loads(strings["_quantization_metadata"])
    assert table["format_version"] == "1.0"
    data = raw[8 + length :]
    ends = sorted((e["data_offsets"] for e in header.values()), key=lambda o: (o[0], o[1]))
    assert ends[0][0] == 0
    assert ends[-1][1] == len(data)
    assert all(a[1] == b[0] for a, b in itertools.pairwise(ends))
    layers = {}
    for key, entry in header.items():
        name, _, rest = key.rpartition(".")
        begin, end = entry["data_offsets"]
        layers.setdefault(name, {})[rest] = (entry["dtype"], entry["shape"], data[begin:end])
    read = {}
    for name, tensors in layers.items():
        integer = tensors.get("weight", ("", 0, 0))[0] in ("I8", "U8", "F8_E4M3")
        assert integer == ("comfy_quant" in tensors) == (name in table["layers"]), name
        if not integer:
            continue
        dtype, shape, text = tensors.pop("comfy_quant")
        marker = json.loads(bytes(text).decode())
        assert (dtype, len(shape)) == ("U8", 1)
        assert marker == table["layers"][name]
        _strict_layer(marker, tensors)
        read[name] = marker, tensors
    return read


def _strict_layer(marker, tensors):
    sizes = {key: shape for key, (_, shape, _) in tensors.items()}
    dtypes = {key: dtype for key, (dtype, _, _) in tensors.items()}
    n, columns = sizes["weight"]
    half = ("F16", "BF16", "F32")
    if marker["format"] == "int8_tensorwise":
        assert dtypes["weight"] == "I8"
        assert dtypes["weight_scale"] == "F32"
        assert sizes["weight_scale"] in ([], [1], [n], [n, 1])
        if marker.get("convrot"):
            assert marker["convrot_groupsize"] in (16, 64, 256)
            assert sizes["weight_scale"] == [n, 1]
        allowed = {"weight", "weight_scale", "bias"}
    elif marker["format"] in ("asym_w4a8_int8", "w6a8_int8"):
        k = columns * 4 // 3 if marker["format"] == "w6a8_int8" else columns * 2
        assert marker["convrot"] is True
        assert k % marker["convrot_groupsize"] == 0
        assert (dtypes["weight_s_rel"], sizes["weight_s_rel"]) == ("F8_E4M3", [n, k // marker["group_size"]])
        assert (dtypes["weight_s_channel"], sizes["weight_s_channel"]) == ("F32", [n])
        allowed = {"weight", "weight_s_rel", "weight_s_channel", "weight_codebook", "bias"}
        if "weight_codebook" in sizes:
            assert (dtypes["weight_codebook"], sizes["weight_codebook"]) == ("F32", [16])
    elif marker["format"] == "awq_w4a16":
        groups = 2 * columns // marker["group_size"]
        zeros = "weight_zeros" if "weight_zeros" in sizes else "weight_zero"
        assert sizes["weight_scale"] == sizes[zeros] == [groups, n]
        assert dtypes["weight_scale"] == dtypes[zeros]
        assert dtypes[zeros] in half
        allowed = {"weight", "weight_scale", zeros, "bias"}
    else:
        assert marker["format"] == "svdquant_w4a4"
        assert marker["lowrank_branch_input_basis"] == "raw"
        assert marker["proj_down_smooth_folded"] is True
        assert isinstance(marker["act_unsigned"], bool)
        rank = sizes["proj_down"][1]
        assert sizes["weight_scale"] == [2 * columns // 64, n]
        assert sizes["proj_down"] == [2 * columns, rank]
        assert sizes["proj_up"] == [n, rank]
        assert sizes["smooth_factor"] == [2 * columns]
        allowed = {"weight", "weight_scale", "proj_down", "proj_up", "smooth_factor", "bias"}
    assert set(tensors) <= allowed


def tensor_of(entry):
    dtype, shape, data = entry
    kinds = {"I8": torch.int8, "F16": F16, "BF16": BF16, "F32": torch.float32, "F8_E4M3": torch.float8_e4m3fn}
    return torch.frombuffer(bytearray(data), dtype=kinds[dtype]).reshape(shape)


# ------------------------------------------------------------------------------------------------------------- nunchaku


@pytest.mark.parametrize("version", ["nunchaku", "nunchaku-v1"])
def test_nunchaku_svdquant_both_ways(version, tmp_path):
    old = {
        "smooth_factor": "smooth",
        "smooth_factor_orig": "smooth_orig",
        "proj_down": "lora_down",
        "proj_up": "lora_up",
    }
    layers, wanted = {}, {}
    for seed, name in enumerate(["blocks.0.attn.to_q", "blocks.0.ff.net.2"]):
        wanted[name], theirs = svdquant_layer(10 * seed)
        layers[name] = {(old.get(k, k) if version == "nunchaku-v1" else k): t for k, t in theirs.items()}
    extra = {"norm.weight": normal(16)}
    source = write(tmp_path / "n.safetensors", layers, {"model_class": "X"}, **extra)
    report = km.convert_file(source, tmp_path / "c.safetensors")
    read = strict_read(tmp_path / "c.safetensors")
    for name, tensors in wanted.items():
        marker, found = read[name]
        assert marker["act_unsigned"] == (name == "blocks.0.ff.net.2")
        assert all(same(tensor_of(found[key]), tensor) for key, tensor in tensors.items())
    assert report.by_format() == {"svdquant_w4a4": 2}
    assert report.unsigned == ("blocks.0.ff.net.2",)
    assert len(report.dropped) == 2
    again = km.convert_file(tmp_path / "c.safetensors", tmp_path / "n2.safetensors", version)
    first, second = load_file(source), load_file(tmp_path / "n2.safetensors")
    assert first.keys() == second.keys()
    assert all(same(first[key], second[key]) for key in first)
    assert again.config["rank"] == R


@pytest.mark.parametrize("rows", [K // G, 16])
@pytest.mark.parametrize(
    ("name", "n", "splits"),
    [("a.norm1.linear", 6 * K, 6), ("single_transformer_blocks.0.norm.linear", 3 * K, 3), ("a.b", N, 0)],
)
def test_nunchaku_awq_modulations(rows, name, n, splits, tmp_path):
    codes, zeros, scales = awq_numbers(n, dtype=BF16)
    bias = normal(n, seed=5)
    order = np.arange(n) if not splits else (np.arange(n) % splits) * (n // splits) + np.arange(n) // splits
    folded = bias.clone().float()
    for part in {1, splits - 2} if splits else ():
        folded[part * (n // splits) : (part + 1) * (n // splits)] += 1
    folded = folded.to(BF16)
    scaled = (torch.from_numpy(-zeros).double() * scales.double()).to(BF16)
    stored = {
        "qweight": gemv_codes(codes[order], np.int32), "wscales": padded(scales[:, order], rows),
        "wzeros": padded(scaled[:, order], rows), "bias": folded[order],
    }  # fmt: skip
    source = write(tmp_path / "n.safetensors", {name: stored})
    report = km.convert_file(source, tmp_path / "c.safetensors")
    marker, found = strict_read(tmp_path / "c.safetensors")[name]
    assert marker["group_size"] == G
    assert same(tensor_of(found["weight"]), nibble_bytes(codes))
    assert same(tensor_of(found["weight_scale"]), scales)
    assert same(tensor_of(found["weight_zeros"]), (scaled.float() + 8 * scales.float()).to(BF16))
    exact = folded.float()
    for part in {1, splits - 2} if splits else ():
        exact[part * (n // splits) : (part + 1) * (n // splits)] -= 1
    assert torch.equal(tensor_of(found["bias"]).float(), exact)  # no rounding: float32 where a 1 was taken off
    assert report.interleaved == ((name,) if splits else ())
    version = "nunchaku" if rows == K // G else "nunchaku-v1"
    back = km.convert_file(tmp_path / "c.safetensors", tmp_path / "n2.safetensors", version)
    second = load_file(tmp_path / "n2.safetensors")
    for key in ("qweight", "wscales", "bias"):
        assert same(second[f"{name}.{key}"], stored[key].contiguous()), key
    step = scales.float().abs().max() * 16 * torch.finfo(BF16).eps
    assert (second[f"{name}.wzeros"].float() - stored["wzeros"].float()).abs().max() <= step
    assert back.rounded in ((), (name,))


def test_nunchaku_modulation_of_unknown_name_is_not_guessed(tmp_path):
    codes, _, scales = awq_numbers(6 * K, dtype=BF16)
    stored = {"qweight": gemv_codes(codes, np.int32), "wscales": scales, "wzeros": scales}
    source = write(tmp_path / "n.safetensors", {"strange": stored})
    with pytest.raises(FormatError, match=r"layer 'strange'.*6 times its 256 inputs.*--adaln 'strange=6'"):
        km.convert_file(source, tmp_path / "c.safetensors")
    assert km.convert_file(source, tmp_path / "c.safetensors", hints=Hints(adaln={"strange": 0})).interleaved == ()
    assert km.convert_file(source, tmp_path / "d.safetensors", hints=Hints(adaln={"str*": 6})).interleaved == (
        "strange",
    )


def test_nunchaku_fp4_file_is_named(tmp_path):
    _, theirs = svdquant_layer()
    fp4 = {**theirs, "wscales": torch.zeros(K // 16, N, dtype=torch.float8_e4m3fn)}
    with pytest.raises(
        FormatError, match=r"layer 'a\.b': these are FP4 codes.*INT4 in groups of 64.*get the INT4 file"
    ):
        km.convert_file(write(tmp_path / "f.safetensors", {"a.b": fp4}), tmp_path / "c.safetensors")
    said = {
        "quantization_config": json.dumps({"method": "svdquant", "weight": {"dtype": "fp4_e2m1_all", "group_size": 16}})
    }
    with pytest.raises(FormatError, match=r"'fp4_e2m1_all'.*holds 'int4'"):
        km.convert_file(write(tmp_path / "g.safetensors", {"a.b": theirs}, said), tmp_path / "c.safetensors")


def test_nunchaku_goes_by_names_so_a_sign_it_would_not_see_is_refused(tmp_path):
    _, theirs = svdquant_layer()
    source = write(tmp_path / "n.safetensors", {"a.ff.net.2": theirs})
    km.convert_file(source, tmp_path / "c.safetensors", hints=Hints(unsigned=()))
    with pytest.raises(FormatError, match=r"layer 'a\.ff\.net\.2': its act_unsigned is False.*--unsigned"):
        km.convert_file(tmp_path / "c.safetensors", tmp_path / "d.safetensors", "nunchaku")
    km.convert_file(tmp_path / "c.safetensors", tmp_path / "d.safetensors", "nunchaku", Hints(unsigned=("nothing",)))


# ------------------------------------------------------------------------------------- AutoAWQ, GPTQ, compressed-tensors


@pytest.mark.parametrize("where", ["header", "config.json"])
@pytest.mark.parametrize("dialect", AWQ_DIALECTS)
def test_awq_dialects_both_ways(dialect, where, tmp_path):
    ours, stored, config = awq_layer(dialect)
    bias = normal(N, seed=9, dtype=F16)
    metadata = {"quantization_config": json.dumps(config)} if where == "header" else {"format": "pt"}
    if where == "config.json":
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "x", "quantization_config": config}))
    source = write(tmp_path / "s.safetensors", {"a.b": {**stored, "bias": bias}}, metadata)
    report = km.convert_file(source, tmp_path / "c.safetensors")
    _, found = strict_read(tmp_path / "c.safetensors")["a.b"]
    for key, tensor in ours.items():
        if dialect == "autoawq-gemv-fast" and key == "weight_zeros":  # its own zeros are rounded products
            tensor = (stored["qzeros"][: K // G].float() + 8 * ours["weight_scale"].float()).to(F16)
        assert same(tensor_of(found[key]), tensor), key
    assert same(tensor_of(found["bias"]), bias)
    assert (
        "rounded once" in report.summary()
    )  # (8 - zi) s has more bits than float16; nothing is lost, see the way back
    km.convert_file(tmp_path / "c.safetensors", tmp_path / "back.safetensors", dialect)
    back = load_file(tmp_path / "back.safetensors")
    assert set(back) == {f"a.b.{key}" for key in (*stored, "bias")}
    assert all(same(back[f"a.b.{key}"], tensor) for key, tensor in stored.items())
    loaded = km.load(tmp_path / "c.safetensors")["a.b"]
    codes, zeros, scales = awq_numbers()
    truth = (torch.from_numpy(codes).double() - torch.from_numpy(zeros).t().double().repeat_interleave(G, 1)) * (
        scales.t().double().repeat_interleave(G, 1)
    )
    half_a_step = 8 * scales.double().max() * torch.finfo(F16).eps
    assert (loaded.dequantize(torch.float32).double() - truth).abs().max() <= half_a_step


@pytest.mark.parametrize("source", AWQ_DIALECTS)
@pytest.mark.parametrize("target", AWQ_DIALECTS)
def test_from_each_dialect_to_each_other(source, target, tmp_path):
    _, stored, config = awq_layer(source)
    _, wanted, _ = awq_layer(target)
    said = {"quantization_config": json.dumps(config)}
    report = km.convert_file(
        write(tmp_path / "s.safetensors", {"a.b": stored}, said), tmp_path / "t.safetensors", target
    )
    assert report.rounded == ()  # integers on both sides
    found = load_file(tmp_path / "t.safetensors")
    assert set(found) == {f"a.b.{key}" for key in wanted}
    assert all(same(found[f"a.b.{key}"], tensor) for key, tensor in wanted.items())


@pytest.mark.parametrize("dialect", ["nunchaku", *AWQ_DIALECTS])
def test_load_reads_every_dialect_itself(dialect, tmp_path):
    layer, config = (svdquant_layer()[1], {}) if dialect == "nunchaku" else awq_layer(dialect)[1:]
    said = {"quantization_config": json.dumps(config)}
    source = write(tmp_path / "s.safetensors", {"a.b": layer}, said, **{"n.weight": normal(8)})
    km.convert_file(source, tmp_path / "c.safetensors")
    direct, converted = km.load(source), km.load(tmp_path / "c.safetensors")
    assert set(direct) == set(converted) == {"a.b", "n.weight"}
    mine, theirs = direct["a.b"].state_dict(), converted["a.b"].state_dict()
    assert mine.keys() == theirs.keys()
    assert all(same(mine[key], theirs[key]) for key in mine)
    assert direct["a.b"].compute_dtype == converted["a.b"].compute_dtype
    km.save(direct, tmp_path / "again.safetensors")
    strict_read(tmp_path / "again.safetensors")


def test_gptq_whose_zeros_nobody_explains_is_refused_until_told(tmp_path):
    ours, stored, _ = awq_layer("gptq_v2")
    source = write(tmp_path / "s.safetensors", {"a.b": stored})
    with pytest.raises(FormatError, match=r"layer 'a\.b'.*--from gptq .*--from gptq_v2"):
        km.convert_file(source, tmp_path / "c.safetensors")
    km.convert_file(source, tmp_path / "c.safetensors", hints=Hints("gptq_v2"))
    assert same(load_file(tmp_path / "c.safetensors")["a.b.weight_zeros"], ours["weight_zeros"])


def test_gptq_with_activation_order_is_refused_and_nothing_is_left(tmp_path):
    _, stored, config = awq_layer("gptq")
    stored["g_idx"] = stored["g_idx"].flip(0)
    source = write(tmp_path / "s.safetensors", {"a.b": stored}, {"quantization_config": json.dumps(config)})
    with pytest.raises(FormatError, match=r"layer 'a\.b'.*desc_act"):
        km.convert_file(source, tmp_path / "c.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["s.safetensors"]


def test_symmetric_compressed_tensors_has_no_zero_points(tmp_path):
    codes, _, scales = awq_numbers()
    stored = {
        "weight_packed": plain_words(codes), "weight_scale": scales.t().contiguous(), "weight_shape": torch.tensor([N, K]),
    }  # fmt: skip
    source = write(tmp_path / "s.safetensors", {"a.b": stored})
    km.convert_file(source, tmp_path / "c.safetensors")
    assert not load_file(tmp_path / "c.safetensors")["a.b.weight_zeros"].any()
    report = km.convert_file(tmp_path / "c.safetensors", tmp_path / "d.safetensors", "compressed-tensors")
    found = load_file(tmp_path / "d.safetensors")
    assert set(found) == {f"a.b.{key}" for key in stored}
    assert all(same(found[f"a.b.{key}"], tensor) for key, tensor in stored.items())
    weights = report.config["config_groups"]["group_0"]["weights"]
    assert (weights["symmetric"], weights["group_size"], weights["num_bits"]) == (True, G, 4)


@pytest.mark.parametrize("shape", [(N, 1), (N,), (1,)])
def test_int_quantized_w8a8(shape, tmp_path):
    stored = {"weight": torch.randint(-127, 128, (N, K), dtype=torch.int8), "weight_scale": normal(*shape).abs()}
    said = {"quantization_config": json.dumps({"quant_method": "compressed-tensors", "format": "int-quantized"})}
    plain = {"lm_head.weight": normal(8, K)}
    source = write(tmp_path / "s.safetensors", {"a.b": stored}, said, **plain)
    km.convert_file(source, tmp_path / "c.safetensors")
    marker, found = strict_read(tmp_path / "c.safetensors")["a.b"]
    assert marker == {"format": "int8_tensorwise"}
    assert torch.equal(tensor_of(found["weight_scale"]).flatten(), stored["weight_scale"].float().flatten())
    report = km.convert_file(tmp_path / "c.safetensors", tmp_path / "d.safetensors", "compressed-tensors")
    assert same(load_file(tmp_path / "d.safetensors")["a.b.weight"], stored["weight"])
    group = report.config["config_groups"]["group_0"]
    assert group["weights"]["strategy"] == ("tensor" if shape == (1,) else "channel")
    assert group["input_activations"]["strategy"] == "token"
    assert report.config["ignore"] == ["lm_head"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"input_scale": torch.ones(1)}, "known are bias, weight"),
        ({"weight_zero_point": torch.ones(N, 1, dtype=torch.int8)}, "int8_tensorwise is symmetric"),
        ({"weight_scale": torch.ones(N, 4)}, "int8_tensorwise has no groups"),
    ],
)
def test_int_quantized_that_is_not_ours(change, words, tmp_path):
    stored = {"weight": torch.zeros(N, K, dtype=torch.int8), "weight_scale": torch.ones(N, 1), **change}
    said = {"quantization_config": json.dumps({"quant_method": "compressed-tensors", "format": "int-quantized"})}
    with pytest.raises(FormatError, match=words) as caught:
        km.convert_file(write(tmp_path / "s.safetensors", {"a.b": stored}, said), tmp_path / "c.safetensors")
    assert "'a.b'" in str(caught.value)


# ---------------------------------------------------------------------------------------------------------------- comfy


FORMATS = ["int8", "w4a8", "w6a8", "svdquant", "awq"]


def comfy_layer(name, seed=0):
    """One layer by its format: tensors under comfy's keys and the marker."""
    format = get_format(name)
    config = format.config_for(N, K)
    tensors = format.quantize(normal(N, K, seed=seed), config)
    return format.state_dict({k: t for k, t in tensors.items() if t is not None}), format.marker(config)


@pytest.mark.parametrize("spelling", ["tensor", "header", "params", "NUL padded", "unknown keys"])
@pytest.mark.parametrize("name", FORMATS)
def test_every_format_and_spelling_becomes_strict_comfy(name, spelling, tmp_path):
    tensors, marker = comfy_layer(name)
    nested = {
        "format": marker["format"],
        "params": {k: v for k, v in marker.items() if k != "format"},
        "orig_dtype": "x",
    }
    said = {
        "tensor": marker,
        "header": None,
        "params": nested,
        "NUL padded": marker,
        "unknown keys": {**marker, "new": [1]},
    }[spelling]
    layer = dict(tensors)
    if said is not None:
        layer["comfy_quant"] = marker_tensor(said)
    if spelling == "NUL padded":
        layer["comfy_quant"] = torch.nn.functional.pad(layer["comfy_quant"], (0, 5))
    metadata = (
        {"_quantization_metadata": json.dumps({"format_version": "1.0", "layers": {"a.b": marker}})}
        if spelling == "header"
        else {}
    )
    source = write(tmp_path / "s.safetensors", {"a.b": layer}, {"mine": "kept", **metadata}, **{"n.weight": normal(8)})
    km.convert_file(source, tmp_path / "c.safetensors")
    written, found = strict_read(tmp_path / "c.safetensors")["a.b"]
    assert {key: written[key] for key in marker} == marker
    assert all(same(tensor_of(found[key]), tensor) for key, tensor in tensors.items())
    km.convert_file(tmp_path / "c.safetensors", tmp_path / "d.safetensors")
    first, second = load_file(tmp_path / "c.safetensors"), load_file(tmp_path / "d.safetensors")
    assert first.keys() == second.keys()
    assert all(same(first[key], second[key]) for key in first)


def test_comfy_quants_spellings(tmp_path):
    """What that tool writes: no format for INT8, the singular zero, tile-packed SVDQuant, and the way back."""
    int8, _ = comfy_layer("int8")
    awq, awq_marker = comfy_layer("awq")
    svdquant, svdquant_marker = comfy_layer("svdquant")
    tiles = {
        **svdquant, "weight": tile_packed.pack_weight(svdquant["weight"]),
        "weight_scale": tile_packed.pack_scale(svdquant["weight_scale"]),
        "proj_up": tile_packed.pack_proj_up(svdquant["proj_up"]),
    }  # fmt: skip
    layers = {
        "i": {**int8, "comfy_quant": marker_tensor({"convrot": True, "convrot_groupsize": 256, "per_row": True})},
        "a": {**{k.replace("zeros", "zero"): t for k, t in awq.items()}, "comfy_quant": marker_tensor(awq_marker)},
        "s": {**tiles, "comfy_quant": marker_tensor({**svdquant_marker, "layout": "kitchen_tile_packed_w4a4"})},
    }
    source = write(tmp_path / "s.safetensors", layers)
    km.convert_file(source, tmp_path / "c.safetensors")
    read = strict_read(tmp_path / "c.safetensors")
    for name, tensors in {"i": int8, "a": awq, "s": svdquant}.items():
        assert all(same(tensor_of(read[name][1][key]), tensor) for key, tensor in tensors.items())
    assert "layout" not in read["s"][0]
    km.convert_file(tmp_path / "c.safetensors", tmp_path / "q.safetensors", "comfy-quants")
    strict_read(tmp_path / "q.safetensors")
    assert "a.weight_zero" in load_file(tmp_path / "q.safetensors")


def test_uint8_scales_and_kitchen_tensor_names(tmp_path):
    w4a8, marker = comfy_layer("w4a8")
    svdquant, svdquant_marker = comfy_layer("svdquant")
    renamed = {key if key.startswith("weight") else f"weight_{key}": tensor for key, tensor in svdquant.items()}
    layers = {
        "w": {**w4a8, "weight_s_rel": w4a8["weight_s_rel"].view(torch.uint8), "comfy_quant": marker_tensor(marker)},
        "s": {**renamed, "comfy_quant": marker_tensor(svdquant_marker)},
    }
    km.convert_file(write(tmp_path / "s.safetensors", layers), tmp_path / "c.safetensors")
    read = strict_read(tmp_path / "c.safetensors")
    assert same(tensor_of(read["w"][1]["weight_s_rel"]), w4a8["weight_s_rel"])
    assert all(same(tensor_of(read["s"][1][key]), tensor) for key, tensor in svdquant.items())


@pytest.mark.parametrize(
    ("layer", "to", "words"),
    [
        ("int8", "nunchaku", "nunchaku has no form for int8_tensorwise; it holds svdquant_w4a4, awq_w4a16"),
        ("int8", "compressed-tensors", "its weight is rotated .ConvRot, groups of 256."),
        ("w4a8", "autoawq", "autoawq has no form for asym_w4a8_int8"),
        ("awq", "autoawq", r"zeros are no integers.*keep the layer in awq_w4a16$"),
        ("awq", "compressed-tensors", "zeros are no integers"),
        ("awq", "gptq", r"zeros are no integers.*keep the layer in awq_w4a16$"),
    ],
)
def test_what_a_target_cannot_hold_is_refused_by_name(layer, to, words, tmp_path):
    tensors, marker = comfy_layer(layer)
    source = write(tmp_path / "s.safetensors", {"a.b": {**tensors, "comfy_quant": marker_tensor(marker)}})
    before = source.read_bytes()
    with pytest.raises(FormatError, match=words) as caught:
        km.convert_file(source, tmp_path / "c.safetensors", to)
    assert "'a.b'" in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["s.safetensors"]
    assert source.read_bytes() == before


def test_asymmetric_w4a8_is_not_written_for_comfyui(tmp_path):
    format = get_format("w4a8")
    config = format.config_for(N, K, levels="asymmetric")
    state = format.state_dict(format.quantize(normal(N, K), config))
    source = write(tmp_path / "s.safetensors", {"a.b": {**state, "comfy_quant": marker_tensor(format.marker(config))}})
    with pytest.raises(FormatError, match=r"layer 'a\.b'.*weight_correction.*levels=codebook"):
        km.convert_file(source, tmp_path / "c.safetensors")


def test_empty_markers(tmp_path):
    """Beside a float weight an empty marker marks nothing; beside codes it leaves them without a meaning."""
    tensors, marker = comfy_layer("int8")
    layers = {
        "a": {**tensors, "comfy_quant": marker_tensor(marker)},
        "e": {"weight": normal(64, 64), "comfy_quant": torch.empty(0, dtype=torch.uint8)},
        "z": {"weight": normal(64, 64), "comfy_quant": torch.zeros(7, dtype=torch.uint8)},
    }
    source = write(tmp_path / "s.safetensors", layers)
    report = km.convert_file(source, tmp_path / "c.safetensors")
    assert set(report.left) == {"e", "z"}
    assert set(strict_read(tmp_path / "c.safetensors")) == {"a"}
    assert not isinstance(km.load(source)["e.weight"], km.load(source)["a"].__class__)
    assert "e.comfy_quant" not in km.load(source)
    assert km.inspect_file(source)["problems"] == []
    layers["bad"] = {**tensors, "comfy_quant": torch.zeros(3, dtype=torch.uint8)}
    with pytest.raises(FormatError, match="layer 'bad': its marker is empty"):
        km.convert_file(write(tmp_path / "t.safetensors", layers), tmp_path / "d.safetensors")


@pytest.mark.parametrize(
    ("marker", "metadata", "words"),
    [
        (
            {"format": "nvfp4"},
            None,
            r"layer 'a\.b'.*unknown format 'nvfp4'; formats known to this version.*pip install --upgrade",
        ),
        ({"format": "int8_tensorwise_v9"}, None, r"layer 'a\.b'.*'int8_tensorwise_v9'"),
        (
            {"format": "int8_tensorwise"},
            {"_quantization_metadata": json.dumps({"format_version": "2.0", "layers": {}})},
            "format_version '2.0', and '1.0' is known here.*pip install --upgrade",
        ),
    ],
)
def test_unknown_and_newer_formats_say_what_to_do(marker, metadata, words, tmp_path):
    tensors, _ = comfy_layer("int8")
    source = write(tmp_path / "s.safetensors", {"a.b": {**tensors, "comfy_quant": marker_tensor(marker)}}, metadata)
    with pytest.raises(FormatError, match=words):
        km.convert_file(source, tmp_path / "c.safetensors")
    assert km.inspect_file(source)["problems"]


def test_codes_that_nobody_explains(tmp_path):
    source = write(tmp_path / "s.safetensors", {"a.b": {"weight": torch.zeros(N, K, dtype=torch.int8)}})
    with pytest.raises(FormatError, match=r"a\.b\.weight.*would be a guess.*--from"):
        km.convert_file(source, tmp_path / "c.safetensors")
    other = {"qweight": torch.zeros(N, 4, dtype=torch.int32), "qmeta": torch.zeros(2)}
    with pytest.raises(FormatError, match=r"layer 'a\.b'.*qmeta.*no known toolkit"):
        km.convert_file(write(tmp_path / "t.safetensors", {"a.b": other}), tmp_path / "c.safetensors")


def test_all_refusals_are_counted(tmp_path):
    tensors, marker = comfy_layer("int8")
    layers = {f"l{i}": {**tensors, "comfy_quant": marker_tensor(marker)} for i in range(4)}
    with pytest.raises(
        FormatError, match=r"4 layers are refused\. layer 'l0' and 3 more: nunchaku has no form"
    ) as caught:
        km.convert_file(write(tmp_path / "s.safetensors", layers), tmp_path / "c.safetensors", "nunchaku")
    assert str(caught.value).count("has no form") == 1
    for number, format in enumerate(("w4a8", "w6a8")):
        tensors, marker = comfy_layer(format)
        layers[f"other: {number}"] = {**tensors, "comfy_quant": marker_tensor(marker)}
    with pytest.raises(
        FormatError, match=r"6 layers are refused\. layer 'l0' and 3 more: .*; layer 'other: 0': .*w4a8"
    ) as caught:
        km.convert_file(write(tmp_path / "s.safetensors", layers), tmp_path / "c.safetensors", "nunchaku")
    assert str(caught.value).count("has no form") == 3


CONTRADICTIONS = [
    ("comfy", "gptq", "--from says gptq, and by its keys .* has 2 layers of comfy; leave --from away"),
    ("autoawq", "comfy", "--from says comfy, and by its keys .* has 2 layers of AutoAWQ GEMM"),
    ("autoawq", "gptq", "--from says gptq, and by its keys .* has 2 layers of AutoAWQ GEMM"),
    ("nunchaku", "autoawq", "--from says autoawq, and by its keys .* has 2 layers of nunchaku SVDQuant"),
    ("gptq", "nunchaku", "--from says nunchaku, and by its keys .* has 2 layers of GPTQ"),
    ("gptq_v2 said", "gptq", "layer 'a' and 1 more: the header's .* says it is gptq_v2, and --from says gptq; leave"),
    ("gptq said", "autoawq", "layer 'a' and 1 more: the header's .* says it is gptq, and --from says autoawq; leave"),
    ("autoawq said", "gptq", "--from says gptq, and by its keys .* has 2 layers of AutoAWQ GEMM"),
]


@pytest.mark.parametrize(("stored", "said", "words"), CONTRADICTIONS)
def test_a_from_that_contradicts_the_file_is_refused_with_what_was_found(stored, said, words, tmp_path):
    name, _, with_config = stored.partition(" ")
    metadata = None
    if name == "comfy":
        tensors, marker = comfy_layer("int8")
        layer = {**tensors, "comfy_quant": marker_tensor(marker)}
    elif name == "nunchaku":
        layer = svdquant_layer()[1]
    else:
        _, layer, config = awq_layer(name)
        metadata = {"quantization_config": json.dumps(config)} if with_config else None
    source = write(tmp_path / "s.safetensors", {"a": layer, "b": layer}, metadata)
    before = source.read_bytes()
    for dry_run in (True, False):
        with pytest.raises(FormatError, match=words):
            km.convert_file(source, tmp_path / "c.safetensors", hints=Hints(said), dry_run=dry_run)
    assert [path.name for path in tmp_path.iterdir()] == ["s.safetensors"]
    assert source.read_bytes() == before


def test_a_from_is_for_the_layers_that_need_it(tmp_path):
    """A file that mixes toolkits, or whose config names a tool whose layout another one shares."""
    tensors, marker = comfy_layer("int8")
    _, stored, config = awq_layer("gptq")
    layers = {"a": {**tensors, "comfy_quant": marker_tensor(marker)}, "b": stored}
    assert set(
        km.convert_file(
            write(tmp_path / "s.safetensors", layers), tmp_path / "c.safetensors", hints=Hints("gptq")
        ).layers
    ) == {"a", "b"}
    metadata = {"quantization_config": json.dumps({**config, "quant_method": "auto-round"})}
    source = write(tmp_path / "t.safetensors", {"b": stored}, metadata)
    with pytest.raises(FormatError, match="auto-round"):
        km.convert_file(source, tmp_path / "d.safetensors")
    assert set(km.convert_file(source, tmp_path / "d.safetensors", hints=Hints("gptq")).layers) == {"b"}
    metadata = {"quantization_config": json.dumps({k: v for k, v in config.items() if k != "checkpoint_format"})}
    source = write(tmp_path / "u.safetensors", {"b": stored}, metadata)
    assert set(km.convert_file(source, tmp_path / "e.safetensors", hints=Hints("gptq_v2")).layers) == {"b"}


# ------------------------------------------------------------------------------------------------- files, shards, kills


def many_layers(count):
    made = {}
    for number in range(count):
        _, made[f"blocks.{number}.q"] = svdquant_layer(number)
    return made


def test_shards_in_and_out(tmp_path):
    layers = many_layers(6)
    whole_file = write(tmp_path / "n.safetensors", layers, **{"head.weight": normal(16, 16)})
    (tmp_path / "in").mkdir()
    (tmp_path / "out").mkdir()
    state = load_file(whole_file)
    index = {"weight_map": {}}
    for part in range(3):
        keys = [key for number, key in enumerate(sorted(state)) if number % 3 == part]
        save_file({key: state[key] for key in keys}, tmp_path / f"in/m-{part}.safetensors")
        index["weight_map"] |= dict.fromkeys(keys, f"m-{part}.safetensors")
    source = tmp_path / "in/m.safetensors.index.json"
    source.write_text(json.dumps(index))
    target = tmp_path / "out/model.safetensors.index.json"
    report = km.convert_file(source, target, shard_bytes=60_000)
    assert len(report.files) > 2
    assert sorted(path.name for path in target.parent.iterdir()) == sorted([*report.files, target.name])
    single = km.convert_file(whole_file, tmp_path / "c.safetensors")
    assert single.by_format() == report.by_format()
    joined = {key: tensor for name in report.files for key, tensor in load_file(target.parent / name).items()}
    wanted = load_file(tmp_path / "c.safetensors")
    assert joined.keys() == wanted.keys()
    assert all(same(joined[key], wanted[key]) for key in joined)
    assert set(km.load(target)) == set(km.load(tmp_path / "c.safetensors"))
    for name in report.files:
        assert km.inspect_file(target.parent / name)["problems"] == []
    with pytest.raises(FormatError, match=r"is in .* already, and shards cannot be replaced all at once"):
        km.convert_file(source, target, shard_bytes=60_000)


KILLED = """
    import hashlib, json, os, pathlib, shutil, sys
    from kitchen_models import convert, staging

    source, folder, name, old = sys.argv[1], pathlib.Path(sys.argv[2]), sys.argv[3], sys.argv[4]
    staging.SYNC_BYTES = 12_000
    step, stop, puts = 0, -1, 0

    def die():
        global step
        if step == stop:
            os.kill(os.getpid(), 9)
        step += 1

    def dying(real):
        def wrapped(*args, **kwargs):
            die()
            result = real(*args, **kwargs)
            die()
            return result
        return wrapped

    for call in ("fdatasync", "fsync", "replace", "ftruncate", "pwrite"):
        setattr(os, call, dying(getattr(os, call)))
    real_put = staging.Stage.put
    def put(self, name, tensor):
        global puts
        puts += 1
        real_put(self, name, tensor)
    staging.Stage.put = put

    def run(moment):
        "What a run of its own, killed at this moment, tells: its exit, its steps, its puts, and what lies there afterwards."
        global stop
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            stop = moment
            convert.convert_file(source, folder / name, shard_bytes=30_000)
            os.write(writer, json.dumps([step, puts]).encode())
            os._exit(0)
        os.close(writer)
        said = os.read(reader, 1000)
        os.close(reader)
        signal = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        hashed = lambda path: hashlib.sha256(path.read_bytes()).hexdigest()
        shown = {p.name: hashed(p) for p in folder.iterdir() if p.is_file()}
        return {"exit": signal, "said": json.loads(said or b"[0, 0]"), "shown": shown, "source": hashed(pathlib.Path(source))}

    def fresh():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        if old:
            (folder / name).write_text(old)

    fresh()
    whole = run(-1)
    print(json.dumps([whole]))
    for moment in range(whole["said"][0]):
        fresh()
        killed = run(moment)
        hidden = [p.name for p in folder.iterdir() if p.is_dir()]
        print(json.dumps([killed, run(-1), hidden, [p.name for p in folder.iterdir() if p.is_dir()]]))
"""


@pytest.mark.parametrize("sharded", [False, True])
def test_killed_at_every_moment_and_taken_up(sharded, tmp_path):
    """SIGKILL before and after every write, truncation, sync and rename; each time a run of the same command ends the work."""
    source = write(tmp_path / "n.safetensors", many_layers(2))
    before = hashlib.sha256(source.read_bytes()).hexdigest()
    name = "c.safetensors.index.json" if sharded else "c.safetensors"
    old = "" if sharded else "an older file"
    words = [sys.executable, "-c", textwrap.dedent(KILLED), source, tmp_path / "out", name, old]
    ran = subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()
    (whole,), *kills = map(json.loads, ran)
    wanted = whole["shown"]
    older = hashlib.sha256(old.encode()).hexdigest()
    assert len(kills) == whole["said"][0] > 40
    fewer = 0
    for killed, resumed, hidden, left in kills:
        assert killed["exit"] == -signal.SIGKILL
        assert killed["source"] == resumed["source"] == before
        shown = killed["shown"]
        if sharded:  # no index, so no checkpoint, before all of it is there
            assert all(shown[key] == wanted[key] for key in shown)
            assert name not in shown or shown == wanted
        else:
            assert set(shown) == {name}
            assert shown[name] in (older, wanted[name])
        assert hidden in ([], [f".{name}.partial"])
        assert resumed["exit"] == 0
        assert resumed["shown"] == wanted
        assert left == []
        fewer += resumed["said"][1] < whole["said"][1]
    assert fewer > len(kills) / 3, "runs go on where the killed ones were, they do not start over"


def test_what_another_run_left_is_of_no_use(tmp_path):
    source, other = (write(tmp_path / f"{n}.safetensors", many_layers(n)) for n in (3, 2))
    hidden = tmp_path / ".c.safetensors.partial"
    hidden.mkdir()
    (hidden / "fingerprint").write_text("of something else")
    (hidden / "journal").write_text('"blocks.0.q.weight"\n"blocks.1.q.wei')
    (hidden / "c.safetensors").write_bytes(b"rubbish")
    km.convert_file(source, tmp_path / "c.safetensors")
    km.convert_file(other, tmp_path / "d.safetensors")
    assert (len(km.load(tmp_path / "c.safetensors")), len(km.load(tmp_path / "d.safetensors"))) == (3, 2)
    assert not hidden.exists()


def test_a_hidden_folder_that_is_not_ours_is_left_alone(tmp_path):
    source, hidden = write(tmp_path / "s.safetensors", many_layers(2)), tmp_path / ".c.safetensors.partial"
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "precious").write_text("x")
    hidden.symlink_to(theirs)
    with pytest.raises(FormatError, match=r"is a link, and files would be deleted where it leads"):
        km.convert_file(source, tmp_path / "c.safetensors")
    hidden.unlink()
    theirs.rename(hidden)
    with pytest.raises(FormatError, match=r"holds 'precious' and was not made by an earlier run; move it away"):
        km.convert_file(source, tmp_path / "c.safetensors")
    assert (hidden / "precious").read_text() == "x"


def test_a_folder_that_takes_no_folders_ends_in_words(tmp_path, monkeypatch):
    """As /proc does, where making one says that there is no such file."""
    source = write(tmp_path / "s.safetensors", many_layers(1))

    def mkdir(self, *args, **kwargs):
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr(type(tmp_path), "mkdir", mkdir)
    with pytest.raises(FormatError, match=r"cannot write in .*No such file or directory; choose another folder"):
        km.convert_file(source, tmp_path / "c.safetensors")


def test_a_resumed_run_reports_what_the_first_one_rounded(tmp_path, monkeypatch):
    from kitchen_models import staging

    layers = {f"l{number}": awq_layer("gptq", number)[1] for number in range(4)}
    source = write(tmp_path / "s.safetensors", layers)
    whole = km.convert_file(source, tmp_path / "whole.safetensors", hints=Hints("gptq_v2"))
    assert whole.rounded == ("l0", "l1", "l2", "l3")
    monkeypatch.setattr(staging, "SYNC_BYTES", 1)

    def stop(name, done, total):
        if name == "l2":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        km.convert_file(source, tmp_path / "c.safetensors", hints=Hints("gptq_v2"), progress=stop)
    resumed = km.convert_file(source, tmp_path / "c.safetensors", hints=Hints("gptq_v2"))
    assert resumed.rounded == whole.rounded
    assert (tmp_path / "c.safetensors").read_bytes() == (tmp_path / "whole.safetensors").read_bytes()


@pytest.mark.parametrize(("to", "key"), [("compressed-tensors", "ignore"), ("autoawq", "modules_to_not_convert")])
def test_the_config_names_every_matrix_that_is_left(to, key, tmp_path):
    plain = {"f.weight": torch.ones(8, 8), "d.weight": torch.ones(8, 8).double()}
    plain["e.weight"] = torch.ones(8, 8).to(torch.float8_e4m3fn)
    _, stored, config = awq_layer("gptq")
    source = write(tmp_path / "s.safetensors", {"a.b": stored}, {"quantization_config": json.dumps(config)}, **plain)
    assert km.convert_file(source, tmp_path / "c.safetensors", to).config[key] == ["d", "e", "f"]


def damaged(layer):
    """(what was done, the layer after it), one tensor at a time."""
    for key, tensor in layer.items():
        rest = {k: t for k, t in layer.items() if k != key}
        yield f"{key} gone", rest
        changed = {
            "cut": tensor[1:],
            "flat": tensor.reshape(-1),
            "longer": torch.cat([tensor, tensor]),
            "deeper": tensor[None],
        }
        if tensor.dim() == 2 and tensor.shape[0] != tensor.shape[1]:
            changed["turned"] = tensor.t()
        for other in (torch.int8, torch.int16, torch.int32, torch.float32, torch.float8_e4m3fn):
            if other != tensor.dtype:
                changed[str(other)] = tensor.to(torch.float32).to(other)
        for how, made in changed.items():
            if (made.shape, made.dtype) == (tensor.shape, tensor.dtype):
                continue
            yield f"{key} {how}", {**rest, key: made}


@pytest.mark.parametrize("dialect", ["nunchaku", "nunchaku-awq", *AWQ_DIALECTS])
def test_a_damaged_layer_is_named_or_still_means_the_same(dialect, tmp_path):
    if dialect == "nunchaku":
        layer, config = svdquant_layer()[1], {"method": "svdquant"}
    elif dialect == "nunchaku-awq":
        codes, _, scales = awq_numbers(dtype=BF16)
        layer, config = (
            {"qweight": gemv_codes(codes, np.int32), "wscales": scales, "wzeros": scales, "bias": normal(N)},
            {},
        )
    else:
        _, layer, config = awq_layer(dialect)
    said = {"quantization_config": json.dumps(config)}
    km.convert_file(write(tmp_path / "whole.safetensors", {"a.b": layer}, said), tmp_path / "whole.out.safetensors")
    whole = load_file(tmp_path / "whole.out.safetensors")
    accepted = []
    for what, broken in damaged(layer):
        source, out = write(tmp_path / "s.safetensors", {"a.b": broken}, said), tmp_path / "o.safetensors"
        problems = km.inspect_file(source)["problems"]
        try:
            km.convert_file(source, out)
        except KitchenError as error:
            assert "a.b" in str(error), (what, error)  # noqa: PT017
            assert not out.exists()
            continue
        assert not problems, what
        accepted.append(what)
        found = load_file(out)
        for key in whole.keys() & found.keys():
            if key.endswith((".weight", "comfy_quant")) and not what.startswith(("qweight", "weight_packed")):
                assert torch.equal(found[key], whole[key]), (what, key)
        out.unlink()
    optional = ("smooth_factor_orig", "bias", "g_idx", "weight_zero_point gone")
    floats = ("torch.float32",)  # another float dtype of a scale is not damage
    padded_rows = ("wscales longer", "wzeros longer", "qzeros longer", "scales longer", "weight_shape torch.int32")
    unexpected = [w for w in accepted if not w.startswith(optional) and not w.endswith(floats) and w not in padded_rows]
    assert unexpected == []


def test_a_full_disk_is_said_before_and_loses_no_earlier_work(tmp_path, monkeypatch):
    source, target = write(tmp_path / "n.safetensors", many_layers(3)), tmp_path / "c.safetensors"
    full = shutil.disk_usage(tmp_path)._replace(free=1000)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: full)
        with pytest.raises(FormatError, match="its disk has 1000 free"):
            km.convert_file(source, target)
    assert [path.name for path in tmp_path.iterdir()] == ["n.safetensors"]
    real, count = staging.Stage.put, iter(range(100))

    def fails(self, name, tensor):
        if next(count) == 9:
            raise OSError(28, "No space left on device")
        real(self, name, tensor)

    with monkeypatch.context() as patch:
        patch.setattr(staging, "SYNC_BYTES", 1000)
        patch.setattr(staging.Stage, "put", fails)
        with pytest.raises(FormatError, match=r"No space left on device.*run the same command again"):
            km.convert_file(source, target)
    journal = tmp_path / ".c.safetensors.partial" / "journal"
    before = journal.read_text()
    assert len(before.splitlines()) >= 8
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: full)
        with pytest.raises(FormatError, match="its disk has 1000 free"):
            km.convert_file(source, target)
    assert journal.read_text() == before
    km.convert_file(source, target)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c.safetensors", "n.safetensors"]
    assert len(km.load(target)) == 3


KEYS = sorted(
    {
        "qweight", "wscales", "wzeros", "smooth_factor", "smooth", "proj_down", "proj_up", "lora_down", "lora_up", "qzeros",
        "scales", "g_idx", "weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight", "bias", "wtscale",
        "comfy_quant",
    }
)  # fmt: skip
DTYPES = [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, F16, BF16, torch.float32, torch.float8_e4m3fn]
SHAPES = st.lists(st.sampled_from([0, 1, 2, 4, 8, 16, 32, 64, 128, 256]), max_size=3)
METHODS = ["", "awq", "gptq", "compressed-tensors", "svdquant", "hqq"]


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    layer=st.dictionaries(st.sampled_from(KEYS), st.tuples(st.sampled_from(DTYPES), SHAPES), min_size=1),
    method=st.sampled_from(METHODS),
    target=st.sampled_from(sorted(TARGETS)),
)
def test_whatever_lies_under_those_keys_ends_in_words(layer, method, target, tmp_path):
    state = {f"a.{key}": torch.zeros(shape, dtype=dtype) for key, (dtype, shape) in layer.items()}
    said = {"quantization_config": json.dumps({"quant_method": method, "bits": 4, "group_size": 64})}
    source, out = tmp_path / "f.safetensors", tmp_path / "o.safetensors"
    save_file(state, source, said)
    report = km.inspect_file(source)
    try:
        km.convert_file(source, out, target)
    except KitchenError as error:
        assert str(error)  # noqa: PT017
    else:
        assert not report["problems"]
        out.unlink()
    assert {path.name for path in tmp_path.iterdir()} == {"f.safetensors"}


def test_two_runs_at_once_are_kept_apart(tmp_path):
    from kitchen_models.staging import FilePlan, staging
    from kitchen_models.writer import Planned

    plan = [FilePlan("x.safetensors", (Planned("a", "F32", (1,)),), {})]
    with staging(tmp_path / "x.safetensors", plan, "one") as stage:
        with (
            pytest.raises(FormatError, match="another run is writing"),
            staging(tmp_path / "x.safetensors", plan, "one"),
        ):
            pass
        stage.put("a", torch.ones(1))
    assert load_file(tmp_path / "x.safetensors")["a"].item() == 1


def test_the_source_is_never_the_target(tmp_path):
    source = write(tmp_path / "n.safetensors", many_layers(1))
    with pytest.raises(FormatError, match="is the source itself"):
        km.convert_file(source, source)
    (tmp_path / "link.safetensors").symlink_to(source)
    with pytest.raises(FormatError, match="is the source itself"):
        km.convert_file(source, tmp_path / "link.safetensors")


def test_command(tmp_path, capsys):
    import argparse

    from kitchen_models import commands

    def kitchen(*arguments):
        parser = argparse.ArgumentParser()
        commands.convert_command(parser.add_subparsers())
        options = parser.parse_args(["convert", *map(str, arguments)])
        return options.func(options)

    source = write(tmp_path / "n.safetensors", many_layers(2), **{"head.weight": normal(16, 16)})
    assert kitchen(source, tmp_path / "c.safetensors", "--to", "comfy", "--dry-run") == 0
    assert "nothing was written" in capsys.readouterr().out
    assert not (tmp_path / "c.safetensors").exists()
    assert kitchen(source, tmp_path / "c.safetensors", "--to", "comfy") == 0
    line = capsys.readouterr().out
    assert line.count("\n") == 1
    assert "2 layers to comfy (2 svdquant_w4a4 from nunchaku SVDQuant)" in line
    assert "left: 1 float" in line
    assert re.search(r"\), \d+\.\d\d KiB -> \d+\.\d\d KiB;", line)
    assert kitchen(tmp_path / "c.safetensors", tmp_path / "d.safetensors", "--to", "nunchaku", "--json") == 0
    assert json.loads(capsys.readouterr().out)["quantization_config"]["method"] == "svdquant"


def test_a_broken_config_beside_a_comfy_file_is_no_concern(tmp_path):
    tensors, marker = comfy_layer("int8")
    source = write(tmp_path / "s.safetensors", {"a": {**tensors, "comfy_quant": marker_tensor(marker)}})
    (tmp_path / "config.json").write_text("{")
    assert km.inspect_file(source)["problems"] == []
    km.convert_file(source, tmp_path / "c.safetensors")
    _, stored, _ = awq_layer("autoawq")
    with pytest.raises(FormatError, match=r"config\.json.*cannot be read"):
        km.convert_file(write(tmp_path / "t.safetensors", {"a": stored}), tmp_path / "d.safetensors")


@pytest.mark.parametrize("to", ["comfy", "compressed-tensors", "gptq"])
def test_config_json_goes_along_to_another_folder(to, tmp_path):
    _, stored, config = awq_layer("autoawq")
    (tmp_path / "in").mkdir()
    (tmp_path / "out").mkdir()
    model = {"model_type": "qwen3", "hidden_size": 256, "quantization_config": config}
    (tmp_path / "in/config.json").write_text(json.dumps(model))
    source = write(tmp_path / "in/model.safetensors", {"a": stored})
    report = km.convert_file(source, tmp_path / "out/model.safetensors", to)
    written = json.loads((tmp_path / "out/config.json").read_text())
    method = {"comfy": "kitchen"}.get(to, to)
    assert written["quantization_config"]["quant_method"] == method
    assert {k: v for k, v in written.items() if k != "quantization_config"} == {
        "model_type": "qwen3",
        "hidden_size": 256,
    }
    assert report.config_file == str(tmp_path / "out/config.json")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["config.json", "model.safetensors"]
    if to != "comfy":  # and our own reader goes by it
        state = load_file(tmp_path / "out/model.safetensors")
        save_file(state, tmp_path / "out/model.safetensors")
        assert set(km.load(tmp_path / "out/model.safetensors")) == {"a"}
    (tmp_path / "out/config.json").write_text("mine")
    assert km.convert_file(source, tmp_path / "out/model.safetensors", to).config_file == ""
    assert (tmp_path / "out/config.json").read_text() == "mine"
    assert json.loads((tmp_path / "in/config.json").read_text()) == model


def test_inspect_names_the_form_and_what_to_do(tmp_path, capsys):
    from kitchen_models.inspect import render

    layers = many_layers(1)
    _, layers["m"], _ = awq_layer("gptq")
    report = km.inspect_file(write(tmp_path / "n.safetensors", layers))
    entries = {entry["name"]: entry for entry in report["layers"]}
    assert entries["blocks.0.q"]["stored_as"] == "nunchaku SVDQuant"
    assert entries["blocks.0.q"]["shape"] == [N, K]
    assert "--from gptq" in entries["m"]["problem"]
    render(report)
    assert "kitchen convert IN OUT --to comfy" in capsys.readouterr().out


def test_the_default_device_of_the_process_does_not_matter(tmp_path):
    _, stored, config = awq_layer("gptq")
    source = write(tmp_path / "s.safetensors", {"a": stored}, {"quantization_config": json.dumps(config)})
    with torch.device("meta"):
        km.convert_file(source, tmp_path / "c.safetensors")
        km.convert_file(tmp_path / "c.safetensors", tmp_path / "d.safetensors", "compressed-tensors")
    assert load_file(tmp_path / "d.safetensors")["a.weight_zero_point"].device.type == "cpu"


def test_every_target_is_in_the_help_and_in_the_guide():
    from kitchen_models import commands

    text = Path(commands.__file__).read_text(encoding="utf-8")
    guide = (Path(__file__).parents[3] / "docs/guides/convert.md").read_text(encoding="utf-8")
    assert all(name in text and f"`{name}`" in guide for name in TARGETS)


def test_memory_is_that_of_one_layer(tmp_path):
    """Thirty layers, a peak of a few of them: measured in a process of its own."""
    big = {
        f"l{i}": {key: t.repeat(8, 8) if t.dim() == 2 else t.repeat(8) for key, t in svdquant_layer(i)[1].items()}
        for i in range(2)
    }
    layer = sum(t.nbytes for t in big["l0"].values())
    layers = {f"l{i}": big[f"l{i % 2}"] for i in range(60)}
    for tensors in big.values():
        for key in ("proj_down", "proj_up"):
            tensors[key] = tensors[key][:, :R].contiguous()
    write(tmp_path / "few.safetensors", {name: layers[name] for name in list(layers)[:2]})
    write(tmp_path / "many.safetensors", layers)
    code = textwrap.dedent("""
        import resource, sys
        from kitchen_models import convert, files
        files.READ_WINDOW = 4 << 20
        convert.convert_file(sys.argv[1], sys.argv[2])
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
    """)

    def peak(name):
        words = [sys.executable, "-c", code, str(tmp_path / name), str(tmp_path / f"out-{name}")]
        return int(subprocess.run(words, capture_output=True, text=True, check=True).stdout)

    few, many = peak("few.safetensors"), peak("many.safetensors")
    assert os.path.getsize(tmp_path / "many.safetensors") > 25 * layer
    assert many - few < 6 * layer + (8 << 20)
