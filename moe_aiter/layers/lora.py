"""Low-rank adapters of linear layers and of experts.

    y = W x + c * B (A x),   c = alpha / r, or alpha / sqrt(r)      LoRA, Hu et al. 2021, arXiv 2106.09685
    y = m / |W + c B A| * (W x + c * B (A x))                       DoRA, Liu et al. 2024, arXiv 2402.09353

r is the rank; alpha / sqrt(r) is rsLoRA's, Kalajdzievski 2023, arXiv 2312.03732.  |.| is the norm of each row
of the matrix, which DoRA takes as a constant in the backward pass (its section 4.3).  A bias is added last.

LoRA never makes the product B A.  DoRA makes W + c B A for its norm, one block at a time.

Adapters of several ranks are padded to the largest one: products have tiles of at least 16 ranks, and one
tensor for all adapters needs no copy.  The padding's c is 0, so its gradient is exactly 0.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..invariance import refuse_batch
from ..kernels.base.check import (
    cast_as_linear,
    check_axes,
    check_device,
    check_float,
    check_index,
    check_plan,
    check_shape,
    check_sizes,
    check_tensor,
    checked,
    renamed,
    sum_dtype,
)
from ..kernels.grouped.segment_gmm import segment_gmm
from ..kernels.quantize.four_bit import FourBit
from ..op import no_autocast
from ..private_api import LINEAR, in_fsdp
from ..routing.plan import RoutePlan, make_plan, permute, unpermute
from .by_step import LowRank, Projection, by_adapter, experts_by_step, low_rank, split_plan, spread
from .experts import Experts, SteppedExperts, Weights, Within, apply_linear, is_hooked, local_part, through
from .four_bit import FourBitExperts
from .loading import Loading
from .lora_merge import Mergeable
from .lora_peft import check_alpha, copy_in, factors_of_all_experts, load_stacked, number_of, rank_in

NORM_BLOCK = 2**25  # numbers of W + c B A that DoRA holds at a time, 128 MiB in float32
FEW_ROWS = 256  # up to which each is a segment of its own; more are sorted by adapter


# the factors


class LoRAFactors(Loading):
    """`count` pairs A (count, r, in) and B (count, out, r), and with `dora` their magnitudes (count, out).

    A begins as nn.Linear's weights do, B with zeros.  In training, each number of A's input is dropped
    with probability `dropout`, as by F.dropout, and each rank of each pair with probability `rank_dropout`
    in a step, for all rows; the others are divided by the rest of it.

    The pairs belong to `adapters` adapters; those of an expert are neighbours.  `rank` and `alpha` are
    numbers, or sequences of one for each adapter.  r is the largest rank; of a smaller one, the rest of A and
    B stays 0.  If adapters differ in either, the buffer `scales` (adapters, r), float64, has c, then 0.
    """

    scales: Tensor | None

    @checked
    def __init__(
        self, weight: Tensor | FourBit, count: int, *, rank: int | Sequence[int],
        alpha: float | Sequence[float] | None = None, rslora: bool = False, dora: bool = False,
        dropout: float = 0.0, rank_dropout: float = 0.0, adapters: int = 1,
    ):  # fmt: skip
        super().__init__()
        if hasattr(weight, "placements"):
            raise ValueError("the weight is sharded: make the adapters first, and shard the layer with them")
        check_sizes(num_adapters=adapters)
        for name, chance in (("dropout", dropout), ("rank_dropout", rank_dropout)):
            if not 0 <= chance < 1:
                raise ValueError(f"{name} must be at least 0 and less than 1, not {chance}")
        self.count, self.adapters = count, adapters
        self.dropout, self.rank_dropout, self.rslora = dropout, rank_dropout, rslora
        self.ranks, self.alphas = one_each("rank", rank, adapters), one_each("alpha", alpha, adapters)
        for r in self.ranks:
            check_sizes(rank=r)
        for number in self.alphas:
            check_alpha(number)
        self.rank = max(self.ranks)
        self.alpha = self.ranks[0] if self.alphas[0] is None else self.alphas[0]
        self.scaling = self.scaling_of(0, self.ranks[0])
        self.out_features, self.in_features = out_features, in_features = weight.shape[-2:]
        where: dict[str, Any] = {"device": weight.device, "dtype": weight.dtype}
        self.A = nn.Parameter(torch.empty(count, self.rank, in_features, **where))
        self.B = nn.Parameter(torch.empty(count, out_features, self.rank, **where))
        self.magnitude = nn.Parameter(torch.empty(count, out_features, **where)) if dora else None
        self.register_buffer("scales", self.first_scales() if self.differ() else None)
        self.reset_parameters(weight)

    def scaling_of(
        self, adapter: int, rank: int, alpha: float | None = None, rslora: bool | None = None
    ) -> float:
        """Return c of an adapter of this rank; `alpha` and `rslora` are by default those of the layer."""
        alpha = self.alphas[adapter] if alpha is None else alpha
        root = self.rslora if rslora is None else rslora
        return (rank if alpha is None else alpha) / (math.sqrt(rank) if root else rank)

    def first_scales(self) -> Tensor:
        rows = [
            [self.scaling_of(n, rank)] * rank + [0.0] * (self.rank - rank)
            for n, rank in enumerate(self.ranks)
        ]
        return torch.tensor(rows, dtype=torch.float64, device=self.A.device)

    def reset_parameters(self, weight: Tensor | FourBit) -> None:
        """Begin anew, with no effect on a layer of this weight, (out, in) or (count, out, in)."""
        bound = max(self.A.shape[-1], 1) ** -0.5
        nn.init.uniform_(self.A, -bound, bound)
        nn.init.zeros_(self.B)
        if self.scales is not None:
            self.scales = self.first_scales()
            a = local_part(self.A).detach()
            if len(a) % self.adapters == 0:  # a rank has whole experts; padding in others never has an effect
                a *= (self.scales != 0).repeat(len(a) // self.adapters, 1)[..., None]
        if self.magnitude is not None:
            with torch.no_grad():
                self.magnitude.copy_(row_norms(weight))

    def forward(
        self, x: Tensor, lens: Tensor, numbers: Tensor | None = None, *, within: Within | None = None
    ) -> Tensor:
        """c * B (A x) of each segment of rows of `x`, by the pair it names; zeros where it names none.

        `within` is for `through`, whose function then gets the arguments.
        """
        if within is not None:
            return within(x, lens, numbers)
        return self.added(x, lens, numbers)

    def added(self, x: Tensor, lens: Tensor, numbers: Tensor | None) -> Tensor:
        """Do as `forward`, in a forward pass of this module that runs already."""
        x, a, b = cast_as_linear(x, self.scaled_a(), self.B)
        rows = F.dropout(x.to(a.dtype), self.dropout, self.training)
        low = segment_gmm(rows, a.mT, lens, weight_indices=numbers)  # (R, r)
        return segment_gmm(low, b.mT, lens, weight_indices=numbers).to(x.dtype)

    def scale_of(self, count: int, dtype: torch.dtype) -> float | Tensor:
        """Return c of so many pairs: one number, or (count, r, 1) where adapters differ."""
        if self.scales is None:
            return self.scaling
        return self.scales.repeat(count // self.adapters, 1)[..., None].to(dtype)

    def scale(self, a: Tensor, dtype: torch.dtype) -> Tensor:
        """Return c of each rank of `a`, in training 0 for the ranks that are dropped: (count, r, 1)."""
        if self.training and (self.dropout or self.rank_dropout):
            refuse_batch(f"dropout is {self.dropout} and rank_dropout {self.rank_dropout}: both are random")
        kept = F.dropout(a.new_ones(*a.shape[:2], 1, dtype=dtype), self.rank_dropout, self.training)
        return self.scale_of(len(a), dtype) * kept

    def scaled_a(self) -> Tensor:
        """c * A, in training without the ranks that are dropped: (count, r, in)."""
        a = local_part(self.A)
        return a * self.scale(a, a.dtype)

    def low_rank(self, weight: Tensor | FourBit) -> LowRank:
        """The adapters of the weight (count, out, in) as `experts_by_step` takes them, in its dtype."""
        a, b = (t.to(weight.dtype) for t in (self.scaled_a(), local_part(self.B)))
        growth = None if self.magnitude is None else self.growth(weight)
        return LowRank(a, b, growth, self.input_dropout)

    def local_factors(self, weight: Tensor | FourBit) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return a, b and growth of `low_rank`; for several adapters A, B and their scale (count, r)."""
        if self.adapters == 1:
            return self.low_rank(weight)[:3]
        a, b = local_part(self.A), local_part(self.B)
        return a.to(weight.dtype), b.to(weight.dtype), self.scale(a, sum_dtype(a))[..., 0]

    @property
    def input_dropout(self) -> float:
        """The probability with which a number of A's input is dropped now."""
        return self.dropout if self.training else 0.0

    @torch.no_grad()
    def norms(self, weight: Tensor | FourBit) -> Tensor:
        """|W + c B A| (count, out) in float32, from the sum itself, made in blocks of `NORM_BLOCK` numbers.

        |W|^2 + 2 c W (B A) + |c B A|^2 would do without the sum, but cancels where B A is close to -W / c.
        """
        all_b = local_part(self.B)
        count, out_features = all_b.shape[:2]
        in_features = weight.shape[-1]
        rows = max(1, min(out_features, NORM_BLOCK // max(in_features, 1)))
        pairs = max(1, NORM_BLOCK // max(rows * in_features, 1))
        size = count, out_features, in_features
        plain = weight.plain() if isinstance(weight, FourBit) else weight.expand(size)
        norms = all_b.new_empty(size[:2], dtype=torch.promote_types(weight.dtype, torch.float32))
        for i in range(0, count, pairs):
            for j in range(0, out_features, rows):
                block = slice(i, i + pairs), slice(j, j + rows)
                norms[block] = row_norms(self.adapted(plain[block], block[0], all_b[block]))
        return norms.clamp_min(torch.finfo(norms.dtype).tiny)

    def adapted(self, weight: Tensor, pairs: int | slice, b: Tensor) -> Tensor:
        """W + c B A of some pairs in float32, also under autocast; without a float32 copy of W.

        `b` are some rows of their B.  Not for autograd.
        """
        all_a, wide = local_part(self.A), sum_dtype(weight)
        scale = self.scale_of(len(all_a), wide)
        a = (scale if isinstance(scale, float) else scale[pairs]) * all_a[pairs].to(wide)
        with no_autocast(weight):
            return (b.to(wide) @ a).add_(weight)

    def growth(self, weight: Tensor | FourBit) -> Tensor:
        """m / |W + c B A| - 1, (count, out) in float32: what DoRA multiplies by, less the one of LoRA."""
        magnitude = local_part(self.magnitude)
        assert magnitude is not None
        dtype, wide = magnitude.dtype, sum_dtype(magnitude)
        least = torch.finfo(dtype).tiny  # the norm of a row of zeros, which float16 would round to 0
        # rounded as m is: a new adapter changes nothing
        norms = self.norms(weight).to(dtype).clamp_min(least).to(wide)
        return (magnitude.to(wide) - norms) / norms

    @torch.no_grad()
    def merged(self, weight: Tensor, number: int | slice) -> Tensor:
        """The one weight that does the same as `weight` with these factors: here the product is made."""
        wide = sum_dtype(weight)
        b, magnitude = local_part(self.B), local_part(self.magnitude)
        full = self.adapted(weight, number, b[number])
        if magnitude is not None:
            full *= (magnitude[number].to(wide) / row_norms(full))[..., None]
        return full.to(weight.dtype)

    def check_present(self, *weights: Tensor) -> None:
        """Raise ValueError if these weights or the factors have no numbers outside of a forward pass."""
        if any(t.is_meta or t.dim() < 2 for t in (*weights, *self.parameters())):  # ZeRO-3's are (0,)
            raise ValueError(
                "the weights have no numbers now: they are on the meta device, or hooks hide them outside of "
                "forward passes; merge, load and save adapters before you shard or offload, or after its end"
            )

    def of_adapter(self, adapter: int, rank: int | None = None) -> tuple[Tensor, Tensor]:
        """Return views of A (E, rank, in) and B (E, out, rank) of an adapter, by default all of its rank."""
        pairs = slice(number_of(adapter, self.adapters), None, self.adapters)
        rank = self.rank_of(adapter) if rank is None else rank
        return self.A.detach()[pairs, :rank], self.B.detach()[pairs, :, :rank]

    def rank_of(self, adapter: int) -> int:
        """Return the rank of an adapter; of one with an alpha of 0 the rank that it has a place for."""
        return self.rank if self.scales is None else int(self.scales[adapter].count_nonzero()) or self.rank

    def take_rank(self, adapter: int, rank: int, alpha: float | None, rslora: bool | None) -> None:
        """Let an adapter, whose first ranks were loaded, have this rank, and c by these options."""
        scaling = self.scaling_of(adapter, rank, alpha, rslora)
        if self.scales is None:
            if (rank, scaling) == (self.rank, self.scaling):
                return
            self.scales = self.first_scales()
        a, b = self.of_adapter(adapter, self.rank)
        a[:, rank:], b[..., rank:] = 0, 0
        self.scales[adapter, :rank], self.scales[adapter, rank:] = scaling, 0

    def differ(self) -> bool:
        """Whether adapters differ in rank or scaling as they were made."""
        return len({*zip(self.ranks, self.alphas, strict=True)}) > 1

    def make_room(self, state: Mapping[str, Any], prefix: str) -> None:
        if f"{prefix}scales" in state:
            self.scales = self.first_scales() if self.scales is None else self.scales
        elif f"{prefix}A" in state and not self.differ():
            self.scales = None  # an adapter of a smaller rank was loaded, and the state is of before

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "ranks" not in state:  # pickled before adapters had ranks of their own
            state = state | {"adapters": 1, "ranks": (state["rank"],), "alphas": (state["alpha"],)}
            state["_buffers"]["scales"] = None
        super().__setstate__(state)  # type: ignore[no-untyped-call]  # torch's

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "LoRAFactors":
        before = self.scales
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch's
        if before is not None and self.scales is not None and self.scales.dtype != before.dtype:
            self.scales = before.to(self.scales.device)
        return self

    def extra_repr(self) -> str:
        sizes = f"{self.count} x {self.in_features} -> {self.rank} -> {self.out_features}"
        scaling = f"{self.scaling:g}" if self.scales is None else "of each adapter"
        dropout = f"dropout={self.dropout}, rank_dropout={self.rank_dropout}"
        return f"{sizes}, scaling={scaling}, {dropout}"


def one_each(name: str, value: Any, adapters: int) -> tuple[Any, ...]:
    """Return a number for each adapter, of a sequence or of one number for all."""
    values = tuple(value) if isinstance(value, (tuple, list)) else (value,) * adapters
    if len(values) != adapters:
        raise ValueError(f"{name} has {len(values)} numbers for {adapters} adapters: {value}")
    return values


def row_norms(weight: Tensor | FourBit) -> Tensor:
    if isinstance(weight, FourBit):
        plain = weight.plain()
        return torch.cat([row_norms(plain[e : e + 1]) for e in range(max(weight.shape[0], 1))])
    norms: Tensor = torch.linalg.vector_norm(weight, dim=-1, dtype=sum_dtype(weight))
    return norms


# modules


class AtProduct(TorchFunctionMode):
    """Calls `fn` with the weight and the bias of an nn.Linear where its forward pass multiplies by them."""

    def __init__(self, fn: Callable[..., tuple[Tensor, Tensor | None]]):
        super().__init__()
        self.fn = fn
        self.found: tuple[Tensor, Tensor | None] | None = None

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is LINEAR and self.found is None:
            self.found = self.fn(*args[1:], **(kwargs or {}))
        return func(*args, **(kwargs or {}))


class LoRALinear(Mergeable):
    """A frozen nn.Linear with `num_adapters` low-rank adapters; each row of a batch can use another adapter.

    The keyword arguments `rank`, `alpha` (default: the rank), `rslora`, `dora`, `dropout` and `rank_dropout`
    are those of `LoRAFactors`: `rank` and `alpha` may be sequences, of one number for each adapter.
    state_dict keys: base.weight, base.bias, lora.A (num_adapters, r, in), lora.B (num_adapters, out, r), with
    `dora` lora.magnitude (num_adapters, out), and if adapters differ lora.scales (num_adapters, r).  `base`
    is frozen.  Raises ValueError for a base that is sharded already.
    """

    merges: ClassVar = {"weight": "lora"}
    base: nn.Linear

    @checked
    def __init__(self, base: nn.Linear, num_adapters: int = 1, **lora: Any):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora = LoRAFactors(base.weight, num_adapters, **lora, adapters=num_adapters)
        self.original = None

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        lora, count = self.lora, self.lora.count
        if lora.adapters != count:  # as LoRAFactors.__setstate__ has left it
            lora.adapters, lora.ranks, lora.alphas = count, lora.ranks * count, lora.alphas * count

    @property
    def num_adapters(self) -> int:
        """Return the number of adapters."""
        return self.lora.adapters

    @renamed(lens="seg_lens", weight_indices="adapter_ids")
    def forward(self, x: Tensor, adapter_ids: Tensor | None = None, seg_lens: Tensor | None = None) -> Tensor:
        """Return the output of `base` plus that of the adapters: (..., in) -> (..., out).

        `adapter_ids`, int32 or int64, are the adapters' numbers: (...), one for each row of `x`, or one for
        each index of the first axes of `x`, for example (batch,) for (batch, length, in).  With `seg_lens`
        (B,), flattened rows of `x` form B segments of these lengths, and `adapter_ids` (B,) has one number
        for each segment.  -1 means no adapter.  A layer with a single adapter needs no `adapter_ids`.
        Raises ValueError for shapes that do not fit, and for `adapter_ids` after `merge`; TypeError for
        dtypes; with MOE_AITER_DEBUG=1 also ValueError for `adapter_ids` of adapters that are not there.
        After `merge`, adapters get no gradients: in training mode a warning says so.
        """
        self.check_trains()
        check_tensor("x", x)
        in_features = self.base.in_features
        if x.dim() < 1 or x.shape[-1] != in_features:
            raise ValueError(f"x is {tuple(x.shape)} but the layer needs (..., in={in_features})")
        check_float(x=x)
        if not is_hooked(self.base):
            check_device(x=x, weight=self.base.weight)
        rows = x.reshape(x.shape[:-1].numel(), in_features)  # (R, in)
        if self.original is not None and adapter_ids is not None:
            raise ValueError("an adapter is merged into the weight: adapter_ids cannot choose another")
        if self.original is not None:
            out = apply_linear(self.base, rows)
        elif self.lora.magnitude is not None:
            lens, ids = self.named(x, adapter_ids, seg_lens)
            out = through((self.lora,), self.with_dora, rows, lens, ids)
        else:
            out = apply_linear(self.base, rows)
            out = (out + self.adapted(rows, *self.named(x, adapter_ids, seg_lens))).to(out.dtype)
        return out.view(*x.shape[:-1], out.shape[1])

    def named(
        self, x: Tensor, adapter_ids: Tensor | None, seg_lens: Tensor | None
    ) -> tuple[Tensor | None, Tensor]:
        """The lengths of the segments and the adapter of each, or None and the adapter of each row."""
        if adapter_ids is None:
            if self.lora.count > 1 or seg_lens is not None:
                raise ValueError(f"adapter_ids must say which of {self.lora.count} adapters")
            adapter_ids = torch.zeros((), dtype=torch.int32, device=x.device)
        check_tensor("adapter_ids", adapter_ids)
        check_index(adapter_ids=adapter_ids)
        if seg_lens is not None:
            check_shape("seg_lens", seg_lens, "B")
            check_shape("adapter_ids", adapter_ids, "B")
            return seg_lens, adapter_ids
        axes = adapter_ids.shape
        if axes != x.shape[: len(axes)] or len(axes) >= x.dim():
            raise ValueError(f"adapter_ids is {tuple(axes)} but x is {tuple(x.shape)}")
        ids, length = adapter_ids.flatten(), math.prod(x.shape[len(axes) : -1])
        if length == 1 and ids.numel() > FEW_ROWS:
            return None, ids
        return torch.full_like(ids, length), ids

    def with_dora(self, rows: Tensor, lens: Tensor | None, ids: Tensor) -> Tensor:
        """Return the output (R, out), in a forward pass of `lora`."""
        out, growth, bias = self.base_and_growth(rows)
        y = out.to(sum_dtype(out)) - (0 if bias is None else bias)
        return (out + self.adapted(rows, lens, ids, y, growth)).to(out.dtype)

    def base_and_growth(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the result of `base` (R, out), `LoRAFactors.growth` (num_adapters, out), and the bias."""
        base, growth = self.base, self.lora.growth
        if not is_hooked(base):
            return apply_linear(base, rows), growth(base.weight), base.bias

        def read(weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
            return growth(weight), None if bias is None else bias.detach().clone()

        with AtProduct(read) as product:
            out = base(rows)
        if product.found is None:
            raise NotImplementedError(
                f"DoRA cannot read the weight of this {type(base).__name__}, which hooks hide outside of its "
                "forward pass: shard or offload the LoRALinear as one module"
            )
        return out, *product.found

    def adapted(
        self, rows: Tensor, lens: Tensor | None, ids: Tensor,
        y: Tensor | None = None, growth: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Return what the adapters add to the result of `base`; with DoRA to `y`, which has no bias."""
        if lens is not None:
            return self.added(rows, lens, ids, y, growth)
        plan = make_plan(ids[:, None], self.lora.count)
        rows, y = permute(rows, plan), None if y is None else permute(y, plan)
        return unpermute(self.added(rows, plan.group_sizes, None, y, growth), plan)

    def added(
        self, rows: Tensor, lens: Tensor, numbers: Tensor | None, y: Tensor | None, growth: Tensor | None
    ) -> Tensor:
        delta: Tensor
        if y is None or growth is None:
            delta = self.lora(rows, lens, numbers)
            return delta
        delta = self.lora.added(rows, lens, numbers)
        if numbers is not None:
            there = (numbers >= 0) & (numbers < len(growth))
            growth = growth[numbers.where(there, 0)] * there[:, None]
        return delta + spread(growth, lens, y) * (delta + y)

    @checked
    def merge(self, adapter: int = 0) -> None:
        """Add one adapter to `base.weight`, in place, and keep a copy of the weight.

        The other adapters are unavailable until `unmerge`.  Until then, `state_dict` has the weight as it
        was, and loading raises ValueError.  Whatever else uses the weight, uses the merged one.
        Raises ValueError for merged adapters, also of another layer with the same weight, for a weight that
        is no parameter of `base` itself, and for one that is sharded.
        """
        self.check_unmerged()
        (weight,) = self.own_weights()
        if hasattr(weight, "placements"):
            raise ValueError("the weight is sharded: merge the adapter before you shard the layer")
        merged = self.lora.merged(weight, number_of(adapter, self.num_adapters))
        self.keep_original()
        weight.copy_(merged)

    @checked
    def peft_state_dict(self, adapter: int = 0, prefix: str = "") -> dict[str, Tensor]:
        """Return one adapter in PEFT's format: lora_A.weight (r, in) and lora_B.weight (out, r), r its rank.

        With DoRA also lora_magnitude_vector (out,).
        """
        return {name: t.detach().clone() for name, t in self.by_peft_name(adapter, prefix).items()}

    @checked
    def load_peft_state_dict(
        self, state: Mapping[str, Tensor], adapter: int = 0, prefix: str = "", *, alpha: float | None = None,
        rslora: bool | None = None,
    ) -> None:  # fmt: skip
        """Load one adapter in the format of `peft_state_dict`, of the layer's rank or a smaller one.

        alpha, rslora: lora_alpha and use_rslora of adapter_config.json [those of the layer].
        Raises KeyError for missing keys, ValueError for another shape, for a larger rank, and for an adapter
        with DoRA in a layer without, and after `merge`; then nothing is copied.
        """
        self.check_loadable()
        rank = rank_in(state, prefix, self.lora, alpha)
        copy_in(self.by_peft_name(adapter, prefix, rank), state)
        self.lora.take_rank(adapter, rank, alpha, rslora)

    def by_peft_name(self, adapter: int, prefix: str, rank: int | None = None) -> dict[str, Tensor]:
        lora = self.lora
        lora.check_present()
        (a,), (b,) = lora.of_adapter(adapter, rank)
        found = {"lora_A.weight": a, "lora_B.weight": b}
        if lora.magnitude is not None:
            found["lora_magnitude_vector"] = lora.magnitude[adapter]
        return {f"{prefix}{name}": t for name, t in found.items()}


class LoRAExperts(Mergeable, SteppedExperts):
    """Frozen `Experts` with `num_adapters` low-rank adapters for each expert, one of which each token uses.

        moe.experts = LoRAExperts(moe.experts, rank=16)
        moe.experts = LoRAExperts(moe.experts, 3, rank=[16, 16, 4])
        y = moe(x, adapter_ids=ids)

    They replace the experts of an `MoE`.  `base` may have 4 bits, from `quantize(model, "nf4")`: then without
    `merge`.

    The keyword arguments are those of `LoRAFactors`: `rank` and `alpha` may be sequences, of one number for
    each adapter.  state_dict keys: base.*, and for gate_up (and down alike), with P = E * num_adapters,
    gate_up_lora.A (P, r, H), gate_up_lora.B (P, 2I, r), with `dora` gate_up_lora.magnitude (P, 2I), and if
    adapters differ gate_up_lora.scales (num_adapters, r).  Adapter n of expert e is e * num_adapters + n.
    Once sharded by `moe_aiter.distributed`, they are DTensors, of which each rank computes its own part.
    The router stays trainable.  `row_chunks`, `recompute` and `fp8` of the experts have an effect only after
    `merge`: beside adapters, products use the weights' dtype.
    Raises TypeError unless `base` is an `Experts`, perhaps one of 4 bits, ValueError for `dora` with several
    adapters and for a base that is sharded already.
    """

    merges: ClassVar = {"gate_up": "gate_up_lora", "down": "down_lora"}
    base: Experts | FourBitExperts

    def __init__(self, base: Experts | FourBitExperts, num_adapters: int = 1, **lora: Any):
        super().__init__()
        if not isinstance(base, (Experts, FourBitExperts)):
            raise TypeError(f"base must be an Experts, such as MoE(...).experts, not {type(base).__name__}")
        if base.dispatcher is not None or in_fsdp(base):  # codes are buffers, which tell nothing
            raise ValueError("the experts are sharded: make the adapters first, and shard both")
        check_sizes(num_adapters=num_adapters)
        if num_adapters > 1 and lora.get("dora"):
            raise ValueError(
                f"dora=True, but num_adapters is {num_adapters}: DoRA would make the weights of all experts "
                "with each adapter in each forward pass; use a single adapter, or leave out dora"
            )
        self.base = base.requires_grad_(False)
        gate_up, down = base.local_weights()[:2] if self.has_four_bits else (base.gate_up, base.down)
        count = base.num_experts * num_adapters
        self.gate_up_lora = LoRAFactors(gate_up, count, **lora, adapters=num_adapters)
        self.down_lora = LoRAFactors(down, count, **lora, adapters=num_adapters)
        self.original = None

    def forward(
        self, x: Tensor, routing_weights: Tensor, plan: RoutePlan, adapter_ids: Tensor | None = None, *,
        within: Within | None = None,
    ) -> Tensor:  # fmt: skip
        """Do as `Experts.forward`, (T, H) -> (T, H), with the adapter `adapter_ids` (T,) of each token.

        `adapter_ids`, int32 or int64: -1 means no adapter.  A single adapter needs none.
        Raises ValueError for shapes that do not fit, for `adapter_ids` after `merge` and, of a single
        adapter, with DoRA or with shared experts; TypeError for dtypes; with MOE_AITER_DEBUG=1 also
        ValueError for an adapter that is not there.  After `merge`, adapters get no gradients: in training
        mode a warning says so.
        """
        self.check_trains()
        if within is None:
            plan = self.plan_of(x, plan, adapter_ids)
        return super().forward(x, routing_weights, plan, within=within)

    def plan_of(self, x: Tensor, plan: RoutePlan, adapter_ids: Tensor | None) -> RoutePlan:
        """Return the plan with rows by expert and adapter, or as it is without `adapter_ids`."""
        merged, one = self.original is not None, self.num_adapters == 1
        if adapter_ids is None:
            if not (one or merged):
                raise ValueError(f"adapter_ids must say which of {self.num_adapters} adapters")
            return plan
        if merged:
            raise ValueError("an adapter is merged into the weights: adapter_ids cannot choose another")
        if one and (self.gate_up_lora.magnitude is not None or self.dispatcher is not None):
            raise ValueError(
                "adapter_ids: a single adapter with dora, or of shared experts, is for all tokens"
            )
        check_axes(x=(x, "T, H"), adapter_ids=(adapter_ids, "T"))
        check_index(adapter_ids=adapter_ids)
        check_device(x=x, adapter_ids=adapter_ids)
        check_plan(plan)
        return by_adapter(RoutePlan(*plan), adapter_ids, self.num_adapters)

    @property
    def num_adapters(self) -> int:
        """Return the number of adapters of each expert."""
        return self.gate_up_lora.adapters

    @property
    def has_four_bits(self) -> bool:
        """Whether the frozen weights have 4 bits."""
        return isinstance(self.base, FourBitExperts)

    def owners(self) -> tuple[nn.Module, ...]:
        """Return the modules that have the weights and the factors."""
        return self.base, *self.base.children(), self.gate_up_lora, self.down_lora

    def local_weights(self) -> Weights:
        """Return the weights and biases of `base` and, unless merged, the adapters' factors, as `LowRank`.

        Of sharded ones the part of this rank.  In training, ranks are dropped here.
        """
        gate_up, down, *biases = self.base.local_weights()
        if self.original is not None:
            return gate_up, down, *biases
        gate_up, down = cast_as_linear(gate_up, down)
        factors = self.gate_up_lora.local_factors(gate_up), self.down_lora.local_factors(down)
        return gate_up, down, *biases, *factors[0], *factors[1]

    def compute(
        self, x: Tensor, routing_weights: Tensor, plan: RoutePlan, weights: Weights, save_z: bool = True,
        lent: bool = False,
    ) -> Tensor:  # fmt: skip
        """Return the experts' output as `forward` does, on this rank, with these `local_weights`."""
        gate_up, down, gate_up_bias, down_bias, *factors = weights
        if not factors:
            return self.base.compute(x, routing_weights, plan, weights, save_z, lent)
        x, gate_up, down = cast_as_linear(x, gate_up, down)
        check_float(x=x, gate_up=gate_up)
        check_plan(plan)
        plan, segments = split_plan(RoutePlan(*plan), gate_up.shape[0])
        up_adapter = low_rank(factors[:3], self.gate_up_lora.input_dropout, segments)
        down_adapter = low_rank(factors[3:], self.down_lora.input_dropout, segments)
        up, down = Projection(gate_up, gate_up_bias, up_adapter), Projection(down, down_bias, down_adapter)
        return experts_by_step(x, up, self.base.options.activate, down, routing_weights, plan)

    @checked
    def merge(self, adapter: int = 0) -> None:
        """Add one adapter to the weights, in place, and keep a copy of the weights.

        What `LoRALinear.merge` says of its weight is so here too.  Raises ValueError as it does, for weights
        of 4 bits, for weights that are sharded other than by experts, and for several adapters of shared
        experts.
        """
        self.check_unmerged()
        if self.dispatcher is not None and self.num_adapters > 1:
            raise ValueError("ranks share the experts, of which only a single adapter can be merged")
        if isinstance(self.base, FourBitExperts):
            bits = self.base.gate_up.weight().bits
            raise ValueError(f"the weights have {bits} bits, which would round the adapters away")
        for name, p in self.named_parameters():
            placements = getattr(p, "placements", ())
            if any(getattr(placement, "dim", 0) != 0 for placement in placements):
                raise ValueError(f"{name} is sharded by {placements}: merge needs whole experts on each rank")
        number = number_of(adapter, self.num_adapters)
        for w, lora in zip(self.keep_original(), (self.gate_up_lora, self.down_lora), strict=True):
            for e in range(len(w)):  # one by one: all of them in float32 would take twice their memory
                w[e] = lora.merged(w[e], e * self.num_adapters + number)

    @checked
    def peft_state_dict(self, prefix: str = "", *, adapter: int = 0) -> dict[str, Tensor]:
        """Return one adapter in PEFT's format for `target_parameters` gate_up_proj and down_proj.

        base_layer.lora_A.weight and base_layer.lora_B.weight belong to gate_up, lora_A.weight and
        lora_B.weight to down.  With the adapter's rank r, A is (E * r, in), expert after expert; B is
        (out, r * E), rank after rank.
        Raises ValueError with DoRA, which PEFT does not support for these weights.
        """
        return factors_of_all_experts(self.by_peft_name(prefix), adapter)

    @checked
    def load_peft_state_dict(
        self, state: Mapping[str, Tensor], prefix: str = "", *, adapter: int = 0, alpha: float | None = None,
        rslora: bool | None = None,
    ) -> None:  # fmt: skip
        """Load one adapter in the format of `peft_state_dict`, of the layer's rank or a smaller one.

        alpha, rslora: lora_alpha and use_rslora of adapter_config.json [those of the layer].
        Raises KeyError for missing keys, ValueError for another shape, for a larger rank, with DoRA, or after
        `merge`; then nothing is copied.
        """
        self.check_loadable()
        load_stacked(self.by_peft_name(prefix), state, adapter, alpha, rslora)

    def by_peft_name(self, prefix: str) -> dict[str, LoRAFactors]:
        return {f"{prefix}base_layer.": self.gate_up_lora, prefix: self.down_lora}
