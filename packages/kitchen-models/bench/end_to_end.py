#!/usr/bin/env python3
"""Whole models in each format: four Qwen-Image-like blocks over 8 steps, and a decode step of a Llama-like model.

    python packages/kitchen-models/bench/end_to_end.py --out benchmarks/results/h200/end_to_end.json
    python packages/kitchen-models/bench/end_to_end.py --tiny                    small sizes, on the CPU where there is no GPU

The weights are seeded random ones with outlier channels, in bf16. Columns: kitchen, comfy-kitchen on the same stored tensors,
and bf16. Where a format is compared with "dequantized", that is the same model with bf16 nn.Linear over its dequantized
weights. PSNR takes the largest magnitude of the reference as its peak, which is stricter than its range.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import math
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "tools"))
import benchlib

from kitchen_core import QuantizedLinear, trace
from kitchen_models import Rules

BF16 = torch.bfloat16
FORMATS = ("int8", "w4a8", "w6a8", "svdquant", "awq")
# nunchaku's recipe for this model: 4 bits with a low-rank branch, and the modulation, which sees one row, in AWQ
RULES = {"svdquant": ["re:.*_mod=awq", "*=svdquant"]}
STEPS = 8
TOKENS = 8
THREADS = 8 if torch.cuda.is_available() else 1
AWQ_LEAST_DB = 33.0
SOURCES = [
    "packages/kitchen-int8/csrc", "packages/kitchen-w4a8/csrc", "packages/kitchen-svdquant/csrc", "packages/kitchen-awq/csrc",
]  # fmt: skip


class Sizes(NamedTuple):
    """Widths and lengths of both models."""

    hidden: int = 3072
    mlp: int = 12288
    heads: int = 24
    blocks: int = 4
    image_tokens: int = 4096
    text_tokens: int = 256
    channels: int = 64
    llm_hidden: int = 4096
    llm_mlp: int = 11008
    llm_heads: int = 32
    llm_kv_heads: int = 8
    llm_layers: int = 4
    llm_context: int = 1024


TINY = Sizes(256, 512, 2, 2, 64, 16, 64, 256, 512, 4, 2, 2, 32)


# ------------------------------------------------------------------------------------------------------------ models


def seeded_linear(k: int, n: int, generator: torch.Generator, bias: bool = True) -> nn.Linear:
    """Gaussian weights; one column in 256 (input channel) is 6 times larger, and one row (output channel) 4 times."""
    device = generator.device
    weight = torch.randn(n, k, generator=generator, device=device) * k**-0.5
    weight[:, torch.randperm(k, generator=generator, device=device)[: max(1, k // 256)]] *= 6
    weight[torch.randperm(n, generator=generator, device=device)[: max(1, n // 256)]] *= 4
    made = nn.Linear(k, n, bias, device="meta", dtype=BF16)
    made.weight = nn.Parameter(weight.to(BF16), requires_grad=False)
    if bias:
        made.bias = nn.Parameter((torch.randn(n, generator=generator, device=device) * 0.02).to(BF16), False)
    return made


class Stream(nn.Module):
    """The weights of one of the two streams of a block: image or text."""

    def __init__(self, sizes: Sizes, generator: torch.Generator) -> None:
        super().__init__()
        d = sizes.hidden
        self.to_q, self.to_k, self.to_v, self.to_out = (seeded_linear(d, d, generator) for _ in range(4))
        self.mlp_up, self.mlp_down = seeded_linear(d, sizes.mlp, generator), seeded_linear(sizes.mlp, d, generator)
        self.stream_mod = seeded_linear(d, 6 * d, generator)
        with torch.no_grad():  # outlier channels in front of the linears, as trained models have them
            scale = self.stream_mod.bias.view(6, d)[1::3]
            scale[:, torch.randperm(d, generator=generator, device=generator.device)[: max(1, d // 256)]] += 8

    def modulation(self, temb: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """shift, 1 + scale, gate for the attention, and the same for the MLP."""
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = self.stream_mod(F.silu(temb)).chunk(6, -1)
        return shift, 1 + scale, gate, mlp_shift, 1 + mlp_scale, mlp_gate

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        """Up, GELU, down."""
        return self.mlp_down(F.gelu(self.mlp_up(x), approximate="tanh"))


class Block(nn.Module):
    """A double-stream block: each stream has weights of its own, the attention runs over both."""

    def __init__(self, sizes: Sizes, generator: torch.Generator) -> None:
        super().__init__()
        self.heads = sizes.heads
        self.image, self.text = Stream(sizes, generator), Stream(sizes, generator)

    def forward(self, x: torch.Tensor, t: torch.Tensor, temb: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        streams, states = (self.image, self.text), (x, t)
        mods = [stream.modulation(temb) for stream in streams]
        normed = [norm(h) * mod[1] + mod[0] for h, mod in zip(states, mods, strict=True)]
        q, k, v = (
            torch.cat([getattr(s, name)(h) for s, h in zip(streams, normed, strict=True)], 1).unflatten(
                -1, (self.heads, -1)
            )
            for name in ("to_q", "to_k", "to_v")
        )
        q, k = (F.rms_norm(h, h.shape[-1:]) for h in (q, k))
        mixed = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        mixed = mixed.transpose(1, 2).flatten(2)
        parts = mixed.split([x.shape[1], t.shape[1]], 1)
        made = []
        for stream, mod, h, part in zip(streams, mods, states, parts, strict=True):
            h = h + mod[2] * stream.to_out(part)
            made.append(h + mod[5] * stream.mlp(norm(h) * mod[4] + mod[3]))
        return made[0], made[1]


def norm(h: torch.Tensor) -> torch.Tensor:
    """LayerNorm without weights."""
    return F.layer_norm(h, h.shape[-1:], eps=1e-6)


class ImageModel(nn.Module):
    """Latents [1, tokens, channels] at noise level sigma [1] -> velocity; the linears in and out are no part of the formats."""

    def __init__(self, sizes: Sizes, generator: torch.Generator) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(sizes, generator) for _ in range(sizes.blocks))
        self.latent_embedder = seeded_linear(sizes.channels, sizes.hidden, generator)
        self.time_embedder = seeded_linear(256, sizes.hidden, generator)
        self.final_norm_out = seeded_linear(sizes.hidden, sizes.channels, generator)

    def forward(self, latents: torch.Tensor, text: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        half = torch.exp(torch.arange(128, device=sigma.device) * (-math.log(10000) / 128))
        angles = 1000 * sigma.float()[:, None] * half
        temb = self.time_embedder(torch.cat((angles.cos(), angles.sin()), -1).to(latents.dtype))[:, None]
        x = self.latent_embedder(latents)
        for block in self.blocks:
            x, text = block(x, text, temb)
        return self.final_norm_out(norm(x))


def sample(model: nn.Module, noise: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
    """STEPS Euler steps from noise to sigma 0; the latents are kept in fp32 between the steps, as schedulers do."""
    x, dtype = noise.float(), noise.dtype
    sigmas = torch.linspace(1, 0, STEPS + 1, device=noise.device)
    for now, after in itertools.pairwise(sigmas):
        x = x + (after - now) * model(x.to(dtype), text, now[None]).float()
    return x


class DecoderLayer(nn.Module):
    """A Llama layer for one new token, q/k/v and gate/up as one weight each, as servers store them."""

    def __init__(self, sizes: Sizes, generator: torch.Generator) -> None:
        super().__init__()
        d, device = sizes.llm_hidden, generator.device
        self.heads, self.kv_heads, self.width = sizes.llm_heads, sizes.llm_kv_heads, d // sizes.llm_heads
        self.qkv = seeded_linear(d, (self.heads + 2 * self.kv_heads) * self.width, generator, False)
        self.out = seeded_linear(self.heads * self.width, d, generator, False)
        self.gate_up = seeded_linear(d, 2 * sizes.llm_mlp, generator, False)
        self.down = seeded_linear(sizes.llm_mlp, d, generator, False)
        gains = [torch.ones(d, device=device) + 0.1 * torch.randn(d, generator=generator, device=device) for _ in "ab"]
        self.norm1, self.norm2 = (nn.Parameter(g.to(BF16), requires_grad=False) for g in gains)
        cache = torch.randn(2, 1, self.kv_heads, sizes.llm_context, self.width, generator=generator, device=device)
        self.cache = nn.Parameter(cache.to(BF16), requires_grad=False)

    def attention(self, qkv: torch.Tensor) -> torch.Tensor:
        """One token against the cache, whose last place it takes (a copy: the cache stays as it is for the next run)."""
        q, k, v = qkv.unflatten(-1, (-1, self.width)).transpose(1, 2).split([self.heads, *[self.kv_heads] * 2], 1)
        keys, values = self.cache
        keys[:, :, -1:].copy_(k)
        values[:, :, -1:].copy_(v)
        mixed = F.scaled_dot_product_attention(q, keys, values, enable_gqa=True)
        return mixed.transpose(1, 2).flatten(2)

    def forward(self, x: torch.Tensor, fused: bool = False) -> torch.Tensor:
        """``fused``: norms, SwiGLU and residuals go into the linears that offer it."""
        d = x.shape[-1]
        if fused:
            qkv = fused_linear(self.qkv)(x, input_act="rms_norm", input_act_weight=self.norm1, input_act_eps=1e-6)
            x = fused_linear(self.out)(self.attention(qkv), residual=x)
            both = fused_linear(self.gate_up)(x, input_act="rms_norm", input_act_weight=self.norm2, input_act_eps=1e-6)
            return fused_linear(self.down)(both, input_act="swiglu", residual=x)
        x = x + self.out(self.attention(self.qkv(F.rms_norm(x, (d,), self.norm1, 1e-6))))
        gate, up = self.gate_up(F.rms_norm(x, (d,), self.norm2, 1e-6)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


def fused_linear(layer: nn.Module) -> Callable[..., torch.Tensor]:
    """A layer's linear with activation and residual: QuantizedLinear's own, or that of comfy-kitchen's tensor."""
    return layer if isinstance(layer, QuantizedLinear) else layer.fused


