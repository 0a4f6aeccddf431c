"""SegmentGEMMWrapper beyond the documented examples, which are in tests/compat."""

import pytest
import torch

from moe_aiter import SegmentGEMMWrapper
from moe_aiter.config import settings


def wrapper(device="cpu", backend="auto"):
    return SegmentGEMMWrapper(torch.empty(8, dtype=torch.uint8, device=device), backend=backend)


def make(device, lens, weights, d_in=16, d_out=24):
    x = torch.randn(sum(lens), d_in, device=device)
    return x, torch.randn(weights, d_out, d_in, device=device), torch.tensor(lens, device=device)


def expected(x, w, lens, index):
    return torch.cat([r @ w[i].T for r, i in zip(x.split(lens), index, strict=True)])


@pytest.mark.parametrize("backend", ["auto", "sm80", "sm90", "triton", "torch"])
@pytest.mark.parametrize("at", ["seg_lens", "seg_indptr", "both"])
@pytest.mark.parametrize("host", [False, True])
def test_ragged_segments(device, backend, at, host):
    """Also none, repeated weights, and indices that are on the CPU."""
    lens, index = [200, 0, 56, 192], [2, 0, 2, 1]
    x, w, seg_lens = make(device, lens, 3)
    indptr = torch.cat([seg_lens.new_zeros(1), seg_lens.cumsum(0)])
    given = {"seg_lens": seg_lens if at != "both" else seg_lens * 0, "seg_indptr": indptr}
    given = {k: v for k, v in given.items() if at in (k, "both")}
    given["weight_indices"] = torch.tensor(index, device=device)
    given = {k: v.cpu() if host else v for k, v in given.items()}
    y = wrapper(device, backend).run(x, w, 4, True, **given)
    torch.testing.assert_close(y, expected(x, w, lens, index), rtol=1e-4, atol=1e-4)
    y = wrapper(device, backend).forward(x, w.mT.contiguous(), 4, False, **given)
    torch.testing.assert_close(y, expected(x, w, lens, index), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_lengths_that_the_dtype_of_x_cannot_hold(device, dtype):
    """Upstream casts them to it: 2049 is 2048 then."""
    lens = [2049, 257, 1]
    x, w, seg_lens = make(device, lens, 3)
    y = wrapper(device).run(x.to(dtype), w.to(dtype), 3, True, seg_lens)
    torch.testing.assert_close(y.float(), expected(x, w, lens, range(3)), rtol=0.05, atol=0.2)


def test_out_is_overwritten_and_rows_past_the_segments_are_left_alone(device):
    x, w, seg_lens = make(device, [3, 4], 2)
    x = torch.cat([x, x])
    out = torch.full((14, 24), float("nan"), device=device)
    assert wrapper(device).run(x, w, 2, True, seg_lens, out=out) is out
    fresh = wrapper(device).run(x, w, 2, True, seg_lens)
    assert torch.equal(out[:7], fresh[:7]) and out[7:].isnan().all() and not fresh[7:].any()


def test_it_is_differentiable(device):
    x, w, seg_lens = make(device, [3, 4], 3)
    x.requires_grad_(), w.requires_grad_()
    wrapper(device).run(x, w, 2, True, seg_lens).sum().backward()
    torch.testing.assert_close(w.grad[1], x[3:].sum(0).expand(24, 16))
    assert x.grad is not None and not w.grad[2].any()


def test_more_weights_than_segments_and_no_rows(device):
    x, w, seg_lens = make(device, [3, 4], 5)
    y = wrapper(device).run(x, w, 2, True, seg_lens)
    torch.testing.assert_close(y, expected(x, w, [3, 4], range(2)), rtol=1e-4, atol=1e-4)
    assert wrapper(device).run(x[:0], w, 2, True, seg_lens * 0).shape == (0, 24)
    assert wrapper(device).run(x[:0], w, 0, True, seg_lens[:0]).shape == (0, 24)


def test_buffers():
    segment = wrapper()
    assert segment._float_workspace_buffer.numel() == 8 and segment._int_workspace_buffer.numel() == 2**20
    one, other = torch.empty(1, dtype=torch.int8), torch.empty(2, dtype=torch.int8)
    segment.reset_workspace_buffer(one, other)
    assert segment._float_workspace_buffer is one and segment._int_workspace_buffer is other
    x, w, lens = make("cpu", [2, 3], 2)
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn):
        segment = SegmentGEMMWrapper(torch.empty(4).to(dtype))
        segment.reset_workspace_buffer(torch.empty(0).to(dtype), torch.empty(3).to(dtype))
        assert torch.equal(segment.run(x, w, 2, True, lens), wrapper().run(x, w, 2, True, lens))
    with pytest.raises(TypeError, match="float_workspace_buffer must be a tensor, not int"):
        SegmentGEMMWrapper(4)
    with pytest.raises(TypeError, match="int_workspace_buffer must be a tensor, not NoneType"):
        segment.reset_workspace_buffer(one, None)


