"""Shared experts whose products begin while tokens travel, in Triton's interpreter, through mapped files."""

import contextlib
import copy

import pytest
import torch
from check import error
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

from moe_aiter import Experts, make_plan, use
from moe_aiter.config import interpret
from moe_aiter.distributed import ExpertParallel, expert_mesh, slots, transport
from moe_aiter.op import IMPLS, INPUTS, register_kernel

from .ranks import every_loan_pays, of_all_ranks, run
from .shared_memory import use_files

pytestmark = pytest.mark.interpret
E, K, T, H, I = 8, 2, 8, 32, 16  # noqa: E741  tokens of each rank
CASES = {  # rows, recompute, guests
    2: [(2.0, "none", 2), (2.0, "z", 0), (0.5, "none", 0), (0.5, "none", 1)],
    3: [(3.0, "none", 0), (3.0, "none", 2)],
    4: [(1.0, "none", 0)],
}
# kernels of a user's own know no passes: some would read what has not arrived, or add to sums that have left
OWN = ("expert_up", 4.0, True), ("expert_down_grad_over_z", 4.0, True), ("gmm_unpermute", 0.5, True)
OWN += ("expert_down", 4.0, False), ("gmm_unpermute", 4.0, False)
NO_PASSES = "does not take the rows of one rank after the other"


def step(shared, x, ids, s, dout, recompute):
    shared.recompute = recompute
    shared.zero_grad()
    x, s = x.clone().requires_grad_(), s.clone().requires_grad_()
    out = shared(x, s, make_plan(ids, E))
    out.backward(dout)
    grads = {name: p.grad for name, p in shared.named_parameters()}
    with torch.no_grad():
        alone = shared(x, s, make_plan(ids, E))
    return of_all_ranks({"out": out.detach(), "alone": alone, "dx": x.grad, "ds": s.grad} | grads)


class Log:
    """In which order a rank's products take rows, tokens arrive and sums leave."""

    def __init__(self, patch):
        self.events = []
        arriving, leaving = transport.Sources.arriving, transport.Sources.leaving
        receive, leaving_others = transport.Fetch.receive, transport.Pass.leaving

        def noted_arriving(sources):
            for groups in arriving(sources):
                self.events.append("rows")
                yield groups

        def noted_leaving(sources, *given):
            for groups in leaving(sources, *given):
                self.events.append("sums")
                yield groups

        def noted_others(window, *given):
            self.events.append("others")
            return leaving_others(window, *given)

        def noted_receive(transfer):
            if transfer.results is None:
                self.events.append("wait")
            return receive(transfer)

        patch.setattr(transport.Sources, "arriving", noted_arriving)
        patch.setattr(transport.Sources, "leaving", noted_leaving)
        patch.setattr(transport.Pass, "leaving", noted_others)
        patch.setattr(transport.Fetch, "receive", noted_receive)


class Reader(TorchDispatchMode):
    """Counts the rows of z and a that are written when `expert_up` returns, and those of experts."""

    def __init__(self):
        super().__init__()
        self.rows = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **kwargs or {})
        if func is torch.ops.moe_aiter.expert_up.default:
            written = [t.isfinite().all(1).sum().item() for t in out if len(t)]
            self.rows.append([args[5].sum().item(), *written])
        return out


def check(rank, world, folder):
    torch.manual_seed(rank)
    x, s, dout = torch.randn(T, H), torch.rand(T, K), torch.randn(T, H)
    ids = torch.rand(T, E).argsort(1)[:, :K]
    torch.manual_seed(0)
    experts = Experts(E, H, I, bias=True)
    with pytest.MonkeyPatch.context() as patch, use("triton"):
        use_files(folder, patch)
        patch.setattr(slots, "ROWS", 8)  # several windows of few rows
        every_loan_pays(patch)
        log = Log(patch)
        for rows, recompute, lent in CASES[world]:
            results = []
            for name, borrowed in (("collective", 0), ("collective", lent), ("symmetric", lent)):
                style = ExpertParallel(transport=name, rows=rows, guests=borrowed)
                mesh = expert_mesh("cpu", world)["ep"]
                shared = parallelize_module(copy.deepcopy(experts), mesh, style)
                log.events.clear()
                results.append(step(shared, x, ids, s, dout, recompute))
            for what, value in results[0].items():
                for other in results[1:]:
                    assert error(other[what], value) < 1e-6, (what, rows, recompute, lent)
            others = int(world / rows) - 1  # windows
            rows_of_all, sums = ["rows"] * world, [*["others"] * others, "sums"]
            expected, sums_of_all = ["rows", *["rows", *sums] * (world - 1), "wait", *sums], sums * world
            if recompute == "z":  # needs all tokens first
                expected += ["wait", *rows_of_all, "wait", *rows_of_all, *sums_of_all]
            else:  # the tokens are not waited for until all else is done
                expected += [*rows_of_all, "wait", *sums_of_all, "wait"]
            assert log.events[: len(expected)] == expected
        shared = parallelize_module(
            copy.deepcopy(experts), mesh, ExpertParallel(transport="symmetric", rows=4.0)
        )
        with Reader() as reader:
            step(shared, x, ids, s, dout, "none")
        assert reader.rows and all(len(set(rows)) == 1 for rows in reader.rows)
        for op, rows, fails in OWN:
            with pytest.MonkeyPatch.context() as registered:
                registered.setitem(IMPLS[op], "triton", None)
                own = lambda out, *inputs, op=op: IMPLS[op]["torch"](out, INPUTS[op](*inputs))  # noqa: E731
                register_kernel(op=op, backend="triton")(own)
                style = ExpertParallel(transport="symmetric", rows=rows)
                shared = parallelize_module(copy.deepcopy(experts), mesh, style)
                with pytest.raises(RuntimeError, match=NO_PASSES) if fails else contextlib.nullcontext():
                    got = step(shared, x, ids, s, dout, "none")
                    assert all(error(got[what], value) < 1e-6 for what, value in results[0].items())


@pytest.mark.parametrize("world", CASES)
@pytest.mark.skipif(not interpret, reason="it needs the interpreter, or GPUs: test_on_gpus.py")
def test_passes(world, tmp_path):
    run(world, check, tmp_path)
