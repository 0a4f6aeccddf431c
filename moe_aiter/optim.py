"""Muon for models with stacked experts: orthogonal updates of matrices, AdamW for everything else.

    m    = lerp(m, g, 1 - momentum)                             g the gradient of a matrix (A, B)
    u    = lerp(g, m, momentum), or m without `nesterov`
    w   -= lr * weight_decay * w + lr * scale * orthogonal(u)

`orthogonal` brings all singular values close to 1, by Newton-Schulz iterations: with x = u / |u|,

    p = x x^T,   x = a x + (b p + c p p) x                      `ns_steps` times, in 16 bits

The experts of a layer are one batch of matrices.  `scale` is 0.2 sqrt(max(A, B)), so that an update has the
size of one of AdamW and learning rates of AdamW can be kept, or sqrt(max(1, A / B)) with "original".
kernels/dense/muon.py has the computation.

Sources: Jordan et al. 2024, kellerjordan.github.io/posts/muon; Liu et al. 2025 (Moonlight), arXiv 2502.16982.
"""

import logging
import math
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.optim.adamw import adamw

from .kernels.base.activations import get_activation
from .kernels.base.check import check_known, check_not_negative, check_sizes, checked, is_kind
from .kernels.dense.muon import dtype_on, muon_direction, muon_update
from .layers import Experts, OptimizedMoELayer
from .layers.experts import SharedExpert
from .layers.fuse import FusedLinear
from .layers.lora import LoRAFactors
from .routing import Router

__all__ = ["Muon", "muon_groups"]

AT_A_TIME = 2**27  # numbers of a batch of matrices that are in work at a time
SCALES = {
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
    "original": lambda rows, columns: math.sqrt(max(1, rows / max(1, columns))),
}
HALVES = {  # whether a parameter has transposed matrices, and whether gate and up alternate
    "rows": (False, False),
    "interleaved": (False, True),
    "transposed": (True, False),
    "transposed interleaved": (True, True),
}
# patterns of ".name.", for what types do not tell
ROUTERS = "*.router*", "*_router.*", "*.gate.*", "*_gate.*", "*.gates.*", "*.gating.*"
OUTPUTS = "*.lm_head.*", "*.head.*", "*.embed_out.*", "*.output_layer.*", "*.score.*", "*.classifier.*"
MATRICES = "*_proj.", "*_proj_weight.", ".w[123]."  # 2-D ones of a module that is no linear layer
EXPERTS = re.compile(r"expert|(\b|_)moe|moe(layer|block|mlp|ffn)?$", re.I)  # of a path, ".", and a class

log = logging.getLogger("moe_aiter")


