"""Quantised checkpoints as a source of `convert`: each format against what it stands for, in a few lines."""

import json

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("safetensors", reason="safetensors is not installed")

from integrations.checkpoints import change, change_config, save, tensors
from integrations.checkpoints import same as identical
from integrations.families import tiny_model

from moe_aiter.integrations.checkpoints import CheckpointError, convert, load_moe, quantised

GROUP = 8
AWQ = 0, 2, 4, 6, 1, 3, 5, 7
DENSE = ".self_attn.o_proj.weight"  # stays what it is called, and is dequantised too


def pack(codes, dim, order=range(8)):
    """Eight numbers of 4 bits in an int32 along `dim`, the lowest bits first, filled up with zeros."""
    codes = codes.movedim(dim, -1).long()
    codes = torch.nn.functional.pad(codes, (0, -codes.shape[-1] % 8)).unflatten(-1, (-1, 8))[..., list(order)]
    words = sum(codes[..., i] << 4 * i for i in range(8))
    return (words - 2**32 * (words >= 2**31).long()).int().movedim(-1, dim).contiguous()


def four_bits(out, width, zeros=None):
    """Codes (out, in), zero points and scales (out, groups), and the weight."""
    groups = -(-width // GROUP)
    codes, scales = torch.randint(16, (out, width)), torch.rand(out, groups).half()
    zeros = torch.randint(16, (out, groups)) if zeros is None else torch.full((out, groups), zeros)
    each = torch.arange(width) // GROUP
    return codes, zeros, scales, ((codes - zeros[:, each]) * scales[:, each].float()).half()


def gptq(stem, out, width, version, order):
    codes, zeros, scales, weight = four_bits(out, width)
    perm = torch.randperm(width) if order else torch.arange(width)  # desc_act
    stored = zeros.T - (1 if version == "gptq" else 0) & 15
    parts = {"qweight": pack(codes.T[perm], 0), "qzeros": pack(stored, 1), "scales": scales.T.contiguous()}
    parts["g_idx"] = (torch.arange(width) // GROUP)[perm].int()
    return {f"{stem}.{name}": t for name, t in parts.items()}, weight[:, perm]


def awq(stem, out, width):
    codes, zeros, scales, weight = four_bits(out, width)
    parts = {"qweight": pack(codes.T, 1, AWQ), "qzeros": pack(zeros.T, 1, AWQ), "scales": scales.T}
    return {f"{stem}.{name}": t for name, t in parts.items()}, weight


def packed(stem, out, width, symmetric):
    codes, zeros, scales, weight = four_bits(out, width, 8 if symmetric else None)
    parts = {"packed": pack(codes, 1), "scale": scales, "shape": torch.tensor([out, width])}
    parts |= {} if symmetric else {"zero_point": pack(zeros, 0)}
    return {f"{stem}.weight_{name}": t for name, t in parts.items()}, weight


def fp8(stem, out, width, block):
    weight, scales = (
        torch.randn(out, width).to(torch.float8_e4m3fn),
        torch.rand(-(-out // block[0]), -(-width // block[1])),
    )
    rows, columns = torch.arange(out)[:, None] // block[0], torch.arange(width) // block[1]
    found = weight.float() * scales[rows, columns]
    return {f"{stem}.weight": weight, f"{stem}.weight_scale_inv": scales}, found.half()


def compressed(**changes):
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": True}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights | changes}}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP}
AWQ_CONFIG = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}
FP8 = {"quant_method": "fp8", "weight_block_size": [16, 10]}
CASES = {
    "gptq": (GPTQ, lambda *a: gptq(*a, "gptq", False), 24),
    "gptq-desc_act": (GPTQ | {"desc_act": True}, lambda *a: gptq(*a, "gptq", True), 24),
    "gptq_v2": (GPTQ | {"checkpoint_format": "gptq_v2"}, lambda *a: gptq(*a, "gptq_v2", False), 24),
    "format": (GPTQ | {"format": "gptq_v2"}, lambda *a: gptq(*a, "gptq_v2", False), 24),
    "awq": (AWQ_CONFIG, awq, 24),
    "symmetric": (compressed(), lambda *a: packed(*a, True), 20),
    "asymmetric": (compressed(symmetric=False), lambda *a: packed(*a, False), 20),
    "fp8": (FP8, lambda *a: fp8(*a, (16, 10)), 24),
    "fp8-128": ({"quant_method": "fp8"}, lambda *a: fp8(*a, (128, 128)), 24),
}


def quantise(folder, settings, make, width=24):
    """A checkpoint of float16 in `folder`, quantised; and the tensors that it stands for."""
    sizes = {"intermediate_size": width, "num_hidden_layers": 1, "num_local_experts": 3}
    tiny_model("mixtral", torch.float16, **sizes).save_pretrained(folder)
    standing = tensors(folder)

    def edit(found):
        for key in [key for key in found if ".experts." in key or key.endswith(DENSE)]:
            parts, weight = make(key.removesuffix(".weight"), *found.pop(key).shape)
            found.update({name: t.contiguous() for name, t in parts.items()})
            standing[key] = weight.contiguous()

    change(folder, edit)
    change_config(folder, quantization_config=settings)
    return standing


@pytest.mark.parametrize("case", CASES)
def test_weights_are_what_they_stand_for(case, tmp_path):
    settings, make, width = CASES[case]
    standing = quantise(tmp_path / "theirs", settings, make, width)
    report = convert(tmp_path / "theirs", tmp_path / "ours")
    assert len(report.differences) == 1
    moe = load_moe(tmp_path / "ours", "model.layers.0.mlp")
    block = "model.layers.0.block_sparse_moe.experts.2."
    rows = torch.cat([standing[f"{block}{name}.weight"] for name in ("w1", "w3")])
    assert torch.equal(moe.experts.gate_up[2], rows)
    convert(tmp_path / "ours", tmp_path / "back", to="hub", check=False)
    assert identical(tensors(tmp_path / "back"), standing)
    assert "quantization_config" not in json.loads((tmp_path / "back" / "config.json").read_text())


def test_fp8_experts_of_transformers(tmp_path):
    """Stacked: a scale for each block of each expert."""
    save(tmp_path / "theirs", "qwen3_moe", torch.bfloat16, fused=True)
    found = tensors(tmp_path / "theirs")
    key = "model.layers.1.mlp.experts.gate_up_proj"
    experts = [fp8("x", 48, 16, (16, 10)) for _ in found[key]]
    parts = {key: torch.stack([e[0]["x.weight"] for e in experts])}
    parts[f"{key}_scale_inv"] = torch.stack([e[0]["x.weight_scale_inv"] for e in experts])
    change(tmp_path / "theirs", lambda found: found.update(parts))
    change_config(tmp_path / "theirs", quantization_config=FP8)
    convert(tmp_path / "theirs", tmp_path / "ours")
    got = load_moe(tmp_path / "ours", "model.layers.1.mlp").experts.gate_up
    torch.testing.assert_close(got.half(), torch.stack([e[1] for e in experts]), rtol=2**-7, atol=0)
    # 24 rows of gates and 24 of up: four blocks of 13 rows, or two of each
    settings = FP8 | {"weight_block_size": [13, 10]}
    parts[f"{key}_scale_inv"] = torch.ones(len(experts), 4, 2)
    change(tmp_path / "theirs", lambda found: found.update(parts))
    change_config(tmp_path / "theirs", quantization_config=settings)
    with pytest.raises(CheckpointError, match=r"has 24 rows of gates.* a multiple of 13 rows is needed"):
        convert(tmp_path / "theirs", tmp_path / "other")


def test_stacked_experts_are_read_one_at_a_time(tmp_path, monkeypatch):
    """A layer of DeepSeek-V3, dequantised as a whole in float32, takes 90 GB."""
    save(tmp_path / "theirs", "qwen3_moe", torch.bfloat16, fused=True)

    def edit(found):
        for key in [key for key in found if key.endswith(("gate_up_proj", "down_proj"))]:
            found[f"{key}_scale_inv"] = torch.ones(*found[key].shape[:1], 1, 1)
            found[key] = found[key].to(torch.float8_e4m3fn)

    change(tmp_path / "theirs", edit)
    change_config(tmp_path / "theirs", quantization_config={"quant_method": "fp8"})
    axes = []
    made = quantised.fp8_weight

    def watched(settings, parts):
        axes.append(parts["weight"].ndim)
        return made(settings, parts)

    monkeypatch.setitem(quantised.FORMATS, "fp8", quantised.FORMATS["fp8"]._replace(weight=watched))
    convert(tmp_path / "theirs", tmp_path / "ours")
    assert set(axes) == {2}


def lose(found):
    del found["model.layers.0.block_sparse_moe.experts.0.w1.qzeros"]


def lose_order(found):
    del found["model.layers.0.block_sparse_moe.experts.0.w1.g_idx"]


def lose_zeros(found):
    del found["model.layers.0.block_sparse_moe.experts.0.w1.weight_zero_point"]


def regroup(found):
    key = "model.layers.0.block_sparse_moe.experts.0.w1.scales"
    found[key] = found[key][:1].contiguous()


def centre(found):
    """Zero points of a symmetric weight of gptq_v2, where config.json says gptq."""
    key = "model.layers.0.block_sparse_moe.experts.0.w1.qzeros"
    found[key] = torch.full_like(found[key], -2004318072)  # 8 eights


def overflow(found):
    found[f"model.layers.0{DENSE}_scale_inv"].fill_(1e6)


def scramble(found):
    found["model.layers.0.block_sparse_moe.experts.0.w1.g_idx"][3] = 9


@pytest.mark.parametrize(
    "case, edit, problem",
    [
        ("gptq", lose, "w1.qzeros is missing beside"),
        ("gptq-desc_act", lose_order, "w1.g_idx is missing beside"),
        ("asymmetric", lose_zeros, "w1.weight_zero_point is missing beside"),
        ("gptq", regroup, "w1.scales is (1, 24); it should be (2, 24)"),
        ("gptq", centre, "symmetric weight in 'gptq_v2', each the zero point 8"),
        ("gptq", scramble, "its g_idx has numbers outside of 0 to 1"),
        ("gptq", {"bits": 8}, "bits is 8; only 4 is known"),
        ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'; known: gptq, gptq_v2"),
        ("gptq", {"group_size": 0}, "group_size is 0; it should be a whole number above 0"),
        ("gptq", {"quant_method": "exl3"}, "belongs to quantised weights: save it dequantised"),
        ("awq", {"version": "gemv"}, "version is 'gemv'; only 'gemm' is known"),
        ("awq", {"zero_point": False}, "zero_point is False; only True is known"),
        ("symmetric", {"format": "nvfp4-pack-quantized"}, "only 'pack-quantized' is known"),
        ("symmetric", compressed(num_bits=8), "weights are int of 8 bits; only int of 4 is known"),
        ("symmetric", compressed(actorder="group"), "actorder is 'group', which permutes the inputs"),
        ("symmetric", compressed(group_size=0), "strategy is 'group' with group_size 0; known: group,"),
        ("fp8", {"weight_block_size": None}, "weight_block_size is None; only blocks"),
        ("fp8", {"weight_block_size": [16, 16]}, "it should be (2, 1)"),
        ("fp8", overflow, "it has numbers that are not finite in torch.float16"),
        ("fp8-128", lambda found: found.pop(f"model.layers.0{DENSE}_scale_inv"), "but has no scales"),
    ],
)
def test_what_cannot_be_read_is_refused(case, edit, problem, tmp_path):
    settings, make, width = CASES[case]
    quantise(tmp_path / "theirs", settings, make, width)
    if isinstance(edit, dict):
        change_config(tmp_path / "theirs", quantization_config=settings | edit)
    else:
        change(tmp_path / "theirs", edit)
    with pytest.raises(CheckpointError) as refusal:
        convert(tmp_path / "theirs", tmp_path / "ours")
    assert any(problem in text for text in refusal.value.problems), refusal.value.problems
    assert not (tmp_path / "ours").exists()
