"""A valid call of each name of moe_aiter.distributed, in a process group of one, and of moe_aiter.optim."""

import itertools

import torch
import torch.distributed as dist
from callables import small_moe
from samples import alone
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from moe_aiter import distributed as ours
from moe_aiter import optim

MODULES = [ours, optim]
NUMBERS = itertools.count()  # of files and folders: the id of an object that is gone is used again


def mesh():
    alone()
    return ours.expert_mesh("cpu", 1)


def model() -> nn.Module:
    return nn.Sequential(small_moe())


def group():
    alone()
    return dist.group.WORLD


def with_gradient() -> nn.Parameter:
    p = nn.Parameter(torch.ones(3))
    p.grad = torch.ones(3)
    return p


def saved(**more) -> dict:
    """A model, its optimizer, and where they go."""
    alone()
    net = model()
    return {"model": net, "optimizer": torch.optim.SGD(net.parameters(), 0.1), **more}


def checkpoint() -> dict:
    given = saved()
    dist.barrier()
    path = f"checkpoint-{next(NUMBERS)}"
    ours.save_sharded(path, **given)
    return {"path": path, **given}


def fresh(**given) -> dict:
    return {"path": f"fresh-{next(NUMBERS)}", **given}


OURS = {
    "ExpertDispatcher": lambda: {
        "group": group(),
        "num_experts": 4,
        "rows": 2.0,
        "max_tokens": 8,
        "keep_x": False,
    },
    "ExpertParallel": lambda: {"rows": 2.0, "max_tokens": 8, "keep_x": False},
    "clip_grad_norm_": lambda: {
        "parameters": [with_gradient()],
        "max_norm": 1.0,
        "norm_type": 2.0,
        "error_if_nonfinite": False,
        "foreach": False,
    },
    "expert_mesh": lambda: {"device_type": "cpu", "ep": 1} if group() else {},
    "export_safetensors": lambda: fresh(model=model()),
    "load_sharded": checkpoint,
    "parallelize": lambda: {
        "model": model(),
        "mesh": mesh(),
        "rows": 2.0,
        "max_tokens": 8,
        "keep_x": False,
        "fsdp": True,
        "mp_policy": MixedPrecisionPolicy(),
        "reshard_after_forward": True,
    },
    "parameter_groups": lambda: {"model": model()},
    "reduce_gradients": lambda: {"model": model(), "mesh": mesh()},
    "save_sharded": lambda: fresh(**saved()),
    "simulate": lambda: {
        "counts": torch.tensor([9000, 40, 50, 600]),
        "ranks": 2,
        "guests": 1,
        "sizes": (64, 32),
        "dtype": torch.bfloat16,
        "gated": True,
        "link": 240e9,
        "rate": 600e12,
    },
}
CALLS = {f"distributed.{name}": (getattr(ours, name), given) for name, given in OURS.items()}
CALLS |= {
    "optim.Muon": (
        optim.Muon,
        lambda: {
            "params": [with_gradient()],
            "lr": 0.1,
            "weight_decay": 0.1,
            "momentum": 0.9,
            "nesterov": True,
            "ns_steps": 5,
            "adjust_lr_fn": "original",
            "betas": (0.9, 0.95),
            "eps": 1e-8,
        },
    ),
    "optim.muon_groups": (optim.muon_groups, lambda: {"model": model(), "adamw": ["*.router.*"]}),
}
