"""Muon for models with stacked experts: orthogonal updates of matrices, AdamW for everything else.

    m    = lerp(m, g, 1 - momentum)                             g the gradient of a matrix (A, B)
    u    = lerp(g, m, momentum), or m without `nesterov`
    w   -= lr * weight_decay * w + lr * scale * orthogonal(u)

`orthogonal` brings all singular values close to 1, by Newton-Schulz iterations: with x = u / |u|,

    p = x x^T,   x = a x + (b p + c p p) x                      `ns_steps` times, in 16 bits

The experts of a layer are one batch of matrices.  `scale` is 0.2 sqrt(max(A, B)), so that an update has the
size of one of AdamW and learning rates of AdamW can be kept, or sqrt(max(1, A / B)) with "original".

Sources: Jordan et al. 2024, kellerjordan.github.io/posts/muon; Liu et al. 2025 (Moonlight), arXiv 2502.16982.
"""

import math
import warnings
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from .kernels.base.activations import get_activation
from .kernels.base.check import check_not_negative, check_sizes, checked, is_kind
from .layers import Experts
from .layers.experts import SharedExpert
from .routing import Router

__all__ = ["Muon", "muon_groups"]

COEFFICIENTS = 3.4445, -4.7750, 2.0315  # Jordan et al.: steep at 0, and near 1 after five steps
AT_A_TIME = 2**27  # numbers of a batch of matrices that are in work at a time
SCALES = {
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
    "original": lambda rows, columns: math.sqrt(max(1, rows / columns)),
}


