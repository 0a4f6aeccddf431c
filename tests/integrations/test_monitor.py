"""A monitor of transformers' models, and its numbers in the logs of transformers' Trainer."""

import copy
import types

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")

from integrations.families import FAMILIES, TOP_K, VOCAB, E, experts_of, tiny_model
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState
from transformers.trainer_callback import CallbackHandler

from moe_aiter import MoE
from moe_aiter.integrations.monitor import ExpertsMonitor, MonitorCallback, watch
from moe_aiter.integrations.transformers import NAME, register


@pytest.fixture(autouse=True)
def registered():
    register()


def counted(model, run):
    """The choices of each experts module, by a hook of the test's own."""
    found = []

    def count(module, args, out):
        found.append(args[1].flatten().bincount(minlength=E).tolist())

    hooks = [m.register_forward_hook(count) for m in experts_of(model)]
    run()
    for hook in hooks:
        hook.remove()
    return found


@pytest.mark.parametrize("experts", ["eager", NAME])
@pytest.mark.parametrize("family", FAMILIES)
def test_choices_of_a_model(family, experts):
    model, tokens = tiny_model(family, experts=experts), torch.randint(1, VOCAB, (2, 9))
    model.train()
    want_out = model(tokens).logits
    monitor = ExpertsMonitor(model)
    want = counted(model, lambda: model(tokens))
    monitor.reset()
    assert torch.equal(model(tokens).logits, want_out)
    read = monitor.read()
    assert [s.choices.tolist() for s in read.values()] == want and len(want) > 0
    assert all(name.endswith("mlp.experts") for name in read)
    s = next(iter(read.values()))
    assert s.tokens == 18 and s.choices.sum() == 18 * TOP_K and s.logit_norm is s.bias_range is None
    model.eval()
    model(tokens)
    copy.deepcopy(model).train()(tokens)  # a copy has no monitor
    monitor.remove()
    model.train()(tokens)
    assert all(s.tokens == 18 for s in monitor.read().values())
    assert not any(m._forward_pre_hooks for m in experts_of(model))


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_counts_once(reentrant):
    model, tokens = tiny_model("mixtral", experts=NAME), torch.randint(1, VOCAB, (2, 9))
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    with ExpertsMonitor(model) as monitor:
        model(tokens, labels=tokens).loss.backward()
    assert [s.tokens for s in monitor.read().values()] == [18, 18]


def test_compiled_experts():
    torch.compiler.reset()
    module = experts_of(tiny_model("qwen3_moe", experts=NAME))[0]
    x, ids = torch.randn(7, module.hidden_dim), torch.rand(7, E).argsort(1)[:, :TOP_K]
    ids[0, 0] = E  # of another rank
    with ExpertsMonitor(nn.ModuleList([module])) as monitor:
        compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
        compiled(x, ids, torch.rand(7, TOP_K)).sum().backward()
        module(x, top_k_index=ids, top_k_weights=torch.rand(7, TOP_K))
    (s,) = monitor.read().values()
    assert s.choices.tolist() == (2 * ids.flatten().bincount(minlength=E + 1)[:E]).tolist()


def test_layers_of_both_kinds():
    model = nn.ModuleList([MoE(16, 8, 4, 2), experts_of(tiny_model("mixtral"))[0]])
    monitor = ExpertsMonitor(model)
    model[0](torch.randn(5, 16))
    assert [s.tokens for s in monitor.read().values()] == [5, 0]
    monitor.remove()


class Reporter(TrainerCallback):
    """As transformers' own, which the Trainer puts in front of the callbacks it is given."""

    def __init__(self):
        self.seen = []

    def on_log(self, args, state, control, logs, **_):
        self.seen.append(dict(logs))


def log(handler, state, logs):
    """What Trainer.log does."""
    state.log_history.append({**logs, "step": state.global_step})
    handler.on_log(None, state, TrainerControl(), logs)


def test_the_logs_of_a_trainer():
    model, reporter, state = tiny_model("mixtral", experts=NAME), Reporter(), TrainerState()
    model.train()
    handler = CallbackHandler([reporter], model, None, None, None)
    callback = watch(types.SimpleNamespace(callback_handler=handler), prefix="experts")
    assert isinstance(callback, MonitorCallback) and handler.callbacks[0] is callback
    tokens = torch.randint(1, VOCAB, (2, 9))
    handler.on_train_begin(None, state, TrainerControl())
    for rows in (1, 2):
        model(tokens[:rows])
        log(handler, state, {"loss": 1.0})
    log(handler, state, {"eval_loss": 1.0})
    handler.on_train_end(None, state, TrainerControl())
    log(handler, state, {"loss": 1.0})
    tags = [tag for tag in reporter.seen[0] if tag.startswith("experts/")]
    name = "experts/model.layers.0.mlp.experts"
    assert f"{name}/entropy" in tags and f"{name}/max_violation" in tags
    assert [seen[f"{name}/tokens"] for seen in reporter.seen[:2]] == [9, 18]
    assert [len(seen) for seen in reporter.seen[2:]] == [1, 1]
    assert state.log_history[0] == reporter.seen[0] | {"step": 0}
    assert not any(m._forward_pre_hooks for m in experts_of(model))


def test_a_training_that_broke_off_can_begin_again():
    model, state = tiny_model("mixtral"), TrainerState()
    callback = MonitorCallback()
    for _ in range(2):
        callback.on_train_begin(None, state, TrainerControl(), model)
    callback.on_train_end(None, state, TrainerControl())
    assert not any(m._forward_pre_hooks for m in experts_of(model))
