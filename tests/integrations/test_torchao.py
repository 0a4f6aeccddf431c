"""torchao's tensors as weights: for training they say how products are made, which no kernel here follows."""

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from moe_aiter import LoRAExperts, MoE, expert_mlp, gemm, gmm, make_plan

KEPT = ("detach", "transpose", "_to_copy", "clone", "view", "slice", "empty_like", "as_strided", "t")


class Wrapper(Tensor):
    """As torchao's Float8TrainingWeightWrapperTensor: an op that it does not know gets the plain tensor."""

    @staticmethod
    def __new__(cls, data: Tensor):
        made = Tensor._make_wrapper_subclass(cls, data.shape, strides=data.stride(), dtype=data.dtype)
        made.data_inside = data
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        plain = tree_map_only(cls, lambda t: t.data_inside, (args, kwargs or {}))
        out = func(*plain[0], **plain[1])
        kept = func.overloadpacket.__name__ in KEPT
        return tree_map_only(Tensor, cls, out) if kept else out

    def __tensor_flatten__(self):
        return ["data_inside"], None

    @classmethod
    def __tensor_unflatten__(cls, inner, *_):
        return cls(inner["data_inside"])


Wrapper.__module__ = "torchao.prototype.moe_training.tensor"


def wrap(module: nn.Module, *names: str) -> nn.Module:
    for name in names:
        setattr(module, name, nn.Parameter(Wrapper(getattr(module, name).data)))
    return module


def layer(**options) -> MoE:
    return MoE(32, 32, num_experts=4, top_k=2, **options)


def with_adapters() -> MoE:
    moe = layer()
    moe.experts = LoRAExperts(moe.experts, rank=4)
    return moe


@pytest.mark.parametrize("name", ["gate_up", "down"])
@pytest.mark.parametrize("make", [layer, lambda: layer(fp8="e4m3"), with_adapters])
def test_layers_refuse_them(make, name):
    moe = make()
    owner = next(m for m in moe.modules() if isinstance(getattr(m, name, None), nn.Parameter))
    assert owner is not moe
    moe(torch.randn(5, 32))
    wrap(owner, name)
    with pytest.raises(TypeError, match=r"is a Wrapper of torchao.*quantize_.*fp8="):
        moe(torch.randn(5, 32))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), pytest.raises(TypeError, match="torchao"):
        moe(torch.randn(5, 32))


@pytest.mark.parametrize("of", [lambda w: w, lambda w: w.detach(), lambda w: w.to(torch.bfloat16)])
def test_products_refuse_them(of):
    w = of(Wrapper(torch.randn(4, 16, 32)))
    x, sizes = torch.randn(8, 32, dtype=w.dtype), torch.full((4,), 2, dtype=torch.int32)
    with pytest.raises(TypeError, match="rhs is a Wrapper of torchao"):
        gmm(x, w.mT, sizes)
    with pytest.raises(TypeError, match="w is a Wrapper of torchao"):
        gemm(x, Wrapper(torch.randn(32, 16)).to(w.dtype))
    plan, routing = make_plan(torch.zeros(8, 1, dtype=torch.int32), 4), torch.ones(8, 1)
    with pytest.raises(TypeError, match="gate_up is a Wrapper of torchao"):
        expert_mlp(x, w, w.mT[:, :, :8], routing, plan)


def test_compiled_layers_refuse_them():
    moe = layer()
    torch.compile(moe, fullgraph=True, backend="eager")(torch.randn(5, 32))
    wrap(moe.experts, "gate_up")
    with pytest.raises((TypeError, torch._dynamo.exc.Unsupported), match=r"TypeError|of torchao"):
        torch.compile(moe, fullgraph=True, backend="eager")(torch.randn(5, 32))


def test_other_classes_of_tensors_go_on():
    plain = type("Plain", (Wrapper,), {"__module__": "elsewhere"})
    moe, x = layer(), torch.randn(5, 32)
    expected = moe(x)
    moe.experts.gate_up = nn.Parameter(plain(moe.experts.gate_up.data))
    assert torch.equal(moe(x), expected)


def test_check_of_transformers_says_so(capsys):
    pytest.importorskip("transformers", reason="transformers is not installed")
    from integrations.families import experts_of, tiny_model

    from moe_aiter.integrations.transformers import NAME, check, register

    register()
    model = tiny_model("mixtral")
    model.set_experts_implementation(NAME)
    assert {found.path for found in check(model).values()} == {"fused"}
    for experts in experts_of(model):
        wrap(experts, "down_proj")
    assert {found.path for found in check(model).values()} == {"not ours"}
    assert "down_proj is a Wrapper of torchao, which the kernels refuse" in capsys.readouterr().out
    with pytest.raises(TypeError, match="down is a Wrapper of torchao"):
        model(torch.zeros(1, 3, dtype=torch.long))


@pytest.mark.parametrize("kind", ["Float8Tensor", "Int8Tensor"])
def test_the_package_s_own_tensors(kind):
    quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    moe = layer()
    w = getattr(quantization, kind).from_hp(moe.experts.gate_up.data, granularity=quantization.PerRow())
    moe.experts.gate_up = nn.Parameter(w, requires_grad=False)
    with pytest.raises(TypeError, match=f"gate_up is a {kind} of torchao"):
        moe(torch.randn(5, 32))
