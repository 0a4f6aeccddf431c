"""grouped_gemm: `ops.gmm`; and absl's parameterized tests, if absl is not installed."""

import functools
import importlib.util
import unittest

import torch
from names import module

from moe_aiter import gmm

LARGE_TESTS = ("ZeroSize",)


def grouped(a, b, batch_sizes, trans_b=False):
    return gmm(a, b.mT if trans_b else b, batch_sizes.to(a.device), trans_rhs=False)


def parameters(*cases):
    """A decorator of a class: each test for each case, whose values are its arguments."""

    def decorate(kind):
        for name in [n for n in vars(kind) if n.startswith("test")]:
            test = vars(kind)[name]
            delattr(kind, name)
            for i, case in enumerate(cases):
                values = case if isinstance(case, tuple) else (case,)
                setattr(kind, f"{name}{i}", functools.partialmethod(test, *values))
        return kind

    return decorate


def install(checkout):
    backend = module("grouped_gemm.backend", gmm=backend_gmm)
    module("grouped_gemm.ops", gmm=grouped, backend=backend)
    if importlib.util.find_spec("absl") is None:
        module("absl.testing.parameterized", TestCase=unittest.TestCase, parameters=parameters)


def backend_gmm(a, b, batch_sizes, trans_a=False, trans_b=False, c=None):
    """The product and its transpose without gradients."""
    from moe_aiter import tgmm

    with torch.no_grad():
        sizes = batch_sizes.to(a.device)
        out = tgmm(a, b, sizes) if trans_a else grouped(a, b, sizes, trans_b)
        return out if c is None else c.copy_(out)
