"""What is kept of a weight serves until the weight changes or is gone, and never another one."""

import dataclasses
import gc
import threading
import weakref

import pytest
import torch
from check import Hidden
from torch._subclasses import FakeTensorMode

from moe_aiter import derived as module
from moe_aiter.derived import (
    Cache,
    Entry,
    cache_size,
    derived,
    forget,
    key_of_weight,
    set_cache_size,
    state_of,
    tensors,
)


class Calls:
    """`make` for a weight, counted."""

    def __init__(self, w, of=lambda w: w * 2):
        self.w, self.of, self.count = w, of, 0

    def __call__(self):
        self.count += 1
        return self.of(self.w)


@pytest.fixture(autouse=True)
def empty():
    before = cache_size()
    forget()
    yield
    set_cache_size(before)
    forget()


@pytest.fixture
def w(device):
    return torch.nn.Parameter(torch.randn(4, 6, device=device))


def test_kept_while_the_weight_stays(w):
    make = Calls(w)
    first = derived(w, "twice", make)
    assert derived(w, "twice", make) is first and derived(w.detach(), "twice", make) is first
    assert make.count == 1 and not first.requires_grad and torch.equal(first, 2 * w)


CHANGES = {
    "in place": lambda w: w.detach().add_(1),
    "through a view": lambda w: w.detach()[0].add_(1),
    "other memory": lambda w: setattr(w, "data", torch.ones_like(w)),
    "an optimizer that hides it": lambda w: Hidden([w]).step(),
    "forget": lambda w: forget(),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_made_anew_after_a_change(change, w):
    make = Calls(w)
    derived(w, "twice", make)
    change(w)
    assert torch.equal(derived(w, "twice", make), 2 * w) and make.count == 2
    assert len(module.CACHE.entries) == 1


def test_what_and_where_are_told_apart(w):
    flat = w.detach().flatten()
    views = [w, w.mT, w[:2], w[2:], w[:, :3], flat, flat.view(torch.int32)]
    for view in views:
        assert torch.equal(derived(view, "twice", lambda view=view: view * 2), view * 2)
    assert torch.equal(derived(w, "thrice", lambda: w * 3), w * 3)
    assert len(module.CACHE.entries) == len(views) + 1


@pytest.mark.parametrize("elsewhere", [True, False])
def test_memory_that_was_given_back_is_not_trusted(elsewhere, device):
    """As FSDP2 does it: the storage is emptied and filled again, and the version says nothing."""
    w = torch.zeros(1000, device=device)
    storage, size, address = w.untyped_storage(), w.untyped_storage().nbytes(), w.data_ptr()
    derived(w, "twice", lambda: w * 2)
    version = w._version
    with torch.autograd._unsafe_preserve_version_counter(w):
        storage.resize_(0)
        between = [torch.empty(1000, device=device) for _ in range(8 * elsewhere)]
        storage.resize_(size)
        w.fill_(1)
    assert w._version == version and (w.data_ptr() != address) >= elsewhere
    if not elsewhere:  # but what fills it with other numbers is a step of the optimizer
        Hidden([torch.randn(1, requires_grad=True)]).step()
    assert torch.equal(derived(w, "twice", lambda: w * 2), w * 2)
    del between


def test_nothing_is_kept_alive(w):
    w = torch.nn.Parameter(w.detach().clone())
    kept = weakref.ref(derived(w, "twice", lambda w=w: w.detach() * 2))
    storage = weakref.ref(w.untyped_storage())
    view = w.detach()[1:]
    del w
    gc.collect()
    assert kept() is not None and storage() is not None  # a view is enough
    del view
    gc.collect()
    assert kept() is None and storage() is None and module.CACHE.size == 0


def test_another_weight_at_the_same_address_is_another():
    for value in range(50):
        w = torch.full((64,), float(value))
        assert torch.equal(derived(w, "twice", lambda w=w: w * 2), w * 2)
        del w


def test_a_dead_weight_in_the_place_of_another():
    """Which is there as long as its burial waits."""
    cache, w = Cache(), torch.randn(3)
    dead = weakref.ref(torch.randn(3).untyped_storage())
    cache.entries[key_of_weight(w, "twice")] = Entry(dead, state_of(w), "wrong", 0)
    assert dead() is None and torch.equal(cache.get(w, "twice", lambda: w * 2), w * 2)


def test_a_weight_that_dies_while_the_lock_is_held():
    """The collector may run anywhere, and calls back in that very thread."""
    w = torch.randn(3)
    derived(w, "twice", lambda w=w: w * 2)
    with module.CACHE.lock:
        del w
        gc.collect()
        assert len(module.CACHE.entries) == 1
    other = torch.randn(3)
    derived(other, "twice", lambda: other * 2)
    assert len(module.CACHE.entries) == 1 and module.CACHE.size == 12


def test_bound():
    cache = Cache(limit=100)
    a, b, c, large = torch.randn(10), torch.randn(10), torch.randn(10), torch.randn(26)
    makes = {id(t): Calls(t) for t in (a, b, c, large)}

    def ask(t):
        cache.get(t, "twice", makes[id(t)])
        return makes[id(t)].count

    assert [ask(a), ask(b), ask(a), ask(c)] == [1, 1, 1, 1] and cache.size == 80
    assert [ask(a), ask(c), ask(b)] == [1, 1, 2]  # b was not asked for longest
    assert [ask(large), ask(large)] == [1, 2] and cache.size == 80  # more than there may be
    cache.close()
    assert cache.size == 0 and [ask(b), ask(b)] == [3, 4]


def test_the_size_is_set(w):
    make = Calls(w)
    set_cache_size(1)
    derived(w, "twice", make)
    assert cache_size() == 1 and module.CACHE.size == w.nbytes
    set_cache_size(0)
    assert module.CACHE.size == 0
    derived(w, "twice", make)
    assert derived(w, "twice", make) is not derived(w, "twice", make) and make.count == 4
    for wrong in (-1, 1.5, True):
        with pytest.raises((ValueError, TypeError), match="mb must be"):
            set_cache_size(wrong)
    assert cache_size() == 0


def test_what_would_keep_the_weight_alive_is_not_kept(w):
    for of in (lambda w: w.mT, lambda w: (w * 2, [w[0].detach()])):
        make = Calls(w, of)
        derived(w, "view", make)
        derived(w, "view", make)
        assert make.count == 2 and not module.CACHE.entries


def test_where_nothing_is_kept(w):
    with torch.inference_mode():
        inferred = w * 1
        make = Calls(inferred)
        derived(inferred, "twice", make)
        derived(inferred, "twice", make)
        assert make.count == 2
        kept = derived(w, "twice", lambda: w * 2)
    assert not kept.is_inference()  # a training step may be next
    weight = w.detach()
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(weight)
        assert type(derived(fake, "twice", lambda: fake * 2)) is type(fake)
    out = torch.func.vmap(lambda row: derived(row, "twice", lambda: row * 2))(w.detach())
    assert torch.equal(out, 2 * w)
    compiled = torch.compile(lambda w: derived(w, "twice", lambda: w * 2), backend="eager", fullgraph=True)
    w.data.add_(1)  # of which `kept` knows nothing
    assert torch.equal(compiled(w.detach()), 2 * w) and len(module.CACHE.entries) == 1


def test_a_failure_is_not_kept(w):
    def fail():
        raise ArithmeticError("no")

    with pytest.raises(ArithmeticError):
        derived(w, "twice", fail)
    assert torch.equal(derived(w, "twice", lambda: w * 2), 2 * w)


def test_a_change_while_it_is_made(w):
    """The value may be of before or after: it is returned, and not kept."""

    def make():
        out = w * 2
        w.add_(1)
        return out

    derived(w, "twice", make)
    assert torch.equal(derived(w, "twice", lambda: w * 2), 2 * w)


@pytest.mark.parametrize("drop", [Cache.forget, Cache.close])
def test_dropped_while_it_is_made(drop):
    cache, w = Cache(), torch.randn(3)

    def make():
        drop(cache)  # as another thread may
        return w * 2

    cache.get(w, "twice", make)
    assert not cache.entries


def test_values_of_all_kinds(w):
    @dataclasses.dataclass
    class Pair:
        first: torch.Tensor
        size: int

    dense = w.detach()
    csr, csc, coo = dense.to_sparse_csr(), dense.to_sparse_csc(), dense.to_sparse()
    counts = [
        len(list(tensors(value))) for value in (csr, csc, coo, Pair(dense, 1), {"a": (dense, [csr])}, 3)
    ]
    assert counts == [3, 3, 2, 1, 4, 0]
    kept = derived(w, "csr", lambda: Pair(w.detach().to_sparse_csr(), 24))
    assert derived(w, "csr", lambda: None) is kept
    sizes = [t.untyped_storage().nbytes() for t in tensors(kept)]  # of more than there are indices
    assert module.CACHE.size == sum(sizes) >= w.nbytes


def test_threads():
    """Weights change and die while others are asked for; each answer is of the weight at hand."""
    cache, wrong = Cache(limit=2000), []

    def work(seed):
        generator = torch.Generator().manual_seed(seed)
        for _ in range(300):
            w = torch.randn(16, generator=generator)
            for _ in range(3):
                if not torch.equal(cache.get(w, "twice", lambda w=w: w * 2), w * 2):
                    wrong.append(seed)
                w += 1

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gc.collect()
    cache.find(torch.randn(1), "twice")  # whoever comes next clears up
    assert not wrong and not cache.entries and cache.size == 0


# on a GPU


@pytest.mark.gpu
def test_a_graph_reads_what_was_kept_before():
    w, x = torch.randn(64, device="cuda"), torch.randn(64, device="cuda")
    made, graph = Calls(w), torch.cuda.CUDAGraph()
    before = derived(w, "twice", made)
    address = before.data_ptr()
    del before
    with torch.cuda.graph(graph):
        out = x + derived(w, "twice", made)
        other = derived(w, "thrice", lambda: w * 3)
        assert derived(w, "thrice", lambda: w * 3) is not other
    assert made.count == 1 and len(module.CACHE.entries) == 1
    forget()  # but the graph still reads it
    spoil = [torch.full((64,), float("nan"), device="cuda") for _ in range(8)]
    assert address not in {t.data_ptr() for t in spoil}
    graph.replay()
    assert torch.equal(out, x + 2 * w) and torch.equal(other, 3 * w)
    assert torch.stack(spoil).isnan().all()  # nor does the graph write there


@pytest.mark.gpu
def test_other_streams_wait():
    w, side = torch.ones(2**22, device="cuda"), torch.cuda.Stream()
    torch.cuda.synchronize()

    def slowly():
        torch.cuda._sleep(50_000_000)
        return w * 2

    derived(w, "twice", slowly)
    with torch.cuda.stream(side):
        got = derived(w, "twice", slowly).sum()
    torch.cuda.current_stream().wait_stream(side)
    assert got.item() == 2 * w.numel() and len(module.CACHE.entries) == 1
