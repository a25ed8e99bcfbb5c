"""A caller's word on FP16 GEMMs, and the dtype of activations behind codes: what providers read of them."""

import threading

import pytest
import torch

from kitchen_core import UnsupportedError, fallback, fp16_fallback, int8_linear, quantize_int8_convrot_weight, registry
from kitchen_core.registry import Kernel

FP32, BF16 = torch.float32, torch.bfloat16


def test_blocks_nest_and_end():
    assert fallback.asked() == ""
    with fp16_fallback(False):
        assert fallback.asked() == fallback.OFF
        with fp16_fallback(True):
            assert fallback.asked() == fallback.ON
        with fp16_fallback(True, fp32_activations=True):
            assert fallback.asked() == fallback.FP32_TOO
        assert fallback.asked() == fallback.OFF
    with pytest.raises(ValueError, match="inside"), fp16_fallback(False):
        raise ValueError("inside")
    assert fallback.asked() == ""


def test_another_thread_is_not_concerned():
    seen = []
    with fp16_fallback(False):
        thread = threading.Thread(target=lambda: seen.append(fallback.asked()))
        thread.start()
        thread.join()
    assert seen == [""]


@pytest.mark.parametrize("wrong", ["0", 0, None, "off"])
def test_only_bools(wrong):
    with pytest.raises(UnsupportedError, match="takes True or False"):
        fp16_fallback(wrong)


def test_the_dtype_behind_codes_is_told_only_where_it_is_not_the_outputs():
    assert fallback.activation_dtype(BF16) == BF16
    with fallback.codes_of(FP32, BF16):
        assert fallback.activation_dtype(BF16) == FP32
    with fallback.codes_of(BF16, FP32):
        assert fallback.activation_dtype(FP32) == BF16
    for same in ((FP32, FP32), (BF16, torch.float16)):
        with fallback.codes_of(*same):
            assert fallback._activations.get() is None
            assert not registry.overridden(), "nothing is chosen anew for that"


def test_a_kernel_sees_the_word_of_a_call_and_nothing_remembers_it():
    seen = []

    def supports(problem, facts):
        seen.append(fallback.asked())
        return "only looks"

    spy = Kernel("int8_linear", "spy", lambda *a: None, supports, 900, "fallback-test")
    registry.register(spy)
    try:
        x, (weight, scale) = torch.randn(3, 64), quantize_int8_convrot_weight(torch.randn(8, 64), 64)
        for asked in (None, False, True, None, False):
            int8_linear(x, weight, scale, fp16_fallback=asked)
    finally:
        registry.unregister(spy)
    assert seen == ["", "0", "1", "0"], "the plain call is remembered, the others are not"
