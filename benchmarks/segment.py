"""`python -m benchmarks segment`: segment GEMM beside its peers, for LoRA, decoding and dense segments.

The host's time stands beside, and a copy that reads and writes as many bytes as the product must.
"""

import argparse
import dataclasses
import functools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from moe_aiter.bench.command import Asked, Command, Contest
from moe_aiter.bench.measure import WHERE, add_list
from moe_aiter.kernels.grouped.segment_gmm import SegmentInputs, segment_gmm_reference
from moe_aiter.layers.segment import SegmentGEMMWrapper

from .products import OURS, KernelTimer, Product, by_truth, copy_of


@dataclasses.dataclass(frozen=True)
class Segments:
    """`segments` of `length` rows on average, half of it at least, through `weights` in turn."""

    segments: int
    length: int
    d_in: int
    d_out: int
    weights: int

    @property
    def lens(self) -> list[int]:
        """Ragged, but as many rows in all whatever the seed."""
        half = self.length // 2
        more = torch.randint(0, half + 1, (self.segments // 2,), generator=torch.Generator().manual_seed(0))
        pairs = torch.stack([self.length - more, self.length + more], 1).flatten().tolist()
        return pairs + [self.length] * (self.segments % 2)


SEGMENTS = {
    "lora-shrink": Segments(64, 64, 4096, 16, 64),
    "lora-expand": Segments(64, 64, 16, 4096, 64),
    "decode-shrink": Segments(256, 1, 4096, 64, 256),
    "decode-expand": Segments(256, 1, 64, 4096, 256),
    "dense": Segments(8, 1000, 4096, 4096, 8),
    "dense-shared": Segments(8, 1000, 4096, 4096, 2),
    "dense-many": Segments(128, 256, 2048, 2048, 128),
    "toy": Segments(5, 3, 24, 8, 5),  # for tests
    "toy-shared": Segments(5, 3, 70, 8, 2),
}
REAL = [name for name in SEGMENTS if not name.startswith("toy")]
DEFAULT = {"cuda": REAL, "cpu": [name for name in REAL if not name.startswith("dense")]}


def options(parser: argparse.ArgumentParser) -> None:
    names = "cases, as --list prints them [all but toys on a GPU, lora and decode on a CPU]"
    parser.add_argument("--case", nargs="+", choices=SEGMENTS, metavar="NAME", help=names)
    add_list(parser, lambda: ", ".join(SEGMENTS), of="cases")
    text, dtypes = "dtype of inputs and weights [float16]", ("bfloat16", "float16", "float32")
    parser.add_argument("--dtype", choices=dtypes, default="float16", help=text)


def asked(args: argparse.Namespace, kind: str) -> Iterator[Asked]:
    for name in args.case or DEFAULT[kind]:
        s = SEGMENTS[name]
        cells = {"case": name, "segments": s.segments, "rows": sum(s.lens), "d_in": s.d_in, "d_out": s.d_out}
        yield Asked(f"{name}: {s}", cells | {"weights": s.weights}, functools.partial(contest, s))


COMMAND = Command(
    [
        *WHERE,
        *("case", "segments", "rows", "d_in", "d_out", "weights"),
        *("contender", "launch", "us", "host_us", "tflops", "gb_per_s", "copy_percent", "error"),
    ],
    (
        *("{contender:<18}", "{us:9.1f} us,", "host {host_us:7.1f} us,", "{tflops:7.2f} TFLOP/s,"),
        *("{gb_per_s:5.0f} GB/s,", "{copy_percent:3.0f} % of a copy,", "{launch}"),
    ),
    options,
    asked,
)


def contest(s: Segments, device: torch.device, dtype: torch.dtype) -> Contest:
    p = new_problem(s, device, dtype)

    def compare(rows: list[dict]) -> None:
        for row in rows:
            row["copy_percent"] = 100 * rows[-1]["us"] / row["us"]

    judge = by_truth(functools.partial(p.reference, torch.float64), functools.partial(p.reference, dtype))
    return Contest(list(contenders(p)), judge, KernelTimer(device, host=True), compare)


@dataclasses.dataclass
class Problem:
    """The tensors of a product: weights (W, d_out, d_in), and the segments on the device and on the host."""

    segments: Segments
    x: Tensor
    weights: Tensor
    indptr: Tensor
    numbers: Tensor | None  # the weight of each segment, where weights are shared

    @property
    def bytes(self) -> int:
        """The bytes to read and to write; each weight is read once."""
        numbers = self.x.numel() + self.weights.numel() + len(self.x) * self.segments.d_out
        return numbers * self.x.element_size()

    @property
    def flops(self) -> int:
        return 2 * len(self.x) * self.segments.d_in * self.segments.d_out

    def reference(self, dtype: torch.dtype) -> Tensor:
        weights = self.weights.to(dtype).mT
        i = SegmentInputs(self.x.to(dtype), weights, None, self.indptr, self.numbers)
        return segment_gmm_reference(i)


def new_problem(s: Segments, device: torch.device, dtype: torch.dtype) -> Problem:
    x = torch.randn(sum(s.lens), s.d_in, device=device, dtype=dtype)
    weights = torch.randn(s.weights, s.d_out, s.d_in, device=device, dtype=dtype)
    indptr = torch.tensor([0, *s.lens], device=device).cumsum(0)
    shared = s.weights != s.segments
    numbers = torch.arange(s.segments, device=device) % s.weights if shared else None
    return Problem(s, x, weights.mul_(s.d_in**-0.5), indptr, numbers)


def contenders(p: Problem) -> Iterator[Product]:
    """Ours, peers, and last the copy."""
    workspace = torch.empty(2**20, dtype=torch.int8, device=p.x.device)
    call = (p.x, p.weights, p.segments.segments, True, None, p.indptr, p.numbers)
    lens, w = p.segments.lens, p.weights.mT
    order = range(len(lens)) if p.numbers is None else p.numbers.tolist()
    found = {
        OURS: functools.partial(SegmentGEMMWrapper(workspace).run, *call),
        "torch loop": lambda: torch.cat([r @ w[i] for i, r in zip(order, p.x.split(lens), strict=True)]),
    }
    if p.numbers is None:
        ends = p.indptr[1:].int()
        found["torch._grouped_mm"] = lambda: torch._grouped_mm(p.x, w, offs=ends)
    if p.x.is_cuda:
        found["flashinfer"] = flashinfer(call, p.x)
    for name, call in found.items():
        yield Product(name, call, ours=name == OURS, flops=p.flops, bytes=p.bytes)
    yield copy_of(p.bytes, p.x.device)


def flashinfer(call: tuple, x: Tensor) -> Callable[[], Tensor]:
    """Imported at the first call, with its output given, as in its own benchmark."""

    @functools.cache
    def made() -> tuple:
        from flashinfer import SegmentGEMMWrapper as Theirs

        workspace = torch.empty(32 * 2**20, dtype=torch.int8, device=x.device)
        return Theirs(workspace, backend="auto"), x.new_empty(len(x), call[1].shape[1])

    def run() -> Tensor:
        wrapper, out = made()
        *head, lens, indptr, numbers = call
        named = {"seg_lens": lens, "seg_indptr": indptr, "weight_indices": numbers}
        return wrapper.run(*head, out=out, **named)

    return run
