"""Whether tensors share memory, which no metadata of one of them says."""

import torch
from torch import Tensor


def check_apart(names: list[str], inputs: tuple, written: list[int]) -> None:
    """Raise ValueError if what an op writes shares memory with another of its inputs."""
    for i in written:
        for j, other in enumerate(inputs):
            if j != i and isinstance(other, Tensor) and inputs[i] is not None and overlap(inputs[i], other):
                raise ValueError(f"{names[i]} shares memory with {names[j]}")


def overlap(x: Tensor, y: Tensor) -> bool:
    """Whether some byte belongs to both, by storage, offsets and strides; in doubt, True."""
    if not torch._C._is_alias_of(x, y) or not x.numel() or not y.numel():
        return False
    x_start, y_start = (t.storage_offset() * t.itemsize for t in (x, y))
    steps = steps_of(x), steps_of(y)
    x_bytes, y_bytes = width(x, steps[0], 0), width(y, steps[1], 0)
    if x_start + x_bytes <= y_start or y_start + y_bytes <= x_start:
        return False
    for period, _ in steps[0] + steps[1]:  # of columns of one buffer, the distance of its rows
        x_width, y_width = width(x, steps[0], period), width(y, steps[1], period)
        if (y_start - x_start) % period >= x_width and (x_start - y_start) % period >= y_width:
            return False
    return True


def steps_of(x: Tensor) -> list[tuple[int, int]]:
    """For each axis, by how many bytes its elements are apart, and how often."""
    sizes = zip(x.stride(), x.shape, strict=True)
    return [(stride * x.itemsize, size - 1) for stride, size in sizes if stride and size > 1]


def width(x: Tensor, steps: list[tuple[int, int]], period: int) -> int:
    """The bytes from the first of `x` to its last, where those a multiple of `period` apart are one."""
    return x.itemsize + sum(step * count for step, count in steps if not period or step % period)
