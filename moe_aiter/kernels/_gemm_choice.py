"""When the kernels of the dense product are wanted: where the table of the GPU says that torch is slower."""

from collections.abc import Callable

from ..tuning.choice import choose_backend


def wants(backend: str) -> Callable[..., bool]:
    """Whether `backend`, which could compute it, should."""

    def check(x, w, bias, c, activation, alpha, beta, dtype, save_z) -> bool:
        if dtype not in (None, x.dtype):  # torch would convert the operands first
            return backend == "triton"
        return choose_backend(*question(x, w, bias, c, activation)) == backend

    return check


def question(x, w, bias, c, activation: str) -> tuple:
    """What `choose_backend` is asked."""
    (B, M, K), N = x.shape, w.shape[2]
    layout = "".join("n" if t.stride(2) == 1 else "t" for t in (x, w))
    epilogue = activation or ("bias" if bias is not None else "none" if c is None else "c")
    return "gemm" if B == 1 else "bmm", x, layout, epilogue, B * M, N, K
