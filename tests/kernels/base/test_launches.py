"""A launch that goes past Triton's Python must still be the launch that Triton would have made."""

from types import SimpleNamespace

import pytest
import torch

from moe_aiter.kernels.rows.permute import unpermute
from moe_aiter.kernels.rows.route import choose_experts

from ...references import unpermute_reference

launches = pytest.importorskip("moe_aiter.kernels.base.launch")


class OnGPU(torch.Tensor):
    """A tensor that says so, in memory of so many bytes."""

    is_cuda, nbytes_below = True, 0

    def untyped_storage(self):
        return SimpleNamespace(size=lambda: self.nbytes_below)


@pytest.mark.parametrize("rocm", [False, True])
def test_on_amd_far_memory_needs_another_kernel(rocm, monkeypatch):
    """Triton compiles 32-bit offsets for tensors below 2 GiB there, and permute's arguments tell no rows."""
    monkeypatch.setattr(launches, "ROCM", rocm)
    x, found = torch.empty(4).as_subclass(OnGPU), []
    for x.nbytes_below in (16, 2**31 - 1, 2**31):
        found.append(launches.specialisation(x))
    assert found[0] == found[1] and (found[1] != found[2]) is rocm


@pytest.mark.parametrize("rows, columns", [(128, 64), (200, 264)])
def test_a_descriptor_says_what_tritons_would(rows, columns):
    hopper = pytest.importorskip("moe_aiter.kernels.hopper.gluon")
    x, box = torch.empty(rows, columns, dtype=torch.bfloat16), (64, 32)
    names = "shape", "strides", "block_shape", "padding", "round_f32_to_tf32"

    def said(descriptor):
        lists = [getattr(descriptor, name, None) for name in names]
        return [tuple(v) if isinstance(v, (list, tuple)) else v for v in lists], descriptor.layout

    ours, ragged = hopper.descriptor(x, *box), hopper.ragged_descriptor(x, *box)
    assert said(ours) == said(hopper.TensorDescriptor.from_tensor(x, list(box), ours.layout))
    fields = list(ragged.shape), list(ragged.strides), list(ragged.block_shape), ragged.layout
    assert said(ragged) == said(hopper.TensorDescriptor(x, *fields))  # which checks them
    assert ours.base is ragged.base is x
    assert launches.specialisation(ours) == (x.dtype, box) != launches.specialisation(ragged)


def draw(rows, columns, dtype=torch.bfloat16, offset=0):
    """Rows and their plan; an `offset` in elements misaligns the memory."""
    memory = torch.randn(rows * 2 * columns + offset, device="cuda").to(dtype)
    x = memory[offset:].view(rows * 2, columns)
    order = torch.randperm(rows * 2, device="cuda").int()
    return x, order, order.argsort().int().view(rows, 2)


@pytest.mark.gpu
def test_arguments_that_differ(no_debug):
    """Each of these needs another compiled kernel, or none of Triton's: sizes, dtypes, alignment."""
    for rows, columns in ((1, 1), (16, 256), (17, 255), (16, 256), (33, 1000)):
        for dtype in (torch.bfloat16, torch.float32, torch.bfloat16):
            for offset in (0, 1, 0):
                x, order, rank = draw(rows, columns, dtype, offset)
                for weights in (None, torch.rand(rows, 2, device="cuda"), None):
                    want = unpermute_reference(x, order, rank, weights)
                    torch.testing.assert_close(unpermute(x, order, rank, weights), want)


@pytest.mark.gpu
def test_a_number_that_was_an_int(no_debug):
    """Triton compiles an int of 1 into the kernel, and passes other ints and floats in their own types."""
    logits = torch.randn(40, 8, device="cuda")
    plain = choose_experts(logits, 2)[1]
    for scale in (1, 2, 1.0, 2.0, 0.5, 3, 1):
        torch.testing.assert_close(choose_experts(logits, 2, scale=scale)[1], plain * scale)


@pytest.mark.gpu
def test_the_second_launch_is_not_tritons(no_debug, monkeypatch):
    x, order, rank = draw(24, 64)
    unpermute(x, order, rank)

    def fail(*args, **kwargs):
        raise AssertionError("this launch went to Triton")

    monkeypatch.setattr(launches.JITFunction, "run", fail)
    torch.testing.assert_close(unpermute(x, order, rank), unpermute_reference(x, order, rank, None))
    with pytest.raises(AssertionError, match="went to Triton"):
        unpermute(x, order, rank, torch.rand(24, 2, device="cuda"))


@pytest.mark.gpu
def test_a_profilers_hook_sees_every_launch(no_debug):
    logits, names = torch.randn(40, 8, device="cuda"), []
    choose_experts(logits, 2)
    hooks = launches.launch_hooks.launch_enter_hook

    def hook(metadata):
        names.append(metadata.get()["name"])

    hooks.add(hook)
    try:
        for _ in range(3):
            choose_experts(logits, 2)
    finally:
        hooks.remove(hook)
    assert names == ["route_kernel"] * 3


@pytest.mark.parametrize("hook, watched", [(None, False), (print, True)])
def test_a_hook_that_is_no_chain(hook, watched, monkeypatch):
    assert not launches.is_watched()
    monkeypatch.setattr(launches.launch_hooks, "launch_enter_hook", hook)
    assert launches.is_watched() == watched
