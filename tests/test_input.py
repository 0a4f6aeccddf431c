"""Bad arguments of every public callable: each computes by a stated rule, or raises an error that names it.

`callables.py` has a valid call of each.  A test changes one argument at a time.
"""

import importlib.util
import inspect
import math
import pathlib
import re

import callables
import callables_compat
import callables_distributed
import pytest
import torch
from torch import Tensor, nn

import moe_aiter

REPOSITORY = pathlib.Path(__file__).parent.parent
CALLS = {name: (getattr(moe_aiter, name), given) for name, given in callables.OURS.items()}
CALLS |= callables_compat.MORE | callables_distributed.CALLS
MODULES = [*callables_compat.MODULES, *callables_distributed.MODULES]
ELSEWHERE = callables_compat.ELSEWHERE
TRANSFORMERS = importlib.util.find_spec("transformers") is not None
if TRANSFORMERS:
    import callables_integrations

    CALLS |= callables_integrations.CALLS
    ELSEWHERE |= callables_integrations.RESULTS
    MODULES += callables_integrations.MODULES
DOCUMENTS = [REPOSITORY / "README.md", *sorted(REPOSITORY.glob("docs/*.md"))]
# they have no arguments to check, or are tuples and records that functions return
WITHOUT = {"keep_fp8_weights", "patch_linear", "unpatch_linear"}
RESULTS = {"LayerStatistics", "LoadStatistics", "MoERouting", "QuantizationReport", "RoutePlan", "Routing"}
RESULTS |= {"Route", "RouteDifference"}

FOREIGN = {"quantization_report.inputs"}  # they are the model's, and so are its errors
PATHS = {"directory", "folder", "source"}  # an error may say which instead of the argument's name

