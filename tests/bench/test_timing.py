"""moe_aiter/bench/timing.py: what is captured, and what is launched one by one."""

import pytest
import torch

from moe_aiter.bench import timing
from moe_aiter.bench.timing import kernels


@pytest.mark.gpu
def test_a_call_that_waits_is_not_captured():
    x = torch.randn(9, device="cuda")
    _, how = kernels(lambda: x.nonzero(), True, False)
    assert how == "eager" and torch.randn(3, device="cuda").isfinite().all()
    launched, how = kernels(lambda: x.mul_(2), True, False)
    before = x.clone()
    launched()
    assert how == "graph" and torch.equal(x, 2 * before)


def test_ours_is_captured_or_refused(monkeypatch):
    def refuse(call):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(timing, "never_waits", lambda call: False)
    monkeypatch.setattr(timing, "captured", refuse)
    assert kernels(print, True, False) == (print, "eager")
    with pytest.raises(RuntimeError, match="capturing"):
        kernels(print, True, True)
