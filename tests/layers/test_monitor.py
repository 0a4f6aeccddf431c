"""A monitor counts what a recount does, changes nothing, and leaves nothing behind."""

import copy
import io
import pickle

import forked
import numpy as np
import pytest
import torch
from check import few
from torch import nn
from torch.utils.checkpoint import checkpoint

from moe_aiter import Capacity, ExpertChoice, MoE, Monitor, Router, TopP

H, WIDTH, E, K, T = 16, 8, 6, 2, 13


def build(device="cpu", num_experts=E, **options):
    return MoE(H, WIDTH, num_experts, K, device=device, **options)


def tokens(device="cpu", num_tokens=T):
    return torch.randn(num_tokens, H, device=device)


class Recount:
    """What the calls of one layer routed, in NumPy and float64, from the routing that it returns."""

    def __init__(self, num_experts=E):
        self.num_experts, self.choices, self.kept, self.logits = num_experts, [], [], []

    def add(self, moe, x, **inputs):
        """The routing of another call, by a twin without a monitor, and by one without a capacity."""
        twin = copy.deepcopy(moe)
        assert twin.monitor is None
        for to, capacity in ((self.kept, moe.capacity), (self.choices, None)):
            twin.capacity = capacity
            _, (routing, _) = twin(x, return_routing=True, **inputs)
            to.append(routing.expert_ids.flatten().cpu().numpy())
        mask = inputs.get("mask")
        logits = routing.logits.detach().double().cpu().numpy()
        self.logits.append(logits if mask is None else logits[mask.flatten().cpu().numpy()])

    def check(self, s):
        ids, kept, z = (np.concatenate(part) for part in (self.choices, self.kept, self.logits))
        counts = np.bincount(ids[ids >= 0], minlength=self.num_experts)
        share = counts / counts.sum()
        some = share[share > 0]
        assert s.choices.tolist() == counts.tolist() and s.tokens == len(z)
        assert s.dead_experts == (counts == 0).sum()
        np.testing.assert_allclose(s.drop_rate, 1 - (kept >= 0).sum() / counts.sum(), atol=1e-12)
        np.testing.assert_allclose(s.load, share, rtol=1e-6)
        np.testing.assert_allclose(s.entropy, -(some * np.log(some)).sum() / np.log(len(share)), rtol=1e-5)
        np.testing.assert_allclose(s.max_violation, counts.max() / counts.mean() - 1, rtol=1e-5)
        np.testing.assert_allclose(s.logit_norm, np.linalg.norm(z, axis=1).mean(), rtol=1e-6)
        np.testing.assert_allclose(s.logit_max, np.abs(z).max(), rtol=1e-6)
        np.testing.assert_allclose(s.logsumexp, np.log(np.exp(z).sum(1)).mean(), rtol=1e-6)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"capacity": Capacity(0.5)},
        {"capacity": Capacity(0.6, "probability"), "z_loss_coef": 0.1},
        {"score": "sigmoid", "selection_bias": True, "load_balance_coef": 0.1},
        {"choice": ExpertChoice()},
        {"choice": TopP(0.5)},
    ],
    ids=str,
)
@pytest.mark.parametrize("masked", [False, True])
def test_beside_a_recount(device, options, masked):
    model = nn.Sequential(build(device, **options), build(device, 9, **options))
    counts = Recount(), Recount(9)
    with Monitor(model) as monitor:
        for num_tokens in (T, 0, 2 * T):
            x = tokens(device, num_tokens)
            inputs = {"mask": torch.arange(num_tokens, device=device) % 4 > 0} if masked else {}
            for moe, count in zip(model, counts, strict=True):
                count.add(moe, x, **inputs)
                moe(x, **inputs)
        read = monitor.read()
    assert list(read) == ["0", "1"]
    for s, count in zip(read.values(), counts, strict=True):
        count.check(s)


def test_given_ids_and_dropped_ones_count_as_they_are(device):
    moe = build(device, selection_bias=True)
    moe.router.selection_bias += torch.linspace(-0.5, 0.25, E, device=device)
    ids = torch.tensor([[0, 1], [0, -1], [0, 0]], device=device)
    monitor = Monitor(moe)
    moe(tokens(device, 3), expert_ids=ids)
    s = monitor.read()["MoE"]
    assert s.choices.tolist() == [4, 1, 0, 0, 0, 0] and s.dead_experts == 4 and s.tokens == 3
    assert s.bias_range == (-0.5, 0.25) and s.max_violation == pytest.approx(4 / (5 / E) - 1)
    assert s.logit_norm > 0


