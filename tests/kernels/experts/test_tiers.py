"""Each product of a step says its tier, and why it is not Hopper's."""

import logging

import pytest
import torch

from moe_aiter import tuning
from moe_aiter.kernels import hopper
from moe_aiter.kernels.experts.mlp import expert_mlp
from moe_aiter.kernels.experts.tiers import meta_experts, products, tier
from moe_aiter.op import IMPLS, runs
from moe_aiter.routing.plan import make_plan

pytestmark = [pytest.mark.no_interpreter, pytest.mark.no_host]
ROWS, ODD, FEW = (8192, 2048, 768, 128, 8), (10007, 1000, 356, 13, 3), (64, 2048, 768, 128, 8)


def tiers(shape, why_not="", **how):
    with tuning.tables_of(("sm90",)):
        return {
            name: tier(product, why_not) for name, product in products(meta_experts(shape, **how)).items()
        }


@pytest.mark.parametrize("shape", [ROWS, ODD])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_predicates_of_the_op_decide(shape, transposed, dtype, monkeypatch):
    monkeypatch.setattr(hopper, "is_hopper", lambda device: True)
    for product in products(meta_experts(shape, transposed=transposed, bias=True, dtype=dtype)).values():
        with tuning.tables_of(("sm90",)):
            found = tier(product)
        assert (found.name == "hopper") == bool(runs(IMPLS[product.op]["hopper"], product.inputs))
        assert (found.name == "hopper") == (found.why == "")


@pytest.mark.parametrize("shape", [ROWS, (10007, 1000, 360, 13, 3)])
@pytest.mark.parametrize("transposed", [False, True])
def test_whole_units_of_16_bytes_run_on_hopper(shape, transposed):
    found = tiers(shape, transposed=transposed, bias=True)
    assert {name: str(t) for name, t in found.items()} == dict.fromkeys(found, "hopper")


def test_reasons():
    odd = tiers(ODD)
    assert odd["down_grad"] == ("portable", "rows of (13, 1000, 356) are no multiples of 16 bytes")
    assert str(odd["down"]) == "portable: rows of (30021, 356) are no multiples of 16 bytes"
    assert tiers(FEW)["dx"].why == "it is faster for so few rows of an expert"
    assert tiers(ROWS, dtype=torch.float32)["up"].why == "torch.float32 has no Hopper kernel"
    assert {t.why for t in tiers(ROWS, "sm_80 is no Hopper GPU").values()} == {"sm_80 is no Hopper GPU"}
    many = tiers((64, 64, 64, hopper.MAX_GROUPS + 1, 1))
    assert many["up"].why == f"there are more than {hopper.MAX_GROUPS} experts"


def test_a_reason_is_false_and_a_text():
    no = hopper.No("why")
    assert not no and (True and no and True) is no and str(no) == "why"


def test_sizes():
    found = {name: p[2:] for name, p in products(meta_experts((6, 5, 4, 3, 2), "relu2")).items()}
    assert found["up"] == (12, 4, 5) and found["down_grad"] == (12, 4, 5) and found["dx"] == (12, 5, 4)
    assert found["down"] == (12, 5, 4) and found["dW_down"] == (5, 4, 12) and found["dW_up"] == (5, 4, 12)


@pytest.mark.gpu
@pytest.mark.parametrize("transposed", [False, True])
def test_a_step_runs_what_is_said(transposed, caplog):
    T, H, I, E, k = 100, 192, 320, 5, 2  # noqa: E741
    device = torch.device("cuda")
    i = meta_experts((T, H, I, E, k), transposed=transposed)
    why_not = "" if hopper.is_hopper(torch.device("cuda", 0)) else "no Hopper GPU"
    said = {name: tier(product, why_not).name for name, product in products(i).items()}
    x, up, down = (torch.zeros_like(t, device=device, requires_grad=True) for t in (i.x, i.gate_up, i.down))
    plan = make_plan(torch.randint(E, (T, k), device=device), E)
    with caplog.at_level(logging.DEBUG, "moe_aiter"):
        out = expert_mlp(x, up, down, torch.rand(T, k, device=device), plan)
        out.backward(torch.zeros_like(out))  # that of a sum would have strides of 0
    ran = [(r.args[0], r.args[2]) for r in caplog.records if r.msg.startswith("%s on %s: backend")]
    names = {"hopper": "hopper", "portable": "triton"}
    for op, product in (("expert_up", "up"), ("expert_down_grad_over_z", "down_grad"), ("tgmm", "dW_up")):
        assert (op, names[said[product]]) in ran
