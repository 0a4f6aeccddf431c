"""How much of the rows of Y, forward, and of dX, backward, is in memory at a time.

R = T * k rows of H columns are the largest tensor of many a step, and live only from a product to the sum of
each token's rows.  In chunks of columns they take less, but each chunk reads the product's rows of I or 2I
columns again, and is some launches more.  So: as few chunks as keep these rows from setting the peak.  What a
step needs besides, above its inputs, where it needs most:

    forward   O + Z + A                   + rows of Y
    backward  O + dZ + dWdown + s * A                       dZ in the memory of Z
              O + dZ + dWdown + dX        + rows of dX
              O + dZ + dWdown + dX + dWgate_up

The rows may lift the highest of these by an eighth.  With T 24576, H 1536, I 256, E 128, k 8 it is the last,
624 MiB; Y or dX in one piece are 576, and would lift it to 1008; in 2 and 3 chunks to 648.
"""

from torch import Tensor

from ._expert_inputs import ExpertInputs, needs_grad
from .gmm_unpermute import BLOCK

SLACK = 8  # the rows may lift the peak by a part in so many
MOST = 4  # chunks: more cost more time than their memory is worth


def row_bytes(i: ExpertInputs, row_chunks: int | None) -> tuple[int, int]:
    """The most bytes for the rows of Y and for those of dX, for as many chunks as asked, or by the rule.

    Without gradients, the rows may take as much as if there were all of them: what a layer's training
    fits in is enough.  Sizes that a compiler does not know are compared by `max` alone, which it can record.
    """
    (T, H), (_, width, _), R, size = i.x.shape, i.gate_up.shape, i.order.shape[0], i.x.element_size()

    def in_chunks(n: int) -> int:
        return -(-H // (n * BLOCK)) * BLOCK * R * size

    if row_chunks is not None:
        return in_chunks(row_chunks), in_chunks(row_chunks)
    trained = needs_grad(i)

    def wanted(t: Tensor) -> bool:
        return t.requires_grad or not trained

    def gradient(t: Tensor, main_grad: Tensor | None = None) -> int:
        return t.numel() * size if wanted(t) and main_grad is None else 0

    out, z, a = T * H * size, R * width * size, R * i.down.shape[2] * size
    forward = out + a + (z if i.save_z else 0)
    early = out + z + gradient(i.down, i.down_main_grad)
    late = early + gradient(i.x)
    rest = max(forward, early + (a if wanted(i.down) else 0))
    rest = max(rest, late + gradient(i.gate_up, i.gate_up_main_grad))
    limit = rest + rest // SLACK
    return max(limit - forward, in_chunks(MOST)), max(limit - late, in_chunks(MOST))
