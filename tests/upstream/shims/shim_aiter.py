"""AITER: `aiter.*` is `moe_aiter.compat.aiter.*`; what only AITER's tests need is read from the checkout."""

import importlib
import importlib.util
import logging
import sys

from names import Alias, module


class Logger:
    """What AITER's helpers log with."""

    def __getattr__(self, name):
        return getattr(logging.getLogger("aiter"), name)


def install(checkout):
    sys.meta_path.insert(0, Alias("aiter", "moe_aiter.compat.aiter"))
    importlib.import_module("aiter.ops.triton.utils")
    module("aiter.ops.triton.utils.logger", AiterTritonLogger=Logger)
    module("op_tests.triton_tests")  # in the checkout it imports what the tests of attention need
    # the tests draw their tensors by helpers in this file
    path = checkout / "aiter/ops/triton/utils/gmm_common.py"
    spec = importlib.util.spec_from_file_location("aiter.ops.triton.utils.gmm_common", path)
    made = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = made
    spec.loader.exec_module(made)
