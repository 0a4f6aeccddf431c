"""Float32 main gradients in a plain training loop."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from moe_aiter import MoE, OptimizedMoELayer, use_main_grad

H, WIDTH, E, K, T = 16, 12, 6, 2, 13


def build(device, dtype=torch.float32):
    return nn.Sequential(
        nn.Linear(H, H, device=device, dtype=dtype), MoE(H, WIDTH, E, K, device=device, dtype=dtype)
    )


def train(model, optimizer, batches, hand_over=lambda: None, clip=True, set_to_none=True):
    norms = []
    for batch in batches:
        for x in batch:
            model(x).square().mean().backward()
        if clip:
            hand_over()
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.01))
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
    return norms


@pytest.mark.parametrize("set_to_none", [False, True])
@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("foreach", [False, True])
def test_a_loop_stays_as_it_was(device, clip, foreach, set_to_none):
    """AdamW, clipped and not, three steps of three micro-batches."""
    plain = build(device)
    model = copy.deepcopy(plain)
    batches = torch.randn(3, 3, T, H, device=device)
    want, got = (torch.optim.AdamW(m.parameters(), 1e-2, foreach=foreach) for m in (plain, model))
    hand_over = use_main_grad(model, got)
    want_norms = train(plain, want, batches, clip=clip)
    norms = train(model, got, batches, hand_over, clip, set_to_none)
    torch.testing.assert_close(norms, want_norms)
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q, msg=lambda m, name=name: f"{name}: {m}")
    weight = model[1].experts.down
    assert weight.grad is None and weight.main_grad.dtype == torch.float32
    assert weight.main_grad.count_nonzero() == 0


def test_sixteen_bit_weights_get_the_rounded_sum(device):
    """A micro-batch that alone changes nothing in bfloat16 counts."""
    model = build(device, torch.bfloat16)
    weight = model[1].experts.down
    hand_over = use_main_grad(model, torch.optim.SGD(model.parameters(), 1.0))
    x = torch.randn(T, H, device=device, dtype=torch.bfloat16)
    weight.main_grad.fill_(256.0)
    for _ in range(4):
        model(x).sum().backward()
    assert weight.grad is None
    hand_over()
    assert weight.grad.dtype == torch.bfloat16 and weight.main_grad.dtype == torch.float32
    assert torch.equal(weight.grad, weight.main_grad.bfloat16())
    added = weight.main_grad - 256
    assert ((added.abs() > 1e-3) & (added.abs() < 1)).any()


def test_what_is_handed_over_twice_is_what_there_is(device):
    model = build(device, torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    hand_over = use_main_grad(model, optimizer)
    x, weight = torch.randn(T, H, device=device, dtype=torch.bfloat16), model[1].experts.gate_up
    for _ in range(2):
        model(x).float().square().mean().backward()
        hand_over()
        assert torch.equal(weight.grad, weight.main_grad.bfloat16())
    clipped = weight.grad.zero_()
    before = weight.detach().clone()
    optimizer.step()
    assert torch.equal(weight, before), "the step took what was handed over, not what was clipped"
    assert weight.grad is None and clipped.count_nonzero() == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_step_takes_what_was_added_after_the_hand_over(device, dtype):
    model = build(device, dtype)
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    hand_over = use_main_grad(model, optimizer)
    x, weight = torch.randn(T, H, device=device, dtype=dtype), model[1].experts.gate_up
    before = weight.detach().clone()
    for i in range(3):
        model(x).float().square().mean().backward()
        if i == 0:
            hand_over()
    expected = before - weight.main_grad.to(dtype)
    optimizer.step()
    assert torch.equal(weight, expected)


def test_a_step_that_is_skipped_leaves_nothing(device):
    """As GradScaler skips one whose gradients are not finite."""
    model = build(device)
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    hand_over = use_main_grad(model, optimizer)
    model(torch.full((T, H), torch.inf, device=device)).sum().backward()
    hand_over()
    optimizer.zero_grad()
    weight = model[1].experts.down
    assert weight.grad is None and weight.main_grad.count_nonzero() == 0


def with_closure(model, optimizer, x):
    def closure():
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    assert optimizer.step(closure) > 0


def with_penalty(model, optimizer, x):
    """Its gradient is autograd's."""
    (model(x).square().mean() + model[1].experts.down.square().sum()).backward()
    optimizer.step()
    optimizer.zero_grad()