class Muon(torch.optim.Optimizer):
    """Update matrices by Muon, and other parameters by AdamW.

        optimizer = Muon(muon_groups(model), lr=3e-4)

    `params` are parameters, or groups as `muon_groups` makes them.  In a group, Muon takes 2-D parameters,
    and 3-D ones as batches of matrices, unless the group has `muon=False`.  With `halves="rows"` the first
    half of a matrix's rows is one matrix and the second half another, as gate and up are; with "interleaved"
    the even and the odd rows are.  "transposed" and "transposed interleaved" are for matrices (in, out), with
    gate and up in columns.  Without groups, every 2-D parameter is a matrix, as for torch.optim.Muon, and 3-D
    parameters cause a warning.

    lr, weight_decay    of both; weight decay is decoupled, and only for parameters of two or more axes.
    momentum, nesterov, ns_steps, adjust_lr_fn    of Muon, as in torch.optim.Muon.  "match_rms_adamw" makes
                        the update as large as one of AdamW, "original" does not.
    betas, eps          of AdamW.

    DTensors are fine: experts that are sharded by experts are updated where they are; other shards are
    gathered for the update of their matrix.
    Raises ValueError for a number out of its range, an unknown `adjust_lr_fn` or `halves`, and for halves of
    an odd number of rows or columns; `load_state_dict` ValueError for the state of another optimizer; `step`
    RuntimeError for sparse gradients.
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
        check_known("adjust_lr_fn", adjust_lr_fn, SCALES)
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
        if (halves := group["halves"]) is None:
            return
        check_known("halves", halves, HALVES)
        axis, odd = (-1, "columns") if HALVES[halves][0] else (-2, "rows")
        for p in group["params"]:
            if p.dim() in (2, 3) and p.shape[axis] % 2:
                raise ValueError(f"halves={halves!r}, but a parameter {tuple(p.shape)} has odd {odd}")

    def load_state_dict(self, state_dict: dict) -> None:
        for group in state_dict["param_groups"]:
            if missing := sorted(self.defaults.keys() - group.keys()):
                raise ValueError(
                    f"the state's groups lack {', '.join(missing)}: it is that of another optimizer; begin "
                    "with a new Muon, or load a state that Muon has saved"
                )
        super().load_state_dict(state_dict)

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        grads = (p.grad for group in self.param_groups for p in group["params"])
        if any(grad is not None and grad.is_sparse for grad in grads):
            raise RuntimeError(
                "Muon does not support sparse gradients: make embeddings with sparse=False, or give them to "
                "torch.optim.SparseAdam"
            )
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
        m, halves = state["momentum_buffer"], group["halves"]
        rows, columns = p.shape[-2:]
        if halves:
            rows, columns = (columns, rows) if HALVES[halves][0] else (rows, columns)
            rows //= 2
        scale = SCALES[group["adjust_lr_fn"]](rows, columns)
        lr, decay = as_tensor(group["lr"], p), group["weight_decay"]
        how = momentum, group["nesterov"], group["ns_steps"], None
        for local, update in updates(p, p.grad, m, halves, how):
            muon_update(local, update, lr, decay, scale)
        if hasattr(p, "placements"):
            increment_version(p)  # of which the ops saw what is local

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


def as_tensor(lr: float | Tensor, p: Tensor) -> Tensor:
    """Return the learning rate as a tensor on the device of p, where a kernel reads it: the host does not."""
    dtype = torch.promote_types(p.dtype, torch.float32)
    if isinstance(lr, Tensor):
        return lr.to(p.device, dtype)
    return torch.full((), lr, device=p.device, dtype=dtype)


def updates(
    p: Tensor, g: Tensor, m: Tensor, halves: str | None, how: tuple
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield parts of `p` that this rank has, each with its orthogonal update, and update the momentum m."""
    if not p.numel():
        return
    if hasattr(p, "placements"):
        if p.dim() == 3 and all(getattr(s, "dim", 0) == 0 for s in p.placements):
            p, g, m = p.to_local(), g.to_local(), m.to_local()  # whole matrices
        else:
            yield sharded_update(p, g, m, halves, how)
            return
    p, g, m = (matrices_of(t, halves) for t in (p, g, m))
    for part, update in directions(g, m, how):
        yield p[part], update


