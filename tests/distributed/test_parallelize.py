"""Models sharded by `parallelize` against one process with the batches of all ranks."""

import copy
import functools
import math
import pickle

import pytest
import torch
import torch.distributed as dist
from check import error, few
from hostile import Plant
from safetensors.torch import load_file
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint

from moe_aiter import (
    Experts,
    LoRAExperts,
    MoE,
    ZeroCompute,
    aux_loss,
    balance_step,
    set_aux_loss,
    use_main_grad,
)
from moe_aiter.config import interpret
from moe_aiter.distributed import (
    clip_grad_norm_,
    expert_mesh,
    export_safetensors,
    load_sharded,
    parallelize,
    parameter_groups,
    reduce_gradients,
    save_sharded,
)

from .ranks import gpus, run, whole
from .shared_memory import use_files

if interpret:
    pytest.skip("nothing here runs Triton", allow_module_level=True)

E, T, H = 16, 24, 32


class Block(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.norm, self.moe = nn.LayerNorm(H), MoE(H, 16, E, 3, bias=True, **options)
        self.repeats = False

    def forward(self, x):
        inner = lambda x: self.moe(self.norm(x))  # noqa: E731
        return x + (checkpoint(inner, x, use_reentrant=False) if self.repeats else inner(x))


def kind() -> str:
    """The device of this process."""
    return "cuda" if dist.is_initialized() and dist.get_backend() == "nccl" else "cpu"


def build(**options) -> nn.Module:
    torch.manual_seed(0)
    options = {"shared_intermediate": 8, "selection_bias": True} | options
    return nn.Sequential(nn.Linear(H, H), Block(**options), Block(**options)).to(kind())


def batches(world: int, step: int) -> torch.Tensor:
    return torch.randn(world, T, H, generator=torch.Generator().manual_seed(step)).to(kind())


def loss_of(model, x):
    return (model(x) - x.roll(1, -1)).square().mean()


def optimizer_of(model):
    return torch.optim.AdamW(parameter_groups(model), 1e-2, fused=True)


def compare(model, alone, what, tolerance=1e-6):
    for (name, p), q in zip(model.named_parameters(), alone.parameters(), strict=True):
        got, want = what(p), what(q)
        assert error(whole(got), want) < tolerance, f"{name}: {error(whole(got), want):.1e}"


def mean_of(loss):
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def check_steps(rank, world, ep, folder):
    """Gradients, clipped by either norm, two steps, and checkpoints."""
    tight = {"cpu": 1e-6, "cuda": 1e-5}[kind()]  # a GPU adds up in other orders
    for norm_type in (2.0, math.inf):
        alone, model = build(), parallelize(build(), expert_mesh(kind(), ep))
        optimizers = [torch.optim.AdamW(alone.parameters(), 1e-2), optimizer_of(model)]
        for step in range(2):
            x = batches(world, step)
            want = loss_of(alone, x.flatten(0, 1))
            want.backward()
            loss = loss_of(model, x[rank])
            loss.backward()
            assert error(mean_of(loss), want.detach()) < tight
            compare(model, alone, lambda p: p.grad, tight if step == 0 else 100 * tight)
            norm = nn.utils.clip_grad_norm_(alone.parameters(), 0.1, norm_type)
            assert error(clip_grad_norm_(model.parameters(), 0.1, norm_type), norm) < (
                tight if step == 0 else 10 * tight
            )
            compare(model, alone, lambda p: p.grad, tight if step == 0 else 100 * tight)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    save_sharded(folder / f"{world}-{ep}", model, optimizers[1])
    with pytest.raises(FileExistsError):
        save_sharded(folder / f"{world}-{ep}", model, optimizers[1])
    export_safetensors(folder / f"{world}-{ep}.safetensors", model)
    for name, weight in load_file(folder / f"{world}-{ep}.safetensors").items():
        assert torch.equal(weight, whole(model.state_dict()[name]).cpu()), name
    loss = mean_of(loss_of(model, batches(4, 9)[:world].flatten(0, 1)))
    if rank == 0:
        torch.save(loss, folder / f"{world}-{ep}.loss")


def check_load(world, ep, folder, saved_by="4-2"):
    """What more ranks saved (ranks-ep), in a model of other weights on any mesh; then the same loss."""
    model = build()
    with torch.no_grad():
        for t in (*model.parameters(), *model.buffers()):
            t.zero_()
    if world > 1:
        parallelize(model, expert_mesh(kind(), ep))
    optimizer = optimizer_of(model)
    load_sharded(folder / saved_by, model, optimizer)
    saved = load_file(folder / f"{saved_by}.safetensors")
    assert saved.keys() == model.state_dict().keys()
    for name, t in model.state_dict().items():
        assert torch.equal(whole(t).cpu(), saved[name]), name
    moments = {name: [whole(optimizer.state[p][key]) for key in ("exp_avg", "exp_avg_sq")]
               for name, p in model.named_parameters()}  # fmt: skip
    before = folder / "moments.pt"
    if f"{world}-{ep}" == saved_by and dist.get_rank() == 0:
        torch.save(moments, before)
    if world < int(saved_by[0]):
        for name, values in torch.load(before, kind()).items():
            assert all(map(torch.equal, values, moments[name])), name
    loss = loss_of(model, batches(4, 9)[: int(saved_by[0])].flatten(0, 1))
    loss = mean_of(loss) if world > 1 else loss.detach()
    assert error(loss, torch.load(folder / f"{saved_by}.loss", kind())) < 1e-6


def check_a_rank_without_rows(rank, world, ep):
    """All tokens go to the first experts: the others' gradients are zeros, and everything is finite."""
    model = parallelize(build(selection_bias=False), expert_mesh(kind(), ep))
    for block in model[1:]:
        with torch.no_grad():
            block.moe.router.bias.to_local().fill_(0)
        block.moe.router.register_forward_hook(lambda m, i, routing: routing._replace(
            expert_ids=routing.expert_ids.new_tensor([0, 1, 2]).expand(T, 3)))  # fmt: skip
    loss_of(model, batches(world, 0)[rank]).backward()
    norm = clip_grad_norm_(model.parameters(), 1.0)
    assert norm.isfinite() and norm > 0
    for block in model[1:]:
        grad = whole(block.moe.experts.down.grad)
        assert grad[:3].count_nonzero() and not grad[3:].count_nonzero()


def check_experts_alone(rank, world, ep):
    """Without FSDP2: `reduce_gradients` makes means, of main gradients too."""
    alone, model = build(), parallelize(build(), expert_mesh("cpu", ep), fsdp=False)
    hand_over = use_main_grad(model, optimizer_of(model))
    x = batches(world, 0)
    loss_of(alone, x.flatten(0, 1)).backward()
    loss_of(model, x[rank]).backward()
    reduce_gradients(model, expert_mesh("cpu", ep))
    hand_over()
    compare(model, alone, lambda p: p.grad)


def check_balance(rank, world, ep):
    """The global balance loss and the selection bias count the tokens of all ranks."""
    options = {"global_balance_coef": 0.1, "shared_intermediate": 0}
    alone, x = build(**options), batches(world, 0)
    loss_of(alone, x.flatten(0, 1)).backward()
    for how in ("return", "attach"):
        model = build(**options, global_balance_group=dist.group.WORLD)
        set_aux_loss(model, how)
        parallelize(model, expert_mesh("cpu", ep))
        loss = loss_of(model, x[rank])
        (loss + aux_loss(model)).backward()  # of attached losses a number
        compare(model, alone, lambda p: p.grad)
    balance_step(alone)
    balance_step(model, group=dist.group.WORLD)
    for ours, theirs in zip(model[1:], alone[1:], strict=True):
        assert torch.equal(ours.moe.router.selection_bias, theirs.moe.router.selection_bias)


def check_memory_options(rank, world, ep):
    """Checkpointing, weights that stay whole, bfloat16, and parameters on the meta device."""
    alone, x = build(), batches(world, 0)
    loss_of(alone, x.flatten(0, 1)).backward()
    model = parallelize(build(), expert_mesh("cpu", ep), reshard_after_forward=False)
    for block in model[1:]:
        block.repeats = True
    loss_of(model, x[rank]).backward()
    compare(model, alone, lambda p: p.grad)

    policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)
    model = parallelize(build(), expert_mesh("cpu", ep), mp_policy=policy)
    seen = []
    model[1].moe.experts.register_forward_pre_hook(lambda m, inputs: seen.extend(t.dtype for t in inputs[:2]))
    loss_of(model, x[rank].bfloat16()).backward()
    assert seen == [torch.bfloat16, torch.float32]
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())
    halves = [build().bfloat16() for _ in range(world)]
    for half, batch in zip(halves, x, strict=True):
        loss_of(half, batch.bfloat16()).backward()
    for ours, *theirs in zip(model.parameters(), *(half.parameters() for half in halves), strict=True):
        mean = sum(p.grad.float() for p in theirs) / world
        # with ep > 1 a token's sum is rounded on each rank, so that the next router may choose another expert
        assert error(whole(ours.grad), mean) < (2e-2 if ep == 1 else 0.25)

    model = parallelize(build().to("meta"), expert_mesh("cpu", ep)).to_empty(device="cpu")
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    for p in model.parameters():
        assert whole(p).isfinite().all() and whole(p).abs().max() <= 1


