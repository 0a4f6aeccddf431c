"""Routes of transformers' models: their own routers weigh the replayed experts, by their own rules."""

import contextlib
import copy
from functools import partial

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")

from integrations.families import FAMILIES, VOCAB, E, experts_of, tiny_model
from torch._dynamo.utils import counters

from moe_aiter import record_routes, replay_routes
from moe_aiter.integrations.monitor import ExpertsMonitor
from moe_aiter.integrations.transformers import NAME, register, unregister

ONE_GROUP = {  # whose score is the sum of two of its experts
    "one group, k=2": ("deepseek_v3", {"n_group": 1}),
    "one group, k=3": ("deepseek_v3", {"n_group": 1, "num_experts_per_tok": 3}),
    "one group, k=4": ("glm4_moe", {"num_experts_per_tok": 4}),
}
CASES = {family: (family, {}) for family in FAMILIES} | ONE_GROUP
IMPLEMENTATIONS = "eager", "grouped_mm", NAME, "batched_mm"
SKIPS = "skip_fwd_side_effects_in_bwd_under_checkpoint"


@pytest.fixture(autouse=True)
def registered():
    register()


def inputs_of_experts(model, run):
    """The ids and weights that all experts get, by hooks of the test's own, behind those of a replay."""
    found = []
    forwards = [(m, m.forward, vars(m).get("forward")) for m in experts_of(model)]
    for m, forward, _ in forwards:

        def seen(x, ids, weights, forward=forward):
            found.extend((ids.clone(), weights.detach().clone()))
            return forward(x, ids, weights)

        m.forward = seen
    run()
    for m, _, before in forwards:
        del m.forward
        if before is not None:
            m.forward = before
    return found


def moved(model):
    """A copy whose routers choose other experts."""
    model = copy.deepcopy(model)
    for name, p in model.named_parameters():
        if "gate.weight" in name or "router.weight" in name:
            p.data += torch.randn_like(p)
    return model


def router_gradients(model):
    return [p.grad for n, p in model.named_parameters() if "gate.weight" in n or "router.weight" in n]


@pytest.mark.parametrize("experts", ["eager", NAME])
@pytest.mark.parametrize("case", CASES)
def test_families(case, experts):
    family, changes = CASES[case]
    model, tokens = tiny_model(family, experts=experts, **changes).train(), torch.randint(1, VOCAB, (2, 9))
    with record_routes(model, weights=True) as routes:
        want = inputs_of_experts(model, lambda: model(tokens))
        loss = model(tokens, labels=tokens).loss
    assert all(name.endswith("mlp.experts") and len(calls) == 2 for name, calls in routes.items())
    with replay_routes(model, routes) as replay:
        got = inputs_of_experts(model, lambda: model(tokens))
        again = model(tokens, labels=tokens).loss
        again.backward()
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    choices, top_k = 2 * tokens.numel(), model.config.num_experts_per_tok  # of two calls
    for player in replay.players.values():
        assert player.totals.tolist() == [0, choices * top_k, 0, choices]
    assert abs(again - loss) < 1e-6 and all(g.abs().sum() > 0 for g in router_gradients(model))
    assert all(d == (0, 0) for d in replay.differences().values())
    other = moved(model)
    with replay_routes(other, routes, weights=True):
        got = inputs_of_experts(other, lambda: other(tokens))
        assert abs(other(tokens, labels=tokens).loss - loss) < 1e-6
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    with replay_routes(other, routes) as replay:
        got = inputs_of_experts(other, lambda: other(tokens))
        other(tokens)
    assert all(torch.equal(a, b) for a, b in zip(got[::2], want[::2], strict=True))
    assert all(d.choices > 0 for d in replay.differences().values())
    assert not torch.equal(got[1], want[1])  # the new router's weights
    assert not any("forward" in vars(m) or m._forward_pre_hooks for m in other.modules())


