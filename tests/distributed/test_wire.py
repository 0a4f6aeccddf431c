"""Shared experts with `fp8=`: tokens sent in 8 bits have the bits of tokens quantised where they arrive."""

import contextlib
import copy
import functools

import pytest
import torch
from check import few
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

from moe_aiter import Experts, LoRAExperts, MoE, make_plan, quantize, use
from moe_aiter.config import interpret
from moe_aiter.distributed import ExpertParallel, expert_mesh, experts, parallelize, transport
from moe_aiter.kernels.experts.fp8 import ALL, BLOCK, RECIPES

from .ranks import all_bits, of_all_ranks, run, whole
from .shared_memory import use_files

if interpret:
    pytest.skip("nothing here runs Triton", allow_module_level=True)

E, K, T, H, I = 12, 2, 24, 160, 32  # noqa: E741  tokens of each rank; a block of 128 columns, and a part
TRANSPORTS = "collective", "symmetric"
ONE_RANK, MASKED, NO_TOKENS, NOT_FINITE, COLUMNS = "one rank", "masked", "no tokens", "not finite", "columns"
CASES = {  # -> a kind of input, options of the experts, of the dispatcher
    "float32": ("", {}, {}),
    "bfloat16": ("", {"dtype": torch.bfloat16}, {}),
    "float16": ("", {"dtype": torch.float16}, {}),
    "biases": ("", {"bias": True}, {}),
    "masked choices": (MASKED, {"dtype": torch.bfloat16}, {}),
    "windows": (ONE_RANK, {"bias": True}, {"rows": 1.0}),
    "windows, bfloat16": (ONE_RANK, {"dtype": torch.bfloat16}, {"rows": 1.0}),
    "padded": ("", {}, {"max_tokens": T + 3}),
    "no tokens": (NO_TOKENS, {}, {}),
    "z again": ("", {"recompute": "z"}, {}),
    "not finite": (NOT_FINITE, {}, {}),
    "by columns": (COLUMNS, {"dtype": torch.bfloat16}, {}),
    "guests": (ONE_RANK, {"dtype": torch.bfloat16}, {"guests": 3}),
    "guests, windows": (ONE_RANK, {"bias": True}, {"guests": 1, "rows": 0.5}),
    "tokens kept": ("", {}, {"keep_x": True}),
}
FROZEN = {"none": (), "x": ("x",), "gate_up": ("gate_up",), "down": ("down",), "weights": ("gate_up", "down")}


def build(fp8, hidden=H, **options) -> Experts:
    torch.manual_seed(0)
    return Experts(E, hidden, I, fp8=fp8, **options)


def share(layer, world, **options):
    mesh = expert_mesh("cpu", world)["ep"]
    return parallelize_module(copy.deepcopy(layer), mesh, ExpertParallel(**options))


