"""When the kernels of the dense product are wanted: where the table of the GPU says that torch is slower, and
on Hopper, whatever the GPU, for few rows of a weight that takes long to read."""

from collections.abc import Callable, Sequence

from ..tuning.choice import choose_backend

FEW = 16  # rows, which `hopper/few_rows.py` is for
LONG = 2**22  # numbers of all weights, 8 MiB: what was measured is as much and more
DEEP = 512  # of them in a row, or some warps of a program would have nothing to read


def wants(backend: str) -> Callable[..., bool]:
    """Whether `backend`, which could compute it, should."""

    def check(x, w, bias, c, activation, alpha, beta, dtype, save_z) -> bool:
        if dtype not in (None, x.dtype):  # torch would convert the operands first
            return backend == "triton"
        otherwise = "torch" if w.stride(2) == 1 else unmeasured(x.shape[1:], w.numel(), w.itemsize)
        return choose_backend(*question(x, w, bias, c, activation), otherwise) == backend

    return check


def unmeasured(size: Sequence[int], numbers: int, itemsize: int) -> str:
    """Whom `choose_backend` names for matrices (M, K), and a weight that lies by rows, where the table says
    nothing of them."""
    M, K = size
    return "hopper" if M <= FEW and K >= DEEP and numbers >= LONG and itemsize == 2 else "torch"


def question(x, w, bias, c, activation: str) -> tuple:
    """What `choose_backend` is asked."""
    (B, M, K), N = x.shape, w.shape[2]
    layout = "".join("n" if t.stride(2) == 1 else "t" for t in (x, w))
    epilogue = activation or ("bias" if bias is not None else "none" if c is None else "c")
    return "gemm" if B == 1 else "bmm", x, layout, epilogue, B * M, N, K
