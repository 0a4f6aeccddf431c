"""`python -m moe_aiter` is `moe-aiter`."""

import runpy

runpy.run_module("moe_aiter.cli", run_name="__main__")