def outputs(moe, x, dtype):
    x = x.clone().requires_grad_()
    with torch.autocast(x.device.type, dtype or torch.bfloat16, enabled=dtype is not None):
        out = moe(x)
    return out, *torch.autograd.grad(out.float().square().sum(), [x, *moe.parameters()])


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
@pytest.mark.parametrize(
    "options", [{}, {"capacity": Capacity(0.7), "z_loss_coef": 0.1, "load_balance_coef": 0.1}], ids=str
)
def test_outputs_and_gradients_are_the_same_to_the_bit(device, options, autocast):
    moe, x = build(device, **options), tokens(device)
    want = outputs(moe, x, autocast)
    with Monitor(moe) as monitor:
        got = outputs(moe, x, autocast)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert monitor.read()["MoE"].tokens == T


MODES = ["plain", "reentrant", "non-reentrant", "compiled", "compiled outside"]


@pytest.mark.parametrize("mode", few(MODES, *MODES[:3], "compiled outside"))
def test_counts_once(device, mode):
    torch.compiler.reset()
    moe = build(device, capacity=Capacity(0.8))
    monitor, count = Monitor(moe), Recount()
    compiled = {"fullgraph": True, "backend": "aot_eager"}
    run = {
        "plain": moe,
        "reentrant": lambda x: checkpoint(moe, x, use_reentrant=True),
        "non-reentrant": lambda x: checkpoint(moe, x, use_reentrant=False),
        "compiled": torch.compile(moe, **compiled),
        "compiled outside": torch.compile(lambda x: checkpoint(moe, x, use_reentrant=False), **compiled),
    }[mode]
    for num_tokens in (T, T, 5):
        x = tokens(device, num_tokens)
        run(x.requires_grad_()).square().sum().backward()
        count.add(moe, x)
    count.check(monitor.read()["MoE"])


@pytest.mark.parametrize("evaluation", [False, True])
def test_evaluation_counts_if_asked(device, evaluation):
    moe = build(device)
    monitor = Monitor(moe, evaluation=evaluation)
    moe.eval()
    with torch.no_grad():
        moe(tokens(device))
    moe.train()
    moe(tokens(device))
    assert monitor.read()["MoE"].tokens == T * (1 + evaluation)


def test_attached_and_removed_around_a_compiled_layer():
    torch.compiler.reset()
    moe, x = build(), tokens()
    compiled = torch.compile(moe, fullgraph=True, backend="aot_eager")
    compiled(x)
    with Monitor(compiled) as monitor:
        compiled(x)
    compiled(x)
    assert {name: s.tokens for name, s in monitor.read().items()} == {"MoE": T}


def test_reset_remove_and_before_any_token():
    moe, x = build(), tokens()
    monitor = Monitor(moe)
    s = monitor.read()["MoE"]
    assert (s.tokens, s.load.sum(), s.dead_experts, s.drop_rate, s.entropy) == (0, 0, E, 0, 0)
    assert (s.bias_range, s.logit_norm, s.logit_max, s.logsumexp) == (None,) * 4
    moe(x)
    monitor.reset()
    moe(x[:5])
    monitor.remove()
    moe(x)
    assert moe.monitor is None and monitor.read()["MoE"].tokens == 5
    with Monitor(moe) as second:
        monitor.remove()  # not its own
        moe(x)
    assert second.read()["MoE"].tokens == T and moe.monitor is None


def test_state_copies_and_pickles_know_nothing_of_it():
    moe, x = build(selection_bias=True), tokens()
    keys, text = moe.state_dict().keys(), repr(moe)
    monitor = Monitor(moe)
    assert moe.state_dict().keys() == keys and repr(moe) == text and len(list(moe.modules())) == 3
    file = io.BytesIO()
    torch.save(moe, file)
    file.seek(0)
    for twin in (copy.deepcopy(moe), torch.load(file, weights_only=False)):
        assert twin.monitor is None
        twin(x)
    assert monitor.read()["MoE"].tokens == 0


def test_a_copy_of_a_monitor_leaves_the_model_alone():
    """A model may have its monitor as an attribute, and be copied or saved with it."""
    model = nn.Sequential(build())
    model.monitor = Monitor(model)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        twin.monitor.remove()
        assert twin[0].monitor is None and model[0].monitor is not None
    del model[0].monitor
    model.monitor.remove()
    assert model[0].monitor is None


def test_a_model_that_is_materialised_after(device):
    moe = build("meta")
    monitor = Monitor(moe)
    moe.to_empty(device=device).reset_parameters()
    moe(tokens(device))
    assert monitor.read()["MoE"].tokens == T


