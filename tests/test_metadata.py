"""Inputs like earlier ones are not looked at again, and nothing else passes for them."""

import uuid
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from moe_aiter import op
from moe_aiter.op import IMPLS, Written, define_inplace_op, define_op, register_kernel, use

seen = []


class SumInputs(NamedTuple):
    x: Tensor
    y: Tensor
    scale: float


class AddInputs(NamedTuple):
    out: Written
    x: Tensor


class TwoInputs(NamedTuple):
    out: Written
    x: Tensor
    sums: Written | None = None


def new_sum(i):
    seen.append("new")
    if i.x.shape != i.y.shape:
        raise ValueError("shapes")
    return torch.empty_like(i.x), i.x.new_empty(1, dtype=torch.int64)


def launch(out, i):
    seen.append("launch")
    torch.add(i.x, i.y, alpha=i.scale, out=out[0])
    out[1].fill_(i.x.numel())


# a name of its own: this module can be imported twice, an op is defined once
NAME = f"sum_{uuid.uuid4().hex}"
sum_op = define_op(
    NAME,
    SumInputs,
    outputs=2,
    new=new_sum,
    reference=lambda i: (i.x + i.scale * i.y, torch.tensor([i.x.numel()])),
    host=launch,
)
add_op = define_inplace_op(
    f"add_{NAME}",
    AddInputs,
    check=lambda i: seen.append("check"),
    reference=lambda i: i.out.add_(i.x),
)


beside_op = define_op(
    f"beside_{NAME}", AddInputs, new=lambda i: torch.empty_like(i.x), reference=lambda i: i.out.add_(i.x)
)


@pytest.fixture(autouse=True)
def forget():
    seen.clear()


def test_a_check_is_made_once_for_the_same_metadata():
    for value in range(3):
        x = torch.full((2, 3), float(value))
        out, size = sum_op(x, x, 2.0)
        assert torch.equal(out, 3 * x) and size == 6
        assert out.data_ptr() not in (x.data_ptr(), 0) and size.dtype == torch.int64
    assert seen == ["new", "launch", "launch", "launch"]


@pytest.mark.parametrize(
    "other",
    [
        (torch.ones(4, 3), torch.ones(4, 3), 2.0),
        (torch.ones(3, 4).T, torch.ones(4, 3), 2.0),
        (torch.ones(4, 3).double(), torch.ones(4, 3).double(), 2.0),
        (torch.ones(13)[1:].view(4, 3), torch.ones(4, 3), 2.0),
        (torch.ones(4, 3), torch.ones(4, 3), 0.5),
    ],
    ids=["shape", "strides", "dtype", "alignment", "number"],
)
def test_other_metadata_are_looked_at(other):
    x = torch.ones(5, 3)
    sum_op(x, x, 2.0)
    seen.clear()
    out, _ = sum_op(*other)
    assert seen == ["new", "launch"] and out.stride() == torch.empty_like(other[0]).stride()
    torch.testing.assert_close(out, other[0] + other[2] * other[1])


def test_what_was_refused_is_refused_again():
    for _ in range(2):
        with pytest.raises(ValueError, match="shapes"):
            sum_op(torch.ones(2, 2), torch.ones(3, 3), 1.0)


def test_the_choice_of_a_backend_is_made_again():
    x = torch.ones(2, 2)
    sum_op(x, x, 1.0)
    with use("torch"):
        sum_op(x, x, 1.0)
    assert seen.count("launch") == 1
    before = dict(IMPLS[NAME])
    try:
        register_kernel(op=NAME, backend="host")(lambda out, x, y, scale: out[0].fill_(7))
        assert (sum_op(x, x, 1.0)[0] == 7).all()
    finally:
        IMPLS[NAME].update(before)
    assert torch.equal(sum_op(x, x, 1.0)[0], x + x)


def test_in_place():
    out = torch.zeros(3)
    for _ in range(3):
        add_op(out, torch.ones(3))
        add_op(torch.ones(0), torch.ones(0))
    assert torch.equal(out, torch.full((3,), 3.0)) and seen == ["check", "check"]


two_op = define_inplace_op(
    f"two_{NAME}",
    TwoInputs,
    check=lambda i: None,
    reference=lambda i: None,
    host=lambda out, i: out.numpy().fill(2),
)


