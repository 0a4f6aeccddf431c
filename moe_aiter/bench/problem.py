"""The shapes that are measured, the inputs of the contenders, and the expected results."""

import dataclasses
import re
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels.base.activations import get_activation
from ..routing.router import route


@dataclasses.dataclass(frozen=True)
class Shape:
    """T tokens, each of which goes to `top_k` of E experts of width I."""

    num_tokens: int
    hidden: int
    intermediate: int
    num_experts: int
    top_k: int
    bias: bool = False
    activation: str = "swiglu"
    interleaved: bool = False  # gate and up rows in turn
    transposed: bool = False  # weights lie in memory as (E, H, 2I) and (E, I, H)
    checked: int | None = None  # numbers in the weights whose gradients are compared, if not CHECKED

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.num_tokens, self.hidden, self.intermediate, self.num_experts, self.top_k

    def __str__(self) -> str:
        return ", ".join(map(str, self.sizes))

    @property
    def plain(self) -> bool:
        """Whether it is SwiGLU without biases, gate rows first, weights by rows: what all peers compute."""
        return self.activation == "swiglu" and not (self.bias or self.interleaved or self.transposed)

    @property
    def width(self) -> int:
        """Rows of each expert's first weight: 2I, or I without a gate."""
        return get_activation(self.activation).projections * self.intermediate

    @property
    def forward_flops(self) -> int:
        """Two for each multiplication of the projections; a step has three times as many."""
        return 2 * self.num_tokens * self.top_k * self.hidden * (self.width + self.intermediate)


# the layers of the SonicMoE paper, arXiv 2512.14080, that are not A or B
PAPER = {
    "1.4B-256": Shape(40960, 768, 256, 128, 8),
    "1.4B-512": Shape(40960, 768, 512, 64, 4),
    "1.4B-1024": Shape(40960, 768, 1024, 32, 2),
    "7B-512": Shape(24576, 1536, 512, 64, 4),
    "7B-1024": Shape(24576, 1536, 1024, 32, 2),
    "30B-256": Shape(32768, 4096, 256, 256, 16),
    "30B-512": Shape(32768, 4096, 512, 128, 8),
    "30B-1024": Shape(32768, 4096, 1024, 64, 4),
    "120B-512": Shape(32768, 4096, 512, 256, 16),
    "120B-2048": Shape(32768, 4096, 2048, 64, 4),
}
MODELS = {
    "gpt-oss": Shape(8192, 2880, 2880, 32, 4, bias=True, activation="swiglu_oai", interleaved=True),
    "gpt-oss-plain": Shape(8192, 2880, 2880, 32, 4),  # what biases and its activation cost
    "dsv3": Shape(16384, 7168, 2048, 256, 8),  # DeepSeek-V3
}
TOKENS = {f"C-{2**i}": Shape(2**i, 2048, 768, 128, 8) for i in range(9, 17)}
SHAPES = {
    "A": Shape(32768, 4096, 1024, 128, 8),
    "B": Shape(24576, 1536, 256, 128, 8),
    "C": Shape(32768, 2048, 768, 128, 8),  # Qwen3-30B-A3B
    "D": Shape(16384, 4096, 14336, 8, 2),  # Mixtral 8x7B
    "E": Shape(4096, 2048, 1024, 64, 8),  # OLMoE, a small batch
    "cpu": Shape(4096, 512, 256, 64, 8),
    "toy": Shape(64, 32, 24, 5, 2),  # for tests
    "toy-oai": Shape(64, 32, 24, 5, 2, bias=True, activation="swiglu_oai", interleaved=True),
    **PAPER,
    **MODELS,
    **TOKENS,
}
DEFAULT = {"cuda": ["A", "B", "C", "D", "E"], "cpu": ["cpu"]}
GROUPS = {  # names that --shape takes for several
    "paper": list(PAPER),
    "models": list(MODELS),
    "tokens": list(TOKENS),  # for the plot of TFLOP/s against T
    "top-k": ["30B-1024", "30B-512", "30B-256"],  # for the plot of memory against k: as many FLOPs
}


def named(words: list[str], plain: bool = False) -> dict[str, Shape]:
    """Name -> shape, with the shapes of a group in its place.  A word may also be the sizes of a shape.

    Raises ValueError for a word that is neither and, if only `plain` shapes are allowed, for another shape.
    """
    names = dict.fromkeys(name for word in words for name in GROUPS.get(word, [word]))
    shapes = {name: SHAPES.get(name) or of_sizes(name, plain) for name in names}
    for name, shape in shapes.items():
        if plain and not shape.plain:
            raise ValueError(f"shape {name} has biases or another activation: take SwiGLU without biases")
    return shapes


def listed(plain: bool = False) -> str:
    """The words that `named` takes, in a line."""
    shapes = [name for name, shape in SHAPES.items() if shape.plain or not plain]
    groups = [name for name, group in GROUPS.items() if set(group) <= set(shapes)]
    return f"shapes: {', '.join(shapes)}; groups: {', '.join(groups)}"


