"""2,000 fixed cases with C++ and torch, 300 with the kernels under the interpreter, 1,500 on a GPU."""

import functools
import pathlib
import subprocess
import sys

import pytest
import torch
from samples import is_ours

import moe_aiter
from moe_aiter.config import interpret
from moe_aiter.op import IMPLS

from . import run, scan
from .draw import ON_GPU, Draw
from .hold import TARGETS, Ambiguous, results, run_case, trained_names
from .run import case_number, try_case

CASES = 300 if interpret else 1000
CHUNKS = 20 if interpret else 25  # processes share them


# public names that compute nothing that a loop could check, and what tests them
NOT_FUZZED = {
    "LiveTable": "prints: tests/layers/test_monitor_live.py",
    "LayerStatistics": "is a record",
    "LoadStatistics": "is a record",
    "MoERouting": "is a record",
    "Monitor": "counts: tests/layers/test_monitor.py",
    "QuantizationReport": "is a record",
    "Route": "is a record",
    "RouteDifference": "is a record",
    "RoutePlan": "is a record",
    "Routing": "is a record",
    "preshuffle_weights": "for bfloat16 weights of 256 x 256 and more: tests/layers/test_linear_shuffled.py",
    "quantization_report": "compares two models: tests/layers/test_quantized_report.py",
    "offload": "moves weights: tests/layers/test_offloaded.py",
    "register_kernel": "changes the library: tests/test_backend.py",
    **dict.fromkeys(
        ("pack_routes", "record_routes", "replay_routes"),
        "move routes between models: tests/layers/test_route_replay.py",
    ),
    "use": "each case runs under it, called by the fuzzer itself",
    **dict.fromkeys(
        ("swiglu_limit", "swiglu_softcap"), "return names: tests/kernels/base/test_activations.py"
    ),
    **dict.fromkeys(
        ("enable_batch_invariance", "batch_invariance_enabled"),
        "a switch: tests/layers/test_batch_invariant.py",
    ),
    "unpatch_linear": "ends every patch of the process: tests/layers/test_linear.py",
}
NOT_REACHED = {  # ops that no case can reach here, and what tests them
    "decide": "torch.compile alone",
    "route_once": "torch.compile alone",
    **dict.fromkeys(("keep_route", "take_route"), "torch.compile alone: tests/layers/test_route_graphs.py"),
    "expert_forward": "without gradients: tests/kernels/experts/test_few.py",
    "route_few": "without gradients: tests/kernels/rows/test_route_few.py",
    "four_bit_gmm": "frozen weights of 4 bits: tests/kernels/grouped/test_four_bit.py",
    "expert_up_split": "torchtitan's models: tests/kernels/experts/test_expert_split.py",
    "count_margins": "quantile balancing: tests/routing/test_quantile.py",
    "record_routing": "Monitor: tests/layers/test_monitor.py",
    **dict.fromkeys(
        (
            "expert_down_grad_fp8",
            "expert_up_fp8",
            "plan_row_blocks",
            "quantize_row_blocks",
            "transpose_row_blocks",
        ),
        "8 bits: tests/kernels/experts/test_experts_fp8.py",
    ),
    **dict.fromkeys(
        ("combine_tokens", "dispatch_tokens", "gmm_unpermute_add", "lend_rows", "merge_plans"),
        "several processes: tests/distributed",
    ),
    **dict.fromkeys(
        ("muon_direction", "muon_update_", "symmetric_product"),
        "an optimizer's: tests/kernels/dense/test_muon.py, test_symmetric.py",
    ),
    **dict.fromkeys(("tgmm_fp8", "tgmm_fp8_into"), "Hopper alone: tests/kernels/grouped/test_tgmm_fp8.py"),
}
# on a CPU one op computes all of the experts; the interpreter and a GPU run these
BY_TRITON = {
    "expert_both", "expert_down", "expert_down_grad", "expert_down_grad_over_z", "expert_up", "expert_z"
}  # fmt: skip


def fail_with(lines):
    if lines:
        pytest.fail("\n".join(lines), pytrace=False)


@pytest.mark.interpret
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_fixed_cases(chunk):
    if ON_GPU:
        pytest.skip("on a GPU test_cases_on_gpu draws other shapes")
    numbers = range(chunk, CASES, CHUNKS)
    fail_with([wrong for i in numbers if (wrong := try_case(*case_number(i)))])


@pytest.mark.gpu
@pytest.mark.parametrize("name", TARGETS)
def test_cases_on_gpu(name):
    """One after another, so that cases of one target find its kernels compiled."""
    fail_with([wrong for seed in range(46) if (wrong := try_case(name, seed))])


def test_few_cases_say_nothing():
    """Where rounding decides which expert is chosen a case is left out; they are few."""
    for name in ("route", "moe"):
        silent = 0
        for seed in range(20):
            try:
                run_case(name, seed)
            except Ambiguous:
                silent += 1
        assert silent <= 4, f"{silent} of 20 cases of {name}"


# what is fuzzed


@pytest.fixture(scope="module")
def reached():
    """The code objects that cases call, and the ops that run."""
    codes, ops, patch = set(), set(), pytest.MonkeyPatch()

    def noting(op, fn):
        @functools.wraps(fn)
        def noted(*inputs, **how):
            ops.add(op)
            return fn(*inputs, **how)

        return noted

    def see(frame, event, _):
        if event == "call":
            codes.add(frame.f_code)

    for op, backends in IMPLS.items():
        for backend, fn in list(backends.items()):
            patch.setitem(backends, backend, noting(op, fn))
    sys.setprofile(None if interpret else see)
    for name in ("experts",) if interpret else TARGETS:
        for seed in range(5 if interpret else 25):
            draw = Draw(name, seed)
            case = TARGETS[name](draw)
            results(case.ours, case.tensors, trained_names(case, draw), [], draw, twice=seed % 3 == 0)
    sys.setprofile(None)
    patch.undo()
    return codes, ops


