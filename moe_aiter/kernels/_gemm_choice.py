"""When the kernels of the dense product are wanted: where the table of the GPU says that torch is slower, and
on Hopper, whatever the GPU, for few rows of a weight that takes long to read."""

from collections.abc import Callable

from ..tuning.choice import choose_backend

FEW = 16  # rows, which `hopper/few_rows.py` is for
LONG = 2**23  # numbers of all weights, 16 MiB: what was measured is twice as much and more


def wants(backend: str) -> Callable[..., bool]:
    """Whether `backend`, which could compute it, should."""

    def check(x, w, bias, c, activation, alpha, beta, dtype, save_z) -> bool:
        if dtype not in (None, x.dtype):  # torch would convert the operands first
            return backend == "triton"
        return choose_backend(*question(x, w, bias, c, activation), otherwise=unmeasured(x, w)) == backend

    return check


def unmeasured(x, w) -> str:
    """Whom `choose_backend` names where the table has no row."""
    return "hopper" if x.shape[1] <= FEW and w.stride(2) != 1 and w.numel() >= LONG else "torch"


def question(x, w, bias, c, activation: str) -> tuple:
    """What `choose_backend` is asked."""
    (B, M, K), N = x.shape, w.shape[2]
    layout = "".join("n" if t.stride(2) == 1 else "t" for t in (x, w))
    epilogue = activation or ("bias" if bias is not None else "none" if c is None else "c")
    return "gemm" if B == 1 else "bmm", x, layout, epilogue, B * M, N, K
