"""Batch invariance of shared experts: the bits of one process on any number of ranks, with guests too."""

import copy
import functools
import logging

import pytest
import torch
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

from moe_aiter import Experts, LoRAExperts, make_plan, quantize, use
from moe_aiter.config import interpret
from moe_aiter.distributed import ExpertParallel, expert_mesh
from moe_aiter.invariance import invariant
from moe_aiter.kernels.experts.mlp import by_layer
from moe_aiter.op import IMPLS

from .ranks import every_loan_pays, gathered, run
from .shared_memory import use_files

pytestmark = pytest.mark.interpret
E, K, H, I = 12, 3, 64, 64  # noqa: E741
TOKENS = 24  # of all ranks
KINDS = {
    "float32": lambda: Experts(E, H, I, bias=True),
    "bfloat16": lambda: Experts(E, H, I, dtype=torch.bfloat16, activation="gelu"),
    "recompute": lambda: Experts(E, H, I, bias=True, recompute="z"),
    "fp8": lambda: Experts(E, H, I, dtype=torch.bfloat16, fp8="e4m3"),
    "fp8 all": lambda: Experts(E, H, I, dtype=torch.bfloat16, fp8="e4m3_all"),
    "4 bits": lambda: quantize(Experts(E, H, I, dtype=torch.bfloat16), "nf4"),
    "lora": lambda: LoRAExperts(Experts(E, H, I), rank=4),
}
BACKENDS = ("triton",) if interpret else ("auto", "as on GPUs")
WAYS = [  # transport, rows, guests
    ("collective", 2.0, 0),
    ("symmetric", 2.0, 0),
    ("collective", 0.5, 2),
    ("symmetric", 0.5, 2),
]


def batch(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(1)
    ids = (torch.rand(TOKENS, E) * torch.arange(E, 0, -1)).topk(K).indices  # the first experts are busier
    ids[2, 1] = ids[5] = -1
    x, dout = torch.randn(TOKENS, H, dtype=dtype), torch.randn(TOKENS, H, dtype=dtype)
    return x, ids, torch.rand(TOKENS, K), dout


def step(fn, x, ids, s, dout) -> list[torch.Tensor]:
    """The output, the gradients of tokens and routing weights, and the output of inference."""
    x, s, plan = x.clone().requires_grad_(), s.clone().requires_grad_(), make_plan(ids, E)
    out = fn(x, s, plan)
    out.backward(dout)
    with torch.no_grad():
        return [out.detach(), x.grad, s.grad, fn(x, s, plan)]


def check(rank, world, folder):
    mesh = expert_mesh("cpu", world)["ep"]
    with pytest.MonkeyPatch.context() as patch, invariant():
        use_files(folder, patch)
        patch.setattr("moe_aiter.distributed.slots.ROWS", 8)
        loans = every_loan_pays(patch)
        for kind in ("float32",) if interpret else KINDS:
            torch.manual_seed(0)
            experts = KINDS[kind]()
            inputs = batch(next(experts.parameters()).dtype if kind != "4 bits" else torch.bfloat16)
            for backend in BACKENDS:
                by_layers = backend == "as on GPUs"
                with use("torch" if by_layers else backend), pytest.MonkeyPatch.context() as layers:
                    if by_layers:
                        layers.setitem(IMPLS["expert_mlp"], "torch", by_layer)
                    expected = step(experts, *inputs)
                    for transport, rows, guests in WAYS[-1:] if interpret else WAYS:
                        style = ExpertParallel(transport=transport, rows=rows, guests=guests, max_tokens=17)
                        shared = parallelize_module(copy.deepcopy(experts), mesh, style)
                        again = functools.partial(checkpoint, shared, use_reentrant=rows < 1)
                        for fn in (shared, again):
                            got = step(fn, *(t.tensor_split(world)[rank] for t in inputs))
                            for name, ours, want in zip(
                                ("out", "dx", "ds", "alone"), got, expected, strict=True
                            ):
                                same = torch.equal(gathered(ours), want)
                                assert same, (kind, backend, transport, rows, guests, fn is again, name)
        assert sum(loans)


def check_log(rank, world, folder):
    """Each choice of a token travels alone, which the log counts."""
    mesh, sent = expert_mesh("cpu", world)["ep"], []
    log = logging.getLogger("moe_aiter")
    log.setLevel(logging.INFO)
    log.addFilter(lambda record: sent.append(record.args) or True)
    x, ids, s, _ = (t.tensor_split(world)[rank] for t in batch(torch.float32))
    for on in (False, True):
        with invariant(on):
            shared = parallelize_module(Experts(E, H, I), mesh, ExpertParallel())
            shared(x, s, make_plan(ids, E))
    once, by_choice = (args for args in sent if len(args) == 3)
    assert by_choice[1] == K * once[1] and by_choice[2] == once[2]


def test_log(tmp_path):
    run(2, check_log, tmp_path)


@pytest.mark.parametrize("world", [2, 3])
def test_bits_of_one_process(world, tmp_path):
    run(world, check, tmp_path)
