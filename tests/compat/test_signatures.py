"""Every signature of `moe_aiter.compat` beside upstream's: names, order, defaults."""

import enum
import importlib
import inspect
import pathlib
import pkgutil
import re

import pytest
import torch

from moe_aiter import compat
from moe_aiter.compat import aiter
from moe_aiter.compat.aiter.fused_moe import fused_moe, moe_sorting
from moe_aiter.compat.aiter.ops.triton.gmm import gmm
from moe_aiter.compat.aiter.ops.triton.utils.gmm_common import DEVICE, gen_gmm_tensors, gen_tgmm_tensors
from moe_aiter.compat.flashinfer.gemm import BACKENDS, bmm_fp8
from moe_aiter.compat.flashinfer.grouped_mm import grouped_mm_bf16

DRAWN = (
    "input_type=torch.bfloat16, output_type=torch.bfloat16, group_sizes_dtype=torch.int32, {}device=DEVICE, "
    "{}alt_trans=False, rng_seed=0, unif_group_sizes=False, use_bias=False"
)
INPUT = (
    "M, K, N, G, preferred_element_type=torch.bfloat16, group_sizes_dtype=torch.int32, device=DEVICE, "
    "{}=False, {}alt_trans=False, rng_seed=0, unif_group_sizes=False"
)
PROBABILITIES = "rng_seed=0, unused_tokens_prob=0.0, unused_experts_prob=0.1"
TENSORS, BOTH = "M, K, N, G, num_group_sizes, ", "trans_lhs=False, trans_rhs=False, "
SUM = "preferred_element_type=torch.bfloat16, existing_out=None, accumulate=False, config=None"
SCALES = "lhs_scale=None, rhs_scale=None"
OURS = "preferred_element_type=None, existing_out=None, accumulate=False, config=None"