class Muon(torch.optim.Optimizer):
    """Update matrices by Muon, and other parameters by AdamW.

        optimizer = Muon(muon_groups(model), lr=3e-4)

    `params` are parameters, or groups as `muon_groups` makes them.  In a group, Muon takes 2-D parameters,
    and 3-D ones as batches of matrices, unless the group has `muon=False`.  With `halves="rows"` the first
    half of a matrix's rows is one matrix and the second half another, as gate and up are; with "interleaved"
    the even and the odd rows are.  3-D parameters outside of groups cause a warning.

    lr, weight_decay    of both; weight decay is decoupled, and only for parameters of two or more axes.
    momentum, nesterov, ns_steps, adjust_lr_fn    of Muon, as in torch.optim.Muon.  "match_rms_adamw" makes
                        the update as large as one of AdamW, "original" does not.
    betas, eps          of AdamW.

    DTensors are fine: experts that are sharded by experts are updated where they are; other shards are
    gathered for the update of their matrix.
    Raises ValueError for a number out of its range, an unknown `adjust_lr_fn` or `halves`, and for halves of
    an odd number of rows.
    """

    @checked
    def __init__(
        self,
        params: Iterable,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        adjust_lr_fn: str = "match_rms_adamw",
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
    ):
        check_not_negative(lr=float(lr), weight_decay=weight_decay, momentum=momentum, eps=eps)
        check_sizes(ns_steps=ns_steps)
        if adjust_lr_fn not in SCALES:
            raise ValueError(f"unknown adjust_lr_fn {adjust_lr_fn!r}; known: {', '.join(SCALES)}")
        if not isinstance(betas, (tuple, list)) or not all(is_kind(beta, float) for beta in betas):
            raise TypeError(f"betas must be two numbers, not {betas!r}")
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas must be two numbers from 0 to less than 1, not {betas}")
        defaults = {"lr": lr, "weight_decay": weight_decay, "muon": True, "halves": None}
        defaults |= {"momentum": momentum, "nesterov": nesterov, "ns_steps": ns_steps}
        defaults |= {"adjust_lr_fn": adjust_lr_fn, "betas": betas, "eps": eps}
        if not isinstance(params, Tensor):
            params = list(params)
            if any(is_stacked(p) for p in params):
                warnings.warn(
                    "Muon got 3-D parameters without groups. If these are experts, pass muon_groups(model): "
                    "otherwise gate and up count as one matrix, and Muon updates routers too",
                    stacklevel=3,
                )
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        if group["halves"] not in (None, "rows", "interleaved"):
            raise ValueError(f"unknown halves {group['halves']!r}; known: rows, interleaved")
        for p in group["params"]:
            if group["halves"] and p.dim() in (2, 3) and p.shape[-2] % 2:
                raise ValueError(f"halves={group['halves']!r}, but a parameter {tuple(p.shape)} has odd rows")

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            others: dict = {}  # torch's functions of many tensors take those of one mesh
            for p in group["params"]:
                if p.grad is None:
                    continue
                if group["muon"] and p.dim() in (2, 3):
                    self.update_matrix(p, group)
                else:
                    others.setdefault((getattr(p, "device_mesh", None), p.dim() >= 2), []).append(p)
            for (_, decays), params in others.items():
                self.update_others(params, group, group["weight_decay"] if decays else 0.0)
        return loss

    def update_matrix(self, p: Tensor, group: dict) -> None:
        state, momentum = self.state[p], group["momentum"]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(p.grad)
        m = state["momentum_buffer"]
        m.lerp_(p.grad, 1 - momentum)
        u = p.grad.lerp(m, momentum) if group["nesterov"] else m
        rows, columns = p.shape[-2] // (2 if group["halves"] else 1), p.shape[-1]
        scale = SCALES[group["adjust_lr_fn"]](rows, columns)
        p.mul_(1 - group["lr"] * group["weight_decay"])
        for local, update in updates(p, u, group["halves"], group["ns_steps"]):
            local.add_(update, alpha=-group["lr"] * scale)

    def update_others(self, params: list[Tensor], group: dict, weight_decay: float) -> None:
        for p in params:
            if not self.state[p]:
                like = {name: torch.zeros_like(p) for name in ("exp_avg", "exp_avg_sq")}
                self.state[p] |= {"step": torch.zeros((), dtype=torch.float32)} | like
        lists = [[self.state[p][name] for p in params] for name in ("exp_avg", "exp_avg_sq", "step")]
        (beta1, beta2), how = group["betas"], {"lr": group["lr"], "eps": group["eps"]}
        adamw(
            params, [p.grad for p in params], *lists[:2], [], lists[2],
            amsgrad=False, beta1=beta1, beta2=beta2, weight_decay=weight_decay, maximize=False, **how,
        )  # fmt: skip


def is_stacked(param) -> bool:
    """Whether a parameter, alone or with its name, has three axes, as stacked experts have."""
    p = param[1] if isinstance(param, tuple) and len(param) == 2 else param
    return isinstance(p, Tensor) and p.dim() == 3