# what computes instead: a rule, and the changes of arguments that it is about
LEADING = "leading axes of any number and sizes, as in torch.matmul"
ROWS = "any number of rows, tokens or columns: the argument has this axis alone"
MORE = "more weights, experts or groups than are used"
ALONE = "the only tensor: its device, and what no rule restricts, decide the result"
ANY_NUMBER = "any number, as in torch.addmm; the result may be NaN"
SCALES = "a number, one element or a vector; a row of scales in any documented shape"
SHAPES_ONLY = "nothing but the shape, or the shape and the strides, is read"
COMPUTED = "computed"
COMPUTES = {
    LEADING: {
        "gemm.x": "rank+1",
        "gemm.w": "rank+1",
        "gemm.c": "rank-1",
        "aiter.cutlass_gemm.c": "rank-1",
        "aiter.matmul.x": "rank+1 rank-1 size0",
        "aiter.matmul.y": "rank+1 size1",
        "linear_with_split_bias.x": "rank+1 rank-1 size0",
        "LoRALinear.forward.x": "rank+1 size0",
        "tuned_gemm.gemm_a16w16.A": "rank+1 rank-1 size0",
        "tuned_gemm.tgemm.mm.inp": "rank+1 rank-1 size0",
        "load_statistics.group_sizes": "rank+1 size0 dtype device",
        **{
            f"aiter.{name}.input": "rank+1 rank-1 size0"
            for name in ("AITERLinear.forward", "gemm_bias", "gemm_gelu", "gemm_relu", "linear")
        },
        **{f"{name}.input": "rank+1 rank-1 size0" for name in ("sparse_gemm", "aiter.sparse_gemm")},
        **dict.fromkeys(
            ("aiter.shuffle_weight.x", "aiter.unshuffle_weight.x"), "rank+1 dtype complex device"
        ),
        "aiter.ShuffledWeight.weight": "rank+1 dtype complex device",
    },
    ROWS: {
        "glu.z": "size0 device",
        "permute.x": "size1",
        "unpermute.x": "size1",
        "tgmm.x": "size0 size1",
        "tgmm.y": "size1",
        "make_plan.expert_ids": "size0 size1 device",
        "sort_by_expert.expert_ids": "size0 size1 device",
        "topk.scores": "size0 size1 device",
        "z_loss.logits": "size1",
        "pack_routes.mask": "size1",  # the last token may have no route
        "replay_routes.routes": "size0 list rank+1",  # also a list of passes, or a padded batch
        "replay_routes.tokens": "size0",
        "load_balance_loss.expert_ids": "size1",
        "sequence_balance_loss.expert_ids": "size1",
        "aiter.batched_gemm.a": "size2",
        "aiter.topk_softmax.gating_output": "size1",
        "flashinfer.grouped_mm_bf16.a": "size0",
        "flashinfer.grouped_mm_bf16.b": "size1",
        "aiter.batched_gemm.b": "size1",
        **{
            f"{name}.{which}": axis
            for name in ("aiter.attention", "attention_backend")
            for which, axis in (("q", "size2"), ("v", "size3"), ("mask", "dtype"))
        },
        "SparsePattern.from_dense.w": "dtype complex size0 size1",
        "aiter.AITERConv2d.forward.input": "rank-1 size0 size2 size3",
        "aiter.conv2d.input": "rank-1 size0 size2 size3",
        "aiter.conv2d.weight": "size2 size3",
    },
    MORE: {
        "load_balance_loss.scores": "size1",
        "sequence_balance_loss.scores": "size1",
        "route_to.logits": "size1",
        "segment_gmm.w": "size0",
        "fused_moe.fused_moe.expert_mask": "size0",
        "SegmentGEMMWrapper.run.weights": "size0",
    },
    ALONE: {
        "aiter.gelu.input": "rank+1 rank-1 size0 size1 device",
        "attach_loss.x": "rank+1 rank-1 size0 size1 device",
        "attach_loss.loss": "device",
        "SegmentGEMMWrapper.float_workspace_buffer": "rank+1 rank-1 size0 dtype complex device",
        "SparsePattern.from_mask.mask": "dtype complex",
        "SparsePattern.take.w": "dtype complex device",
        "SparsePattern.to_dense.values": "dtype complex",
        "SparsePattern.to_sparse.values": "dtype complex",
        "SparsePattern.lists": "rank+1 rank-1 size0 device",  # `make_lists` alone makes them
    },
    ANY_NUMBER: {
        **{
            f"{name}.{which}": "NaN infinity"
            for name in ("gemm", "aiter.cutlass_gemm")
            for which in ("alpha", "beta")
        },
        "checkpoints.upcycle.seed": "negative",
        "hash_experts.seed": "negative",
        "Monitor.log.step": "negative",
        **{
            f"gmm_common.gen_{what}.rng_seed": "negative"
            for what in (
                "group_sizes",
                "multiple_group_sizes",
                "gmm_input",
                "gmm_tensors",
                "tgmm_input",
                "tgmm_tensors",
            )
        },
        "gmm_common.is_power_of_2.x": "negative",
        "flashinfer.bmm_fp8.B_scale": "NaN infinity",
    },
    SCALES: {
        "scaled_gemm.x_scale": "number rank-1",
        "scaled_gemm.w_scale": "number rank+1 rank-1",
        "aiter.gemm_a8w8.x_scale": "number rank-1",
        "aiter.gemm_a8w8.w_scale": "number rank+1 rank-1",
        "aiter.gemm_a8w8.bias": "rank+1",
        "aiter.int8_gemm.input_scale": "number rank-1",
        "aiter.int8_gemm.weight_scale": "number rank+1 rank-1",
        "aiter.deepgemm.x_scale": "number",
        "aiter.deepgemm.w_scale": "number",
        "flashinfer.bmm_fp8.A_scale": "number rank+1 rank-1",
    },
    SHAPES_ONLY: {
        "gmm_common.get_gmm_shape.lhs": "dtype complex device size0",
        "gmm_common.get_gmm_shape.rhs": "dtype complex device size2",
        "gmm_common.get_gmm_shape.group_sizes": "dtype complex device",
        "gmm_common.get_tgmm_shape.lhs": "dtype complex device size0",
        "gmm_common.get_tgmm_shape.rhs": "dtype complex device size1",
        "gmm_common.get_tgmm_shape.group_sizes": "dtype complex device size0",
        **{
            f"gmm_common.get_{which}_transposition.{name}": "dtype complex device"
            for which in ("gmm", "tgmm")
            for name in ("lhs", "rhs", "out")
        },
        "gmm_common.get_gmm_transposition.rhs": "dtype complex device size0",
        "gmm_common.get_tgmm_transposition.out": "dtype complex device size0",
        "gmm_common.check_bias_shape_stride.bias": "dtype complex device",
    },
    "nothing but the dtype and the device is read": {
        "gmm_common.check_input_device_dtype.lhs": "rank+1 rank-1 size0 size1",
        "gmm_common.check_input_device_dtype.rhs": "rank+1 rank-1 size0 size1 size2",
        "gmm_common.check_input_device_dtype.group_sizes": "rank+1 rank-1 size0",
        "gmm_common.check_input_device_dtype.bias": "rank+1 rank-1 size0 size1",
    },
    "one number, or one in a list, is meant for both axes, as in torch": {
        "aiter.AITERConv2d.stride": "list",
        "aiter.AITERConv2d.padding": "number",
        "aiter.AITERConv2d.dilation": "list",
        "aiter.conv2d.stride": "list",
        "aiter.conv2d.padding": "number",
        "aiter.conv2d.dilation": "list",
        "sparse_gemm.blocksize": "number",
        "SparsePattern.from_dense.blocksize": "number",
        "aiter.sparse_gemm.blocksize": "number",
    },
    "None, documented, is without a bias or a group, or alpha=rank": {
        "lora.add_lora.alpha": "None list",
        "monitor.watch.group": "None",
        "aiter.gemm_bias.bias": "None",
        "LoRALinear.alpha": "None",
        "LoRAExperts.alpha": "None list",
    },
    "parameters of any dtype that torch initialises": {"aiter.AITERAttention.dtype": "complex"},
    "1 is True, as in AITER's files": {
        f"tuned_gemm.get_GEMM_A16W16_config.{flag}": "number" for flag in ("bias", "scaleAB", "bpreshuffle")
    },
    "a number for each adapter, of which there is one": {
        "LoRAExperts.rank": "list",
        "lora.add_lora.rank": "list",
    },
    "counted from the last, as in Python": {
        f"{layer}.{name}.adapter": "negative"
        for layer in ("LoRALinear", "LoRAExperts")
        for name in ("merge", "peft_state_dict", "load_peft_state_dict")
    },
    "infinity clips nothing; the norm of order infinity is the largest magnitude": {
        f"distributed.clip_grad_norm_.{name}": "infinity" for name in ("max_norm", "norm_type")
    },
    "any name": {
        "LiveTable.show.title": "str",
        "LoRALinear.peft_state_dict.prefix": "str",
        "LoRAExperts.peft_state_dict.prefix": "str",
        "Monitor.log.prefix": "str",
        "aiter.register_kernel.name": "str",
        "lora.save_lora.base_model": "str",
        "monitor.MonitorCallback.prefix": "str",
        "monitor.watch.prefix": "str",
    },
    "any folder that is not there or empty": {
        "distributed.save_sharded.path": "str",
        "distributed.export_safetensors.path": "str",
        "checkpoints.convert.target": "str",
        "checkpoints.upcycle.target": "str",
        "lora.save_lora.directory": "str",
    },
    "loads of any number of experts, which may be means, also of each source": {
        "distributed.simulate.counts": "dtype rank+1 size0",
    },
    "`run` refuses the name": {"SegmentGEMMWrapper.backend": "str"},
}


