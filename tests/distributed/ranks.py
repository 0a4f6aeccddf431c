"""Run a function on several processes of one machine, connected by gloo or, with a GPU each, by NCCL.

With TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1, two ranks share a machine's only GPU: their kernels, their
symmetric memory and its barriers are those of two GPUs, and gloo takes the place of NCCL, which refuses such
ranks.
"""

import contextlib
import math
import os
import pathlib
import warnings
from collections.abc import Callable

import forked
import pytest
import torch
import torch.distributed as dist

from moe_aiter.distributed import experts, guests, transport
from moe_aiter.distributed.loans import Rates
from moe_aiter.distributed.wire import Wire


def run(world: int, function: Callable, folder: pathlib.Path, backend: str = "gloo") -> None:
    """Call `function(rank, world, folder)` in `world` processes; an error in one of them is raised."""
    given = world, function, folder, backend
    if backend == "nccl":  # CUDA does not bear a fork
        torch.multiprocessing.spawn(one_rank, given, nprocs=world)
    else:
        forked.call(one_rank, world, *given)


def one_rank(rank: int, world: int, function: Callable, folder: pathlib.Path, backend: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if backend == "nccl" and torch.cuda.device_count() < world:
        backend = share_gpu()
    elif backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, f"file://{folder}/store", rank=rank, world_size=world)
    function(rank, world, folder)
    leave()


def share_gpu() -> str:
    """Let the ranks of this machine use its only GPU; returns the backend that connects them."""
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
    torch.cuda.set_device(0)
    transport.why_not_symmetric = lambda group, device: ""
    return "gloo"


def ranks_on_gpus() -> int:
    """How many ranks a test of the GPUs has: one for each, or two that share the only one."""
    shared = gpus() == 1 and os.environ.get("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES") == "1"
    return 2 if shared else gpus()


def captured() -> tuple[str, ...]:
    """The transports that neither wait on the host nor leave a CUDA graph: gloo does both."""
    return ("collective", "auto") if dist.get_backend() == "nccl" else ("auto",)


def gpus() -> int:
    """How many GPUs a test may use: a power of two, which divides the experts of all layers."""
    return 2 ** (min(torch.cuda.device_count(), 8).bit_length() - 1) if torch.cuda.is_available() else 0


def leave() -> None:
    """End this process at once: gloo's threads may abort it while the interpreter ends."""
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)


@contextlib.contextmanager
def all_bits():
    """The tokens of experts with `fp8=` travel as they are, and are quantised where they arrive."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experts, "wire_of", lambda experts: Wire())
        yield


def every_loan_pays(patch: pytest.MonkeyPatch) -> list[int]:
    """Lend experts of few rows too; return a list that gets the number of loans of each plan."""
    loans, lend_rows = [], experts.lend_rows

    def counted(*given):
        shares, guests_of = lend_rows(*given)
        loans.append(int((guests_of >= 0).sum()))
        return shares, guests_of

    patch.setattr(experts, "lend_rows", counted)
    patch.setattr(guests, "rates_of", lambda kind: Rates(math.inf, 1.0, 1))
    return loans


def whole(t: torch.Tensor) -> torch.Tensor:
    """Gather a sharded tensor; another one is returned as it is."""
    if not hasattr(t, "full_tensor"):
        return t.detach()
    if t.is_cuda and dist.get_backend() == "gloo":  # whose collective for DTensors reads memory of a CPU
        assert all(placement.is_shard(0) for placement in t.placements)
        return gathered(t.to_local().detach())
    return t.full_tensor().detach()


def gathered(t: torch.Tensor) -> torch.Tensor:
    """Return the tensors of all ranks, one after the other."""
    parts = [torch.empty_like(t) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, t.contiguous())
    return torch.cat(parts)


def of_all_ranks(results: dict) -> dict:
    """Join what belongs to tokens, out, dx and ds, in the order of the ranks, and gather sharded tensors."""
    token = {name: gathered(results[name]) for name in ("out", "dx", "ds")}
    return token | {name: whole(t) for name, t in results.items() if name not in token}