def check_reduce_dtypes(rank, world, ep):
    """Gradients are means of the ranks', whatever dtype they are reduced in."""
    torch.manual_seed(0)
    alone, x = nn.Sequential(MoE(H, 8, 12, 2, bias=True)).to(kind()), batches(world, 0)
    loss_of(alone, x.flatten(0, 1)).backward()
    half, wide = (torch.float16, torch.bfloat16), (torch.float32, torch.float64)
    cases = [(torch.float32, reduce) for reduce in (*half, *wide)] + [
        (dtype, None) for dtype in (*half, *wide)
    ]
    for dtype, reduce in cases:
        model = copy.deepcopy(alone).to(dtype)
        model.zero_grad()
        parallelize(model, expert_mesh(kind(), ep), mp_policy=MixedPrecisionPolicy(reduce_dtype=reduce))
        loss_of(model, x[rank].to(dtype)).backward()
        # with 16-bit tokens a router may choose other experts; a wrong divisor is off by half or more
        limit = 0.35 if dtype in half else 0.02 if reduce in half else 1e-5
        for (name, ours), theirs in zip(model.named_parameters(), alone.parameters(), strict=True):
            found = error(whole(ours.grad).double(), theirs.grad.double())
            assert found < limit, f"{name}, {dtype} reduced in {reduce}: {found}"