def changes(value: object) -> dict[str, object]:
    """What stands in for a valid value, by name."""
    new = {"None": None, "object": object(), "str": "no such word", "list": [value]}
    if isinstance(value, Tensor):
        other = torch.int64 if value.is_floating_point() else torch.float32
        new |= {"number": 3, "dtype": value.to(other), "complex": value.to(torch.complex64)}
        new |= {"rank+1": value[None], "device": value.to("meta")}
        new |= {"rank-1": value[0]} if value.dim() else {}
        new |= {f"size{i}": torch.cat([value, value.narrow(i, 0, 1)], i) for i in range(value.dim())}
    elif isinstance(value, bool):
        new |= {"number": 1}
    elif isinstance(value, int):
        new |= {"bool": True, "NaN": math.nan, "fraction": value + 0.5, "negative": -1 - value}
    elif isinstance(value, float):
        new |= {"bool": True, "NaN": math.nan, "infinity": math.inf}
    elif isinstance(value, torch.dtype):
        new |= {"complex": torch.complex64, "number": 3}
    else:
        new |= {"number": 3}
    return new


def parameters(fn: object) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(fn.forward if isinstance(fn, nn.Module) else fn).parameters)


def takes_none(parameter: inspect.Parameter | None) -> bool:
    return parameter is not None and (parameter.default is None or "None" in str(parameter.annotation))