class Decoder(nn.Module):
    """hidden state [1, 1, d] of one token -> the last layer's hidden state."""

    def __init__(self, sizes: Sizes, generator: torch.Generator) -> None:
        super().__init__()
        self.layers = nn.ModuleList(DecoderLayer(sizes, generator) for _ in range(sizes.llm_layers))
        self.fused = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, self.fused)
        return x


# ---------------------------------------------------------------------------------------------------------- variants


def replaced(model: nn.Module, make: Callable[[str, nn.Linear], nn.Module]) -> nn.Module:
    """A copy of the model that shares all tensors, with other linears."""
    memo = {id(p): p for p in [*model.parameters(), *model.buffers()]}
    made = copy.deepcopy(model, memo)
    for name, module in list(made.named_modules()):
        if isinstance(module, nn.Linear):
            made.set_submodule(name, make(name, module))
    return made


def quantized(model: nn.Module, format: str, samples: dict[str, torch.Tensor]) -> nn.Module:
    """The model in a format, by its rules; SVDQuant sees sample inputs, to choose its smooth factor."""
    rules = Rules.of(RULES[format]) if format in RULES else Rules.of((), format)
    excluded = Rules.of((), "int8")  # the layers in and out stay, in every case

    @torch.inference_mode()
    def make(name: str, linear: nn.Linear) -> nn.Module:
        rule, default = rules.match(name), excluded.match(name)
        if rule.format is None or default.format is None:
            return linear
        given = {"calibration": samples[name]} if rule.format == "svdquant" else {}
        return QuantizedLinear.from_linear(linear, rule.format, **given)

    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    first, *others = linears
    layers = {
        first: make(first, linears[first])
    }  # alone: what torch.linalg loads when first called, threads must not share
    with ThreadPoolExecutor(THREADS) as pool:  # choosing a table or a branch has work for the CPU
        layers |= zip(others, pool.map(make, others, [linears[name] for name in others]), strict=True)
    return replaced(model, lambda name, linear: layers[name])


