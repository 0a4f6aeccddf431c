"""What changes a decision takes effect at the next call, in every thread."""

import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import pytest
import torch

from moe_aiter import switches, tuning
from moe_aiter.compat.aiter.tuned_gemm import get_GEMM_A16W16_config
from moe_aiter.kernels.dense import tuned_gemm
from moe_aiter.op import IMPLS, define_op, register_kernel, use
from moe_aiter.tuning import aiter_csv, choice, table
from moe_aiter.tuning.choice import choose_backend
from moe_aiter.tuning.store import cache_clear

NAME = f"chosen_{uuid.uuid4().hex}"


class Inputs(NamedTuple):
    x: torch.Tensor


def fill(value):
    return lambda out, i: out.fill_(value)


def by_table(out, i):
    out.fill_(1)


by_table.should_use = lambda i: choose_backend(NAME, i.x, "n", "none", 1, 1, 1) == "triton"
chosen_op = define_op(NAME, Inputs, new=lambda i: torch.empty_like(i.x), torch=fill(0), host=by_table)


@pytest.fixture
def tables(tmp_path, monkeypatch):
    """Empty folders of tables, and the implementations as they were afterwards."""
    before = dict(IMPLS[NAME])
    monkeypatch.setattr(choice.CHOICES, "folder", tmp_path / "choice")
    monkeypatch.setattr(table.TILES, "folder", tmp_path)
    cache_clear()
    yield tmp_path
    IMPLS[NAME].clear()
    IMPLS[NAME].update(before)
    monkeypatch.undo()
    cache_clear()


def both(call):
    """The answers of this thread, and of another."""
    with ThreadPoolExecutor(1) as pool:
        return [call(), pool.submit(call).result()]


def write_choice(backend):
    cells = dict.fromkeys(choice.COLUMNS, "")
    cells |= {"op": NAME, "bits": 32, "backend": backend}
    choice.CHOICES.write(choice.CHOICES.folder / "cpu.csv", [cells])


def test_an_op_goes_by_the_table_as_it_is_now(tables):
    run = lambda: chosen_op(torch.ones(2)).tolist()  # noqa: E731
    assert both(run) == [[0, 0]] * 2
    write_choice("triton")
    assert both(run) == [[1, 1]] * 2
    write_choice("torch")
    assert both(run) == [[0, 0]] * 2
    (choice.CHOICES.folder / "cpu.csv").unlink()
    cache_clear()
    register_kernel(op=NAME, backend="host")(fill(2))
    assert both(run) == [[2, 2]] * 2
    with use("torch"):
        assert both(run) == [[0, 0], [2, 2]]  # of this thread alone
    assert both(run) == [[2, 2]] * 2


CHANGES = {
    "a table of choices": lambda: write_choice("torch"),
    "forgotten tables": cache_clear,
    "AITER's cache_clear": get_GEMM_A16W16_config.cache_clear,
    "a kernel": lambda: register_kernel(op=NAME, backend="host")(fill(3)),
    "threads": lambda: torch.set_num_threads(torch.get_num_threads() + 1),
}


@pytest.mark.parametrize("change", CHANGES)
def test_who_multiplies_is_asked_again(change, tables, monkeypatch):
    asked, threads = [], torch.get_num_threads()
    choose = tuned_gemm.choose_product
    monkeypatch.setattr(tuned_gemm, "choose_product", lambda *given: asked.append(given[0]) or choose(*given))
    monkeypatch.setattr(tuned_gemm, "backends", {})
    x, weight = torch.ones(3, 5), torch.ones(7, 5)
    run = lambda: tuned_gemm.tuned_gemm(x, weight).sum().item()  # noqa: E731
    try:
        assert both(run) == [105.0] * 2 and len(asked) == 1
        CHANGES[change]()
        assert run() == 105.0 and len(asked) == 2
    finally:
        torch.set_num_threads(threads)


def test_a_row_of_the_cpu_is_of_the_threads_that_there_are_now():
    threads = torch.get_num_threads()
    try:
        for count in (threads, threads + 1):
            torch.set_num_threads(count)
            assert aiter_csv.this_device(torch.device("cpu")).units == count
    finally:
        torch.set_num_threads(threads)


SWITCHES = {
    "precision": ("BF16", switches.set_default_precision, None),
    "tensor cores": (False, switches.enable_tensor_cores, True),
}


@pytest.mark.parametrize("name", SWITCHES)
def test_a_switch_counts_in_every_thread(name):
    on, switch, off = SWITCHES[name]
    seen = switches.computed(lambda x: torch.full_like(x, x.itemsize))
    half = torch.ones(1, dtype=torch.bfloat16)
    run = lambda: (seen(torch.ones(1)).item(), seen(half).item())  # noqa: E731
    try:
        before = both(run)
        switch(on)
        after = both(run)
        assert before == [(4.0, 2.0)] * 2 and after == [(2.0, 2.0) if on == "BF16" else (4.0, 4.0)] * 2
    finally:
        switch(off)
    assert both(run) == before


def test_the_precision_of_products_counts_in_every_thread(monkeypatch):
    for word in ("tf32", "ieee"):
        monkeypatch.setattr(switches.switches, "matmul", word)
        assert both(switches.float32_precision) == [word] * 2


def test_a_tile_that_is_chosen_here_stays_here():
    with tuning.choose(lambda _: None):
        assert both(lambda: tuning.decided_by()[1] is None) == [False, True]
    assert tuning.decided_by()[1] is None
