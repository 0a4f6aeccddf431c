"""Files of tuned products for tests, and nn.Linear as it is patched to use them."""

import os

import torch
from torch import nn

from moe_aiter.config import settings
from moe_aiter.kernels.dense.tuned_gemm import tuned_gemm
from moe_aiter.layers import linear
from moe_aiter.tuning.aiter_csv import this_device
from moe_aiter.tuning.store import cache_clear

KEY = "cu_num,M,N,K,bias,dtype,outdtype,scaleAB,bpreshuffle,"
HEAD = f"gfx,{KEY}libtype,solidx,splitK,us,kernelName,err_ratio,tflops,bw\n"


def tuned_files(tmp_path):
    """A fixture: write files, and name them in the setting; they have to be the same afterwards.

    `set_to` changes another setting for the length of the test.
    """
    texts, restore = {}, []

    def write(*contents):
        for text in filter(None, contents):
            path = tmp_path / f"{len(texts)}.csv"
            texts[path] = text if text.startswith((HEAD[:8], KEY)) else HEAD + text
            path.write_text(texts[path])
        set_to("config_gemm_bf16", os.pathsep.join(map(str, texts)))
        return list(texts)

    def set_to(name, value):
        before = getattr(settings, name)
        restore.append(lambda: object.__setattr__(settings, name, before))
        object.__setattr__(settings, name, value)
        cache_clear()

    write.set_to = set_to
    yield write
    for undo in reversed(restore):
        undo()
    cache_clear()
    assert all(path.read_text() == text for path, text in texts.items()), "a user's file was written to"


def rows_for(device, libtype, M, N=16, K=32, *, dtype="fp32", bias=0, shuffled=0, us=1.0):
    """A row for this very device."""
    gfx, units = this_device(device)
    return f"{gfx},{units},{M},{N},{K},{bias},{dtype},{dtype},0,{shuffled},{libtype},0,0,{us},kernel,0,0,0\n"


def tuned_calls(monkeypatch):
    """A fixture: what patched Linears give to tuned_gemm, the weight and whether it is shuffled."""
    seen = []

    def watched(x, weight, bias=None, **kwargs):
        seen.append((weight, kwargs.get("is_shuffled", False)))
        return tuned_gemm(x, weight, bias, **kwargs)

    monkeypatch.setattr(linear, "tuned_gemm", watched)
    return seen


def unpatched_after():
    """A fixture: nn.Linear is torch's own before a test and after it."""
    original = nn.Linear.forward
    assert original.__module__.startswith("torch.")
    yield
    linear.unpatch_linear()
    nn.Linear.forward = original


def layer(K=32, N=16, dtype=torch.bfloat16, **kind):
    return nn.Linear(K, N, dtype=dtype, **kind)


class Own(nn.Linear):
    """With a forward of its own."""

    def forward(self, x):
        return super().forward(x) + 1