def check_errors(rank, world, ep):
    mesh = expert_mesh("cpu", ep)
    with pytest.raises(ValueError, match=f"ep=3 does not divide the world of {world} ranks: try ep=1, ep=2"):
        expert_mesh("cpu", 3)
    with pytest.raises(ValueError, match="no MoE layer"):
        parallelize(nn.Linear(3, 3), mesh)
    with pytest.raises(ValueError, match="must have the axes"):
        parallelize(build(), mesh["ep"])
    model = build()
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.warns(UserWarning, match="SGD was made before parallelize and holds parameters that"):
        parallelize(model, mesh)
    del optimizer
    with pytest.raises(ValueError, match=r"reduce_dtype=torch.float32"):
        use_main_grad(model, optimizer_of(model))
    with pytest.raises(ValueError, match="sharded by FSDP2 already"):
        parallelize(model, mesh)
    if ep > 1:
        experts = parallelize(build(), mesh, fsdp=False)[1].moe.experts
        with pytest.raises(ValueError, match="shared among ranks already"):
            parallelize(experts, mesh)
    if world // ep > 1 and ep > 1:
        with pytest.raises(ValueError, match="experts has 7 experts, which ep=2 does not divide: try ep=1"):
            parallelize(MoE(H, 8, 7, 2), mesh)