def dequantized(model: nn.Module) -> nn.Module:
    """The same with bf16 linears over the dequantized weights."""

    def make(name: str, layer: nn.Linear) -> nn.Module:
        if not isinstance(layer, QuantizedLinear):
            return layer
        made = nn.Linear(layer.in_features, layer.out_features, layer.bias is not None, device="meta", dtype=BF16)
        made.weight = nn.Parameter(layer.dequantize(BF16), requires_grad=False)
        made.bias = layer.bias
        return made

    return replaced(model, make)


def with_peer(model: nn.Module, resident: bool) -> nn.Module:
    """The same stored tensors in comfy-kitchen's QuantizedTensor; ``resident``: packed as it wants them for few rows."""
    from comfy_kitchen.tensor import QuantizedTensor, get_layout_class

    def make(name: str, layer: nn.Linear) -> nn.Module:
        if not isinstance(layer, QuantizedLinear):
            return layer
        t, c, shape = layer.inner(), layer.config, (layer.out_features, layer.in_features)
        base = {"orig_dtype": BF16, "orig_shape": shape}
        if layer.format.name == "int8_tensorwise":
            kind, fields = "TensorWiseINT8Layout", {
                "scale": t["scale"], "convrot": bool(c.convrot_groupsize), "convrot_groupsize": c.convrot_groupsize or 256,
            }  # fmt: skip
        elif layer.format.name == "awq_w4a16":
            kind = "TensorCoreAWQW4A16Layout"
            fields = {"scale": t["scale"], "zeros": t["zeros"], "group_size": c.group_size}
        elif layer.format.name == "svdquant_w4a4":
            kind = "TensorCoreSVDQuantW4A4Layout"
            fields = {name: t[name] for name in ("scale", "proj_down", "proj_up", "smooth_factor")}
        else:
            kind = "AsymW4A8Int8Layout"
            fields = {
                "scale": t["s_rel"], "s_channel": t["s_channel"], "codebook": t.get("codebook"), "group_size": c.group_size,
                "convrot_groupsize": c.convrot_groupsize,
            }  # fmt: skip
        layout, codes = get_layout_class(kind), t["qdata"]
        if resident and kind == "AsymW4A8Int8Layout":
            storage = torch.cat((codes.view(torch.uint8).flatten(), fields["scale"].view(torch.uint8).flatten()))
            codes_bytes = codes.numel()
            codes = storage[:codes_bytes].view(torch.int8).view_as(codes)
            fields["scale"] = storage[codes_bytes:].view(t["s_rel"].dtype).view_as(t["s_rel"])
        weight = QuantizedTensor(codes, kind, layout.Params(**base, **fields))
        if resident and kind == "AsymW4A8Int8Layout":
            weight = layout.optimize_for_gemv(weight, storage)
        made = nn.Linear(layer.in_features, layer.out_features, layer.bias is not None, device="meta", dtype=BF16)
        made.weight, made.bias = nn.Parameter(weight, requires_grad=False), layer.bias
        ones = torch.ones(layer.out_features, dtype=BF16, device=codes.device)  # it takes no residual without a scale

        def fused(x: torch.Tensor, residual: torch.Tensor | None = None, **act: Any) -> torch.Tensor:
            given = {} if residual is None else {"residual": residual, "residual_scale": ones}
            return weight.linear_input_act(x, **act, **given)

        made.fused = fused
        return made

    return replaced(model, make)