def test_attached_in_inference_mode(device):
    moe = build(device)
    with torch.inference_mode():
        monitor = Monitor(moe)
    moe(tokens(device))
    assert monitor.read()["MoE"].tokens == T


def test_what_runs_on_no_device_is_not_counted():
    moe = build("meta")
    monitor = Monitor(moe)
    moe(tokens("meta"))
    assert monitor.read()["MoE"].tokens == 0


class WithoutLogits(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = Router(H, E, K)

    def forward(self, x):
        return self.router(x)._replace(logits=None)


def test_a_router_of_ones_own():
    moe = build()
    moe.router = WithoutLogits()
    monitor = Monitor(moe)
    moe(tokens(), mask=torch.arange(T) > 2)
    s = monitor.read()["MoE"]
    assert s.tokens == T - 3 and s.choices.sum() == (T - 3) * K and s.logit_norm is s.logit_max is None
    assert "logit_norm" not in s.scalars() and "bias_min" not in s.scalars()


class Writer:
    def __init__(self):
        self.written = []

    def add_scalar(self, tag, value, step):
        self.written.append((tag, value, step))


class Run:
    def __init__(self):
        self.logged = []

    def log(self, values, step=None):
        self.logged.append((values, step))


def test_sinks():
    model = nn.Sequential(build(selection_bias=True), nn.Linear(H, H), build())
    monitor, x = Monitor(model), tokens()
    writer, run, calls = Writer(), Run(), []
    for step, sink in enumerate((writer, run, lambda values, step: calls.append((values, step)))):
        model(x)
        read = monitor.log(sink, step)
        assert all(s.tokens == T for s in read.values()), "each log begins anew"
    values = {tag: value for tag, value, _ in writer.written}
    assert {step for *_, step in writer.written} == {0} and [run.logged[0][1], calls[0][1]] == [1, 2]
    assert values == run.logged[0][0] == calls[0][0]
    assert values["moe/0/bias_min"] == 0.0 and "moe/2/bias_min" not in values
    assert (
        values["moe/2/entropy"] == read["2"].entropy
        and values["moe/0/dead_experts"] == read["0"].dead_experts
    )
    assert all(isinstance(v, (int, float)) for v in values.values())
    model(x)
    with pytest.raises(TypeError, match="sink must have add_scalar or log, or be a function, not int"):
        monitor.log(3)
    monitor.log(run, 9, prefix="routing")
    assert "routing/0/entropy" in run.logged[1][0]


def test_tensorboard(tmp_path):
    board = pytest.importorskip("torch.utils.tensorboard", reason="TensorBoard is not installed")
    moe = build()
    with Monitor(moe) as monitor, board.SummaryWriter(tmp_path) as writer:
        moe(tokens())
        monitor.log(writer, 1)
    assert any(tmp_path.iterdir())


def one_rank(rank, folder, world):
    torch.distributed.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=world)
    torch.manual_seed(0)
    model = nn.Sequential(build(capacity=Capacity(0.7)), build(num_experts=9))
    torch.manual_seed(rank)
    group = torch.distributed.group.WORLD
    alone, together = Monitor(model), None
    for num_tokens in (3 + rank, 5):
        model(tokens(num_tokens=num_tokens))
    mine = alone.read()
    alone.group = group
    together = alone.read()
    assert alone.read()["0"].tokens == together["0"].tokens, "reading changes nothing"
    torch.save((mine, together), f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.ranks
def test_ranks_are_summed(tmp_path):
    forked.call(one_rank, 2, str(tmp_path), 2)
    (a, both), (b, other) = (torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in (0, 1))
    for layer, s in both.items():
        assert s.choices.tolist() == (a[layer].choices + b[layer].choices).tolist()
        assert s.choices.tolist() == other[layer].choices.tolist() and s.scalars() == other[layer].scalars()
        assert s.tokens == 17 and s.logit_max == max(a[layer].logit_max, b[layer].logit_max)
        mean = (8 * a[layer].logit_norm + 9 * b[layer].logit_norm) / 17
        assert s.logit_norm == pytest.approx(mean) and a[layer].logit_max != b[layer].logit_max
    assert 0 < both["0"].drop_rate < 1 and both["1"].drop_rate == 0


def test_errors():
    with pytest.raises(ValueError, match="Linear has no layer that a monitor can count"):
        Monitor(nn.Linear(2, 2))
    model = nn.Sequential(build(), build())
    first = Monitor(model[1])
    with pytest.raises(ValueError, match="1 has a monitor already"):
        Monitor(model)
    assert model[0].monitor is None, "nothing is half attached"
    first.remove()
    Monitor(model)
