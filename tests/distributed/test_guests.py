"""Experts lent for one call: whoever computes a row, the results are those of one process."""

import copy
import functools
import logging
import random

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from check import error, few
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from moe_aiter import Experts, LoRAExperts, make_plan, use
from moe_aiter.config import interpret
from moe_aiter.distributed import ExpertParallel, expert_mesh, guests, slots, transport
from moe_aiter.kernels.experts.inputs import ExpertInputs
from moe_aiter.kernels.experts.mlp import by_layer
from moe_aiter.op import IMPLS

from ..references import expert_loop_reference
from .ranks import every_loan_pays, gathered, run, whole
from .shared_memory import use_files

if interpret:
    pytest.skip("nothing here runs Triton: test_passes.py does", allow_module_level=True)

CASES = 50  # of a run
EVERY = [(world, first) for world in (2, 3, 4) for first in (0, CASES)]  # ranks, and the number of a case


def draw(number: int, world: int) -> dict:
    """One combination of sizes, skew and options."""
    r = random.Random(number)
    each = r.randint(1, 5)
    case = {
        "experts": r.randint((world - 1) * each + 1, world * each) if each > 1 else world,
        "tokens": r.choice([0, 1, 7, 32, 60]),
        "skew": r.choice([0.0, 1.0, 2.0, 8.0]),
        "hot": r.randrange(world),
        "kept": r.choice([1.0, 1.0, 0.7, 0.0]),  # choices that are not dropped
        "bias": r.random() < 0.5,
        "activation": r.choice(["swiglu", "gelu"]),
        "recompute": r.choice(["none", "z"]),
        "frozen": r.choice([(), (), ("gate_up",), ("down", "down_bias"), ("x",)]),
        "main_grad": r.random() < 0.3,
        "layout": r.choice([None, None, "transposed", "padded"]),
        "transport": r.choice(["collective", "symmetric"]),
        "backend": r.choice(["auto", "torch", "as on GPUs"]),
        "checkpoint": r.choice([None, None, True, False]),  # use_reentrant
        "rows": r.choice([0.5, 1.0, 2.0]),
        "padding": r.choice([None, 3]),
        "micro-batches": r.choice([1, 2]),
    }
    case["top_k"] = r.randint(1, min(4, case["experts"]))
    case["guests"] = r.choice(["auto", *range(min(8, case["experts"] - each) + 1)])
    return case


def experts_of(case: dict) -> Experts:
    torch.manual_seed(0)
    options = {name: case[name] for name in ("bias", "activation", "recompute")}
    experts = Experts(case["experts"], 16, 8, **options)
    for name in case["frozen"]:
        if getattr(experts, name, None) is not None:
            getattr(experts, name).requires_grad_(False)
    return experts


