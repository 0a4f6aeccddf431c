"""transformers' FP8 checkpoints: frozen experts of 8-bit floats with scales of blocks, on FP8 products."""

import pytest
import torch
from torch import Tensor, nn

from moe_aiter.integrations.four_bit import quantize_experts
from moe_aiter.integrations.lora import add_lora, merge_lora
from moe_aiter.integrations.transformers import NAME, check, register
from moe_aiter.kernels.quantize.scale_blocks import dequantize, quantize_blocks

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
fp8 = pytest.importorskip(
    "transformers.integrations.finegrained_fp8", reason="this version has no FP8 experts"
)
if not hasattr(fp8, "FP8ExpertsInterface"):
    pytest.skip("transformers is older than its registry of FP8 experts", allow_module_level=True)

SIZES = {
    "num_experts": 4, "num_experts_per_tok": 2, "vocab_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip


def tiny(intermediate: int = 192, hidden: int = 160, **quantization):
    """A Qwen3-MoE whose experts transformers has replaced, with numbers in them."""
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(**SIZES, hidden_size=hidden, moe_intermediate_size=intermediate)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    weights = [(m.gate_up_proj.data, m.down_proj.data) for m in experts_of(model)]
    how = transformers.FineGrainedFP8Config(**quantization)
    rest = [name for name, m in model.named_modules() if isinstance(m, nn.Linear)]
    model = fp8.replace_with_fp8_linear(model, rest, quantization_config=how)
    for module, pair in zip(experts_of(model), weights, strict=True):
        for name, w in zip(("gate_up_proj", "down_proj"), pair, strict=True):
            fill(module, name, w * 8)
    register()
    model.set_experts_implementation(NAME)
    return model


def experts_of(model: nn.Module) -> list[nn.Module]:
    return [m for m in model.modules() if hasattr(m, "gate_up_proj")]


def fill(module: nn.Module, name: str, w: Tensor) -> None:
    made = getattr(module, name)
    if made.dtype == torch.int8:
        packed = torch.randint(-128, 128, made.shape, dtype=torch.int8)
        scale = torch.randint(118, 124, getattr(module, f"{name}_scale_inv").shape, dtype=torch.uint8)
        scale = scale.view(torch.float8_e8m0fnu)
    elif module.block_size is None:
        rows = getattr(module, f"{name}_scale_inv").shape[1]  # two for gate and up
        scale = w.unflatten(1, (rows, -1)).abs().amax((2, 3))[..., None] / 448
        packed = (w / scale.repeat_interleave(w.shape[1] // rows, 1)).to(torch.float8_e4m3fn)
    else:
        packed, scale = quantize_blocks(w, True)
    setattr(module, name, nn.Parameter(packed, requires_grad=packed.is_floating_point()))
    setattr(module, f"{name}_scale_inv", nn.Parameter(scale, requires_grad=scale.is_floating_point()))


def weight_of(module: nn.Module, name: str) -> Tensor:
    packed, scale = getattr(module, name).detach(), getattr(module, f"{name}_scale_inv").detach()
    if packed.dtype == torch.int8:
        return fp8.Fp8Dequantize(None)._unpack_fp4(packed).double() * scale.double().repeat_interleave(32, -1)
    if module.block_size is None:
        return packed.double() * scale.repeat_interleave(packed.shape[1] // scale.shape[1], 1)
    return dequantize(packed, scale, torch.float64)


class Product(torch.autograd.Function):
    """w @ x for each row of x, where rows and the gradients of results have 8 bits."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(w)
        return rounded(x) @ w.mT

    @staticmethod
    def backward(ctx, dz):
        return rounded(dz) @ ctx.saved_tensors[0], None


def rounded(x: Tensor) -> Tensor:
    return dequantize(*quantize_blocks(x, False), torch.float64)


def expected(module: nn.Module, x: Tensor, ids: Tensor, s: Tensor) -> Tensor:
    multiply = (lambda x, w: x @ w.mT) if module.gate_up_proj.dtype == torch.int8 else Product.apply
    gate_up, down = weight_of(module, "gate_up_proj"), weight_of(module, "down_proj")
    out = torch.zeros_like(x)
    for e in range(module.num_experts):
        token, choice = (ids == e).nonzero(as_tuple=True)
        a = module._apply_gate(multiply(x[token], gate_up[e]))
        out = out.index_add(0, token, s[token, choice, None] * multiply(a, down[e]))
    return out


FOUR = {"weight_block_size": None, "expert_dtype": "fp4", "scale_fmt": "ue8m0"}


@pytest.mark.parametrize("how", [{}, {"activation_scheme": "static"}, {"weight_block_size": None}, FOUR])
def test_outputs_and_gradients(how):
    """Widths that blocks of 128 do not divide; an expert without tokens; a choice that is dropped."""
    try:
        whole = how == {"weight_block_size": None}  # whose rows of gates must fill blocks
        module = experts_of(tiny(256 if whole else 192, **how))[0]
    except TypeError as error:
        pytest.skip(f"this version of transformers does not know it: {error}")
    module.config.dtype = torch.float64  # in which no sum is rounded to another number of 8 bits
    x = torch.randn(30, 160, dtype=torch.float64)
    ids = torch.stack([torch.randperm(3)[:2] for _ in range(30)])
    ids[0, 0] = 4  # how transformers marks experts of other ranks
    s = (
        torch.tensor([0.5, 0.25]).double().expand(30, 2).clone()
    )  # powers of two, by which rounding is the same
    s[0, 0] = 0
    leaves, exact = ([t.clone().requires_grad_() for t in (x, s)] for _ in range(2))
    y = module(leaves[0], ids, leaves[1])
    reference = expected(module, exact[0], ids, exact[1])
    assert relative(y, reference) < 1e-6  # routing weights are float32
    dy = torch.randn_like(reference)
    dx, ds = torch.autograd.grad(y, leaves, dy)
    expected_dx, expected_ds = torch.autograd.grad(reference, exact, dy)
    assert relative(dx, expected_dx) < 1e-6
    assert relative(ds, expected_ds) < 0.06  # by the gradient of a, of 8 bits, and not by the output


def relative(x: Tensor, exact: Tensor) -> float:
    return float((x.detach().double() - exact.detach()).norm() / exact.detach().norm())


def test_adapters_train_on_them(capsys):
    model = tiny()
    tokens = torch.randint(64, (2, 8))
    logits = model(tokens).logits
    assert {found.path for found in check(model).values()} == {"two products"}
    assert "its weights have 8 bits, multiplied by rows of 8 bits" in capsys.readouterr().out
    add_lora(model, rank=4)
    assert torch.equal(model(tokens).logits, logits)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    losses = []
    for _ in range(8):
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
    with pytest.raises(ValueError, match="have 8 bits, which would round the adapters away"):
        merge_lora(model)


def test_other_blocks_are_refused(capsys):
    model = tiny()
    for module in experts_of(model):
        module.block_size = (64, 128)
    assert {found.path for found in check(model).values()} == {"not ours"}
    assert "blocks of (64, 128)" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"blocks of \(64, 128\).*reads those of \(128, 128\)"):
        model(torch.zeros(1, 3, dtype=torch.long))


@pytest.mark.parametrize("how", [{}, FOUR])
def test_what_changed_their_dtype_is_refused(how, capsys):
    try:
        model = tiny(**how)
    except TypeError as error:
        pytest.skip(f"this version of transformers does not know it: {error}")
    model.to(torch.float16)
    why = r"gate_up_proj of FP8Experts is .* gate_up_proj_scale_inv torch.float16: .*load the model again"
    with pytest.raises(TypeError, match=why):
        model(torch.zeros(1, 3, dtype=torch.long))
    assert {found.path for found in check(model).values()} == {"not ours"}
    assert "load the model again" in capsys.readouterr().out


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_16_bits(dtype):
    module = experts_of(tiny())[0]
    module.config.dtype = dtype  # as after from_pretrained(dtype=...)
    x, ids, s = torch.randn(30, 160, dtype=dtype), torch.randint(4, (30, 2)), torch.full((30, 2), 0.5)
    y = module(x, ids, s)
    assert y.dtype == dtype and relative(y, expected(module, x.double(), ids, s.double())) < 0.03


def test_two_scales_in_a_block_are_refused():
    module = experts_of(tiny(weight_block_size=None))[0]
    with pytest.raises(ValueError, match=r"one scale for 192 rows of gates.*a multiple of 128 rows"):
        module(torch.zeros(1, 160), torch.zeros(1, 2, dtype=torch.long), torch.ones(1, 2))
    module = experts_of(tiny(96))[0]  # has two blocks, as gate and up of a published checkpoint have one each
    with pytest.raises(ValueError, match=r"96 rows of gates, so a block .* needs a multiple of 128 rows"):
        module(torch.zeros(1, 160), torch.zeros(1, 2, dtype=torch.long), torch.ones(1, 2))


def test_adapters_of_peft():
    peft = pytest.importorskip("peft", reason="PEFT is not installed")
    from moe_aiter.integrations import peft as ours

    ours.register()
    try:
        model, tokens = tiny(), torch.randint(64, (2, 8))
        logits, names = model(tokens).logits, {name for name, _ in experts_of(model)[0].named_parameters()}
        targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
        made = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=[], target_parameters=targets))
        assert {name for name, _ in experts_of(model)[0].named_parameters()} == names
        assert torch.equal(made(tokens).logits, logits)
        with pytest.raises(ValueError, match="has 8 bits, which would round adapters away"):
            made.merge_and_unload()
        made(tokens, labels=tokens).loss.backward()
        found = [p.grad for name, p in made.named_parameters() if "lora_B" in name]
        assert len(found) == 4 and all(grad.abs().max() > 0 for grad in found)
    finally:
        ours.unregister()


def test_they_are_not_quantised_again():
    with pytest.raises(ValueError, match="has weights of 8 bits"):
        quantize_experts(tiny(), "nf4")


# rows of whole blocks, others that Hopper's kernels take, and some that they do not
@pytest.mark.parametrize("sizes", [(512, 256), (160, 176), (136, 152)])
@pytest.mark.gpu
def test_on_a_gpu(sizes):
    hidden, intermediate = sizes
    module = experts_of(tiny(intermediate, hidden=hidden))[0].cuda()
    module.config.dtype = torch.bfloat16
    x = torch.randn(300, hidden, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    ids = torch.rand(300, 4, device="cuda").topk(2).indices
    s = torch.rand(300, 2, device="cuda", requires_grad=True)
    y = module(x, ids, s)
    dy = torch.randn_like(y)
    exact = [t.detach().double().requires_grad_() for t in (x, s)]
    reference = expected(module, exact[0], ids, exact[1])
    assert relative(y, reference) < 0.03
    grads = torch.autograd.grad(reference, exact, dy.double())
    for grad, other in zip(torch.autograd.grad(y, [x, s], dy), grads, strict=True):
        assert relative(grad, other) < 0.06