def test_weights_are_those_of_the_router():
    """Qwen3-MoE's rule, written here once more, on experts that its router would not choose."""
    model, tokens = tiny_model("qwen3_moe", experts=NAME), torch.randint(1, VOCAB, (1, 5))
    ids = torch.tensor([[4, 1], [0, 5], [2, 3], [3, 0], [1, 2]])
    logits = []
    gate = model.model.layers[0].mlp.gate
    hook = gate.register_forward_hook(lambda _, args, out: logits.append(out[0]))
    with replay_routes(model, torch.stack([ids, ids], 1)):
        got = inputs_of_experts(model, lambda: model(tokens))
    hook.remove()
    chosen = logits[0].softmax(1).gather(1, ids)
    assert torch.equal(got[0], ids) and torch.allclose(got[1], chosen / chosen.sum(1, keepdim=True))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_and_padding(reentrant):
    """Checkpointing has the gradients of the run without it; a dropped token is one of no expert."""
    tokens = torch.randint(1, VOCAB, (2, 9))
    for family in ("qwen3_moe", "gpt_oss", "deepseek_v3"):
        model = tiny_model(family, experts=NAME).train()
        with record_routes(model) as routes:
            model(tokens)
        for calls in routes.values():
            calls[0].expert_ids[3] = -1
        other, found = moved(model), []
        for checkpointing in (False, True):
            if checkpointing:
                other.gradient_checkpointing_enable({"use_reentrant": reentrant})
                other.enable_input_require_grads()
            other.zero_grad()
            with replay_routes(other, routes):
                loss = other(tokens, labels=tokens).loss
                loss.backward()
            found.append([loss, *(p.grad.clone() for p in other.parameters() if p.grad is not None)])
        for a, b in zip(*found, strict=True):
            assert a.isfinite().all()
            torch.testing.assert_close(a, b)
        with replay_routes(other, routes), torch.no_grad():
            ids, weights, *_ = inputs_of_experts(other, partial(other, tokens))
        assert (ids[3] == E).all() and (weights[3] == 0).all()


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])  # without biases, with biases
def test_dropped_tokens_in_every_implementation(family):
    """No expert adds to a token of the id -1, whatever implementation runs; it may change in a replay."""
    model, tokens = tiny_model(family).train(), torch.randint(1, VOCAB, (1, 9))
    with record_routes(model) as routes:
        model(tokens)
    ids = torch.stack([calls[0].expert_ids for calls in routes.values()], 1)
    ids[[0, 3, 8]] = -1
    found, outputs = [], []
    hook = experts_of(model)[0].register_forward_hook(lambda m, args, out: outputs.append(out))
    with replay_routes(model, [ids] * len(IMPLEMENTATIONS)):
        for name in IMPLEMENTATIONS:
            model.set_experts_implementation(name)
            model.zero_grad()
            loss = model(tokens, labels=tokens).loss
            loss.backward()
            found.append([loss, *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
    hook.remove()
    assert all(out[[0, 3, 8]].count_nonzero() == 0 and out.count_nonzero() > 0 for out in outputs)
    for others in found[1:]:
        for a, b in zip(others, found[0], strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.full
@pytest.mark.parametrize("case", CASES)
def test_compiled(case):
    """Without a graph break; further blocks need no further graph."""
    torch.compiler.reset()
    counters.clear()
    family, changes = CASES[case]
    model, tokens = tiny_model(family, experts=NAME, **changes), torch.randint(1, VOCAB, (2, 5))
    run = torch.compile(model, backend="aot_eager", fullgraph=True)
    run(tokens)
    found = []
    for _ in range(2):
        with record_routes(model, weights=True) as routes:
            run(tokens)
        assert all(len(calls) == 1 for calls in routes.values())
        found.append(counters["stats"]["unique_graphs"])
    for calls in routes.values():
        calls[0].expert_ids[3] = -1
        calls[0].routing_weights[3] = 0
    other = moved(model)
    with replay_routes(other, routes) as replay:
        want = other(tokens).logits
    differences = replay.differences()
    run = torch.compile(other, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        with replay_routes(other, routes) as replay:
            torch.testing.assert_close(run(tokens).logits, want)
        assert replay.differences() == differences
        found.append(counters["stats"]["unique_graphs"])
    assert found == [2, 2, 3, 3]


@pytest.mark.full
@pytest.mark.skipif(not hasattr(torch._dynamo.config, SKIPS), reason="this torch compiles no such checkpoint")
def test_compiled_with_checkpoints_inside():
    """Within a checkpoint, torch compiles what a replay changes in Python only if it is told to."""
    torch.compiler.reset()
    model, tokens = tiny_model("qwen3_moe", experts=NAME).train(), torch.randint(1, VOCAB, (2, 5))
    with record_routes(model) as routes:
        model(tokens)
    other, found = moved(model), []
    for compiles in (False, True):
        if compiles:
            other.gradient_checkpointing_enable({"use_reentrant": False})
            for layer in other.model.layers:
                layer.compile(backend="aot_eager", fullgraph=True)
        other.zero_grad()
        with replay_routes(other, routes), torch._dynamo.config.patch({SKIPS: compiles}):
            loss = other(tokens, labels=tokens).loss
            loss.backward()
        found.append([loss, *(p.grad.clone() for p in other.parameters() if p.grad is not None)])
    torch.testing.assert_close(*found)


def test_a_monitor_counts_mismatches():
    model, tokens = tiny_model("qwen3_moe", experts=NAME).train(), torch.randint(1, VOCAB, (2, 5))
    with record_routes(model) as routes:
        model(tokens)
    other = moved(model)
    with ExpertsMonitor(other) as monitor, replay_routes(other, routes) as replay:
        other(tokens).logits.sum().backward()
    read = monitor.read()
    for name, layer in replay.differences().items():
        assert layer == (read[name].mismatch_rate, read[name].token_mismatch_rate) and layer.choices > 0


@pytest.mark.parametrize("experts", ["eager", NAME])
@pytest.mark.parametrize("before", [False, True])
def test_a_monitor_counts_no_dropped_choices(before, experts):
    """Neither if its hook precedes the replay's, nor where the experts get another id for a dropped one."""
    model, tokens = tiny_model("qwen3_moe", experts=experts).train(), torch.randint(1, VOCAB, (1, 9))
    with record_routes(model) as routes:
        model(tokens)
    ids = torch.stack([calls[0].expert_ids for calls in routes.values()], 1)
    ids[[0, 3, 8]] = -1
    want = [layer[layer >= 0].long().bincount(minlength=E).tolist() for layer in ids.unbind(1)]
    with contextlib.ExitStack() as stack:
        if not before:
            stack.enter_context(replay_routes(model, ids))
        monitor = stack.enter_context(ExpertsMonitor(model))
        if before:
            stack.enter_context(replay_routes(model, ids))
        model(tokens)
    assert [s.choices.tolist() for s in monitor.read().values()] == want


def test_one_use_at_a_time():
    model, tokens = tiny_model("qwen3_moe"), torch.randint(1, VOCAB, (1, 5))
    with record_routes(model) as routes:
        model(tokens)
        for use in (record_routes, partial(replay_routes, routes=dict(routes))):
            with pytest.raises(ValueError, match=r"experts are recorded or replayed already"), use(model):
                pass
    with replay_routes(model, routes):
        with pytest.raises(ValueError, match="already"), record_routes(model):
            pass
        model(tokens)
    assert not any("routes" in vars(m) for m in model.modules())


@pytest.mark.parametrize(
    "family, kind",
    {"llama4_text": "Llama4TextMoe", "jetmoe": "JetMoeMoE", "longcat_flash": "LongcatFlashExperts"}.items(),
)
def test_experts_without_the_decorator(family, kind):
    model = tiny_model(family, experts=NAME)
    lacks = f"{kind} lacks transformers' decorator use_experts_implementation"
    for use in (record_routes, partial(replay_routes, routes=torch.zeros(1, 1, 1).int())):
        with pytest.raises(ValueError, match=lacks):
            use(model)
    with pytest.raises(ValueError, match=rf"no MoE layer, {type(model.model.embed_tokens).__name__}$"):
        record_routes(model.model.embed_tokens)
    unregister()
    with pytest.raises(ValueError, match=r"call .*register\(\) first"):
        record_routes(model)


def test_experts_of_a_model_that_was_loaded_before(monkeypatch):
    """They get the decorator when their model is switched to our name."""
    kind = pytest.importorskip("transformers.models.step3p7.modeling_step3p7").Step3p7Experts
    monkeypatch.delattr(kind, "has_gate", raising=False)
    experts = kind.__new__(kind)
    torch.nn.Module.__init__(experts)
    with pytest.raises(ValueError, match="for Step3p7Experts, its model was neither loaded nor switched"):
        record_routes(torch.nn.Sequential(experts))


def test_mismatches():
    model, tokens = tiny_model("deepseek_v3", experts=NAME), torch.randint(1, VOCAB, (1, 5))
    with record_routes(model) as routes:
        model(tokens)
    ((name, (route,)),) = routes.items()
    ids = route.expert_ids
    some = ids.clone()
    some[0, 0] = -1
    for given, message in [
        ({name: ids[:4]}, f"{name} gets 5 tokens, but its routes have 4"),
        ({name: ids[:, :1]}, f"{name} chooses 2 experts a token, but its routes have k=1"),
        ({name: some}, f"{name} cannot drop some choices of a token"),
        (torch.stack([ids, ids], 1), "the model has 1 MoE layers"),
    ]:
        with pytest.raises(ValueError, match=message), replay_routes(model, given):
            model(tokens)
    with pytest.raises(ValueError, match="has no router in the model"):
        replay_routes(experts_of(model)[0], {type(experts_of(model)[0]).__name__: ids})
