"""Experts lent in whole MoE layers: capacity, replay, FSDP2, adapters, 4 and 8 bits, drawn at random."""

import functools
import random

import pytest
import torch
import torch.distributed as dist
from check import error, few
from torch import nn
from torch.utils.checkpoint import checkpoint

from moe_aiter import Capacity, LoRAExperts, MoE, quantize, record_routes, replay_routes, use
from moe_aiter.config import interpret
from moe_aiter.distributed import expert_mesh, parallelize
from moe_aiter.kernels.experts.fp8 import ALL, RECIPES
from moe_aiter.kernels.experts.mlp import by_layer
from moe_aiter.op import IMPLS

from .ranks import every_loan_pays, gathered, run, whole
from .shared_memory import use_files

if interpret:
    pytest.skip("nothing here runs Triton: test_passes.py does", allow_module_level=True)

CASES, TOGETHER = 100, 25  # for each number of ranks, and of them in one test
FOUR_BITS = {"nf4": 64, "mxfp4": 32, "int4": 128}  # -> sizes that fit


def draw(number: int, world: int) -> dict:
    """One combination of a layer and how it is shared."""
    r = random.Random(number)
    efsdp = r.choice([1, 2]) if world == 4 else 1
    ep, each = world // efsdp, r.randint(2, 4)
    case = {
        "ep": ep,
        "experts": ep * each - (r.choice([0, 1]) if efsdp == 1 else 0),
        "fsdp": efsdp > 1 or r.random() < 0.5,
        "guests": r.randint(1, min(4, (ep - 1) * each - 1)),
        "tokens": r.choice([1, 7, 32]),
        "hot": r.choice([0.0, 1.0]),  # how much the router prefers the experts of one rank
        "kind": r.choice(["plain", "lora", "dora", "4 bits", "4 bits, lora", "fp8"]),
        "format": r.choice(list(FOUR_BITS)),
        "recipe": r.choice(RECIPES),
        "bias": r.random() < 0.5,
        "activation": r.choice(["swiglu", "gelu"]),
        "capacity": r.choice([None, Capacity(1.0), Capacity(0.5, drop="probability")]),
        "replay": r.random() < 0.3,
        "checkpoint": r.choice([None, True, False]),  # use_reentrant
        "transport": r.choice(["collective", "symmetric"]),
        "backend": r.choice(["auto", "torch", "as on GPUs"]),
        "rows": r.choice([0.5, 1.0, 2.0]),
        "reshard": r.random() < 0.5,
    }
    case["top_k"] = r.randint(1, min(3, case["experts"]))
    case["hidden"] = {"4": FOUR_BITS[case["format"]], "f": 32}.get(case["kind"][0], 16)
    return case


def model_of(case: dict) -> nn.Sequential:
    torch.manual_seed(0)
    names, fp8 = ("bias", "activation", "capacity"), case["recipe"] if case["kind"] == "fp8" else None
    options = {name: case[name] for name in names}
    moe = MoE(case["hidden"], case["hidden"], case["experts"], case["top_k"], fp8=fp8, **options)
    with torch.no_grad():  # tokens have a large first number
        moe.router.weight[:, 0] = case["hot"] * (torch.arange(case["experts"]) < 2)
    if case["kind"].startswith("4 bits"):
        moe = quantize(moe, case["format"])
    if case["kind"].endswith("ora"):
        moe.experts = LoRAExperts(moe.experts, rank=2, dora=case["kind"] == "dora")
        for name, p in moe.experts.named_parameters():
            if "lora" in name:
                p.data.add_(0.3 * torch.randn_like(p))
    return nn.Sequential(moe)


def step(model, case, routes, x, dout) -> tuple:
    """The output of some tokens and their gradient; those of parameters stay there."""
    fn, x = model, x.clone().requires_grad_()
    if case["checkpoint"] is not None:
        fn = functools.partial(checkpoint, model, use_reentrant=case["checkpoint"])
    if routes is None:
        out = fn(x)
        out.backward(dout)
    else:
        with replay_routes(model, routes):
            out = fn(x)
            out.backward(dout)
    return out.detach(), x.grad


def gradients(model) -> dict:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def truth(case: dict, routes: list, x, dout) -> dict:
    """One process in float64, which passes the tokens of each rank alone: that is what capacity counts."""
    model, case = model_of(case).double(), case | {"checkpoint": None}
    every = zip(routes, x.double(), dout.double(), strict=True)
    results = [step(model, case, *given) for given in every]
    out, dx = map(torch.cat, zip(*results, strict=True))
    scale = 1 / len(x) if case["fsdp"] else 1.0
    return {"out": out, "dx": dx} | {name: scale * grad for name, grad in gradients(model).items()}


def shared(rank: int, case: dict, routes: list, x, dout, slots: int) -> dict:
    model = model_of(case)
    options = {name: case[name] for name in ("rows", "transport", "fsdp")}
    options["reshard_after_forward"] = case["reshard"]
    parallelize(model, expert_mesh("cpu", case["ep"]), guests=slots, **options)
    backend = case["backend"]
    with use("torch" if backend == "as on GPUs" else backend), pytest.MonkeyPatch.context() as patch:
        if backend == "as on GPUs":
            patch.setitem(IMPLS["expert_mlp"], "torch", by_layer)
        out, dx = step(model, case, routes[rank], x[rank], dout[rank])
    found = {"out": gathered(out), "dx": gathered(dx)}
    for name, grad in gradients(model).items():
        if not hasattr(grad, "full_tensor"):  # of a parameter that each rank has
            dist.all_reduce(grad)
        found[name] = whole(grad)
    return found


def check_case(rank: int, world: int, number: int) -> None:
    case = draw(number, world)
    torch.manual_seed(number)
    x, dout, before = torch.randn(3, world, case["tokens"], case["hidden"])
    x[..., 0], before[..., 0], routes = 2.0, 2.0, [None] * world
    if case["replay"]:  # other tokens' routes
        model = model_of(case)
        for r in range(world):
            with record_routes(model) as routes[r], torch.no_grad():
                model(before[r])
    got = shared(rank, case, routes, x, dout, case["guests"])
    alone = case["kind"] != "fp8"
    expected = truth(case, routes, x, dout) if alone else shared(rank, case, routes, x, dout, 0)
    assert got.keys() == expected.keys(), (number, case)
    for name, value in got.items():
        limit = limit_of(case, name)
        assert error(value, expected[name]) < limit, (number, case, name, error(value, expected[name]))


def limit_of(case: dict, name: str) -> float:
    """How far a result may be from one process in float64, or in 8 bits from that without guests."""
    if case["kind"] == "fp8":  # a number between two codes may go to either
        # columns of 8 bits share a scale, which depends on the rows that a rank computes
        return 0.06 if case["recipe"].endswith(ALL) and "experts" in name else 5e-3
    return 5e-6 if name.endswith("router.bias") else 2e-6  # the former's sum nearly cancels


def drawn(rank, world, folder, first):
    """Most cases lend."""
    with pytest.MonkeyPatch.context() as patch:
        use_files(folder, patch)
        loans = every_loan_pays(patch)
        for number in range(first, first + TOGETHER):
            check_case(rank, world, 1000 * world + number)
    assert sum(loans) > TOGETHER, (loans, len(loans))


EVERY = [(world, first) for world in (2, 3, 4) for first in range(0, CASES, TOGETHER)]


@pytest.mark.parametrize("world, first", few(EVERY, (4, 0), several=True))
def test_drawn_layers(world, first, tmp_path):
    run(world, functools.partial(drawn, first=first), tmp_path)
