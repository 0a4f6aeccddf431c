"""A valid call of each public name of the package: tests/test_input.py changes one argument at a time."""

import io

import torch
from torch import nn

import moe_aiter as ours

T, H, E, K, N = 6, 8, 4, 2, 12
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
FP8 = torch.float8_e4m3fn


def rand(*shape: int, dtype: torch.dtype = F32) -> torch.Tensor:
    return torch.linspace(0.1, 0.9, torch.Size(shape).numel()).view(shape).to(dtype)


def ids() -> torch.Tensor:
    return torch.arange(T * K).view(T, K) % E


def mask() -> torch.Tensor:
    return torch.arange(T) < 4


def plan() -> ours.RoutePlan:
    return ours.make_plan(ids(), E)


def sizes(*rows: int) -> torch.Tensor:
    return torch.tensor(rows or (2, 0, 3, 1), dtype=torch.int32)


def small_moe(**options) -> ours.MoE:
    return ours.MoE(H, 4, E, K, **options)


def linears(count: int) -> list[nn.Linear]:
    return [nn.Linear(H, N) for _ in range(count)]


def experts_of(**more) -> dict:
    return {"x": rand(T, H), "routing_weights": rand(T, K), "plan": plan(), **more}


def products(**more) -> dict:
    return {"lhs": rand(6, H), "rhs": rand(4, H, N), "group_sizes": sizes(), **more}


def transposed(lhs: torch.Tensor, **more) -> dict:
    return {"lhs": lhs, "rhs": rand(6, N), "group_sizes": sizes(), "bias_grad": rand(4, H).clone(), **more}


def attended(**more) -> dict:
    heads = {name: rand(2, 2, 5, 8) for name in "qkv"}
    return {**heads, "mask": torch.ones(2, 5, dtype=torch.bool), "is_causal": True, "scale": 0.5, **more}


def bytes_of(**shapes: tuple[int, ...]) -> dict:
    return {name: torch.ones(shape, dtype=torch.int8) for name, shape in shapes.items()}


def trained_router() -> nn.Module:
    return small_moe(selection_bias=True).train()


def quantized_pair() -> dict:
    model = nn.Sequential(nn.Linear(16, 16))
    return {"model": model, "quantized": ours.quantize(model), "inputs": rand(3, 16)}


def trained(model: nn.Module) -> dict:
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters())}


def used(backend: str) -> None:
    with ours.use(backend):
        pass


ROUTER = {"top_k": K, "score": "softmax", "renormalize": True, "scale": 2.0}
WHERE = {"device": "cpu", "dtype": F32}
EXPERTS = {
    "activation": "swiglu",
    "bias": True,
    "interleaved": True,
    "row_chunks": 2,
    "recompute": "z",
    "fp8": "e4m3",
}
COEFFICIENTS = {
    f"{name}_coef": 0.1 for name in ("load_balance", "sequence_balance", "global_balance", "z_loss")
}
LORA = {"rank": 2, "alpha": 4.0, "rslora": True, "dora": True, "dropout": 0.1, "rank_dropout": 0.1}

