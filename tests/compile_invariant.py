"""Cases for test_compile.py: dense products with batch invariance."""

import functools

from aot import Case
from compile_products import F32, Dense

from moe_aiter.invariance import invariant


def run_invariant(dense):
    with invariant():
        dense.run()


def cases():
    """One row has the kernel of many; its small matrix instructions add up as the large ones do."""
    for m, n in ((1, 128), (1, 1536), (4096, 4096)):
        for out in (None, F32):
            run = functools.partial(run_invariant, Dense(m=m, n=n, k=2048, out=out))
            yield (
                f"dense invariant {m}, {n}, {out}",
                Case(run, matrix="any" if m == 1 else "own", kernels=["gemm_kernel"]),
            )
    for n, k in ((77, 333), (77, 2056), (8200, 333)):  # of which no 16 bytes can be loaded at once
        run = functools.partial(run_invariant, Dense(m=7, n=n, k=k))
        yield f"dense invariant, narrow {n}, {k}", Case(run, matrix="any", kernels=["gemm_kernel"])


CASES = dict(cases())
