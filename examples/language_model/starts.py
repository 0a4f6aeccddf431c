"""starts.jsonl: one line for each time that the training of a run was started or resumed."""

import datetime
import json
import os
import platform
import shlex
import subprocess
import sys
import warnings
from pathlib import Path

import torch

from moe_aiter.files import drafted, version

from . import UsageError
from .metrics import read_metrics
from .model import active_params
from .trainer import Trainer

STARTS = "starts.jsonl"


def note_start(trainer: Trainer) -> None:
    """Add a line about this process and its machine to the run folder."""
    gpu = torch.cuda.get_device_name(trainer.device) if trainer.device.type == "cuda" else None
    row = {
        "step": trainer.step,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(" ", "seconds"),
        "device": gpu or f"CPU, {platform.machine()}",
        "processes": trainer.ranks.size,
        "host_cpus": os.cpu_count(),
        "versions": {
            "moe_aiter": version("moe-aiter", "source"),
            "torch": torch.__version__,
            "triton": version("triton", "none"),
            "Python": platform.python_version(),
        },
        "commit": commit(),
        "command": shlex.join(["moe-aiter", *sys.argv[1:]]),
        "parameters": sum(p.numel() for p in trainer.model.parameters()),
        "active_parameters": active_params(trainer.model, trainer.config),
    }
    try:
        rows = read_starts(trainer.run)
    except UsageError as error:  # training does not need the file
        warnings.warn(f"{error}: {STARTS} begins anew", stacklevel=2)
        rows = []
    with drafted(trainer.run / STARTS) as file:
        file.writelines(json.dumps(each) + "\n" for each in [*rows, row])


def read_starts(run: Path) -> list[dict]:
    """Return the lines of starts.jsonl; none for a run of an older version."""
    return read_metrics(run / STARTS) if os.path.lexists(run / STARTS) else []


def commit() -> str | None:
    """Return the commit of this source tree, with -dirty if it has changes; None where git does not know."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True)
    except OSError:  # no git
        return None
    return done.stdout.strip() or None