def of_sizes(word: str, plain: bool) -> Shape:
    """ "4096,2048,768,64,8": T, H, I, E and k."""
    how = "T,H,I,E,k, as in 4096,2048,768,64,8"
    if not re.fullmatch(r"\d{1,9}(,\d{1,9})*", word):
        raise ValueError(f"there is no shape {word!r}; {listed(plain)}; or sizes of your own: {how}")
    sizes = list(map(int, word.split(",")))
    if len(sizes) != 5:
        raise ValueError(f"there is no shape {word!r}: it has {len(sizes)} of 5 sizes; give {how}")
    if 0 in sizes:
        raise ValueError(f"there is no shape {word!r}: a size is 0; give {how}")
    if sizes[4] > sizes[3]:
        raise ValueError(f"{word}: a token cannot go to {sizes[4]} of {sizes[3]} experts")
    return Shape(*sizes)


CHECKED = 2**31  # numbers in the weights of the experts whose gradients are compared, at most


@dataclasses.dataclass
class Problem:
    """Inputs and weights that all contenders share.  `renew` draws new inputs in place."""

    shape: Shape
    x: Tensor  # (T, H)
    dout: Tensor  # (T, H)
    router: Tensor  # (E, H)
    gate_up: Tensor  # (E, width, H)
    down: Tensor  # (E, H, I)
    biases: tuple[Tensor, ...]  # (E, width) and (E, H), or none
    expert_ids: Tensor  # (T, k) int64
    routing_weights: Tensor  # (T, k) float32
    routing: str = "normal"
    skew: float = 1.0  # the exponent of "zipf"

    @torch.no_grad()
    def renew(self, seed: int) -> None:
        """New tokens, gradients and routing, ragged either way.

        normal   the logits are normal
        zipf     each token draws its experts without replacement, the n-th most popular with a chance
                 in proportion to 1 / n ** skew
        """
        torch.manual_seed(seed)
        self.x.normal_()
        self.dout.normal_()
        if self.routing == "zipf":
            logits = zipf_logits(self.shape, self.x.device, self.skew)
            self.x.copy_(steered(self.x, self.router, logits))
        routing = route(self.x.float() @ self.router.float().T, self.shape.top_k)
        self.expert_ids.copy_(routing.expert_ids)
        self.routing_weights.copy_(routing.routing_weights)


def zipf_logits(shape: Shape, device: torch.device, skew: float = 1.0) -> Tensor:
    """(T, E) logits whose k largest are k draws without replacement: log of the chances plus Gumbel noise."""
    T, _, _, E, _ = shape.sizes
    place = torch.randperm(E, generator=torch.Generator().manual_seed(0)).to(device)  # the same all the time
    return -skew * torch.log1p(place) - torch.empty(T, E, device=device).exponential_().log()


def steered(x: Tensor, router: Tensor, logits: Tensor) -> Tensor:
    """`x`, moved as little as possible so that the router gives these logits; it needs H >= E."""
    router = router.float()
    missing = logits - x.float() @ router.T
    return x + torch.linalg.solve(router @ router.T, missing, left=False) @ router


def new_problem(
    shape: Shape, dtype: torch.dtype, device: torch.device, routing: str = "normal", skew: float = 1.0
) -> Problem:
    """A problem with inputs of variance 1, and weights that keep it near 1."""
    torch.manual_seed(0)
    T, H, inner, E, k = shape.sizes

    def normal(*size: int, fan_in: int = 1) -> Tensor:
        return torch.randn(size, device=device, dtype=dtype).mul_(fan_in**-0.5)

    def leaf(*size: int, fan_in: int = 1) -> Tensor:
        return normal(*size, fan_in=fan_in).requires_grad_()

    def weight(rows: int, columns: int) -> Tensor:
        size = (E, columns, rows) if shape.transposed else (E, rows, columns)
        made = normal(*size, fan_in=columns)
        return (made.mT if shape.transposed else made).requires_grad_()

    problem = Problem(
        shape,
        x=leaf(T, H),
        dout=normal(T, H),
        router=leaf(E, H, fan_in=H),
        gate_up=weight(shape.width, H),
        down=weight(H, inner),
        biases=(leaf(E, shape.width), leaf(E, H)) if shape.bias else (),
        expert_ids=torch.zeros(T, k, dtype=torch.int64, device=device),
        routing_weights=torch.zeros(T, k, device=device).requires_grad_(),
        routing=routing,
        skew=skew,
    )
    problem.renew(0)
    return problem


