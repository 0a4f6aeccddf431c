"""For pytest in a suite's process: import names that lead to moe_aiter, a CPU for a GPU, and a report."""

import collections
import importlib
import importlib.util
import json
import math
import pathlib
import re
import sys

import pytest
import torch
from torch.overrides import TorchFunctionMode

LARGE = 2e8  # of the product of a test's integers, which is about what it multiplies: a second on a CPU


def pytest_addoption(parser):
    for name in ("--suite", "--checkout", "--report"):
        parser.addoption(name)


def pytest_configure(config):
    suite = config.getoption("suite")
    config.shim = importlib.import_module(f"shim_{suite}")
    config.counts, config.reasons = collections.Counter(), collections.Counter()
    try:
        config.shim.install(pathlib.Path(config.getoption("checkout")))
    except ImportError as error:
        error = error.__context__ or error
        count_import_error(config, f"{type(error).__name__}: {error}")
        write_report(config)
        pytest.exit("the shim cannot be installed", 0)
    if not torch.cuda.is_available():
        OnCpu().__enter__()


class OnCpu(TorchFunctionMode):
    """Tests that say "cuda" run on the CPU."""

    def __torch_function__(self, fn, types, args=(), kwargs=None):
        if fn in (torch.Tensor.cuda, torch.nn.Module.cuda):
            return args[0]
        kwargs = {name: on_cpu(value) for name, value in (kwargs or {}).items()}
        return fn(*map(on_cpu, args), **kwargs)


def on_cpu(value):
    if isinstance(value, torch.device) or (isinstance(value, str) and value.startswith("cuda")):
        return torch.device("cpu") if torch.device(value).type == "cuda" else value
    return value


def pytest_collection_modifyitems(config, items):
    not_applicable = getattr(config.shim, "NOT_APPLICABLE", {})
    for item in items:
        for part, why in not_applicable.items():
            if part in item.nodeid:
                item.add_marker(pytest.mark.skip(reason=f"not applicable: {why}"))
        if not torch.cuda.is_available() and is_large(item, config.shim):
            item.add_marker(pytest.mark.skip(reason="needs a GPU: too large for a CPU"))


def is_large(item, shim) -> bool:
    given = item.callspec.params if hasattr(item, "callspec") else {}
    work = getattr(shim, "WORK", {}).get(item.originalname, work_of)
    return work(given) > LARGE or any(name in item.nodeid for name in getattr(shim, "LARGE_TESTS", ()))


def work_of(given: dict) -> int:
    return math.prod(n for n in given.values() if type(n) is int and n > 0)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    report = (yield).get_result()
    counts, reasons = item.config.counts, item.config.reasons
    if report.skipped:
        why = report.longrepr[2].removeprefix("Skipped: ") if isinstance(report.longrepr, tuple) else "xfail"
        kind = "not_applicable" if why.startswith("not applicable") else "skipped"
        counts[kind] += 1
        reasons[why if kind == "not_applicable" else f"skipped: {why}"] += 1
    elif report.failed:
        counts["failed"] += 1
        reasons[f"failed: {first_line(call.excinfo)}"] += 1
    elif call.when == "call":
        counts["passed"] += 1


def pytest_collectreport(report):
    if report.failed:
        lines = [line for line in str(report.longrepr).splitlines() if line.startswith("E ")]
        pytest_collectreport.errors.append((lines or [str(report.longrepr)])[-1].removeprefix("E").strip())


pytest_collectreport.errors = []


def first_line(excinfo) -> str:
    text = (str(excinfo.value).strip().splitlines() or [""])[0]
    return f"{excinfo.typename}: {text}"[:200]


def pytest_sessionfinish(session):
    config = session.config
    for error in pytest_collectreport.errors:
        count_import_error(config, error)
    write_report(config)


def count_import_error(config, error: str):
    """A package that is not installed is a reason to skip; one that lacks a name is a failure."""
    package = re.match(r"ModuleNotFoundError: No module named '([^'.]+)", error)
    there = not package or package[1] in sys.modules or importlib.util.find_spec(package[1])
    kind = "failed" if there else "skipped"
    config.counts[kind] += 1
    config.reasons[f"{kind}: the file cannot be imported: {error}"] += 1


def write_report(config):
    report = dict(config.counts) | {"reasons": dict(config.reasons)}
    pathlib.Path(config.getoption("report")).write_text(json.dumps(report))