def directions(g: Tensor, m: Tensor | None, how: tuple) -> Iterator[tuple[slice, Tensor]]:
    """Yield the orthogonal updates of some matrices at a time, and which they are."""
    each = max(1, AT_A_TIME // max(1, g.shape[-1] * g.shape[-2]))
    for first in range(0, len(g), each):
        part = slice(first, first + each)
        yield part, muon_direction(g[part], None if m is None else m[part], *how)


def sharded_update(p: Tensor, g: Tensor, m: Tensor, halves: str | None, how: tuple) -> tuple[Tensor, Tensor]:
    """Return what this rank has of p, whose matrices lie on several ranks, and of its update."""
    from torch.distributed.tensor import distribute_tensor

    momentum, nesterov, *_ = how
    m.lerp_(g, 1 - momentum)
    u = (g.lerp(m, momentum) if nesterov else m).full_tensor()
    result = torch.empty_like(u, dtype=dtype_on(u.device))
    matrices = matrices_of(result, halves)
    for part, update in directions(matrices_of(u, halves), None, how):
        matrices[part].copy_(update)
    shards = distribute_tensor(result, p.device_mesh, p.placements, src_data_rank=None)
    return matrices_of(p.to_local(), None), matrices_of(shards.to_local(), None)


def matrices_of(t: Tensor, halves: str | None) -> Tensor:
    """Return a view of the matrices in a parameter: (n, 1, A, B), or with halves (n, 2, A, B)."""
    t = t[None] if t.dim() == 2 else t
    if halves is None:
        return t[:, None]
    transposed, interleaved = HALVES[halves]
    t = t.mT if transposed else t
    half = t.shape[1] // 2
    return t.unflatten(1, (half, 2)).transpose(1, 2) if interleaved else t.unflatten(1, (2, half))


@checked
def muon_groups(model: nn.Module, *, adamw: Sequence[str] = ()) -> list[dict]:
    """Return groups for `Muon` of all trained parameters, each once, with their names as "param_names".

    Muon gets matrices: 2-D weights of linear layers, 3-D weights of experts, and factors A and B of adapters.
    Gate and up are apart, also where an MLP or experts of another package hold both in one weight `gate_up`.

    AdamW gets the rest: embeddings; the output layer, which has a name such as lm_head, or if none has, the
    shape of the largest embedding; routers and gates; vectors, also those of each expert, such as biases
    (E, 2I), and weights of one row; convolutions; PEFT's factors that hold those of all experts; and
    parameters whose name matches a pattern of `adamw`, such as "*.to_latent.*".  Vectors do not decay.

    One line at INFO on the logger "moe_aiter" says which parameters a group has.
    Raises TypeError if `adamw` is no list or tuple of patterns.
    """
    if not isinstance(adamw, (tuple, list)) or not all(isinstance(pattern, str) for pattern in adamw):
        raise TypeError(f"adamw must be patterns in a list or tuple, not {adamw!r}")
    named = dict(model.named_parameters(remove_duplicate=False))
    matrices, vectors, others = (kinds := {"matrix": set(), "vector": set(), "other": set()}).values()
    others |= {id(p) for p in told_by_type(model)}
    others |= {id(p) for name, p in named.items() if any(fnmatchcase(name, pattern) for pattern in adamw)}
    halves: dict[int, str | None] = {}
    for path, module in model.named_modules():
        for p, kind in own_halves(module):
            halves.setdefault(id(p), kind)
        for local, p in module.named_parameters(recurse=False):
            name = f"{path}.{local}" if path else local
            kinds[kind_of_parameter(module, name, named)].add(id(p))
            halves.setdefault(id(p), halves_of(module, name, named))
    matrices -= others | vectors  # a parameter of several modules, such as a tied one
    groups: dict[tuple, list[tuple[str, Tensor]]] = {}
    for name, p in model.named_parameters():
        if p.requires_grad:
            muon = id(p) in matrices
            # parameters of one axis have no weight decay in any group
            key = muon, halves[id(p)] if muon else None, p.dim() > 1 and id(p) in vectors
            groups.setdefault(key, []).append((name, p))
    return [new_group(pairs, *key) for key, pairs in groups.items()]


def new_group(pairs: list[tuple[str, Tensor]], muon: bool, halves: str | None, vectors: bool) -> dict:
    how = ("Muon" if muon else "AdamW") + (f", halves {halves!r}" if halves else "")
    how += ", no weight decay" if vectors else ""
    names, params = zip(*pairs, strict=True)
    layers = dict.fromkeys(re.sub(r"\b\d+\b", "*", name) for name in names)  # the same ones of all layers
    log.info("%s: %d parameters, %s", how, len(params), ", ".join(layers))
    group = {"params": [*params], "param_names": [*names], "muon": muon, "halves": halves}
    return group | {"weight_decay": 0.0} if vectors else group


def told_by_type(model: nn.Module) -> Iterator[Tensor]:
    """Yield embeddings, output layers without a name that says so, and PEFT's factors of all experts in one.

    Output layers are linear layers with the shape of the largest embedding, unless one of them has its name.
    """
    embeddings = [m.weight for m in model.modules() if isinstance(m, nn.Embedding)]
    largest = max((e.shape for e in embeddings), default=None)
    yield from embeddings
    linear = [(name, m.weight) for name, m in model.named_modules() if isinstance(m, nn.Linear)]
    outputs = [(name, weight) for name, weight in linear if weight.shape == largest]
    if not any(matches(name, OUTPUTS) for name, _ in outputs):
        yield from (weight for _, weight in outputs)
    for module in model.modules():
        if type(module).__name__.endswith("ParamWrapper") and module.num_experts > 1:
            yield from (p for name, p in module.named_parameters() if "lora_" in name)


def matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(f".{name}.", pattern) for pattern in patterns)