def codes_of(thing):
    """The functions that run where `thing` is used: itself, or what a class computes."""
    if not isinstance(thing, type):
        return {getattr(thing, "__wrapped__", thing).__code__}
    names = "forward", "run", "choose", "pick", "from_mask", "__post_init__", "compute"
    methods = map(vars(thing).get, names)
    return {getattr(m, "__func__", m).__code__ for m in methods if m is not None}


def test_every_public_name_is_fuzzed(reached):
    if interpret:
        pytest.skip("seen with C++ and torch")
    codes, _ = reached
    names = set(moe_aiter.__all__) - NOT_FUZZED.keys()
    missing = [name for name in names if not codes_of(getattr(moe_aiter, name)) & codes]
    assert not missing, f"no case in tests/fuzz calls {sorted(missing)}"
    assert NOT_FUZZED.keys() <= set(moe_aiter.__all__)


@pytest.mark.interpret
def test_every_op_is_fuzzed(reached):
    _, ops = reached
    expected = set(filter(is_ours, IMPLS)) - NOT_REACHED.keys()
    missing = (BY_TRITON if interpret else expected - BY_TRITON) - ops
    assert not missing, f"no case in tests/fuzz reaches {sorted(missing)}"
    assert NOT_REACHED.keys() | BY_TRITON <= IMPLS.keys()


# the fuzzer sees what is wrong


def drop_row(fn):
    """`fn`, but for a row of its result."""

    def broken(out, *inputs):
        fn(out, *inputs)
        first = out[0] if isinstance(out, tuple) else out
        if len(first) > 3:
            first[len(first) // 2] = 0

    broken.takes = getattr(fn, "takes", (torch.float32, torch.bfloat16, torch.float16))
    return broken


def late_by_one(fn):
    """`fn` for other values: one number of many is off by a tenth."""

    def broken(out, *inputs):
        fn(out, *inputs)
        first = out[0] if isinstance(out, tuple) else out
        if first.numel() > 20 and first.is_floating_point():
            first.view(-1)[7] += 0.1 * first.float().abs().max().to(first.dtype)

    broken.takes = getattr(fn, "takes", (torch.float32, torch.bfloat16, torch.float16))
    return broken


DEFECTS = {  # the op, its defect, and the target that has to see it
    "a row of gmm is forgotten": ("gmm", drop_row, "gmm"),
    "a row of segment_gmm is forgotten": ("segment_gmm", drop_row, "segment_gmm"),
    "a weight's gradient is forgotten": ("tgmm", drop_row, "gmm"),
    "one number of unpermute is off": ("unpermute", late_by_one, "permute"),
    "one number of glu is off": ("glu", late_by_one, "glu"),
    "one number of route is off": ("route", late_by_one, "route"),
    "one number of quantised rows is off": ("scaled_gemm", late_by_one, "scaled_gemm"),
    "one number of experts is off": ("expert_loop", late_by_one, "moe"),
    "a row of dx is forgotten": ("expert_loop_backward", drop_row, "experts"),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_planted_defects_are_found(defect, monkeypatch):
    op, breaks, name = DEFECTS[defect]
    for kind, fn in list(IMPLS[op].items()):
        monkeypatch.setitem(IMPLS[op], kind, breaks(fn))
    lines = [wrong for seed in range(15) if (wrong := try_case(name, seed))]
    assert lines, "no case of 15 saw it"
    assert all("\n" not in text and f"make fuzz CASE={name}:" in text for text in lines)


def test_a_process_that_dies_takes_one_case_along(capfd, monkeypatch):
    """`make fuzz` goes on behind the case, and prints the command that repeats it."""

    def die_first(command):
        first, end, _, progress = command[-4:]
        dies = first == "5"
        pathlib.Path(progress).write_text(f"{6 if dies else int(end):12} {0:12}")
        return subprocess.CompletedProcess(command, -11 if dies else 0)

    monkeypatch.setattr(subprocess, "run", die_first)
    assert run.watch(first=5, cases=3, seconds=600) == 1
    out = capfd.readouterr().out.splitlines()
    name, seed = run.case_number(6)
    assert out[0] == f"{name}:{seed} ended with status -11; repeat: make fuzz CASE={name}:{seed}"
    assert out[-1].startswith("3 cases in") and out[-1].endswith("1 failures")


# the scan of small shapes


def test_small_shapes():
    for number in range(0, 2000, 40):  # each form
        assert scan.wrong(number) is None, number


def test_a_process_that_dies_is_run_again_shape_by_shape(monkeypatch):
    """The shape that kills its process is named; other shapes of that process are judged."""

    def start(first, count):
        if first <= 57 < first + count:
            return scan.DIED, ["lost"]
        return 0, [f"{first}: off"] * (first == 52)

    monkeypatch.setattr(scan, "start", start)
    assert scan.scan(0, 50) == []
    assert scan.scan(50, 50) == ["52: off", "57: ends its process with status 9: lost"]


def test_a_shape_that_is_wrong_is_named(monkeypatch, tmp_path):
    whole = scan.results

    def results(run, tensors):
        out, *gradients = whole(run, tensors)
        return [out if out.dtype == torch.float64 else out + 1 + out.abs().max(), *gradients]

    monkeypatch.setattr(scan, "results", results)
    scan.work(range(20), tmp_path / "lines")
    assert (tmp_path / "lines").read_text().count("result 0") == 20
