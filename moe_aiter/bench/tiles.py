"""What `moe-aiter tune` does with a product: each tile is checked, then timed, and one is taken."""

import dataclasses
import functools
from collections.abc import Callable

import torch
from torch import Tensor

from .. import tuning
from ..op import IMPLS, ORDER, runs
from ..tuning import Config
from ..tuning.choice import Case
from ..tuning.table import Key
from .layer import FLOOR, SLACK, distances
from .products import Outputs, as_tuple, worst
from .timing import time_graphs

FASTER = 0.97  # of the default's time
CLOSE = 2e-3  # relative distance from the default's result; rounding to bfloat16 alone is 1.7e-3 from exact


@dataclasses.dataclass
class Product:
    """One launch of a kernel that looks a tile up: an implementation, its outputs and its inputs."""

    name: str
    launch: Callable
    out: Tensor | tuple[Tensor, ...]
    inputs: tuple
    flops: float
    accept: Callable[[tuple[Tensor, ...]], bool] | None = None  # else what is near the default's result

    def run(self) -> None:
        self.launch(self.out, *self.inputs)

    def run_with(self, config: Config) -> None:
        with tuning.choose(lambda key: config):
            self.run()

    def outs(self) -> tuple[Tensor, ...]:
        return as_tuple(self.out)

    def key(self) -> Key:
        """What its launcher looks up, found by a run."""
        keys: list[Key] = []
        with tuning.choose(keys.append):
            self.run()
        return keys[0]


@dataclasses.dataclass
class Kernel:
    """A product of `bench gemm` by each backend that has it, into the same outputs."""

    name: str
    outs: Tensor | tuple[Tensor, ...]  # those of no elements do not count
    launches: dict[str, tuple[Callable, tuple]]  # backend -> what is called with outs and inputs, and these
    flops: float
    exact: Callable[[], Outputs]  # in float64
    plain: Callable[[], Outputs] | None = None  # what torch makes of it; else the truth, rounded
    case: Case | None = None  # what the table of choices asks for, where torch is among the backends
    tiled: bool = True

    def products(self) -> dict[str, Product]:
        """By backend, all but torch."""
        accept = functools.cache(self.judge)  # the truth is computed once, and only where a tile is checked
        return {
            backend: Product(self.name, launch, self.outs, inputs, self.flops, lambda outs: accept()(outs))
            for backend, (launch, inputs) in self.launches.items()
            if backend != "torch"
        }

    def judge(self) -> Callable[[tuple[Tensor, ...]], bool]:
        """Whether outputs are no further from the truth than SLACK times what plain torch's are."""
        exact = as_tuple(self.exact())
        bars = distances(as_tuple(self.plain()), exact) if self.plain else None

        def accept(outs: tuple[Tensor, ...]) -> bool:
            outs = tuple(out for out in outs if out.numel())
            far, bar = worst(tuple(o.view(e.shape) for o, e in zip(outs, exact, strict=True)), exact, bars)
            return far <= SLACK * bar + FLOOR

        return accept


def launches_of(op: str, *inputs) -> dict[str, tuple[Callable, tuple]]:
    """The backends of an op that take these inputs, torch among them."""
    there = [*(b for b in ORDER[inputs[0].device.type] if b in ("hopper", "triton")), "torch"]
    impls = {b: IMPLS[op][b] for b in there if b in IMPLS[op]}
    return {b: (impl, inputs) for b, impl in impls.items() if runs(impl, *inputs)}


def pick(default: Config, times: dict[Config, float]) -> Config:
    """The fastest, if it is clearly faster than the default."""
    best = min(times, key=times.__getitem__)
    return best if times[best] <= FASTER * times[default] else default


def check(product: Product, configs: list[Config]) -> tuple[list[Config], list[Config]]:
    """Those that compute what they should, and those that do not.  What does not fit is in neither."""
    good, bad, accept = [], [], product.accept
    for config in configs:
        poison(product.outs())
        if not fits(functools.partial(product.run_with, config)):
            if config is configs[0]:
                raise RuntimeError(f"{product.name}: there is no room for the default, {config}")
            continue
        accept = accept or like_the_default(product, config)
        (good if accept(product.outs()) else bad).append(config)
    return good, bad


def poison(outs: tuple[Tensor, ...]) -> None:
    for out in outs:
        out.fill_(float("nan"))


def fits(call: Callable[[], object]) -> bool:
    """Whether this GPU has room for the tile of a call."""
    from triton.runtime.errors import OutOfResources

    try:
        call()
    except OutOfResources:
        return False
    return True


def like_the_default(product: Product, config: Config) -> Callable[[tuple[Tensor, ...]], bool]:
    expected = [out.clone() for out in product.outs()]
    if any(out.isnan().any() for out in expected):
        raise RuntimeError(f"{product.name}: NaN in the result of the default, {config}")
    return lambda outs: all(is_close(got, want) for got, want in zip(outs, expected, strict=True))


def is_close(got: Tensor, want: Tensor) -> bool:
    """Within CLOSE in the Frobenius norm, in parts, since a copy in float32 might not fit."""
    parts = zip(got.flatten().split(2**26), want.flatten().split(2**26), strict=True)
    sums = [torch.stack([(a.float() - b.float()).square().sum(), b.float().square().sum()]) for a, b in parts]
    error, size = torch.stack(sums).double().sum(0).tolist()
    return error <= CLOSE**2 * size


def measure(product: Product, configs: list[Config], reps: int) -> dict[Config, float]:
    """Microseconds of each."""
    runs = [functools.partial(product.run_with, config) for config in configs]
    return dict(zip(configs, time_graphs(runs, reps), strict=True))
