"""AITER: `aiter.*` is `moe_aiter.compat.aiter.*`, the helpers that draw the tests' tensors included."""

import sys

from names import Alias, module


def install(checkout):
    sys.meta_path.insert(0, Alias("aiter", "moe_aiter.compat.aiter"))
    module("op_tests.triton_tests")  # in the checkout it imports what the tests of attention need