def draw(kind, rank, world, dtype=torch.float32, hidden=H, tokens=T):
    """This rank's tokens, ids, routing weights and gradients; the same numbers of tokens on each."""
    torch.manual_seed(rank)
    tokens = 0 if kind == NO_TOKENS else tokens
    x, dout = torch.randn(2, tokens, hidden).to(dtype)
    ids = torch.rand(tokens, E // world if kind == ONE_RANK else E).argsort(1)[:, :K]
    if kind == MASKED:
        ids[torch.rand(ids.shape) < 0.3] = -1
        ids[0] = -1
    if kind == NOT_FINITE:
        x[1, 0], x[2, 1], dout[3, 2], x[4], dout[5] = float("inf"), float("nan"), -float("inf"), 0, 0
    if kind == COLUMNS:
        x, dout = (t.t().contiguous().t() for t in (x, dout))
    return x, ids, torch.rand(tokens, K).softmax(1), dout


def step(layer, x, ids, s, dout, frozen=()) -> dict:
    layer.zero_grad()
    for name, p in layer.named_parameters():
        p.requires_grad_(name not in frozen)
    x, s = x.detach().requires_grad_("x" not in frozen), s.clone().requires_grad_()
    plan = make_plan(ids, E)
    out = layer(x, s, plan)
    out.backward(dout)
    with torch.no_grad():
        alone = layer(x, s, plan)
    found = {"out": out.detach(), "alone": alone, "dx": x.grad, "ds": s.grad}
    found |= {name: p.grad for name, p in layer.named_parameters()}
    return {name: whole(t) for name, t in found.items() if t is not None}


@contextlib.contextmanager
def noted():
    """The dtypes of what is sent for tokens, and the bytes."""
    sent = []
    with pytest.MonkeyPatch.context() as patch:
        for kind in (transport.CollectiveTransfer, transport.Fetch, transport.Push):
            plainly = kind.send

            def send(transfer, t, plainly=plainly):
                if len(t) > 1:  # the routing is one row
                    sent.append(t)
                return plainly(transfer, t)

            patch.setattr(kind, "send", send)
        yield sent


def same(a: dict, b: dict, what: object) -> None:
    """The same bits, but for those of a NaN."""
    assert a.keys() == b.keys()
    for name in a:
        equal = torch.equal(a[name].nan_to_num(1e30), b[name].nan_to_num(1e30))
        assert equal, f"{what}: {name}"


def check_bits(rank, world, how, recipe):
    for case, (kind, options, dispatch) in CASES.items():
        if dispatch.get("keep_x") and how == "symmetric":
            continue
        x, ids, s, dout = draw(kind, rank, world, options.get("dtype", torch.float32))
        if "max_tokens" in dispatch:  # and other numbers of them on each rank
            x, ids, s, dout = (t[: 5 * rank] for t in (x, ids, s, dout))
        results = []
        for bits in (contextlib.nullcontext, all_bits):
            with bits():
                shared = share(build(recipe, **options), world, transport=how, **dispatch)
                results.append(step(shared, x, ids, s, dout))
        same(*results, (how, recipe, case))
        assert results[0]["out"].dtype == x.dtype


def check_frozen(rank, world, how, recipe):
    for what, frozen in FROZEN.items():
        for recompute in ("none", "z"):
            results = []
            for bits in (contextlib.nullcontext, all_bits):
                with bits():
                    shared = share(build(recipe, recompute=recompute), world, transport=how)
                    results.append(step(shared, *draw("", rank, world), frozen))
            same(*results, (how, recipe, what))


def check_one_process(rank, world, how, recipe):
    """With all rows of an expert in one window: the bits of one process, which has all tokens and experts.

    A token has two experts, so that in float32 a sum over ranks is rounded as the sum over its experts is.
    """
    for dtype in (torch.float32, torch.bfloat16):
        every, layer = [draw(MASKED, r, world, dtype) for r in range(world)], build(recipe, dtype=dtype)
        alone = step(layer, *map(torch.cat, zip(*every, strict=True)))
        shared = share(layer, world, transport=how, rows=float(world))
        got = of_all_ranks(step(shared, *every[rank]) | {"alone": alone["alone"]})
        for name in ("out", "dx") if dtype == torch.bfloat16 else ():
            torch.testing.assert_close(got.pop(name), alone.pop(name), rtol=0.02, atol=0.02)
        same(got, alone, (how, recipe, dtype))


def check_what_travels(rank, world, how, recipe):
    """In 8 bits what the recipe multiplies in 8 bits alone; the log says how many bytes that are."""
    scales = -(-H // 128) if recipe == BLOCK else 1
    plain, codes = [(torch.bfloat16, T, H)], [(torch.uint8, T, H), (torch.float32, T, scales)]
    sums, ds = [(torch.bfloat16, world * T, H)], [(torch.float32, world * T, K)]
    for bias, padding in ((False, 0), (True, 0), (True, 5)):
        lines, all8 = [], recipe.endswith(ALL)
        dout, again = codes if all8 and not bias else plain, codes if all8 else plain
        with pytest.MonkeyPatch.context() as patch, noted() as sent:
            patch.setattr(experts.log, "info", lambda *line, lines=lines: lines.append(line))
            layer = build(recipe, bias=bias, dtype=torch.bfloat16)
            shared = share(layer, world, transport=how, max_tokens=T if padding else None)
            x, ids, s, gradient = draw("", rank, world, torch.bfloat16, tokens=T - padding)
            out = shared(x.requires_grad_(), s.requires_grad_(), make_plan(ids, E))
            out.backward(gradient)
        expected = [*codes, *sums, *dout, *again, *sums, *ds]
        assert [(t.dtype, *t.shape) for t in sent] == expected, (how, recipe, bias)
        mine = sum(t.nbytes * T // len(t) for t in sent[:-1])
        logged = [line[2] for line in lines if "each sends" in line[0]]
        assert logged == [(world - 1) * mine / 1e6], (how, recipe, bias)


def check_nothing_is_kept(rank, world, how, recipe):
    """No tokens of other ranks, in no number of bits; and backward may run twice."""
    for options in ({}, {"bias": True}, {"recompute": "z"}):
        shared, saved = share(build(recipe, **options), world, transport=how), []
        x, ids, s, dout = draw("", rank, world)
        with saved_tensors_hooks(lambda t, saved=saved: saved.append(t.shape) or t, lambda t: t):
            out = shared(x.requires_grad_(), s, make_plan(ids, E))
        assert (T, H) in saved and not {(world * T, H), (world * T,)} & {*saved}
        out.backward(dout, retain_graph=True)
        first = x.grad.clone()
        out.backward(dout)
        assert torch.equal(x.grad, 2 * first)


def check_checkpointing(rank, world, how, recipe):
    """With the routing of the first forward pass, and all its bits."""
    torch.manual_seed(0)
    moe, results = MoE(H, I, E, K, jitter=0.3, fp8=recipe), []
    for options in (None, {"use_reentrant": True}, {"use_reentrant": False}):
        layer = copy.deepcopy(moe)
        layer.experts = share(layer.experts, world, transport=how)
        torch.manual_seed(rank)
        x = torch.randn(T, H, requires_grad=True)
        fn = layer if options is None else functools.partial(checkpoint, layer, **options)
        fn(x).square().sum().backward()
        results.append({"dx": x.grad} | {name: whole(p.grad) for name, p in layer.named_parameters()})
    same(results[0], results[1], (how, recipe, "reentrant"))
    same(results[0], results[2], (how, recipe, "not reentrant"))


def check_modes(rank, world, how, recipe):
    """Under autocast, and while torch looks for NaN in each gradient, but those of DTensors."""
    x, ids, s, dout = draw(ONE_RANK, rank, world)
    results = []
    for bits in (contextlib.nullcontext, all_bits):
        with bits():
            shared = share(build(recipe), world, transport=how, rows=1.0).requires_grad_(False)
            leaf = x.clone().requires_grad_()
            with torch.autocast("cpu", torch.bfloat16):
                out = shared(leaf, s, make_plan(ids, E))
            with torch.autograd.detect_anomaly(check_nan=True):
                out.backward(dout.to(out.dtype))
        results.append({"out": out.detach(), "dx": leaf.grad})
    same(*results, (how, recipe))
    assert out.dtype == torch.bfloat16


def check_short_rows(rank, world, how, recipe):
    """Codes and scales that take more than the tokens, in a buffer of the sizes that they ask for."""
    for hidden, tokens, dtype in ((2, 1, torch.float32), (2, 300, torch.bfloat16), (8, 1, torch.bfloat16)):
        transport.POOLS.clear()
        shared = share(build(recipe, hidden, dtype=dtype), world, transport=how)
        got = step(shared, *draw("", rank, world, dtype, hidden, tokens))
        with all_bits():
            same(got, step(shared, *draw("", rank, world, dtype, hidden, tokens)), (recipe, hidden))
    transport.POOLS.clear()


def check_fsdp(rank, world, how, recipe):
    """parallelize: FSDP2's classes of experts are experts."""
    results = []
    for bits in (contextlib.nullcontext, all_bits):
        torch.manual_seed(0)
        model = torch.nn.Sequential(*[MoE(H, I, E, K, fp8=recipe) for _ in range(2)])
        with bits(), noted() as sent:
            parallelize(model, expert_mesh("cpu", world), transport=how)
            x = draw("", rank, world)[0].requires_grad_()
            model(x).square().sum().backward()
        results.append({"dx": x.grad} | {name: whole(p.grad) for name, p in model.named_parameters()})
        assert any(t.dtype == torch.uint8 for t in sent) == (bits is not all_bits)
    same(*results, (how, recipe))


def check_without_effect(rank, world, how, recipe):
    """Adapters and 4 bits, whose products are not of 8: all travels as it is."""
    for format in (None, "nf4"):
        torch.manual_seed(0)
        moe = MoE(128, 64, E, K, fp8=recipe)
        moe = quantize(moe, format) if format else moe
        layers = [LoRAExperts(moe.experts, rank=2)] + ([moe.experts] if format else [])
        for layer in layers:
            with noted() as sent:
                shared = share(layer, world, transport=how)
                x, ids, s, dout = draw("", rank, world, hidden=128)
                shared(x.requires_grad_(), s, make_plan(ids, E)).backward(dout)
            assert len(sent) >= 4 and {t.dtype for t in sent} == {torch.float32}


def check_compiled(rank, world, recipe):
    """One graph, whose tokens travel as they are, with the bits of an eager step."""
    torch.manual_seed(0)
    moe = MoE(H, I, E, K, fp8=recipe)
    moe.experts = share(moe.experts, world)
    x, results = draw("", rank, world)[0], []
    for layer in (moe, torch.compile(moe, fullgraph=True, backend="aot_eager")):
        moe.zero_grad()
        leaf = x.clone().requires_grad_()
        with noted() as sent:
            layer(leaf).square().sum().backward()
        results.append({"dx": leaf.grad} | {name: whole(p.grad) for name, p in moe.named_parameters()})
    assert all(t.dtype == torch.float32 for t in sent)
    same(*results, recipe)


CHECKS = [check_bits, check_frozen, check_one_process, check_what_travels, check_nothing_is_kept]
CHECKS += [check_checkpointing, check_modes, check_short_rows, check_fsdp, check_without_effect]


def everything(rank, world, folder, recipe):
    with pytest.MonkeyPatch.context() as patch, use("torch"):
        use_files(folder, patch)
        for how in TRANSPORTS:
            for check in CHECKS:
                check(rank, world, how, recipe)
        if recipe != BLOCK and world == 2:
            check_compiled(rank, world, recipe)


EVERY = [(recipe, world) for recipe in RECIPES for world in (2, 3)]


@pytest.mark.parametrize("recipe, world", few(EVERY, ("e5m2_all", 2), (BLOCK, 2), several=True))
def test_wire(recipe, world, tmp_path):
    run(world, functools.partial(everything, recipe=recipe), tmp_path)
