"""What a case draws: sizes, dtypes, layouts, group sizes and numbers, all decided by its name and seed."""

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from moe_aiter.config import interpret

ON_GPU = torch.cuda.is_available() and not interpret
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
# the interpreter takes milliseconds for each program of a kernel
MOST, MOST_GROUPS = (8, 2) if interpret else (70, 9)
FLOATS = (torch.float32, torch.float16) if interpret else (torch.float32, torch.bfloat16, torch.float16)

# On a GPU Triton compiles a kernel again when an integer becomes 1 or a multiple of 16, or a dtype changes.
# So a case there has sizes of one class only, and cases of one class share their compilations.
# `scan.py` has all sizes.
CLASSES = {
    "even": (16, 32, 48, 64),
    "odd": (3, 17, 37, 47, 65, 69),
    "twos": (2, 34, 46, 70),
    "eights": (8, 24, 40, 56),
    "tiny": (0, 1),
}


class Draw:
    """The source of all that is random in one case.

    `form` draws shapes, dtypes and options, `gen` the numbers in tensors.
    """

    def __init__(self, name: str, seed: int):
        self.form = random.Random(f"{name}:{seed}")
        self.gen = torch.Generator().manual_seed(self.form.getrandbits(62))
        self.kind = self.form.choices(list(CLASSES), (5, 3, 1, 1, 1))[0]

    def flip(self, chance: float = 0.5) -> bool:
        return self.form.random() < chance

    def pick(self, *options):
        return self.form.choice(options)

    def option(self, usual, *others, chance: float = 0.4):
        """Mostly `usual`; on a GPU, where every option is one more kernel, more often."""
        return self.pick(*others) if self.flip(chance / 2 if ON_GPU else chance) else usual

    def size(self, low: int = 0, high: int = MOST) -> int:
        high = max(min(high, MOST), low)
        if ON_GPU:
            fitting = [n for n in CLASSES[self.kind] if low <= n <= high]
            return self.pick(*fitting) if fitting else max(low, 1)
        if low == 0 and self.flip(0.05):
            return 0
        low = max(low, 1)
        return self.form.randint(low, max(low, min(self.pick(2, 9, 9, 33, high), high)))

    def count(self, low: int = 1, high: int = MOST_GROUPS) -> int:
        """A number of groups, experts or slots."""
        if ON_GPU:
            return min(max(low, self.pick(2, 8)), high)
        return self.form.randint(low, max(low, min(high, MOST_GROUPS)))

    def dtype(self, *dtypes: torch.dtype) -> torch.dtype:
        dtypes = dtypes or FLOATS
        return self.form.choices(dtypes, (2, 4, 1)[: len(dtypes)])[0] if ON_GPU else self.pick(*dtypes)

    # tensors

    def numbers(self, *shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
        """Normal numbers in `dtype`, with any strides."""
        return self.lay((torch.randn(shape, generator=self.gen) * scale).to(dtype))

    def weights(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Numbers whose products with normal ones, summed over the axis before the last, are about 1."""
        return self.numbers(*shape, dtype=dtype, scale=max(shape[-2], 1) ** -0.5)

    def grid(self, *shape: int, dtype: torch.dtype, step: float, most: int) -> Tensor:
        """Multiples of `step`, which every dtype has exactly."""
        return self.lay(torch.randint(-most, most + 1, shape, generator=self.gen).to(dtype) * step)

    def lay(self, x: Tensor) -> Tensor:
        """`x` on the device, with strides that are drawn; a stride of 0 repeats its first row."""
        x = x.to(DEVICE)
        layout = self.option("plain", "transposed", "spread", "offset", "repeated", chance=0.5)
        if layout == "transposed" and x.dim() > 1:
            return x.mT.contiguous().mT
        if layout == "spread" and x.dim():
            wide = hole(x, [2 * n for n in x.shape])
            return wide[tuple(slice(None, None, 2) for _ in x.shape)].copy_(x)
        if layout == "offset":
            return hole(x, [x.numel() + 1])[1:].view(x.shape).copy_(x)
        if layout == "repeated" and x.dim() and len(x) and x.is_floating_point():
            return x[:1].expand_as(x)
        return x.contiguous()

    def dense(self, x: Tensor) -> Tensor:
        """`x` with any strides but 0: for what is written to."""
        laid = self.lay(x)
        return x.to(DEVICE).clone() if 0 in laid.stride() else laid

    def index(self, values, *shape: int) -> Tensor:
        """int32 or int64, of any strides."""
        dtype = self.pick(torch.int32, torch.int64)
        x = torch.as_tensor(values, dtype=dtype)
        return self.lay(x.reshape(shape) if shape else x.flatten())

    def name(self, count: int) -> int:
        """One of so many, or -1 for none of them."""
        return -1 if self.flip(0.15) else self.form.randrange(count)

    # groups and choices

    def group_sizes(self, groups: int) -> tuple[Tensor, list[int], int]:
        """The sizes on the device and as a list, and how many rows there are, some behind the groups."""
        how = self.pick("any", "any", "one", "none", "first")
        sizes = [self.size(high=20) if self.flip(0.8) else 0 for _ in range(groups)]
        if how == "one":
            sizes = [0] * groups
            sizes[self.form.randrange(groups)] = self.size()
        elif how == "none":
            sizes = [0] * groups
        elif how == "first":
            sizes[0] = 0
        rows = sum(sizes) + self.pick(0, 0, 0, 1, 5)
        if ON_GPU and self.kind == "even":
            rows = -(-rows // 16) * 16
        return self.index(sizes), sizes, rows

    def experts(self, tokens: int, slots: int, experts: int) -> Tensor:
        """(T, k): distinct experts, some dropped; or any, repeated ones too; or one for all."""
        how = self.pick("distinct", "distinct", "any", "one")
        if how == "distinct" and slots <= experts:
            ids = torch.rand(tokens, experts, generator=self.gen).argsort(1)[:, :slots]
        elif how == "one":
            ids = torch.full((tokens, slots), self.form.randrange(experts))
        else:
            ids = torch.randint(experts, (tokens, slots), generator=self.gen)
        if self.flip(0.4):
            dropped = torch.rand(tokens, slots, generator=self.gen) < self.pick(0.1, 0.6, 1.0)
            ids = ids.masked_fill(dropped, -1)
        return self.index(ids, tokens, slots)

    def mask(self, tokens: int) -> Tensor:
        """(T,) bool, False for some tokens, for none or for all."""
        return self.lay(torch.rand(tokens, generator=self.gen) < self.pick(0.3, 0.8, 0.0, 1.0))


def hole(x: Tensor, shape: Sequence[int]) -> Tensor:
    """Memory that nothing may read: NaN, or a number that is far away."""
    if x.dtype == torch.bool:
        return x.new_ones(list(shape))
    return x.new_full(list(shape), float("nan") if x.is_floating_point() else 113)


def again(x: Tensor) -> Tensor:
    """A copy with the same strides, and the same memory between them."""
    return x.new_empty(0).set_(x.untyped_storage().clone(), x.storage_offset(), x.shape, x.stride())


def written_beside(x: Tensor, before: Tensor) -> bool:
    """Whether memory of `x` that is not in its view changed since the copy `before` was made by `again`."""
    flat = []
    for t in (x, before):
        whole = t.new_empty(0).set_(t.untyped_storage())
        flat.append(again(whole))
        flat[-1].as_strided(t.shape, t.stride(), t.storage_offset()).zero_()
    return not torch.equal(*(t.view(torch.uint8) for t in flat))