def check_structures(rank, world, ep):
    """Lists within lists; experts with adapters as the model; refusals that leave the model as it was."""
    mesh = expert_mesh("cpu", ep)
    nested = nn.Module()
    nested.layers = nn.ModuleList([nn.ModuleList([nn.Linear(H, H), Block()])])
    assert all(isinstance(m, FSDPModule) for m in parallelize(nested, mesh).layers[0])
    adapters = parallelize(LoRAExperts(Experts(E, H, 8), rank=2), mesh)
    assert isinstance(adapters, FSDPModule) and not isinstance(adapters.base, FSDPModule)
    tied = build()
    tied[2].moe.experts.down = tied[1].moe.experts.down
    with pytest.raises(ValueError, match=r"1.moe.experts.down and 2.moe.experts.down are one parameter"):
        parallelize(tied, mesh)
    if ep == 4:
        half = nn.Sequential(MoE(H, 8, E, 2), MoE(H, 8, 6, 2))
        with pytest.raises(ValueError, match="leaves ranks without an expert"):
            parallelize(half, mesh)
        assert half[0].experts.dispatcher is None


def check_reduction(rank, world, ep):
    """Gradients of any strides; a mean of large float16 numbers."""
    model, mesh = nn.Linear(3, 2), expert_mesh("cpu", ep)
    model.weight.grad = torch.full((3, 2), 1.0 + rank).t()
    model.bias.grad = torch.full((2,), 1.0 + rank)
    reduce_gradients(model, mesh)
    for p in model.parameters():
        assert torch.equal(p.grad, torch.full_like(p, (world + 1) / 2))
    half = nn.Linear(3, 2).half()
    half.bias.grad = torch.full((2,), 40000.0, dtype=torch.float16)
    reduce_gradients(half, mesh)
    assert torch.equal(half.bias.grad, torch.full((2,), 40000.0, dtype=torch.float16))


def check_saving(rank, world, folder):
    """Saving before the first step changes nothing; what fails on the first rank fails on all."""
    model = parallelize(build(), expert_mesh("cpu", 2))
    optimizer = optimizer_of(model)
    optimizer.register_step_post_hook(lambda *_: balance_step(model))
    model(batches(world, 0)[rank])
    before = [buffer.clone() for buffer in model.buffers()]
    assert sum(buffer.sum() for buffer in before) > 0
    save_sharded(folder / f"early-{world}", model, optimizer)
    assert all(map(torch.equal, model.buffers(), before))
    path, mark = folder / f"early-{world}", folder / f"mark-{world}"
    load_sharded(path, model, optimizer)
    assert not optimizer.state
    dist.barrier()
    if rank == 0:
        (path / ".metadata").write_bytes(pickle.dumps(Plant(mark)))
    with pytest.raises(ValueError, match=r"its pickle names 'io.open', which is not run"):
        load_sharded(path, model, optimizer)
    assert not mark.exists()
    with pytest.raises(OSError, match="cannot be written"):
        export_safetensors(folder / "nowhere" / "model.safetensors", model)

    def fail(draft):
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="the disk is full"):
        save_sharded(folder / f"failed-{world}", model, optimizer, finish=fail)
    tied = nn.Sequential(*[nn.Linear(H, H, bias=False) for _ in range(2)], MoE(H, 8, E, 2))
    tied[1].weight = tied[0].weight
    export_safetensors(
        folder / f"tied-{world}.safetensors", parallelize(tied, expert_mesh("cpu", 2), fsdp=False)
    )
    found = load_file(folder / f"tied-{world}.safetensors")
    assert torch.equal(found["0.weight"], found["1.weight"])


def check_newest(rank, world, ep):
    """Experts without weights and latent ones: the dispatcher gets the rows and the width of real experts."""
    options = {"zero_compute": ZeroCompute(4, 2), "latent": 12}
    alone, model = build(**options), parallelize(build(**options), expert_mesh("cpu", ep))
    x = batches(world, 0)
    loss_of(alone, x.flatten(0, 1)).backward()
    loss_of(model, x[rank]).backward()
    compare(model, alone, lambda p: p.grad)
    alone, x = MoE(H, 8, E, 3, selection_bias=True, quantile_bins=50), torch.randn(world * T, H)
    model = copy.deepcopy(alone)
    alone(x)
    model(x.chunk(world)[rank])
    balance_step(alone, rule="quantile")
    balance_step(model, rule="quantile", group=dist.group.WORLD)
    torch.testing.assert_close(model.router.selection_bias, alone.router.selection_bias)


