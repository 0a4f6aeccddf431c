"""Two hosts, each of which has all experts: what travels between them, and the losses of one process."""

import functools
import json
import pathlib

import forked
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from moe_aiter.config import interpret
from moe_aiter.distributed import expert_mesh, parallelize

from . import hosts, ranks

if interpret:
    pytest.skip("nothing here runs Triton", allow_module_level=True)

TORCHRUN = "--nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:29500 --rdzv-id test"


class Traffic(TorchDispatchMode):
    """Records what ops send to a group of ranks: (op, ranks of the group, numbers of its tensors)."""

    def __init__(self, mesh):
        super().__init__()
        self.names = {group.group_name: group for group in mesh.get_all_groups()}  # the world has an object
        self.sent, self.loans = [], 0

    def groups_of(self, func, args):
        objects = [a for a in args if func.namespace == "c10d" and isinstance(a, torch.ScriptObject)][:1]
        found = [*map(dist.ProcessGroup.unbox, objects)]
        return [*found, *(self.names[a] for a in args if isinstance(a, str) and a in self.names)]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if groups := self.groups_of(func, args):
            numbers = tuple(t.numel() for t in args if isinstance(t, Tensor))
            self.sent.append((func.__name__, dist.get_process_group_ranks(groups[0]), numbers))
        out = func(*args, **(kwargs or {}))
        if func.__name__ == "lend_rows.default":
            self.loans += int((out[1] >= 0).sum())
        return out


def sent_by(model, mesh, x, lends):
    """What a training step sends, after one that has sent what is only sent once."""
    hosts.loss_of(model, x).backward()
    with Traffic(mesh) as traffic:
        hosts.loss_of(model, x).backward()
    assert bool(traffic.loans) == lends
    return traffic.sent


def weights_between_hosts(rank, world, folder, guests):
    """Between hosts travel weights and gradients by FSDP2, as many for any number of tokens.

    Tokens, and the experts that are lent, stay inside a host.
    """
    mesh = expert_mesh("cpu", ep=2)
    model = parallelize(hosts.build(), mesh, guests=guests)
    inside, pair = [2 * (rank // 2), 2 * (rank // 2) + 1], [rank % 2, rank % 2 + 2]
    batches = [hosts.tokens_of(0, world, tokens)[rank] for tokens in (hosts.T, 2 * hosts.T)]
    sent = [sent_by(model, mesh, x, guests > 0) for x in batches]
    within = [[numbers for _, group, numbers in found if group == inside] for found in sent]
    between = [[part for part in found if part[1] != inside] for found in sent]
    assert between[0] == between[1]
    large = [(a, b) for a, b in zip(*within, strict=True) if max(a) > 2 * hosts.E]  # the rest are counts
    assert any(a < b for a, b in large)
    assert any(a == b for a, b in large) == bool(guests)  # weights of lent experts, and their gradients
    assert {op for op, *_ in between[0]} == {"_allgather_base_.default", "_reduce_scatter_base_.default"}
    assert all(group in (pair, list(range(world))) for _, group, _ in between[0])
    experts = sum(p.numel() for p in hosts.build()[1].moe.experts.parameters())
    assert {max(numbers) for _, group, numbers in between[0] if group == pair} == {experts // 2}
    dense = [
        sum(p.numel() for n, p in part.named_parameters() if "experts" not in n) for part in hosts.build()
    ]
    assert {max(numbers) for _, group, numbers in between[0] if group != pair} == set(dense)


@pytest.mark.parametrize("guests", hosts.GUESTS)
def test_only_fsdp_sends_between_hosts(guests, tmp_path):
    ranks.run(4, functools.partial(weights_between_hosts, guests=guests), tmp_path)


def test_two_hosts(tmp_path):
    """Two torchrun of two ranks each, without and with guests: the losses of one process with all tokens."""
    script = pathlib.Path(hosts.__file__)
    forked.on_hosts([[*TORCHRUN.split(), str(script)]] * 2, tmp_path)
    alone = [pytest.approx(hosts.alone(4), rel=1e-5)] * len(hosts.GUESTS)
    for rank in range(4):
        assert json.loads((tmp_path / f"losses-{rank}.json").read_text()) == alone