# AITER e4048607a5 and FlashInfer fb28d7242, both of 22 August 2026; the eight names of AITER's
# docs/api/gemm.rst, which its package does not have, as documented there
UPSTREAM = {
    # aiter.ops.triton.gmm, _triton_kernels.gmm
    "gmm": "lhs, rhs, group_sizes, bias=None, preferred_element_type=torch.bfloat16, existing_out=None, "
    "work_stealing=False, config=None, grid_dim=None",
    "ptgmm": f"lhs, rhs, group_sizes, bias_grad=None, {SUM}, grid_dim=None",
    "nptgmm": f"lhs, rhs, group_sizes, bias_grad=None, {SUM}",
    "get_config": "gmm_type, M, K, N, G, accumulate=False",
    # aiter.ops.triton.utils.gmm_common
    "dtype_from_str": "dtype_str",
    "str_from_dtype": "dtype",
    "group_sizes_dtype_from_str": "dtype_str",
    "str_from_group_sizes_dtype": "dtype",
    "check_group_sizes_dtype": "dtype",
    "is_power_of_2": "x",
    "check_input_device_dtype": "lhs, rhs, group_sizes, bias=None",
    "check_bias_shape_stride": "bias, G, N",
    "gen_uniform_group_sizes": "M, G, group_sizes_dtype=torch.int32, device=DEVICE",
    "gen_group_sizes": f"M, G, group_sizes_dtype=torch.int32, device=DEVICE, {PROBABILITIES}",
    "gen_multiple_group_sizes": "num_group_sizes, M, G, group_sizes_dtype=torch.int32, device=DEVICE, "
    f"{PROBABILITIES}, group_sizes_0=None",
    "gen_gmm_input": INPUT.format("trans_rhs", ""),
    "gen_tgmm_input": INPUT.format("trans_lhs", ""),
    "gen_gmm_output": "M, N, preferred_element_type=torch.bfloat16, device=DEVICE",
    "gen_tgmm_output": "K, N, G, preferred_element_type=torch.bfloat16, device=DEVICE",
    "gen_tgmm_bias_grad": "K, G, device=DEVICE, with_bias_grad=False",
    "gen_gmm_tensors": TENSORS + DRAWN.format("", BOTH),
    "gen_tgmm_tensors": TENSORS + DRAWN.format("", BOTH),
    "get_gmm_shape": "lhs, rhs, group_sizes",
    "get_tgmm_shape": "lhs, rhs, group_sizes",
    "get_gmm_output": "M, N, device=DEVICE, preferred_element_type=torch.bfloat16, existing_out=None",
    "get_tgmm_output": "K, N, G, device=DEVICE, preferred_element_type=torch.bfloat16, existing_out=None",
    "get_tgmm_bias_grad": "K, G, device=DEVICE, existing_bias_grad=None",
    "get_gmm_transposition": "lhs, rhs, out",
    "get_tgmm_transposition": "lhs, rhs, out",
    # aiter.ops, aiter.tuned_gemm
    "deepgemm": "XQ, WQ, Y, group_layout, x_scale=None, w_scale=None",
    "shuffle_weight": "x, layout=(16, 16), use_int4=False, is_guinterleave=False, gate_up=False, pad_k_to=0",
    "gemm_a8w8": "XQ, WQ, x_scale, w_scale, bias=None, dtype=torch.bfloat16, splitK=None",
    "gemm_a16w16": "A, B, bias=None, otype=None, scale_a=None, scale_b=None, scale_c=None",
    "get_GEMM_A16W16_config": "M, N, K, bias, dtype, otype, scaleAB=False, bpreshuffle=False",
    "TunedGemm": "",
    "TunedGemm.mm": "inp, weights, bias=None, otype=None, scale_a=None, scale_b=None, scale_c=None",
    # docs/api/gemm.rst
    "grouped_gemm": "input, weights, expert_ids, topk=None",
    "batched_gemm": "a, b, transpose_a=False, transpose_b=False",
    "gemm_bias": "input, weight, bias, transpose_weight=True",
    "gemm_gelu": "input, weight, bias=None",
    "gemm_relu": "input, weight, bias=None",
    "cutlass_gemm": "a, b, alpha=1.0, beta=0.0, c=None",
    "sparse_gemm": "input, weight, sparsity_pattern",
    "int8_gemm": "input, weight, input_scale, weight_scale, output_dtype=torch.float16",
    # aiter.fused_moe, aiter.ops.moe_op, aiter.ops.topk
    "fused_moe": "hidden_states, w1, w2, topk_weight, topk_ids, expert_mask=None, activation=0, "
    "quant_type=0, doweight_stage1=False, w1_scale=None, w2_scale=None, a1_scale=None, a2_scale=None, "
    "block_size_M=None, num_local_tokens=None, moe_sorting_dispatch_policy=0, dtype=None, "
    "hidden_pad=0, intermediate_pad=0, bias1=None, bias2=None, splitk=0, swiglu_limit=None, beta=None, "
    "linear_beta=None, gate_mode='separated', shared_w1=None, shared_w2=None, shared_w1_scale=None, "
    "shared_w2_scale=None, shared_expert_id=-1, stage2_scatter=None",
    "moe_sorting": "topk_ids, topk_weights, num_experts, model_dim, moebuf_dtype, block_size=32, "
    "expert_mask=None, num_local_tokens=None, dispatch_policy=0, return_local_topk_ids=False, "
    "accumulate=True, flat=False, output_aux=False",
    "topk_softmax": "topk_weights, topk_indices, token_expert_indices, gating_output, need_renorm, "
    "num_shared_experts=0, shared_expert_scoring_func=''",
    "biased_grouped_topk": "gating_output, correction_bias, topk_weights, topk_ids, num_expert_group, "
    "topk_group, need_renorm, routed_scaling_factor=1.0",
    "grouped_topk": "gating_output, topk_weights, topk_ids, num_expert_group, topk_group, need_renorm, "
    "is_softmax=True, routed_scaling_factor=1.0",
    # flashinfer.grouped_mm
    "grouped_mm_bf16": "a, b, m_indptr, out=None, out_dtype=torch.bfloat16, *, backend='cudnn', tactic=-1",
    # flashinfer.gemm
    "bmm_fp8": "A, B, A_scale, B_scale, dtype, out=None, backend='cublas'",
    "SegmentGEMMWrapper": "float_workspace_buffer, backend='auto'",
    "SegmentGEMMWrapper.reset_workspace_buffer": "float_workspace_buffer, int_workspace_buffer",
    "SegmentGEMMWrapper.run": "x, weights, batch_size, weight_column_major, out=None, seg_lens=None, "
    "seg_indptr=None, weight_indices=None",
}
DIFFERENT = {  # on purpose: docs/products.md says of each how
    "gmm": "lhs, rhs, group_sizes, *fourth, bias=None, preferred_element_type=None, existing_out=None, "
    f"work_stealing=False, config=None, grid_dim=None, trans_rhs=None, {SCALES}",
    "ptgmm": f"lhs, rhs, group_sizes, *fourth, bias_grad=None, {OURS}, grid_dim=None, trans_lhs=None, "
    f"bias_grad_from='lhs', {SCALES}",
    "nptgmm": f"lhs, rhs, group_sizes, *fourth, bias_grad=None, {OURS}, trans_lhs=None, "
    f"bias_grad_from='lhs', {SCALES}",
    "get_config": "gmm_type, M, K, N, G, accumulate=False, *, dtype=None, trans=None",
    "gen_multiple_group_sizes": "num_group_sizes, M, G, group_sizes_dtype=torch.int32, device=DEVICE, "
    f"{PROBABILITIES}, *, group_sizes_0=None",
    "gen_gmm_input": INPUT.format("trans_rhs", "*, "),
    "gen_tgmm_input": INPUT.format("trans_lhs", "*, "),
    "gen_gmm_tensors": TENSORS + DRAWN.format("*, ", BOTH),
    "gen_tgmm_tensors": TENSORS + DRAWN.format("*, ", BOTH),
    "deepgemm": "XQ, WQ, Y, group_layout=None, x_scale=None, w_scale=None, *, masked_m=None, "
    "weight_shuffled=None",
    "shuffle_weight": "x, layout=(16, 16), use_int4=False",
    "gemm_a16w16": UPSTREAM["gemm_a16w16"] + ", *, is_shuffled=None",
    "grouped_gemm": UPSTREAM["grouped_gemm"] + ", *, routing_weights=None, reduce=None, bias=None, "
    "out_dtype=None",
    "gemm_gelu": "input, weight, bias=None, transpose_weight=True, approximate='none'",
    "gemm_relu": "input, weight, bias=None, transpose_weight=True",
    "sparse_gemm": "input, weight, sparsity_pattern=None, *, bias=None, transpose_weight=True, "
    "blocksize=None",
    "SegmentGEMMWrapper.run": "x, weights, batch_size, weight_column_major, seg_lens=None, seg_indptr=None, "
    "weight_indices=None, *, out=None",
}
# upstream has no function of this name: a guide shows calls, or we have added it
WITHOUT = [
    "AITERAttention", "AITERConv2d", "AITERLinear", "ShuffledWeight", "attention", "conv2d",
    "dynamic_conv2d", "dynamic_shapes_enabled", "enable_dynamic_shapes", "enable_fusion",
    "enable_tensor_cores", "fusion_enabled", "gelu", "get_cache_size", "get_default_precision",
    "get_kernel", "get_log_level", "linear", "list_kernels", "matmul", "quantize", "register_kernel",
    "set_cache_size", "set_default_precision", "set_log_level", "tensor_cores_enabled",
    "unshuffle_weight",
]  # fmt: skip
DOCS = pathlib.Path(__file__).parents[2] / "docs" / "products.md"