def test_compiles_without_graph_breaks(device):
    x, w, seg_lens = make(device, [3, 4], 3)
    segment = wrapper(device)

    def fn(x, w, lens):
        return segment.run(x, w, 2, True, seg_lens=lens, weight_indices=lens % 3)

    compiled = torch.compile(fn, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, w, seg_lens), fn(x, w, seg_lens))


LENS = torch.tensor([2, 3])
BAD = {
    "no bounds": (dict(seg_lens=None), ValueError, "Either seg_lens or seg_indptr should be provided."),
    "batch_size": (dict(batch_size=3), ValueError, r"seg_lens is \(2,\) but batch_size is 3"),
    "indptr": (dict(seg_indptr=LENS), ValueError, r"seg_indptr is \(2,\) but batch_size \+ 1 is 3"),
    "indices": (dict(weight_indices=LENS[:1]), ValueError, r"weight_indices is \(1,\) but batch_size is 2"),
    "negative": (dict(batch_size=-1), ValueError, "batch_size must not be negative"),
    "not an int": (dict(batch_size=2.0), TypeError, "batch_size must be an int, not float"),
    "few weights": (
        dict(weights=torch.zeros(1, 6, 4)),
        ValueError,
        "batch_size is 2 but there are 1 weights",
    ),
    "d_in": (dict(weight_column_major=False), ValueError, r"x is \(M, K=4\) but weights is \(W, K=6, N\)"),
    "out as upstream has it now": (dict(seg_lens=torch.zeros(5, 6)), TypeError, "seg_lens is a floating"),
    "weights": (dict(weights=torch.zeros(6, 4)), ValueError, r"weights must be \(num_weights, d_out, d_in\)"),
    "x": (dict(x=[1]), TypeError, "x must be a tensor, not list"),
    "dtype": (dict(seg_lens=torch.ones(2)), TypeError, "lens must be int32 or int64"),
}


@pytest.mark.parametrize("change, kind, message", BAD.values(), ids=BAD)
def test_bad_input_is_named_and_nothing_is_launched(change, kind, message, monkeypatch):
    monkeypatch.setattr("moe_aiter.op.pick", lambda *_: pytest.fail("launched"))
    good = dict(x=torch.zeros(5, 4), weights=torch.zeros(2, 6, 4), batch_size=2, seg_lens=LENS)
    with pytest.raises(kind, match=message):
        wrapper().run(**{"weight_column_major": True, **good, **change})


UPSTREAM = {  # the arguments after weight_column_major as FlashInfer has them now
    "out, lens": ((torch.zeros(5, 6), LENS), TypeError, "seg_lens is a floating matrix"),
    "out, lens, None, numbers": ((torch.zeros(5, 6), LENS, None), TypeError, "seg_lens is a floating matrix"),
    "out, None, indptr": ((torch.zeros(5, 6), None, LENS), TypeError, "seg_lens is a floating matrix"),
    "None, lens": ((None, LENS), ValueError, r"seg_indptr is \(2,\) but batch_size \+ 1 is 3, as if it were"),
    "None, None, indptr": (
        (None, None, LENS),
        ValueError,
        "Either seg_lens or seg_indptr should be provided",
    ),
}


@pytest.mark.parametrize("given, kind, message", UPSTREAM.values(), ids=UPSTREAM)
def test_another_order_by_position_is_told_that_out_goes_by_name(given, kind, message):
    with pytest.raises(kind, match=f"{message}.*`out` is an argument by name alone"):
        wrapper().run(torch.zeros(5, 4), torch.zeros(2, 6, 4), 2, True, *given)


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_debug_names_weights_that_are_not_there(device, backend):
    assert settings.debug, "the tests run with MOE_AITER_DEBUG=1"
    x, w, lens = make(device, [3, 4], 2)
    assert not wrapper(device, backend).run(x, w, 2, True, lens, weight_indices=lens - 4)[:3].any()
    with pytest.raises(ValueError, match="weight_indices holds 2 but there are 2 weights"):
        wrapper(device, backend).run(x, w, 2, True, lens, weight_indices=lens - 2)


def test_an_unknown_backend_is_refused_when_it_runs():
    segment = wrapper(backend="cutlass")
    with pytest.raises(ValueError, match="unknown backend 'cutlass'; known: auto, sm80, sm90, triton, torch"):
        segment.run(torch.zeros(5, 4), torch.zeros(2, 6, 4), 2, True, LENS)


@pytest.mark.gpu
def test_nothing_waits_for_the_gpu(no_debug):
    device = torch.device("cuda")
    x, w, seg_lens = make(device, [30, 0, 400], 3, 512, 256)
    run = wrapper(device).run
    expect = run(x.half(), w.half(), 3, True, seg_lens)
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = run(x.half(), w.half(), 3, True, seg_lens)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(got, expect)