def with_zeros(model, optimizer, x):
    """Gradients that are there already."""
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    model(x).square().mean().backward()
    optimizer.step()


def frozen(model, optimizer, x):
    """A weight that is frozen is not even decayed, and its sister stays clipped."""
    model[1].experts.down.requires_grad_(False)
    model(x).square().mean().backward()
    getattr(optimizer, "hand_over", lambda: None)()
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    optimizer.step()


@pytest.mark.parametrize("step", [with_closure, with_penalty, with_zeros, frozen])
def test_other_loops(device, step):
    plain = build(device)
    model = copy.deepcopy(plain)
    want, got = (torch.optim.SGD(m.parameters(), 0.1, weight_decay=0.5) for m in (plain, model))
    got.hand_over = use_main_grad(model, got)
    for x in torch.randn(3, T, H, device=device):
        step(plain, want, x)
        step(model, got, x)
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q, msg=lambda m, name=name: f"{name}: {m}")


def test_which_weights(device):
    frozen = MoE(H, WIDTH, E, K, device=device)
    frozen.experts.down.requires_grad_(False)
    wide = MoE(H, WIDTH, E, K, device=device, dtype=torch.float64)
    other, left_out = OptimizedMoELayer(H, E, WIDTH), MoE(H, WIDTH, E, K, device=device)
    model = nn.ModuleList([frozen, wide, other, left_out])
    optimizer = torch.optim.SGD(nn.ModuleList([frozen, wide, other]).parameters(), 1.0)
    use_main_grad(model, optimizer)
    has = {name for name, p in model.named_parameters() if hasattr(p, "main_grad")}
    assert has == {"0.experts.gate_up", "1.experts.gate_up", "1.experts.down", "2.w1", "2.w2"}
    assert wide.experts.down.main_grad.dtype == torch.float64
    with pytest.raises(ValueError, match="no experts whose weights"):
        use_main_grad(nn.Linear(2, 2), optimizer)


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("handed", [False, True])
def test_a_weight_that_was_replaced_is_missed(device, handed, swap):
    """`optimizer` would go on with tensors that the model has lost."""
    model = build(device)
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    hand_over = use_main_grad(model, optimizer)
    state = {name: nn.Parameter(p.detach().clone()) for name, p in model.state_dict().items()}
    torch.__future__.set_swap_module_params_on_conversion(swap)
    try:
        model.load_state_dict(state, assign=True)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    model(torch.randn(T, H, device=device)).sum().backward()
    with pytest.raises(RuntimeError, match=r"Experts.gate_up is not the tensor .*load_state_dict"):
        hand_over() if handed else optimizer.step()
    other = torch.optim.SGD(model.parameters(), 1.0)
    use_main_grad(model, other)
    other.zero_grad()
    before = model[1].experts.down.detach().clone()
    model(torch.randn(T, H, device=device)).sum().backward()
    other.step()
    assert not torch.equal(before, model[1].experts.down)


def test_loading_by_copies_changes_nothing(device):
    model = build(device)
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    hand_over = use_main_grad(model, optimizer)
    model.load_state_dict(build(device).state_dict())
    model(torch.randn(T, H, device=device)).sum().backward()
    hand_over()
    down = model[1].experts.down
    wanted = down.detach() - down.main_grad
    optimizer.step()
    torch.testing.assert_close(down.detach(), wanted)


@pytest.mark.gpu
def test_no_gradient_is_written_beside_the_sum(no_debug):
    """The second micro-batch's backward pass takes less memory than one of the two gradients would."""
    model = MoE(1024, 1024, 32, 2, device="cuda", dtype=torch.bfloat16)
    use_main_grad(model, torch.optim.SGD(model.parameters(), 1.0))
    x = torch.randn(256, 1024, device="cuda", dtype=torch.bfloat16)
    model(x).sum().backward()
    out = model(x).sum()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out.backward()
    assert torch.cuda.max_memory_allocated() - before < model.experts.down.nbytes