def kind_of_parameter(module: nn.Module, name: str, named: dict[str, Tensor]) -> str:
    """Return whether a parameter of `module` is a "matrix", or one per expert, a "vector", or "other"."""
    path, _, local = name.rpartition(".")
    p, kind = named[name], type(module).__name__
    if p.dim() < 2 or "bias" in local or "scale" in local or kind.endswith("Norm"):
        return "vector"
    if isinstance(module, Router) or is_router(name, named):
        return "vector" if 1 in p.shape else "other"
    if matches(name, OUTPUTS):
        return "other"
    if p.dim() == 3:
        if isinstance(module, (Experts, OptimizedMoELayer)):
            return "matrix"
        if "Conv" in kind or not (isinstance(module, LoRAFactors) or EXPERTS.search(f"{path}.{kind}")):
            return "other"
        return "vector" if 1 in p.shape[1:] else "matrix"
    stacks = [q.shape[0] for q in module.parameters(recurse=False) if q.dim() == 3]
    if p.dim() == 2 and (1 in p.shape or p.shape[0] in stacks):
        return "vector"
    linear = isinstance(module, nn.Linear) or "Linear" in kind or kind.endswith("Conv1D")
    named_so = matches(local, MATRICES) and "expert" not in f"{path}.{kind}".lower()  # there, 2-D are stacks
    return "matrix" if p.dim() == 2 and (named_so or (linear and local == "weight")) else "other"


def is_router(name: str, named: dict[str, Tensor]) -> bool:
    """Whether names say so; a gate beside an `up` of its shape is one of an MLP."""
    up = named.get(re.sub(r"gate(?=\.|$)", "up", name))
    mlp = up is not None and up is not named[name] and up.shape == named[name].shape
    return not mlp and matches(name, ROUTERS)


def own_halves(module: nn.Module) -> Iterator[tuple[Tensor, str | None]]:
    """Yield the weight of this package's module that may have gate and up, and how they lie in it."""
    if isinstance(module, FusedLinear):
        yield module.weight, "rows" if module.sizes[:1] == module.sizes[1:] else None
    elif isinstance(module, OptimizedMoELayer):
        yield module.w1, "transposed" if get_activation(module.activation).gated else None
    elif isinstance(module, (Experts, SharedExpert)):
        kind = "interleaved" if module.interleaved else "rows"
        gate_up = module.gate_up if isinstance(module, Experts) else getattr(module.gate_up, "weight", None)
        yield gate_up, kind if get_activation(module.activation).gated else None


def halves_of(module: nn.Module, name: str, named: dict[str, Tensor]) -> str | None:
    """Return how gate and up lie in another module's parameter, by the flags of transformers or by shapes.

    (2I, H) belongs to a second weight (H, I), and (H, 2I) to (I, H).
    """
    down = re.sub(r"gate_up(?=(_proj)?(\.weight)?$)", "down", name)
    down = re.sub(r"input_linear(?=\.weight$)", "output_linear", down)  # Granite and JetMoe
    if down == name or named[name].dim() not in (2, 3):
        return None
    transposed = getattr(module, "is_transposed", None)
    if transposed is None:
        if down not in named or named[down].dim() < 2:
            return None
        (rows, columns), (last, first) = named[name].shape[-2:], named[down].shape[-2:]
        if (rows, columns) not in ((2 * first, last), (first, 2 * last)):
            return None
        transposed = (rows, columns) == (first, 2 * last)
    how = transposed, not getattr(module, "is_concatenated", True)
    return next(kind for kind, own in HALVES.items() if own == how)