def activation(z: Tensor, shape: Shape) -> Tensor:
    """(..., width) -> (..., I), in plain torch; swiglu_oai is gpt-oss's (OpenAI 2025, arXiv 2508.10925)."""
    if shape.activation not in ("swiglu", "swiglu_oai"):
        return get_activation(shape.activation)(z, shape.interleaved)
    gate, up = (z[..., ::2], z[..., 1::2]) if shape.interleaved else z.chunk(2, -1)
    if shape.activation == "swiglu":
        return F.silu(gate) * up
    gate, up = gate.clamp(max=7), up.clamp(-7, 7)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1)


def expert(x: Tensor, weights: tuple[Tensor, ...], shape: Shape) -> Tensor:
    """(n, H) -> (n, H): one expert with `weights` gate_up, down and its biases, in plain torch."""
    gate_up, down, up_bias, down_bias = (*weights, None, None)[:4]
    return F.linear(activation(F.linear(x, gate_up, up_bias), shape), down, down_bias)


def for_loop(p: Problem) -> Tensor:
    """The experts one by one in plain torch: the definition."""
    out = torch.zeros_like(p.x)
    for e, weights in enumerate(zip(p.gate_up.unbind(), p.down.unbind(), *p.biases, strict=True)):
        token, j = torch.where(p.expert_ids == e)
        y = expert(p.x[token], weights, p.shape)
        out.index_add_(0, token, (y * p.routing_weights[token, j, None]).to(p.x.dtype))
    return out


def checked_experts(shape: Shape) -> list[int]:
    """All experts, or as many, evenly spread, as a GPU can hold the gradients of in float64."""
    numbers = shape.hidden * (shape.width + shape.intermediate)
    count = min(shape.num_experts, max(2, (shape.checked or CHECKED) // numbers))
    return torch.linspace(0, shape.num_experts - 1, count).round().long().unique().tolist()


def truth(p: Problem, expert_ids: Tensor, routed: bool, dtype: torch.dtype) -> list[Tensor]:
    """Return the results of `for_loop` in `dtype`, after the router if `routed`: the truth of all errors.

    Output and gradients of x, gate_up, down, the router or the routing weights, and biases; those of experts'
    weights for `checked_experts` only.  Each expert's backward follows its forward, to hold little.
    """
    wide = torch.promote_types(dtype, torch.float32)
    x, router = p.x.detach().to(dtype).requires_grad_(), None
    if routed:
        router = p.router.detach().to(dtype).requires_grad_()
        routing_weights = chosen_weights(x, router, expert_ids, wide)
    else:
        routing_weights = p.routing_weights.detach().to(wide)
    tensors, kept = (p.gate_up, p.down, *p.biases), checked_experts(p.shape)
    out, dx, ds, *stacks = by_experts(p, expert_ids, x, routing_weights, tensors, kept)
    if routed:
        more, ds = torch.autograd.grad(routing_weights, (x, router), ds)
        dx += more
    return [out, dx, *stacks[:2], ds, *stacks[2:]]


def by_experts(
    p: Problem,
    expert_ids: Tensor,
    x: Tensor,
    s: Tensor,
    tensors: tuple[Tensor, ...],
    kept: Sequence[int],
    weights_of: Callable[[int, list[Tensor]], Sequence[Tensor]] = lambda e, own: own,
) -> list[Tensor]:
    """The output in the dtype of `x`, and the gradients of `x`, of the routing weights `s` and of `tensors`.

    `tensors` have a part for each expert, from which `weights_of` makes its weights; their gradients are
    those of the experts in `kept`.
    """
    x, s, dout = x.detach(), s.detach(), p.dout.to(x.dtype)
    out, dx, ds = torch.zeros_like(dout), torch.zeros_like(dout), torch.zeros_like(s)
    index = {e: i for i, e in enumerate(kept)}
    stacks = [t.new_empty(len(kept), *t.shape[1:], dtype=x.dtype) for t in tensors]
    for e in range(p.shape.num_experts):
        token, j = torch.where(expert_ids == e)
        leaves = [x[token], s[token, j], *(t[e].detach().to(x.dtype) for t in tensors)]
        leaves = [t.requires_grad_() for t in leaves]
        y = (expert(leaves[0], weights_of(e, leaves[2:]), p.shape) * leaves[1][:, None]).to(x.dtype)
        drows, ds[token, j], *grads = torch.autograd.grad(y, leaves, dout[token])
        out.index_add_(0, token, y.detach())
        dx.index_add_(0, token, drows)
        for stack, grad in zip(stacks, grads, strict=True):
            if e in index:
                stack[index[e]] = grad
    return [out, dx, ds, *stacks]


def chosen_weights(x: Tensor, router: Tensor, expert_ids: Tensor, wide: torch.dtype) -> Tensor:
    """(T, k) weights from the router, for a choice of experts already made.  One weight stays as it is, as in
    `route`: renormalised it would be 1."""
    scores = (x.to(wide) @ router.to(wide).T).softmax(-1)  # (T, E)
    weights = scores.gather(1, expert_ids)
    return weights if weights.shape[1] == 1 else weights / weights.sum(1, keepdim=True)
