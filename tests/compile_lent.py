"""Cases for test_compile.py: products of own experts' weights and of guests', see kernels/base/lent.py."""

import functools
from unittest import mock

import compile_hopper as hopper
import compile_products as products
import torch
from aot import in_passes, ints

GUESTS = 4
WEIGHTS = {"UpInputs": "gate_up", "DownGradInputs": "down", "GroupedIntoInputs": "rhs"}


def with_guests(module, run, *given, **named):
    """Return what runs a case whose last experts are guests."""

    def lent(kind, weight, *fields):
        i = kind(*fields)
        own, guests = getattr(i, weight).split([len(i.group_sizes) - GUESTS, GUESTS])
        return i._replace(**{weight: own}, guests=guests)

    def launch():
        kinds = {kind: functools.partial(lent, getattr(module, kind), name) for kind, name in WEIGHTS.items()}
        with mock.patch.multiple(module, **kinds):
            run(*given, **named)

    return launch


def gradient_of_guests(module, run, *given, **named):
    """Return what runs a weight gradient of the last groups alone."""

    def launch():
        def last(out, x, y, sizes, *rest):
            return kind(out[-GUESTS:], x, y, sizes, *rest, first=len(sizes) - GUESTS)

        kind = module.TgmmIntoInputs
        with mock.patch.object(module, "TgmmIntoInputs", last):
            run(*given, **named)

    return launch


ACTIVATIONS = ("swiglu", False), ("swiglu_oai", True), ("gelu", False)
BF16, F32 = torch.bfloat16, torch.float32
PORTABLE = {
    f"{name} {activation}": with_guests(products, in_passes, run, products.FULL, activation, interleaved)
    for activation, interleaved in ACTIVATIONS
    for name, run in (("up", products.run_up), ("down_grad", products.run_down_grad))
}
PORTABLE["gmm"] = with_guests(
    products, products.run_gmm_into, products.FULL, BF16, programs=0, starts=ints(products.E)
)
PORTABLE["tgmm"] = gradient_of_guests(products, products.run_tgmm_accumulate, products.FULL)
HOPPER = {
    f"{name} {activation}": with_guests(hopper, in_passes, run, activation, interleaved)
    for activation, interleaved in ACTIVATIONS
    for name, run in (
        ("up", functools.partial(hopper.run_hopper_up, bias=True)), ("down_grad", hopper.run_hopper_down_grad)
    )
}  # fmt: skip
HOPPER |= {
    "gmm": with_guests(hopper, hopper.run_hopper_gmm_into, ints(hopper.E)),
    "up by columns": with_guests(hopper, hopper.run_hopper_up, by_columns=True),
    "down_grad by rows": with_guests(hopper, hopper.run_hopper_down_grad, by_rows=True),
    **{
        f"tgmm of {groups} groups, {columns_first}": gradient_of_guests(
            hopper, hopper.run_hopper_tgmm, onto=F32, groups=groups, columns_first=columns_first
        )
        for groups in (128, 512)
        for columns_first in (False, True)
    },
}
CASES = {f"{name} with guests": products.Case(run, matrix="any") for name, run in PORTABLE.items()}
CASES |= {f"hopper {name} with guests": hopper.SM90(run) for name, run in HOPPER.items()}