def outcome(fn: object, given: dict, argument: str, change: str, value: object) -> str:
    """ "", or what is wrong with the answer to one changed argument."""
    try:
        fn(**given | {argument: value})
    except (TypeError, ValueError, FileNotFoundError) as error:
        if argument in PATHS and str(value) in str(error):
            return ""
        # shapes and devices of several arguments disagree: then the message names one of these
        named = list(given) if change.startswith(("size", "rank", "device")) else [argument]
        clear = any(re.search(rf"\b{name}\b", str(error)) for name in named)
        return "" if clear else f"{type(error).__name__} does not name it: {error}"
    except (RuntimeError, AttributeError, LookupError, ArithmeticError) as error:
        return f"{type(error).__name__}: {error}"
    return COMPUTED


def answers(name: str):
    """(argument, change, what is wrong) of each change to a valid call."""
    fn, valid = CALLS[name]
    known = parameters(fn)
    for argument in valid():
        for change in changes(valid()[argument]):
            if change == "None" and takes_none(known.get(argument)):
                continue
            given = valid()
            yield argument, change, outcome(fn, given, argument, change, changes(given[argument])[change])


def test_every_public_callable_is_in_the_table():
    public = {name: getattr(moe_aiter, name) for name in moe_aiter.__all__}
    assert public.keys() - CALLS.keys() == WITHOUT | RESULTS
    for module in MODULES:
        for name in module.__all__:
            assert is_in_the_table(module, name), f"{module.__name__}.{name} is in no callables*.py"


@pytest.mark.skipif(not TRANSFORMERS, reason="transformers is not installed")
@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.stem)
def test_every_documented_callable_is_in_the_table(path):
    for line in re.finditer(r"^from (moe_aiter\S*) import ([\w, ]+)$", path.read_text(), re.M):
        module = importlib.import_module(line[1])
        for name in line[2].split(", "):
            assert is_in_the_table(module, name), line[0]


def is_in_the_table(module, name: str) -> bool:
    fn = getattr(module, name)
    if not callable(fn) or not parameters(fn) or name in WITHOUT | RESULTS | ELSEWHERE:
        return True
    return id(fn) in {id(known) for known, _ in CALLS.values()}


@pytest.mark.parametrize("name", CALLS)
def test_arguments(name, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # for a folder of any name
    monkeypatch.setattr("moe_aiter.compat.aiter.KERNELS", {"known": print})
    fn, valid = CALLS[name]
    fn(**valid())  # what is changed is a valid call
    rules = {}
    for about in COMPUTES.values():
        rules |= about
    wrong = {}
    for argument, change, text in answers(name):
        wrong.setdefault(f"{name}.{argument}", {})[change] = text
    for where in wrong.keys() - FOREIGN:
        unclear = {change: text for change, text in wrong[where].items() if text not in ("", COMPUTED)}
        assert not unclear, f"{where}: {unclear}"
        computed = {change for change, text in wrong[where].items() if text == COMPUTED}
        assert computed == set(rules.get(where, "").split()), where