def functions() -> dict:
    found = {}
    for module in pkgutil.walk_packages(compat.__path__, f"{compat.__name__}."):
        module = importlib.import_module(module.name)
        found |= {name: getattr(module, name) for name in getattr(module, "__all__", ())}
    classes = [item for item in found.items() if inspect.isclass(item[1]) and item[0] in UPSTREAM]
    for name, kind in classes:
        methods = vars(kind).items()
        found |= {f"{name}.{m}": fn for m, fn in methods if inspect.isfunction(fn) and not m.startswith("_")}
    return {name: fn for name, fn in found.items() if callable(fn) and not isinstance(fn, enum.EnumMeta)}


def signature(fn) -> str:
    """Its parameters as above: no annotations, no self."""
    given = inspect.signature(fn).parameters.values()
    given = [p.replace(annotation=p.empty) for p in given if p.name != "self"]
    given = [p.replace(default=p.default.value) if isinstance(p.default, enum.Enum) else p for p in given]
    text = str(inspect.Signature(given)).removeprefix("(").removesuffix(")")
    return text.replace(f"device={DEVICE!r}", "device=DEVICE")


def differing(one: str, other: str) -> set[str]:
    """The parameters that only one of two signatures has, or that have another place or default there."""

    def places(text: str) -> dict:
        parameters = inspect.signature(
            eval(f"lambda {text}: 0", {"torch": torch, "DEVICE": DEVICE})
        ).parameters
        named = [n for n, p in parameters.items() if p.kind == p.KEYWORD_ONLY]
        order = [n for n in parameters if n not in named]
        return {n: (p.default, order.index(n) if n in order else "name") for n, p in parameters.items()}

    one, other = places(one), places(other)
    return {name for name in one | other if one.get(name) != other.get(name)}