# the package's own names: a function and the arguments of a valid call, made anew for each
OURS = {
    "Capacity": lambda: {"factor": 1.0, "drop": "position"},
    "ExpertChoice": lambda: {"max_per_token": 2},
    "Experts": lambda: {"num_experts": E, "hidden": H, "intermediate": 4, **EXPERTS, **WHERE},
    "Forced": lambda: {"how": "random"},
    "GroupLimit": lambda: {"num_groups": 2, "top_groups": 1, "score": "top2", "masked": 0.0},
    "LoRAExperts": lambda: {"base": ours.Experts(E, H, 4), **LORA},
    "LoRALinear": lambda: {"base": nn.Linear(H, N), "num_adapters": 2, **LORA},
    "LiveTable": lambda: {"file": io.StringIO()},
    "MoE": lambda: {
        "hidden": H,
        "intermediate": 4,
        "num_experts": E,
        "choice": None,
        "selection_bias": True,
        "quantile_bins": 0,
        "jitter": 0.1,
        "capacity": ours.Capacity(1.0),
        "zero_compute": ours.ZeroCompute(1),
        "latent": 4,
        "dense_router_gradient": False,
        "shared_intermediate": 4,
        "shared_gate": True,
        "global_balance_group": None,
        "batch_invariant": False,
        **ROUTER,
        **EXPERTS,
        **COEFFICIENTS,
        **WHERE,
    },
    "Monitor": lambda: {"model": small_moe(), "evaluation": True, "group": None},
    "OptimizedMoELayer": lambda: {
        "hidden_dim": H,
        "num_experts": E,
        "expert_dim": 4,
        "activation": "gelu",
        "fp8": "e4m3",
        **WHERE,
    },
    "offload": lambda: {"model": small_moe().requires_grad_(False), "device": "cpu", "ahead": 2},
    "pack_routes": lambda: {
        "sequences": [ids()[:, None]],
        "mask": torch.ones(1, T, dtype=torch.bool),
        "shape": (1, K),
        "dtype": "int32",
        "layers_first": False,
    },
    "record_routes": lambda: {"model": small_moe(), "weights": True},
    "replay_routes": lambda: {
        "model": small_moe(),
        "routes": ids()[:, None],
        "layers": [0],
        "layers_first": False,
        "tokens": torch.arange(T),
        "weights": False,
    },
    "Router": lambda: {
        "hidden": H,
        "num_experts": E,
        "choice": ours.GroupLimit(2, 1),
        "selection_bias": True,
        "jitter": 0.1,
        "bias": True,
        **ROUTER,
        **WHERE,
    },
    "SegmentGEMMWrapper": lambda: {
        "float_workspace_buffer": torch.ones(3, dtype=torch.uint8),
        "backend": "torch",
    },
    "Sinkhorn": lambda: {"iterations": 2},
    "SparsePattern": lambda: {
        "shape": (4, 6),
        "blocksize": (1, 1),
        "lists": ours.SparsePattern.from_dense(torch.eye(4, 6), (1, 1)).lists,
    },
    "TokenRounding": lambda: {"tile": 2, "to": "up", "max_added": 1},
    "TopP": lambda: {"p": 0.5},
    "ZeroCompute": lambda: {"identity": 2, "zero": 1, "real_share": 0.5},
    "attach_loss": lambda: {"x": rand(T, H), "loss": rand(1)[0]},
    "aux_loss": lambda: {"model": small_moe()},
    "balance_step": lambda: {
        "model": trained_router(),
        "rate": 0.1,
        "rule": "sign",
        "zero_mean": True,
        "group": None,
    },
    "batch_invariance_enabled": lambda: {},
    "enable_batch_invariance": lambda: {"on": False},
    "expert_mlp": lambda: experts_of(
        gate_up=rand(E, 8, H),
        down=rand(E, H, 4),
        activation="swiglu",
        interleaved=True,
        gate_up_bias=rand(E, 8),
        down_bias=rand(E, H),
        gate_up_main_grad=rand(E, 8, H),
        down_main_grad=rand(E, H, 4),
        row_chunks=2,
        recompute="z",
        fp8=None,
    ),
    "fuse_gate_up": lambda: {**dict(zip(("gate", "up"), linears(2), strict=True)), "trainable": True},
    "fuse_projections": lambda: {"model": nn.ModuleDict({"q_proj": nn.Linear(8, 8)}), "trainable": True},
    "fuse_qkv": lambda: {**dict(zip("qkv", linears(3), strict=True)), "trainable": True},
    "gemm": lambda: {
        "x": rand(T, H),
        "w": rand(H, N),
        "bias": rand(N),
        "activation": "relu",
        "alpha": 2.0,
        "beta": 0.5,
        "c": rand(T, N),
        "out_dtype": F32,
    },
    "glu": lambda: {"z": rand(T, H), "activation": "swiglu", "interleaved": True},
    "gmm": lambda: products(
        bias=rand(4, N),
        preferred_element_type=F32,
        existing_out=rand(6, N),
        work_stealing=True,
        grid_dim=4,
        trans_rhs=False,
    ),
    "grouped_gemm": lambda: {
        "input": rand(T, H),
        "weights": rand(E, H, N),
        "expert_ids": ids(),
        "topk": K,
        "routing_weights": rand(T, K),
        "reduce": "sum",
        "bias": rand(E, N),
        "out_dtype": F32,
    },
    "hash_experts": lambda: {"num_tokens": T, "num_experts": E, "top_k": K, "seed": 3, "device": "cpu"},
    "linear_with_split_bias": lambda: {"x": rand(T, H), "weight": rand(N, H), "bias": rand(N)},
    "load_balance_loss": lambda: {
        "scores": rand(T, E),
        "expert_ids": ids(),
        "mask": mask(),
        "zero_compute": ours.ZeroCompute(1),
    },
    "load_statistics": lambda: {"group_sizes": sizes()},
    "make_plan": lambda: {"expert_ids": ids(), "num_experts": E},
    "nptgmm": lambda: transposed(
        rand(H, 6),
        preferred_element_type=F32,
        existing_out=rand(4, H, N),
        accumulate=True,
        trans_lhs=False,
        bias_grad_from="lhs",
    ),
    "permute": lambda: {"x": rand(T, H), "plan": plan(), "routing_weights": rand(T, K)},
    "preshuffle_weights": lambda: {
        "model": nn.Linear(32, 16, dtype=BF16),
        "require_multiple": 16,
        "layout": (16, 16),
    },
    "ptgmm": lambda: transposed(
        rand(H, 6),
        preferred_element_type=F32,
        existing_out=rand(4, H, N),
        accumulate=True,
        grid_dim=3,
        trans_lhs=False,
        bias_grad_from="lhs",
    ),
    "quantization_report": quantized_pair,
    "quantize": lambda: {"model": nn.Sequential(nn.Linear(16, 16)), "dtype": "int8", "skip": ("0",)},
    "register_kernel": lambda: {"op": "gemm", "backend": "hopper", "takes": (F32,)},
    "route": lambda: {
        "logits": rand(T, E),
        "need_scores": True,
        "choice": ours.GroupLimit(2, 1),
        "selection_bias": rand(E),
        "mask": mask(),
        **ROUTER,
    },
    "route_to": lambda: {
        "logits": rand(T, E),
        "expert_ids": ids(),
        "routing_weights": rand(T, K),
        "score": "softmax",
        "renormalize": True,
        "scale": 2.0,
    },
    "scaled_gemm": lambda: {
        **bytes_of(x=(T, H), w=(H, N)),
        "x_scale": rand(T),
        "w_scale": rand(N),
        "bias": rand(N),
        "out_dtype": F32,
    },
    "segment_gmm": lambda: {
        "x": rand(6, H),
        "w": rand(4, H, N),
        "lens": sizes(1, 2, 3),
        "weight_indices": sizes(2, 0, 1),
        "out": torch.zeros(6, N),
    },
    "sequence_balance_loss": lambda: {
        "scores": rand(T, E),
        "expert_ids": ids(),
        "sequence_length": 3,
        "mask": mask(),
        "zero_compute": ours.ZeroCompute(1),
    },
    "set_aux_loss": lambda: {"model": small_moe(), "how": "return"},
    "set_loss_scale": lambda: {"model": small_moe(), "scale": 2.0},
    "sort_by_expert": lambda: {"expert_ids": ids(), "num_experts": E},
    "sparse_gemm": lambda: {
        "input": rand(T, 8),
        "weight": rand(4, 8),
        "sparsity_pattern": "block",
        "bias": rand(4),
        "transpose_weight": True,
        "blocksize": (2, 4),
    },
    "tgmm": lambda: {
        "x": rand(3, H),
        "y": rand(6, N),
        "group_sizes": sizes(),
        "order": torch.arange(6).int(),
        "top_k": 2,
    },
    "swiglu_limit": lambda: {"gate_max": 10.0, "up_limit": 10.0, "alpha": 1.702, "up_offset": 1.0},
    "swiglu_softcap": lambda: {"gate_cap": 4.0, "up_cap": 25.0},
    "topk": lambda: {"scores": rand(T, E), "k": K},
    "unfuse": lambda: {"model": nn.Sequential(*ours.fuse_qkv(*linears(3)))},
    "unpermute": lambda: {"x": rand(T * K, H), "plan": plan(), "routing_weights": rand(T, K)},
    "use_main_grad": lambda: trained(small_moe()),
    "z_loss": lambda: {"logits": rand(T, E), "mask": mask()},
}