def test_a_main_grad_that_is_another_is_said():
    """By a second call, for another optimizer say: the first would train with sums of nothing."""
    model = MoE(8, 6, 4, 2)
    first, second = (torch.optim.SGD(model.parameters(), 1.0) for _ in range(2))
    use_main_grad(model, first)
    use_main_grad(model, second)
    model(torch.randn(3, 8)).sum().backward()
    with pytest.raises(RuntimeError, match=r"the main_grad of Experts.gate_up .* another call"):
        first.step()
    second.step()


def saved(model, weights_only=False):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


def begun(device, dtype=torch.float32):
    """A model after a step with main gradients; what `use_main_grad` returned, and its optimizer."""
    model = build(device, dtype)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    hand_over = use_main_grad(model, optimizer)
    step_of(model, optimizer)
    return model, hand_over, optimizer


def step_of(model, optimizer):
    """A step that changes the experts."""
    weights = [p for name, p in model.named_parameters() if "experts" in name]
    before = [p.detach().clone() for p in weights]
    p = weights[0]
    model(torch.randn(T, H, device=p.device, dtype=p.dtype)).float().square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    assert weights and not any(map(torch.equal, before, weights))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), saved])
def test_a_copied_model_has_no_main_grad(device, copied):
    model, _, optimizer = begun(device)
    model[1].experts.down.tag = "kept"
    other = copied(model)
    weights = list(other[1].experts.parameters())
    assert not any(hasattr(w, "main_grad") for w in weights)
    assert copied is copy.deepcopy or weights[1].tag == "kept"
    step_of(other, torch.optim.SGD(other.parameters(), 0.1))
    assert hasattr(model[1].experts.down, "main_grad")
    step_of(model, optimizer)
    del model[1].experts.down.tag
    assert saved(list(model.parameters()), weights_only=True)  # as without main gradients


def test_what_users_gave_stays(device):
    """A `main_grad` that is not ours is theirs."""
    model = build(device)
    model[1].experts.down.main_grad = torch.ones(E, H, WIDTH, device=device)
    assert pickle.loads(pickle.dumps(model))[1].experts.down.main_grad.sum() == E * H * WIDTH
    step = torch.optim.SGD(model.parameters(), 0.1).step
    model(torch.randn(T, H, device=device)).sum().backward()
    step()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("gone", [False, True])
def test_a_new_optimizer_is_said(device, gone, dtype):
    model, hand_over, optimizer = begun(device, dtype)
    if gone:
        del hand_over, optimizer
    other = torch.optim.AdamW(model.parameters(), 0.1)
    with pytest.raises(RuntimeError, match=r"AdamW did not train .* call use_main_grad.* or remove\(\)"):
        step_of(model, other)
    use_main_grad(model, other)
    step_of(model, other)


@pytest.mark.parametrize("handed", [False, True])
def test_removed(device, handed):
    model, hand_over, optimizer = begun(device)
    if handed:
        model(torch.randn(T, H, device=device)).sum().backward()
        hand_over()
        optimizer.step()
    hand_over.remove()
    assert not any(hasattr(p, "main_grad") for p in model.parameters())
    step_of(model, optimizer)  # which knows plain gradients too
    step_of(model, torch.optim.AdamW(model.parameters(), 0.1))
    hand_over.remove()
    use_main_grad(model, optimizer)
    hand_over.remove()  # takes nothing that a later call gave
    assert hasattr(model[1].experts.down, "main_grad")
    step_of(model, optimizer)


def test_an_optimizer_around_another(device):
    """The inner one takes the gradients within the outer one's step."""

    class Outer(torch.optim.Optimizer):
        def __init__(self, inner):
            super().__init__(inner.param_groups, {})
            self.inner = inner

        def step(self):
            self.inner.step()

    model, _, optimizer = begun(device)
    step_of(model, Outer(optimizer))