def test_what_is_written_by_a_kernel_cannot_serve_an_earlier_graph():
    """A kernel writes to memory that autograd does not watch."""
    weight, out, sums, x = torch.ones(3, requires_grad=True), torch.ones(3), torch.ones(3), torch.ones(3)
    loss = (weight * out).sum()
    with torch.no_grad():
        for times in (1, 2):
            two_op(out, x, sums)
            assert (out._version, x._version, sums._version) == (times, 0, times)
        two_op(out, x)
    with torch.inference_mode():
        two_op(torch.ones(3), x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_number_and_a_truth_value_differ():
    keys = {op.metadata((value,)) for value in (1, True, 1.0)}
    assert len(keys) == 3


def test_a_zero_has_a_sign():
    keys = {op.metadata((value,)) for value in (0.0, -0.0, 0)}
    assert len(keys) == 3


class Own(torch.Tensor):
    pass


def test_tensors_that_hide_something_have_no_metadata():
    x = torch.ones(3)
    assert op.metadata((x, None)) == op.metadata((torch.zeros(3), None)) is not None
    assert op.metadata((x.as_subclass(Own),)) is None
    found = []
    torch.func.vmap(lambda x: found.append(op.metadata((x,))) or x)(x)
    assert found == [None]
    assert op.metadata((x._neg_view(),)) is None


def test_launchers_read_memory_that_means_what_it_says(monkeypatch):
    def only_plain(out, i):
        assert not any(isinstance(t, torch.Tensor) and t.is_neg() for t in i)
        assert type(i.scale) is float
        launch(out, i)

    monkeypatch.setitem(IMPLS[NAME], "host", only_plain)
    x = torch.ones(2, 3)
    for scale in (2.0, np.float32(2)):
        out, _ = sum_op(x, torch.complex(x, 3 * x).conj().imag, scale)
        assert torch.equal(out, torch.full((2, 3), -5.0))


def test_numbers_of_numpy_become_those_of_python():
    found = op.resolved(np.int32(2), np.float64(2), 2, True, "2", None)
    assert found == [2, 2.0, 2, True, "2", None] and {type(v) for v in found[:3]} == {int, float}
    assert op.metadata(tuple(found)) is not None


@pytest.mark.parametrize("grad", [False, True])
def test_what_is_written_can_be_seen_as_its_negative(monkeypatch, grad):
    def only_plain(out, i):
        assert not any(t.is_neg() for t in (out, *i))
        i.out.add_(i.x)

    for name, write in {"add": add_op, "beside": beside_op}.items():
        monkeypatch.setitem(IMPLS[f"{name}_{NAME}"], "torch", only_plain)
        memory, x = torch.full((3,), 5.0), torch.full((3,), 7.0)
        with torch.set_grad_enabled(grad):
            write(memory._neg_view(), x._neg_view())
        assert torch.equal(memory, torch.full((3,), 12.0))


def test_memory_is_bounded_and_holds_no_tensor(monkeypatch):
    monkeypatch.setattr(op, "MOST", 4)
    known = {}
    for size in range(10):
        op.keep(known, op.metadata((torch.ones(size),)), size)
    assert len(known) == 2
    op.keep(known, None, 3)
    assert len(known) == 2

    def leaves(key):
        return [leaf for part in key for leaf in (leaves(part) if isinstance(part, tuple) else [part])]

    assert not any(isinstance(leaf, torch.Tensor) for key in known for leaf in leaves(key))


def test_a_check_of_metadata_passes_once():
    def check(inputs):
        seen.append(inputs)
        if inputs[0].dim() != 1:
            raise ValueError("axes")

    checked = op.once(check)
    checked((torch.ones(2),))
    checked((torch.zeros(2),))
    assert len(seen) == 1
    for _ in range(2):
        with pytest.raises(ValueError, match="axes"):
            checked((torch.ones(2, 2),))


def test_debug_still_fills_and_checks(monkeypatch):
    assert op.settings.debug
    x = torch.ones(6, 2)
    sum_op(x, x, 1.0)
    monkeypatch.setitem(IMPLS[NAME], "host", lambda *_: None)
    for _ in range(2):
        assert sum_op(x, x, 1.0)[0].isnan().all()
