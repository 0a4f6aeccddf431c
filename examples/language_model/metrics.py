"""metrics.jsonl: one line for each step, and loggers, which get the same numbers.

Numbers stay on the device until several steps are written.
"""

import contextlib
import json
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from moe_aiter import LayerStatistics
from moe_aiter.cli import summary
from moe_aiter.files import drafted, opened, read_text

from . import UsageError, need

NUMBERS = "loss", "val_loss", "val_bits_per_byte", "seconds"  # fields that a resumed run reads
LOGGERS = "tensorboard", "wandb", "trackio"  # packages, each of which is also an extra
PEAK_TFLOPS = {"H100": 989, "H200": 989, "A100": 312, "MI300X": 1307}  # dense bfloat16, from data sheets


class Metrics:
    """Collects steps and appends them to a file.

    `flops_per_step` and `peak` (FLOP/s, or None where it is not known) give the model FLOP utilisation.
    """

    def __init__(self, path: Path, tokens_per_step: int, flops_per_step: float, peak: float | None):
        self.path, self.tokens_per_step = path, tokens_per_step
        self.flops_per_step, self.peak = flops_per_step, peak
        self.pending: list[tuple[dict, dict[str, Tensor]]] = []
        self.mark = time.perf_counter()
        rows = read_metrics(path) if path.exists() else []
        self.start = self.mark - (rows[-1].get("seconds", 0) if rows else 0)

    def add(self, row: dict, tensors: dict[str, Tensor]) -> None:
        """Note a step: plain numbers, and tensors of any shape that are still being computed."""
        self.pending.append((row, tensors))

    def collect(self) -> list[dict]:
        """The rows of the steps noted since the last time; waits until the device has computed them."""
        rows = [row | {name: t.tolist() for name, t in tensors.items()} for row, tensors in self.pending]
        now = time.perf_counter()
        each = (now - self.mark) / len(rows)
        for row in rows:
            row["bits_per_byte"] = row["loss"] / math.log(2)
            row["seconds"] = round(now - self.start, 3)
            row["tokens_per_s"] = round(self.tokens_per_step / each, 1)
            if self.peak:
                row["mfu"] = round(self.flops_per_step / each / self.peak, 4)
        self.pending.clear()
        self.mark = now
        return rows

    def write(self, rows: list[dict]) -> None:
        with opened(self.path, "a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)

    def restart_clock(self) -> None:
        """Leave what happened since the last step out of the speed of the next."""
        self.mark = time.perf_counter()


def read_metrics(path: Path) -> list[dict]:
    """The rows of a metrics.jsonl; a last line that a killed process left unfinished is skipped."""
    rows = []
    lines = read_text(path, path.parent, errors="replace").splitlines()
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            if type(row["step"]) is not int or not is_number(row["step"]):
                raise TypeError("its step is no whole number")
            if wrong := [name for name in NUMBERS if not is_number(row.get(name, 0))]:
                raise TypeError(f"its {wrong[0]} is no number")
            rows.append(row)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            if number < len(lines):
                raise UsageError(f"{path}: line {number} is damaged: {summary(error)}") from error
    return rows


def is_number(value) -> bool:
    """Whether a plot can draw the value: JSON's whole numbers have no largest one."""
    return type(value) is float or (type(value) is int and abs(value) < 2**63)


def with_load(rows: list[dict]) -> list[dict]:
    """The rows with the choices of each expert of each layer."""
    rows = [row for row in rows if "load" in row]
    for row in rows:
        load = row["load"]
        nested = isinstance(load, list) and all(isinstance(layer, list) and layer for layer in load)
        if not nested or not all(
            is_number(n) and (n == 0 or 1 <= n < math.inf) for layer in load for n in layer
        ):
            raise damaged("load", row, "a list of counts for each layer")
        if not load or [len(layer) for layer in load] != [len(layer) for layer in rows[0]["load"]]:
            raise damaged("load", row, "of as many layers and experts as before")
    return rows


def damaged(key: str, row: dict, wanted: str) -> UsageError:
    return UsageError(f"the metrics are damaged: {key} of step {row['step']} is not {wanted}")


@contextlib.contextmanager
def opened_log(name: str | None, run: Path, settings: dict, step: int) -> Iterator[Callable | None]:
    """Open a logger for the steps after `step`, yield its `write(numbers, step=)`, close it at the end."""
    if name is None:
        yield None
        return
    if name == "tensorboard":
        log = need("torch.utils.tensorboard").SummaryWriter(run / name, purge_step=step + 1)
        close = log.close

        def write(numbers: dict, step: int) -> None:
            for key, value in numbers.items():
                log.add_scalar(key, value, step)
    else:
        log = start_log(name, run, settings)
        write, close = log.log, log.finish
    try:
        yield write
    finally:
        close()


def start_log(name: str, run: Path, settings: dict):
    """A run of W&B, or of trackio, which has the same functions."""
    if name == "trackio":
        return need(name, name).init(project="moe-aiter", name=run.name, config=settings)
    wandb = need(name, name)
    try:
        return wandb.init(project="moe-aiter", name=run.name, config=settings, dir=str(run))
    except wandb.Error as error:
        raise UsageError(f"--log {name}: {summary(error)}") from error


def log_rows(write: Callable, rows: list[dict], layers: dict[str, LayerStatistics]) -> None:
    """Pass the numbers of each row to a logger's `write`, with the last row those of each MoE layer."""
    of_layers = {f"moe/{name}/{k}": v for name, layer in layers.items() for k, v in layer.scalars().items()}
    for row in (*rows[:-1], rows[-1] | of_layers):
        write({k: v for k, v in row.items() if k != "step" and is_number(v)}, step=row["step"])


def truncate_metrics(path: Path, step: int) -> list[dict]:
    """Drop the rows past `step`, which a resumed run will write again, and return them."""
    rows = read_metrics(path)
    with drafted(path) as file:
        file.writelines(json.dumps(row) + "\n" for row in rows if row["step"] <= step)
    return [row for row in rows if row["step"] > step]


def peak_flops(device: torch.device) -> float | None:
    """Dense bfloat16 FLOP/s of a GPU, or None where it is not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((tflops * 1e12 for model, tflops in PEAK_TFLOPS.items() if model in name), None)
