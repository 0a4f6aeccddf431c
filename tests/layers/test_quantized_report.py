"""quantization_report: what is converted and how far off it is, and what is left and why."""

import pytest
import torch
from torch import nn

from moe_aiter import LoRALinear, quantization_report, quantize
from moe_aiter.layers.fuse import fuse_qkv
from moe_aiter.layers.quantized import SKIPPED

from .test_quantized import FAR, WEIGHTS, every_dtype, mlp, moe


@every_dtype
def test_the_report(device, dtype):
    model = nn.Sequential(mlp(device), nn.Dropout(0.5), nn.Linear(32, 64, device=device), moe(device))
    quantized, x = quantize(model, dtype, skip="2"), torch.randn(40, 64, device=device)
    report = quantization_report(model, quantized, x)
    assert [r.name for r in report.layers] == ["0.0", "0.2", "3.experts"]
    assert all(r.dtype == dtype and 0 < r.error < 2 * FAR[dtype] for r in report.layers)
    size = WEIGHTS[dtype].itemsize
    linear = report.layers[0]
    beside = 96 * 4 * (2 if size == 1 else 0) or 96 * 2
    assert linear.bytes_before == 4 * (64 * 96 + 96) and linear.bytes_after == size * 64 * 96 + beside
    assert report.bytes_after < report.bytes_before and 0 < report.error < 1
    text = str(report).splitlines()
    assert len(text) == 8 and text[0].split()[:2] == ["layer", "dtype"] and text[4].startswith("whole model")
    assert text[5] == "left as they are: 2"
    assert text[6].split() == ["2", "Linear", *SKIPPED.split()]
    assert text[7].split(maxsplit=2) == ["3.router", "Router", "a kind that is not converted"]
    assert model.training and quantized.training and not model[0][0]._forward_hooks


class Own(nn.Linear):
    def forward(self, x):
        return super().forward(x) + 1


def all_that_stays():
    model = nn.ModuleDict(
        {
            "attention": nn.MultiheadAttention(16, 2),
            "own": Own(4, 4),
            "patched": nn.Linear(4, 4),
            "lora": LoRALinear(nn.Linear(4, 4), rank=2),
            "head": nn.Linear(16, 20, bias=False),
            "embed": nn.Embedding(20, 16),
            "complex": nn.Linear(4, 4, dtype=torch.complex64),
            "skipped": nn.ModuleDict({"a": nn.Linear(4, 4), "norm": nn.LayerNorm(4)}),
            "converted": nn.Linear(4, 4),
            "parametrized": nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
        }
    )
    model["head"].weight = model["embed"].weight
    model["patched"].forward = lambda x: x
    model["q"], model["k"], model["v"] = fuse_qkv(*(nn.Linear(4, 4) for _ in range(3)))
    model.forward = lambda x: model["converted"](x)
    return model


def test_the_report_names_what_is_left_and_why():
    model = all_that_stays()
    quantized = quantize(model, skip=["skipped"])
    quantized.forward = lambda x: quantized["converted"](x)
    report = quantization_report(model, quantized, torch.randn(3, 4))
    assert [layer.name for layer in report.layers] == ["converted", "parametrized"]
    stays, mha = "a kind that is not converted", "nn.MultiheadAttention reads its weights itself"
    assert {layer.name: (layer.kind, layer.reason) for layer in report.left} == {
        "attention": ("MultiheadAttention", mha),
        "attention.out_proj": ("NonDynamicallyQuantizableLinear", mha),
        "own": ("Own", "a forward of its own"),
        "patched": ("Linear", "a forward of its own"),
        "lora.lora": ("LoRAFactors", "an adapter: merge it first"),
        "lora.base": ("Linear", "an adapter: merge it first"),
        "head": ("Linear", "something else uses its weight too"),
        "embed": ("Embedding", stays),
        "complex": ("Linear", "no weights of torch.complex64 are converted"),
        "skipped.a": ("Linear", SKIPPED),
        "q": ("FusedPart", "fused with others"),
        "k": ("FusedPart", "fused with others"),
        "v": ("FusedPart", "fused with others"),
    }
    assert f"left as they are: {len(report.left)}" in str(report)


def test_a_report_without_anything_left():
    report = quantization_report(model := mlp(), quantize(model), torch.randn(3, 64))
    assert report.left == () and str(report).splitlines()[-1].startswith("whole model")


def test_a_report_of_other_inputs():
    model = mlp()
    quantized = quantize(model)
    reports = [
        quantization_report(model, quantized, x) for x in ((torch.ones(2, 64),), {"input": torch.ones(2, 64)})
    ]
    assert reports[0] == reports[1] and quantization_report(model, model, torch.ones(2, 64)).error == 0
    with pytest.raises(ValueError, match="quantized has a layer '0' that model has not"):
        quantization_report(nn.Linear(64, 32), quantized, torch.ones(2, 64))
    with pytest.raises(ValueError, match="the original comes first"):
        quantization_report(quantized, model, torch.ones(2, 64))
    model = nn.Sequential(mlp(), nn.Linear(4, 4))
    other = quantize(model)
    model.forward = model[0].forward
    other.forward = other[0].forward
    report = quantization_report(model, other, torch.ones(1, 64))
    assert report.layers[-1].error is None and "not run" in str(report)