def few_experts(rank, world, ep):
    """More ranks than experts: FSDP2 shards each expert."""
    torch.manual_seed(0)
    alone = nn.Sequential(MoE(H, 16, 2, 1))
    model = parallelize(copy.deepcopy(alone), expert_mesh("cpu", ep))
    x = batches(world, 0)
    loss_of(alone, x.flatten(0, 1)).backward()
    loss_of(model, x[rank]).backward()
    compare(model, alone, lambda p: p.grad)


def reduce_dtypes(rank, world, folder):
    for ep in range(1, world + 1):
        if world % ep == 0:
            check_reduce_dtypes(rank, world, ep)


def test_reduce_dtypes_of_three_ranks(tmp_path):
    run(3, reduce_dtypes, tmp_path)


def everything(rank, world, folder, meshes):
    for ep in meshes:
        check_reduce_dtypes(rank, world, ep)
        check_a_rank_without_rows(rank, world, ep)
        check_experts_alone(rank, world, ep)
        check_balance(rank, world, ep)
        check_memory_options(rank, world, ep)
        check_reduction(rank, world, ep)
        check_newest(rank, world, ep)
    few_experts(rank, world, 2)
    steps(rank, world, folder, meshes)


def steps(rank, world, folder, meshes):
    for ep in meshes:
        check_steps(rank, world, ep, folder)
        check_errors(rank, world, ep)
    for ep in sorted({*meshes, world}):  # with ep=4 some ranks have no expert
        check_structures(rank, world, ep)
    check_saving(rank, world, folder)
    for ep in meshes:
        check_load(world, ep, folder)


def through_memory(rank, world, folder):
    with pytest.MonkeyPatch.context() as patch:
        use_files(folder, patch)
        check_steps(rank, world, 2, folder)
        check_a_rank_without_rows(rank, world, 2)
        check_memory_options(rank, world, 2)


@pytest.mark.parametrize("whole", few([True, False], False))
def test_sharded_models(whole, tmp_path):
    checks, meshes = (everything, (1, 2, 4)) if whole else (steps, (2,))
    run(4, functools.partial(checks, meshes=meshes), tmp_path)
    (tmp_path / "store").unlink()
    run(2, functools.partial(everything, meshes=(1, 2)), tmp_path)
    check_load(1, 1, tmp_path)


@pytest.mark.parametrize("world", few([2, 4], 2))
def test_models_sharded_through_memory(world, tmp_path):
    run(world, through_memory, tmp_path)


def steps_on_gpus(rank, world, folder):
    reduce_dtypes(rank, world, folder)
    for ep in (2**i for i in range(world.bit_length())):
        check_steps(rank, world, ep, folder)
        check_a_rank_without_rows(rank, world, ep)
    check_load(world, world // 2, folder, f"{world}-{world // 2}")


def load_on_gpus(rank, world, folder):
    check_load(world, world, folder, f"{2 * world}-{world}")


@pytest.mark.gpu
@pytest.mark.skipif(gpus() < 2, reason="there are no two GPUs")
def test_sharded_models_on_gpus(tmp_path):
    run(gpus(), steps_on_gpus, tmp_path, "nccl")
    (tmp_path / "store").unlink()
    run(gpus() // 2, load_on_gpus, tmp_path, "nccl")


def test_clipping_without_processes():
    """As torch's function, for plain tensors."""
    model, other = build(), build()
    for m in (model, other):
        loss_of(m, batches(1, 0)[0]).backward()
    for norm_type in (1.0, 2.0, math.inf):
        norms = [fn(m.parameters(), 0.01, norm_type) for fn, m in
                 ((clip_grad_norm_, model), (nn.utils.clip_grad_norm_, other))]  # fmt: skip
        torch.testing.assert_close(*norms)
        compare(model, other, lambda p: p.grad)
    assert clip_grad_norm_([torch.ones(3)], 1.0) == 0
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.tensor([1.0, torch.inf])
    with pytest.raises(RuntimeError, match=r"norm of order 2.0"):
        clip_grad_norm_(weight, 1.0, error_if_nonfinite=True)