def batch_of(case: dict, world: int, seed: int) -> tuple:
    """x, ids, routing weights and dout of all ranks' tokens."""
    torch.manual_seed(seed)
    n, E, k = world * case["tokens"], case["experts"], case["top_k"]
    each = -(-E // world)
    law = (1 + (torch.arange(E) - case["hot"] * each) % E) ** -case["skew"]
    ids = (law.log() - torch.rand(n, E).log().neg().log()).topk(k).indices
    ids = ids.masked_fill(torch.rand(n, k) >= case["kept"], -1)
    return torch.randn(n, 16), ids, torch.rand(n, k), torch.randn(n, 16)


def step(fn, experts, case, batches, own=lambda t: t) -> dict:
    """Output and gradients of some micro-batches; those of tokens are the last one's."""
    sums = {}
    if case["main_grad"]:
        for name in ("gate_up", "down"):
            w = getattr(experts, name)
            if w.requires_grad:
                w.main_grad = torch.zeros_like(w, dtype=torch.promote_types(w.dtype, torch.float32))
                sums[name] = w.main_grad
    for batch in batches:
        x, ids, s, dout = map(own, batch)
        x, s = x.clone().requires_grad_("x" not in case["frozen"]), s.clone().requires_grad_()
        out = fn(x, s, make_plan(ids, case["experts"]))
        out.backward(dout)
    grads = {name: p.grad for name, p in experts.named_parameters() if p.grad is not None} | sums
    tokens = {"out": out.detach(), "dx": x.grad, "ds": s.grad}
    return {name: t for name, t in (tokens | grads).items() if t is not None}


def reference(case: dict, batches) -> dict:
    experts = experts_of(case).double()
    weights = experts.gate_up, experts.gate_up_bias, experts.down, experts.down_bias

    def fn(x, s, plan):
        i = ExpertInputs(x, *weights, s, *plan, case["activation"], False, False)
        return expert_loop_reference(*i)[0]

    wide = [(x.double(), ids, s.double(), dout.double()) for x, ids, s, dout in batches]
    return step(fn, experts, case | {"main_grad": False}, wide)


def shared(experts, world, **options):
    mesh = expert_mesh("cpu", world)["ep"]
    return parallelize_module(copy.deepcopy(experts), mesh, ExpertParallel(**options))


def laid_out(experts: torch.nn.Module, layout: str) -> torch.nn.Module:
    """Let this rank's weights lie in the other order of their axes, or apart; sharding would undo it."""
    for module in experts.modules():
        for name, w in list(module.named_parameters(recurse=False)):
            if w.dim() == 3:
                local = w.detach().to_local()
                local = local.mT.contiguous().mT if layout == "transposed" else F.pad(local, (0, 3))[..., :-3]
                whole_part = {"shape": w.shape, "stride": w.stride()}
                sharded = DTensor.from_local(local, w.device_mesh, w.placements, **whole_part)
                setattr(module, name, torch.nn.Parameter(sharded, w.requires_grad))
    return experts


def check_case(rank: int, world: int, number: int) -> None:
    """Compare with one process in float64; two runs have the same bits."""
    case = draw(number, world)
    batches = [batch_of(case, world, 2 * number + i) for i in range(case["micro-batches"])]
    if case["padding"] is not None:
        case["max_tokens"] = case["tokens"] + case["padding"]
    options = {name: case.get(name) for name in ("guests", "rows", "transport", "max_tokens")}
    backend, results = case["backend"], []
    for _ in range(2):
        experts = shared(experts_of(case), world, **options)
        fn = experts = laid_out(experts, case["layout"]) if case["layout"] else experts
        if case["checkpoint"] is not None:
            fn = functools.partial(checkpoint, experts, use_reentrant=case["checkpoint"])
        with use("torch" if backend == "as on GPUs" else backend), pytest.MonkeyPatch.context() as inner:
            if backend == "as on GPUs":
                inner.setitem(IMPLS["expert_mlp"], "torch", by_layer)
            results.append(step(fn, experts, case, batches, lambda t: t.tensor_split(world)[rank]))
    truth = reference(case, batches)
    for name, value in results[0].items():
        assert torch.equal(whole(value), whole(results[1][name])), (number, case, name)
        value = gathered(value) if name in ("out", "dx", "ds") else whole(value)
        expected = truth.pop(name)
        assert error(value, expected) < 2e-6, (number, case, name, error(value, expected))
    left = {name for name, t in truth.items() if t.count_nonzero()}
    assert not left, (number, case, left)


def drawn(rank, world, folder, first):
    """Most cases lend, in all kinds of computing experts."""
    with pytest.MonkeyPatch.context() as patch:
        use_files(folder, patch)
        loans = every_loan_pays(patch)
        for number in range(first, first + CASES):
            check_case(rank, world, 1000 * world + number)
    assert 2 * sum(loans) > CASES, (loans, len(loans))


@pytest.mark.parametrize("world, first", few(EVERY, (3, 0), several=True))
def test_drawn_combinations(world, first, tmp_path):
    run(world, functools.partial(drawn, first=first), tmp_path)


def check_log(rank, world, folder):
    """The log says once what the loans change, and how many guests "auto" takes."""
    case = draw(1000, world) | {"experts": 2 * world, "tokens": 50, "top_k": 2, "skew": 2.0, "kept": 1.0}
    experts, (x, ids, s, _) = experts_of(case), batch_of(case, world, 0)
    layer, records = shared(experts, world, guests="auto"), []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    log = logging.getLogger("moe_aiter")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    with pytest.MonkeyPatch.context() as patch:
        every_loan_pays(patch)
        for _ in range(2):
            x_own, ids_own, s_own = (t.tensor_split(world)[rank] for t in (x, ids, s))
            layer(x_own, s_own, make_plan(ids_own, 2 * world))
    (auto,) = [text for text in records if "ranks borrow up to" in text]
    assert f"up to {min(8, 2 * world - 2)} experts" in auto
    (rows,) = [text for text in records if text.startswith("experts lent for a call")]
    before = torch.bincount(ids.flatten() // 2, minlength=world).tolist()
    after = world * [50 * 2]
    assert rows == f"experts lent for a call: ranks have {after} rows, and {before} without loans"
    assert repr(layer.dispatcher).endswith("guests=auto")


def test_log(tmp_path):
    run(2, check_log, tmp_path)


def check_unequal(rank, world, folder):
    """Ranks that would read each other's weights in another way are refused on all ranks."""
    case = draw(1000, world) | {"experts": 2 * world, "tokens": 8, "top_k": 2, "main_grad": False}
    x, ids, s, _ = (t.tensor_split(world)[rank] for t in batch_of(case, world, 0))
    plan = make_plan(ids, 2 * world)
    ways = {"guests": {"guests": 1 + rank}, "one alone": {"guests": rank}, "strides": {"guests": 1}}
    for what, options in ways.items():
        layer = shared(experts_of(case), world, **options)
        if what == "strides" and rank == 0:
            laid_out(layer, "transposed")
        with pytest.raises(ValueError, match=f"but not all have guests={options['guests']}"):
            layer(x, s, plan)
        dist.barrier()


def test_unequal(tmp_path):
    run(2, check_unequal, tmp_path)


def check_kept(rank, world, folder):
    """Nothing of guests' weights is kept from forward to backward, which sends them again."""
    case = draw(1000, world) | {"experts": 2 * world, "tokens": 20, "top_k": 2, "skew": 2.0, "kept": 1.0}
    case |= {"frozen": (), "main_grad": False, "bias": False}
    x, ids, s, dout = (t.tensor_split(world)[rank] for t in batch_of(case, world, 0))
    lend, arrived, saved = transport.Collective.lend, [], []

    def noted(*given):
        arrive = lend(*given)
        arrived.extend(StorageWeakRef(t.untyped_storage()) for t in arrive())
        return arrive

    def pack(t):
        saved.append(t.shape)
        return t

    with pytest.MonkeyPatch.context() as patch, use("torch"):
        loans = every_loan_pays(patch)
        patch.setitem(IMPLS["expert_mlp"], "torch", by_layer)
        patch.setattr(transport.Collective, "lend", noted)
        for cast in (False, True):
            layer = shared(experts_of(case), world, guests=1)
            with torch.autocast("cpu", torch.bfloat16, enabled=cast), saved_tensors_hooks(pack, lambda t: t):
                out = layer(x, s, make_plan(ids, 2 * world))
            assert len(arrived) == 2 and all(storage.expired() for storage in arrived)
            assert saved and not any(len(shape) == 3 and shape[0] == 1 for shape in saved)
            out.backward(dout.to(out.dtype))
            arrived.clear()
    assert loans == [1, 1]


def test_kept(tmp_path):
    run(2, check_kept, tmp_path)


def check_biases(rank, world, folder):
    """Gradients of guests' biases of 16 bits travel home in float32."""
    case = draw(1000, world) | {"experts": 2 * world, "tokens": 20, "top_k": 2, "skew": 2.0, "kept": 1.0}
    case |= {"frozen": (), "main_grad": False, "bias": True}
    batch, home = batch_of(case, world, 0), []
    x, ids, s, dout = (t.tensor_split(world)[rank] for t in batch)
    add_to = guests.Guests.add_to

    def noted(self, targets, gradients):
        home.extend(d for d in gradients[2:] if (self.guests_of[rank] >= 0).any())
        add_to(self, targets, gradients)

    with pytest.MonkeyPatch.context() as patch, use("torch"):
        every_loan_pays(patch)
        patch.setitem(IMPLS["expert_mlp"], "torch", by_layer)
        patch.setattr(guests.Guests, "add_to", noted)
        for rows in 2.0, 0.5:
            layer = shared(experts_of(case).bfloat16(), world, guests=1, rows=rows)
            layer(x.bfloat16(), s, make_plan(ids, 2 * world)).backward(dout.bfloat16())
    assert len(home) == (4 if rank else 0)
    assert all((d != d.bfloat16()).any() for d in home)


def test_biases(tmp_path):
    run(2, check_biases, tmp_path)


def check_one_pass(rank, world, folder):
    """Without kernels for both, guests' rows of all windows are computed at once."""
    case = draw(1000, world) | {"experts": 2 * world, "frozen": (), "bias": False}
    lora, plan = LoRAExperts(experts_of(case), rank=2), make_plan(torch.tensor([[0, 1]] * 16), 2 * world)
    compute, sizes = LoRAExperts.compute, []

    def noted(self, x, s, plan, weights, save_z=True, lent=False):
        sizes.append((lent, int(plan.group_sizes.sum())))
        return compute(self, x, s, plan, weights, save_z=save_z, lent=lent)

    with pytest.MonkeyPatch.context() as patch:
        every_loan_pays(patch)
        patch.setattr(slots, "ROWS", 8)
        patch.setattr(LoRAExperts, "compute", noted)
        shared(lora, world, guests=2, rows=0.5)(torch.randn(16, 16), torch.rand(16, 2), plan)
    assert sizes == ([(False, 0), (True, 32)] if rank else [(False, 16), (False, 16)])


def test_one_pass(tmp_path):
    run(2, check_one_pass, tmp_path)


def check_hooks(rank, world, folder):
    """Weights come back from hooks for saved tensors in the usual order of axes, as from pinned memory."""
    case = draw(1000, world) | {"experts": 2 * world, "tokens": 20, "top_k": 2, "skew": 2.0, "kept": 1.0}
    case |= {"frozen": (), "main_grad": False, "bias": True}
    batches = [batch_of(case, world, 0)]
    lora = LoRAExperts(experts_of(case), rank=2)
    for factor in lora.parameters():
        torch.nn.init.normal_(factor)
    with pytest.MonkeyPatch.context() as patch, use("torch"):
        every_loan_pays(patch)
        patch.setitem(IMPLS["expert_mlp"], "torch", by_layer)
        # with adapters in a pass of their own, and with the kernels of both, in one window and in several
        for experts, rows in (lora, 1.0), (experts_of(case), 2.0), (experts_of(case), 0.5):
            results = []
            for hooks in (lambda t: t, lambda t: torch.empty(t.shape, dtype=t.dtype).copy_(t)):
                layer = laid_out(shared(experts, world, guests=1, rows=rows), "transposed")
                with saved_tensors_hooks(hooks, lambda t: t):
                    results.append(step(layer, layer, case, batches, lambda t: t.tensor_split(world)[rank]))
            for name, value in results[0].items():
                assert error(whole(results[1][name]), whole(value).double()) < 2e-6, (name, rows)


def test_hooks(tmp_path):
    run(2, check_hooks, tmp_path)