def updates(p: Tensor, u: Tensor, halves: str | None, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield parts of `p` that this rank has, each with its orthogonal update."""
    if hasattr(p, "placements"):
        if p.dim() == 3 and all(getattr(s, "dim", 0) == 0 for s in p.placements):
            p, u = p.to_local(), u.to_local()  # whole matrices
        else:
            from torch.distributed.tensor import distribute_tensor

            whole = u.full_tensor()
            result = torch.empty_like(whole, dtype=dtype_on(whole.device))
            for part, update in updates(result, whole, halves, steps):
                part.copy_(update)
            shards = distribute_tensor(result, p.device_mesh, p.placements, src_data_rank=None)
            yield p.to_local(), shards.to_local()
            return
    p, u = matrices_of(p, halves), matrices_of(u, halves)
    each = max(1, AT_A_TIME // max(1, p.shape[-1] * p.shape[-2]))
    for first in range(0, p.shape[0], each):
        yield p[first : first + each], orthogonal(u[first : first + each], steps)


def matrices_of(t: Tensor, halves: str | None) -> Tensor:
    """Return a view of the matrices in a parameter, (n, A, B) or with halves (n, 2, A, B)."""
    t = t[None] if t.dim() == 2 else t
    if halves == "rows":
        return t.unflatten(1, (2, -1))
    return t.unflatten(1, (-1, 2)).transpose(1, 2) if halves else t


def dtype_on(device: torch.device) -> torch.dtype:
    """Return the dtype of the iterations.  CPUs multiply bfloat16 much faster than float16."""
    return torch.bfloat16 if device.type == "cpu" else torch.float16


def orthogonal(u: Tensor, steps: int) -> Tensor:
    """Return matrices (..., A, B) in 16 bits with the singular vectors of `u` and values near 1.

    Where x is tall, p = x^T x and is multiplied from the right.  float16 is precise enough for one product
    to compute (a + b p + c p p) x, as c q q + d with q = p + b / 2c; bfloat16 would double the error.
    """
    dtype, (a, b, c) = dtype_on(u.device), COEFFICIENTS
    x = u.reshape(-1, *u.shape[-2:])
    norm = x.norm(dim=(1, 2), keepdim=True, dtype=torch.float32).clamp(min=1e-7)
    x = torch.mul(x, 1 / norm, out=torch.empty_like(x, dtype=dtype))
    tall = x.shape[1] > x.shape[2]
    for _ in range(steps):
        gram = x.mT @ x if tall else x @ x.mT
        if dtype == torch.float16:
            gram.diagonal(dim1=1, dim2=2).add_(b / (2 * c))
            factor = torch.baddbmm(gram, gram, gram, beta=0, alpha=c)
            factor.diagonal(dim1=1, dim2=2).add_(a - b * b / (4 * c))
            x = x @ factor if tall else factor @ x
        else:
            factor = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
            left, right = (x, factor) if tall else (factor, x)
            x = torch.baddbmm(x, left, right, beta=a)
    return x.reshape(u.shape)


@checked
def muon_groups(model: nn.Module, *, adamw: Sequence[str] = ()) -> list[dict]:
    """Return groups for `Muon`: all trained parameters of `model`, each once.

    AdamW gets embeddings, the output layer (an nn.Linear with the shape of the largest embedding), routers,
    whatever is not a matrix, and parameters whose name matches a pattern of `adamw`, such as
    "*.lm_head.*".  Gate and up of gated experts are matrices of their own.
    """
    if not isinstance(adamw, (tuple, list)) or not all(isinstance(pattern, str) for pattern in adamw):
        raise TypeError(f"adamw must be patterns in a list or tuple, not {adamw!r}")
    embeddings = [m.weight for m in model.modules() if isinstance(m, nn.Embedding)]
    largest = max((e.shape for e in embeddings), default=None)
    outputs = [m.weight for m in model.modules() if isinstance(m, nn.Linear) and m.weight.shape == largest]
    routers = [p for m in model.modules() if isinstance(m, Router) for p in m.parameters()]
    others = {id(p) for p in (*embeddings, *outputs, *routers)}
    halves = {id(p): kind for m in model.modules() for p, kind in halves_of(m)}
    groups: dict[tuple, list[Tensor]] = {}
    for name, p in model.named_parameters():
        if p.requires_grad:
            matrix = p.dim() in (2, 3) and id(p) not in others
            muon = matrix and not any(fnmatchcase(name, pattern) for pattern in adamw)
            groups.setdefault((muon, halves.get(id(p)) if muon else None), []).append(p)
    return [{"params": ps, "muon": muon, "halves": kind} for (muon, kind), ps in groups.items()]


def halves_of(module: nn.Module) -> Iterator[tuple[Tensor, str]]:
    """Yield the gate_up of gated experts, and how gate and up lie in it."""
    if isinstance(module, (Experts, SharedExpert)) and get_activation(module.activation).gated:
        gate_up = module.gate_up if isinstance(module, Experts) else module.gate_up.weight
        yield gate_up, "interleaved" if module.interleaved else "rows"