def test_signatures_are_those_of_upstream():
    found = functions()
    alias = {"SegmentGEMMWrapper.forward": "SegmentGEMMWrapper.run"}
    assert all(found[name] is found[other] for name, other in alias.items())
    assert found.keys() - alias.keys() - {*WITHOUT} == UPSTREAM.keys()
    assert {name: signature(found[name]) for name in UPSTREAM} == UPSTREAM | DIFFERENT


def test_the_document_says_what_differs_and_nothing_else():
    section = DOCS.read_text().partition("## Signatures\n")[2].partition("\n## ")[0]
    rows = {}
    for names, text in re.findall(r"^\| (`.+?) \| (.+) \|$", section, re.MULTILINE):
        rows |= dict.fromkeys(re.findall(r"`([\w.]+)`", names), text)
    assert rows.keys() == DIFFERENT.keys()
    for name, ours in DIFFERENT.items():
        parameters = differing(UPSTREAM[name], ours) - {"fourth"}
        assert parameters and not {p for p in parameters if f"`{p}`" not in rows[name]}, name


X8, W8 = torch.randint(-99, 99, (5, 16), dtype=torch.int8), torch.randint(-99, 99, (6, 16), dtype=torch.int8)
E4M3 = torch.rand(2, 16, 16).to(torch.float8_e4m3fn)
EXPERTS = (
    torch.rand(5, 8),
    torch.rand(3, 12, 8),
    torch.rand(3, 8, 6),
    torch.rand(5, 2),
    torch.eye(5, 2).long(),
)
SORTED = EXPERTS[4], EXPERTS[3], 3, 8, torch.float32
BF16, W16 = torch.rand(5, 8).bfloat16(), torch.rand(2, 6, 8).bfloat16()
INDPTR = torch.tensor([0, 2, 5], dtype=torch.int32)
GROUPS = torch.rand(5, 4), torch.rand(2, 4, 6), torch.tensor([2, 3])
WITHOUT_EFFECT = [  # a function of such an argument, and two values
    ("splitK", lambda n: aiter.gemm_a8w8(X8, W8, 1.0, 0.5, splitK=n), (None, 4)),
    ("work_stealing", lambda on: gmm(*GROUPS, work_stealing=on), (False, True)),
    ("backend", lambda name: bmm_fp8(E4M3, E4M3.mT, 1.0, 1.0, torch.float16, backend=name), BACKENDS[:2]),
    ("tactic", lambda n: grouped_mm_bf16(BF16, W16, INDPTR, tactic=n), (-1, 3)),
    ("backend", lambda name: grouped_mm_bf16(BF16, W16, INDPTR, backend=name), ("cudnn", "cake")),
    ("block_size_M", lambda n: fused_moe(*EXPERTS, block_size_M=n), (None, 64)),
    ("moe_sorting_dispatch_policy", lambda n: fused_moe(*EXPERTS, moe_sorting_dispatch_policy=n), (0, 2)),
    ("splitk", lambda n: fused_moe(*EXPERTS, splitk=n), (0, 4)),
    ("dispatch_policy", lambda n: moe_sorting(*SORTED, dispatch_policy=n)[0], (0, 1)),
    ("trans_lhs", lambda on: gen_gmm_tensors(8, 4, 6, 2, 1, device="cpu", trans_lhs=on)[0], (False, True)),
    ("trans_rhs", lambda on: gen_tgmm_tensors(8, 4, 6, 2, 1, device="cpu", trans_rhs=on)[1], (False, True)),
]


@pytest.mark.parametrize("name, fn, values", WITHOUT_EFFECT, ids=[name for name, *_ in WITHOUT_EFFECT])
@pytest.mark.no_interpreter
def test_arguments_without_effect_are_named_as_such(name, fn, values):
    assert torch.equal(*map(fn, values))
    assert f"`{name}`" in DOCS.read_text().partition("## Arguments without effect\n")[2].partition("\n## ")[0]
