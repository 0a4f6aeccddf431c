"""The least time that a GPU could take: each kernel bound by its products or its bytes, one after another."""

import dataclasses

from .shapes import Shape


@dataclasses.dataclass(frozen=True)
class Ceiling:
    """What a device reaches where nothing else holds it up, as measured on one."""

    flops: float  # each second, in a large dense product of bfloat16
    bytes: float  # each second, read and written by a copy


CEILINGS = {"NVIDIA H200": Ceiling(790e12, 4.3e12)}


def floors(shape: Shape, device: str) -> dict[str, float]:
    """Milliseconds of forward and of step on a device that we know; empty for others.

    16-bit numbers, every operand once, for the kernels of a layer that gathers as it multiplies and keeps X
    and Z only.  Router and plan are not counted.
    """
    ceiling = CEILINGS.get(device)
    if ceiling is None:
        return {}
    T, H, width, E, k = shape.sizes
    x, z, a, w = T * k * H, 2 * T * k * width, T * k * width, E * H * width  # numbers of each
    product, gather_sum = 2 * T * k * H * width, (T * k * H, x + T * H)
    forward = [
        (2 * product, x + 2 * w + z + a),  # up
        (product, a + w + x),  # down
        gather_sum,
    ]
    backward = [
        (product, x + w + 2 * z + a),  # dz, weighted activations and the gradient of routing weights
        (product, x + a + w),  # ddown
        (2 * product, z + 2 * w + x),  # rows of dx
        (2 * product, x + z + 2 * w),  # dgate_up
        gather_sum,
    ]

    def ms(kernels: list[tuple[int, int]]) -> float:
        return 1e3 * sum(max(f / ceiling.flops, 2 * n / ceiling.bytes) for f, n in kernels)

    return {"forward": ms(forward), "step": ms(forward + backward)}