class Constant(nn.Linear):
    """A linear that costs nothing: it returns the same output for every input of a shape."""

    def __init__(self, like: nn.Linear) -> None:
        super().__init__(like.in_features, like.out_features, False, device="meta")
        self.device, self.made = like.weight.device, {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape = (*x.shape[:-1], self.out_features)
        if shape not in self.made:
            self.made[shape] = torch.randn(shape, device=self.device).to(BF16)
        return self.made[shape]


def without_linears(model: nn.Module, like: nn.Module) -> nn.Module:
    """The model with a Constant for each layer that ``like`` has quantized: what is left of its time is not the linears'."""
    names = {name for name, m in like.named_modules() if isinstance(m, QuantizedLinear)}
    return replaced(model, lambda name, layer: Constant(layer) if name in names else layer)


def have_peer() -> bool:
    """Whether comfy-kitchen can be imported."""
    try:
        import comfy_kitchen.tensor  # noqa: F401
    except ImportError:
        return False
    return True


def weight_bytes(model: nn.Module, quantized_like: nn.Module | None = None) -> int:
    """Bytes of the linears' weights that the formats are about."""
    names = {n for n, m in (quantized_like or model).named_modules() if isinstance(m, QuantizedLinear)}
    found = 0
    for name, module in model.named_modules():
        if name in names:
            tensors = module.inner().values() if isinstance(module, QuantizedLinear) else [module.weight]
            found += sum(t.nbytes for t in tensors)
    return found


# --------------------------------------------------------------------------------------------------------- measuring


def psnr(result: torch.Tensor, reference: torch.Tensor) -> float:
    """dB, of the largest magnitude of the reference over the root mean square of the difference."""
    result, reference = result.double(), reference.double()
    error = (result - reference).square().mean().sqrt()
    return 20 * math.log10((reference.abs().max() / error.clamp_min(1e-30)).item())


def relative(result: torch.Tensor, reference: torch.Tensor) -> float:
    """||result - reference|| / ||reference||"""
    return float((result.double() - reference.double()).norm() / reference.double().norm())


def input_samples(model: nn.Module, run: Callable[[nn.Module], Any], rows: int = 256) -> dict[str, torch.Tensor]:
    """Some rows of what each linear of the float model is given."""
    found: dict[str, list[torch.Tensor]] = {}

    def keep(name: str) -> Callable[..., None]:
        def seen(module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            x = args[0].reshape(-1, args[0].shape[-1])
            found.setdefault(name, []).append(x[:: -(-x.shape[0] // rows)].clone())

        return seen

    hooks = [m.register_forward_pre_hook(keep(n)) for n, m in model.named_modules() if isinstance(m, nn.Linear)]
    run(model)
    for hook in hooks:
        hook.remove()
    return {name: torch.cat(parts) for name, parts in found.items()}


def peak_of(call: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, int, float]:
    """(result, bytes that the call took at most on top of what was there, seconds) without a graph."""
    if not torch.cuda.is_available():
        start = time.perf_counter()
        return call(), 0, time.perf_counter() - start
    call()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    result = call()
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    return result, torch.cuda.max_memory_allocated() - before, seconds


def graph_times(calls: dict[str, Callable[[], Any]], reps: int) -> dict[str, float | None]:
    """Median us of each as a CUDA graph, replayed in turn; None for one that cannot be captured, which is said."""
    if not torch.cuda.is_available():
        return dict.fromkeys(calls)
    good: dict[str, Callable[[int], Any]] = {}
    for name, call in calls.items():
        try:
            benchlib.capture(lambda i, call=call: call(), 1, 1)
            good[name] = lambda i, call=call: call()
        except Exception as error:  # a peer may do what a capture forbids: the run goes on, and says so
            torch.cuda.synchronize()
            print(f"  {name} cannot be captured: {str(error).splitlines()[0][:160]}", flush=True)
    times = benchlib.time_variants(good, 1, 2000.0, reps)
    return {name: round(times[name].us, 2) if name in times else None for name in calls}


def attempt(what: str, call: Callable[[], Any]) -> Any:
    """What a peer's part returns; None where it raises, and the reason is printed: a peer's failure is a result too."""
    try:
        return call()
    except Exception as error:
        print(f"  {what}: {type(error).__name__}: {str(error).splitlines()[0][:200]}", flush=True)
        return None


def kernels_of(call: Callable[[], Any]) -> list[str]:
    """The kernels that ran, each once."""
    with trace() as calls:
        call()
    return sorted({kernel for _, kernel in calls})


def run_images(sizes: Sizes, formats: tuple[str, ...], device: str, reps: int) -> Iterator[dict[str, Any]]:
    """The image model: quality over STEPS steps, time of a step, memory."""
    generator = torch.Generator(device).manual_seed(1)
    model = ImageModel(sizes, generator)
    noise = torch.randn(1, sizes.image_tokens, sizes.channels, generator=generator, device=device).to(BF16)
    text = torch.randn(1, sizes.text_tokens, sizes.hidden, generator=generator, device=device).to(BF16)
    sigma = torch.full((1,), 0.5, device=device)
    samples = input_samples(model, lambda m: m(noise, text, sigma))
    original, peak, seconds = peak_of(lambda: sample(model, noise, text))
    exact = sample(copy.deepcopy(model).float(), noise.float(), text.float())
    bf16_db = psnr(original, exact)
    print(
        f"image: bf16 {seconds * 1e3:.1f} ms for {STEPS} steps without a graph, PSNR to fp32 {bf16_db:.2f} dB",
        flush=True,
    )
    for format in formats:
        start = time.perf_counter()
        ours = quantized(model, format, samples)
        if device != "cpu":
            torch.cuda.synchronize()
        made = time.perf_counter() - start
        dense = sample(dequantized(ours), noise, text)
        result, own_peak, own_seconds = peak_of(lambda m=ours: sample(m, noise, text))
        row = {
            "model": "image", "case": format, "tokens": [sizes.image_tokens, sizes.text_tokens], "steps": STEPS,
            "quantize_seconds": round(made, 2),
            "psnr_dequantized": round(psnr(result, dense), 2), "psnr_original": round(psnr(result, original), 2),
            "rel_dequantized": relative(result, dense), "psnr_bf16_to_fp32": round(bf16_db, 2),
            "weight_bytes": weight_bytes(ours), "weight_bytes_bf16": weight_bytes(model, ours),
            "working_bytes": own_peak, "working_bytes_bf16": peak,
            "eager_ms": round(own_seconds / STEPS * 1e3, 3), "eager_ms_bf16": round(seconds / STEPS * 1e3, 3),
            "kernels": kernels_of(lambda m=ours: m(noise, text, sigma)),
        }  # fmt: skip
        bare = without_linears(model, ours)
        calls = {
            "ours": lambda m=ours: m(noise, text, sigma), "bf16": lambda: model(noise, text, sigma),
            "rest": lambda m=bare: m(noise, text, sigma),
        }  # fmt: skip
        peer = attempt("comfy-kitchen", lambda m=ours: with_peer(m, False)) if have_peer() else None
        theirs = (
            None if peer is None else attempt("comfy-kitchen", lambda m=peer: peak_of(lambda: sample(m, noise, text)))
        )
        if theirs is not None:
            calls["ck"] = lambda m=peer: m(noise, text, sigma)
            row["psnr_dequantized_ck"], row["psnr_original_ck"] = (
                round(psnr(theirs[0], reference), 2) for reference in (dense, original)
            )
            row["working_bytes_ck"], row["eager_ms_ck"] = theirs[1], round(theirs[2] / STEPS * 1e3, 3)
        times = graph_times(calls, reps)
        row |= {"us": times["ours"], "bf16_us": times["bf16"], "ck_us": times.get("ck"), "rest_us": times["rest"]}
        yield row
        del ours, bare, dense, result, peer, theirs, calls
        if device != "cpu":
            torch.cuda.empty_cache()


def run_decode(sizes: Sizes, formats: tuple[str, ...], device: str, reps: int) -> Iterator[dict[str, Any]]:
    """One decode step of one sequence, as a CUDA graph; its quality over TOKENS tokens, each by itself."""
    generator = torch.Generator(device).manual_seed(2)
    model = Decoder(sizes, generator)
    tokens = torch.randn(TOKENS, 1, 1, sizes.llm_hidden, generator=generator, device=device).to(BF16)
    x = tokens[0]

    def over_tokens(m: nn.Module) -> torch.Tensor:
        return torch.cat([m(token) for token in tokens])

    samples = input_samples(model, over_tokens)
    original = over_tokens(model)
    for format in formats:
        ours = quantized(model, format, samples)
        fused = replaced(ours, lambda name, layer: layer)
        fused.fused = True
        dense, result = over_tokens(dequantized(ours)), over_tokens(ours)
        row = {
            "model": "decode", "case": format, "context": sizes.llm_context, "layers": sizes.llm_layers,
            "rel_dequantized": relative(result, dense), "rel_dequantized_fused": relative(over_tokens(fused), dense),
            "psnr_dequantized": round(psnr(result, dense), 2), "psnr_original": round(psnr(result, original), 2),
            "weight_bytes": weight_bytes(ours), "weight_bytes_bf16": weight_bytes(model, ours),
            "kernels": kernels_of(lambda m=ours: m(x)), "kernels_fused": kernels_of(lambda m=fused: m(x)),
        }  # fmt: skip
        bare = without_linears(model, ours)
        calls = {"ours": lambda m=ours: m(x), "fused": lambda m=fused: m(x), "bf16": lambda: model(x)}
        calls["rest"] = lambda m=bare: m(x)
        peer = attempt("comfy-kitchen", lambda m=ours: with_peer(m, True)) if have_peer() else None
        theirs = None if peer is None else attempt("comfy-kitchen", lambda m=peer: over_tokens(m))
        if theirs is not None:
            row["rel_dequantized_ck"] = relative(theirs, dense)
            calls["ck"] = lambda m=peer: m(x)
            both = replaced(peer, lambda name, layer: layer)
            both.fused = True
            fused_theirs = attempt("comfy-kitchen, fused", lambda m=both: over_tokens(m))
            if fused_theirs is not None:
                row["rel_dequantized_ck_fused"] = relative(fused_theirs, dense)
                calls["ck_fused"] = lambda m=both: m(x)
        times = graph_times(calls, reps)
        row |= {"us": times["ours"], "fused_us": times["fused"], "bf16_us": times["bf16"]}
        row |= {"ck_us": times.get("ck"), "ck_fused_us": times.get("ck_fused"), "rest_us": times["rest"]}
        yield row
        del ours, fused, bare, dense, peer, calls


def run(
    sizes: Sizes, formats: tuple[str, ...] = FORMATS, device: str = "cuda", reps: int = 9
) -> Iterator[dict[str, Any]]:
    """Rows of both models, as they are measured; AWQ's PSNR is required, not only reported."""
    for part in (run_images, run_decode):
        with torch.inference_mode():
            for row in part(sizes, formats, device, reps):
                yield row
                if (row["model"], row["case"]) == ("image", "awq") and not row["psnr_dequantized"] >= AWQ_LEAST_DB:
                    sys.exit(f"AWQ: {row['psnr_dequantized']} dB to the dequantized weights, wanted {AWQ_LEAST_DB}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="where to write the results; nowhere by default")
    parser.add_argument("--tiny", action="store_true", help="small models, to see that it runs")
    parser.add_argument("--formats", nargs="*", default=FORMATS, choices=FORMATS)
    parser.add_argument("--reps", type=int, default=9)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not args.tiny:
        sys.exit("this torch sees no CUDA GPU: give --tiny to run small models on the CPU")
    rows = []
    for row in run(TINY if args.tiny else Sizes(), tuple(args.formats), device, args.reps):
        # JSON has no NaN: what is not finite becomes null, and the run fails in the end
        rows.append({k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()})
        print(row, flush=True)
        if args.out:
            benchlib.write_results(args.out, "end_to_end", rows, SOURCES)
    bad = [f"{row['model']} {row['case']}" for row in rows if row["psnr_dequantized"] is None]
    if bad:
        sys.exit(f"outputs that are not finite: {', '.join(bad)}")


if __name__ == "__main__":
    main()
