"""One weight for several nn.Linear of the same input, such as q, k and v.

    attention.q_proj, attention.k_proj, attention.v_proj = fuse_qkv(
        attention.q_proj, attention.k_proj, attention.v_proj
    )
    q, k, v = attention.q_proj.fused(x)  # one product

A model's own code can still call the projections one by one.  Each call then multiplies by the rows of that
projection: calls share nothing.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from ..kernels.base.check import check_size, checked
from ..private_api import REPLICA, has_hooks, own_modules, own_parameters
from .experts import through
from .linear import multiply
from .loading import why_not_cast

GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class FusedLinear(nn.Module):
    """`weight` (sum of N, K) and `bias` of several projections; `forward(x)` is a tuple of their results.

    Both are Parameters if they are trained, else buffers that state dicts leave out: the projections save and
    load them under the old names.
    """

    weight: Tensor
    bias: Tensor | None

    def __init__(self, linears: Sequence[nn.Linear], trainable: bool):
        super().__init__()
        self.in_features = linears[0].in_features
        self.sizes = [linear.out_features for linear in linears]
        for name in ("weight", "bias"):
            tensors = [getattr(linear, name) for linear in linears]
            fused = None if tensors[0] is None else torch.cat([t.detach() for t in tensors])
            if trainable:
                self.register_parameter(name, None if fused is None else nn.Parameter(fused))
            else:
                self.register_buffer(name, fused, persistent=False)

    def forward(
        self, x: Tensor, *, within: Callable[[Tensor], tuple[Tensor, ...]] | None = None
    ) -> tuple[Tensor, ...]:
        """x (..., K) -> (..., N) for each projection: views of one tensor.  `within` is for `through`."""
        if within is not None:
            return within(x)
        return torch.split(multiply(x, self.weight, self.bias), self.sizes, -1)

    def _save_to_state_dict(self, *args: Any) -> None:
        """Save and load nothing: the projections do."""

    def _load_from_state_dict(self, *args: Any) -> None:
        """Save and load nothing: the projections do."""

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, sizes={self.sizes}, bias={self.bias is not None}"


class FusedPart(nn.Module):
    """A projection that is rows of a FusedLinear; takes the place of an nn.Linear, state dict included.

    Each of them has it as a submodule, `fused`: one Parameter to an optimizer, whichever parts a model keeps.
    """

    def __init__(self, fused: FusedLinear, index: int):
        super().__init__()
        self.index, self.fused = index, fused

    @property
    def rows(self) -> slice:
        sizes = self.fused.sizes
        return slice(sum(sizes[: self.index]), sum(sizes[: self.index + 1]))

    @property
    def weight(self) -> Tensor:
        """(N, K), a view."""
        return self.fused.weight[self.rows]

    @property
    def bias(self) -> Tensor | None:
        """(N,), a view, or None."""
        bias = self.fused.bias
        return None if bias is None else bias[self.rows]

    @property
    def in_features(self) -> int:
        return self.fused.in_features

    @property
    def out_features(self) -> int:
        return self.fused.sizes[self.index]

    def forward(self, input: Tensor) -> Tensor:
        if REPLICA in self.__dict__:  # all projections share `fused`, and no test covers its replicas
            raise RuntimeError(
                "fused projections are not for nn.DataParallel: unfuse(model) first, or use "
                "DistributedDataParallel"
            )
        return through((self.fused,), self.multiplied, input)

    def multiplied(self, x: Tensor) -> Tensor:
        return multiply(x, self.weight, self.bias)

    def requires_grad_(self, requires_grad: bool = True) -> "FusedPart":
        """Raises ValueError if this would change the other projections too."""
        if self.fused.weight.requires_grad != requires_grad:
            raise ValueError(
                f"requires_grad_({requires_grad}) of one projection, but its weight is part of one: call "
                "it before fusing, or after unfuse(model).  For all projections, pass "
                f"trainable={requires_grad} to fuse_projections, or call it of the module around them"
            )
        return self

    def to_linear(self) -> nn.Linear:
        """An nn.Linear with a copy of these rows."""
        linear = nn.Linear(self.in_features, self.out_features, self.bias is not None, device="meta")
        trained = isinstance(self.fused.weight, nn.Parameter)
        for name, t in self.tensors():
            setattr(linear, name, nn.Parameter(t.detach().clone(), requires_grad=trained and t.requires_grad))
        return linear.train(self.training)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors that a state dict has."""
        for name in ("weight", "bias"):
            if (t := getattr(self, name)) is not None:
                yield name, t

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        for name, t in self.tensors():
            destination[prefix + name] = t if keep_vars else t.detach()

    def _load_from_state_dict(
        self, state_dict: dict[str, Tensor], prefix: str, local_metadata: dict[str, Any], strict: bool,
        missing_keys: list[str], unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:  # fmt: skip
        mine = dict(self.tensors())
        for name, t in mine.items():
            key = prefix + name
            loaded = state_dict.get(key)
            if loaded is None:
                missing_keys.append(key)
            elif loaded.shape != t.shape:
                sizes = f"{tuple(loaded.shape)} in the checkpoint and {tuple(t.shape)} here"
                error_msgs.append(f"size mismatch for {key}: {sizes}")
            elif t.is_meta and not loaded.is_meta:
                error_msgs.append(
                    f"{key} is on the meta device: give fused projections memory before loading"
                )
            elif why := why_not_cast(key, loaded, t):
                error_msgs.append(why)
            else:
                with torch.no_grad():
                    t.copy_(loaded)
        own_keys = {prefix + name for name in mine}
        others = (k for k in state_dict if k.startswith(prefix) and k not in own_keys)
        unexpected_keys.extend(others if strict else ())

    def extra_repr(self) -> str:
        bias = self.fused.bias is not None
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={bias}, fused"


@checked
def fuse_qkv(
    q: nn.Linear, k: nn.Linear, v: nn.Linear, *, trainable: bool | None = None
) -> tuple[FusedPart, FusedPart, FusedPart]:
    """Return three projections that share one weight; assign them in place of `q`, `k` and `v`.

    `q.fused(x)` returns the results of all three, from one product; so do `k.fused(x)` and `v.fused(x)`.
    `q(x)`, `k(x)` and `v(x)` run one product each, as before.  In the backward pass of such separate calls,
    each projection adds its weight gradient to a gradient of the whole weight, which takes longer than with
    separate layers: train with `q.fused(x)`.

    `trainable` makes the weight a Parameter (True) or a buffer (False); by default it stays what it is.  Fuse
    after loading, before torch.compile, and before you make the optimizer, which must get the new Parameter.

    The three are trained or frozen together, and `q.weight` is a view: write to it in place (`copy_`), since
    what is assigned to its `.data` is lost.

    Raises ValueError or TypeError unless the three are plain nn.Linear of one input size, dtype and device,
    all with biases or none, all trained or none.  The projections raise RuntimeError under nn.DataParallel,
    and ValueError for a `requires_grad_` that would change the others too.
    """
    of_q, of_k, of_v = fuse((q, k, v), trainable)
    return of_q, of_k, of_v


@checked
def fuse_gate_up(
    gate: nn.Linear, up: nn.Linear, *, trainable: bool | None = None
) -> tuple[FusedPart, FusedPart]:
    """Return an MLP's `gate` and `up` with one shared weight: see `fuse_qkv`."""
    of_gate, of_up = fuse((gate, up), trainable)
    return of_gate, of_up


def fuse(linears: Sequence[nn.Linear], trainable: bool | None) -> tuple[FusedPart, ...]:
    check_fits(linears)
    trained = linears[0].weight.requires_grad if trainable is None else trainable
    fused = FusedLinear(linears, trained)
    return tuple(FusedPart(fused, i).train(linear.training) for i, linear in enumerate(linears))


def check_fits(linears: Sequence[nn.Linear]) -> None:
    """Raise unless these can be one product."""
    first, *others = linears
    for linear in linears:
        if type(linear) is not nn.Linear or type(linear.weight) is not nn.Parameter:
            kinds = f"{type(linear).__name__} with a {type(getattr(linear, 'weight', None)).__name__}"
            raise TypeError(f"only plain nn.Linear are fused, not {kinds}")
        if has_hooks(linear):
            raise ValueError("a projection with hooks is not fused: they would be lost")
    for linear in others:
        check_size("a projection is of {} features", linear.in_features, "another of {}", first.in_features)
        for what in ("dtype", "device", "requires_grad"):
            mine, theirs = getattr(first.weight, what), getattr(linear.weight, what)
            if mine != theirs:
                raise ValueError(f"{what} is {mine} of one projection but {theirs} of another")
    biases = [linear.bias for linear in linears if linear.bias is not None]
    if len(biases) not in (0, len(linears)):
        raise ValueError(f"{len(biases)} of {len(linears)} projections have a bias; it must be all or none")
    if any(b.requires_grad != first.weight.requires_grad or b.dtype != first.weight.dtype for b in biases):
        raise ValueError("biases must be trained, and of the dtype, as the weights are")


@checked
def fuse_projections(
    model: nn.Module, *, trainable: bool | None = None, groups: Sequence[Sequence[str]] = GROUPS
) -> int:
    """Fuse all sibling q_proj, k_proj and v_proj, and gate_proj and up_proj; return the number of groups.

    The model's code, state dict and results stay the same.  Fusing alone makes no model faster, and the
    backward pass slower (see `fuse_qkv`): only a call of `q_proj.fused(x)` runs one product for all
    projections.  Projections that do not fit into one weight, or that share a weight with other modules, stay
    as they are.  `groups` lists the names of siblings to look for.  `unfuse` undoes the fusion.
    """
    uses: Counter[int] = Counter()
    for module in model.modules():
        uses.update(id(t) for t in (*own_parameters(module).values(), *own_modules(module).values()))
    count = 0
    for parent in list(model.modules()):
        for names in groups:
            linears = [own_modules(parent).get(name) for name in names]
            if can_fuse(linears) and all(uses[id(t)] == 1 for one in linears for t in (one, one.weight)):
                for name, part in zip(names, fuse(linears, trainable), strict=True):
                    setattr(parent, name, part)
                count += 1
    return count


def can_fuse(linears: Sequence[Any]) -> TypeGuard[Sequence[nn.Linear]]:
    try:
        check_fits(linears)
    except (TypeError, ValueError):
        return False
    return True


@checked
def unfuse(model: nn.Module) -> int:
    """Give every fused projection in `model` its own weight again; return the number of projections.

    A group that `fuse_projections` counts has two or three projections.  Make the optimizer anew afterwards.
    """
    count = 0
    for parent in list(model.modules()):
        for name, part in list(own_modules(parent).items()):
            if isinstance(part, FusedPart):
                setattr(parent, name, part.to_linear())
                count += 1
    return count
