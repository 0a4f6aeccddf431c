"""`moe-aiter train`: its flags, the run folder, and the text printed before and after training."""

import argparse
import contextlib
import dataclasses
import os
import time
from pathlib import Path

import torch

from moe_aiter.config import printable, say
from moe_aiter.files import UNFINISHED, drafted, locked, read_text, remove

from . import UsageError, need
from .checkpoint import checkpoints, step_of
from .metrics import LOGGERS, opened_log, read_metrics
from .model import active_params
from .presets import (
    PRESETS,
    RESUMABLE,
    TrainConfig,
    add_flags,
    flag,
    flag_values,
    make_config,
    path,
    set_threads,
)
from .ranks import Ranks, check_ranks, started
from .report import read_run, write_page
from .starts import STARTS, note_start
from .trainer import Trainer, learning_rate

RUNS = Path("runs")
RUN_FILES = ("config.json", "metrics.jsonl", "checkpoints", STARTS)
LOCK = "lock"
LAUNCH = "launch"  # names the call of torchrun that started the run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--preset",
        choices=PRESETS,
        help="settings to start from; test: a tiny model, for seconds [gpu if there is a GPU, else cpu]",
    )
    parser.add_argument("--out", type=path, metavar="RUN", help="run folder [a new one in runs/]")
    text = "continue a run [the newest in runs/]"
    parser.add_argument("--resume", nargs="?", type=path, const=True, metavar="RUN", help=text)
    text = "show the expert load of each layer in a table instead of the progress bar"
    parser.add_argument("--live", action="store_true", help=text)
    text = "also write the losses and the statistics of each layer to this logger"
    parser.add_argument("--log", choices=LOGGERS, help=text)
    add_flags(parser)
    text = "loss in nats per byte, bits per byte, speed, and imbalance: the load of a layer's busiest expert "
    text += "divided by the mean load, minus 1; 0 is perfect balance, and the most unbalanced layer is shown"
    parser.add_argument_group("progress bar", text)
    text = (
        "torchrun --standalone --nproc-per-node N -m -- moe_aiter.cli train divides each batch among the N "
    )
    text += "processes that it starts"
    parser.add_argument_group("several processes", text)


def main(args: argparse.Namespace) -> int:
    with started() as ranks:
        try:
            return run_on(ranks, args)
        except UsageError:  # the same on all ranks
            if ranks.first:
                raise
            return 2


def run_on(ranks: Ranks, args: argparse.Namespace) -> int:
    with ranks.together():
        for module in ("tqdm", "safetensors", "plotly", *(["rich"] if args.live else [])):
            need(module)  # now, not after the training
        if args.log:
            need(args.log, args.log)
        if torch.cuda.is_available():
            repeat_on_gpu()
        args = continued(args, ranks)
    args = ranks.broadcast(args)
    with contextlib.ExitStack() as held:  # the run's lock
        return finish((resume_run if args.resume else start_run)(args, ranks, held), args.log)


def finish(trainer: Trainer, logger: str | None) -> int:
    """Train the steps that are left, and write the sample and the report."""
    ranks, settings, rows = trainer.ranks, dataclasses.asdict(trainer.config), []
    tell = print if ranks.first else lambda *_, **__: None
    if ranks.first:
        describe(trainer)
    if trainer.step >= trainer.config.steps:
        tell(f"nothing left to train: the run has made its {trainer.step} steps; to continue, raise --steps")
    with contextlib.ExitStack() as opened:
        with ranks.together():
            logger = logger if ranks.first else None
            log = opened.enter_context(opened_log(logger, trainer.run, settings, trainer.step))
            if ranks.first and trainer.step < trainer.config.steps:
                note_start(trainer)
        status = trainer.train(log)
    if not status:
        tell(f"\na sample of {trainer.config.sample_bytes} bytes:", flush=True)  # it takes seconds
        tell(trainer.write_sample())
    report = trainer.run / "report.html"
    with ranks.together():
        if ranks.first:
            rows = read_metrics(trainer.run / "metrics.jsonl")
            if rows:  # a finished run may have lost its metrics
                write_page(report, [read_run(trainer.run, trainer.run.name)])
    if status:
        run = printable(str(trainer.run))
        tell(f"stopped after step {trainer.step}; continue with: moe-aiter train --resume {run}")
        return status
    if validated := [row for row in rows if "val_loss" in row]:
        last = validated[-1]
        tell(f"\nvalidation loss {last['val_loss']:.4f} nats per byte ({last['val_bits_per_byte']:.3f} bits)"
            f" after {last['seconds']:.0f} s; see {printable(str(report))}")  # fmt: skip
    return 0


def repeat_on_gpu() -> None:
    """Two runs give the same losses; by itself the backward pass of torch's attention would not repeat."""
    # before the first product: torch's deterministic mode insists on it
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # a debugging aid that costs time


def continued(args: argparse.Namespace, ranks: Ranks) -> argparse.Namespace:
    """Return what to do after torchrun has started all ranks again: resume the run that it started before.

    A run without a checkpoint starts anew, in the same folder.
    """
    launch = ranks.launch
    if args.resume or not launch.restarts or not ranks.first:
        return args
    folders = [args.out] if args.out else RUNS.glob("*")
    own = [run for run in folders if (run / LAUNCH).exists() and read_text(run / LAUNCH, run) == launch.name]
    if not own:
        return args
    run = max(own, key=lambda run: (run / LAUNCH).stat().st_mtime)
    if checkpoints(run / "checkpoints"):
        return argparse.Namespace(**vars(args) | {"resume": run})
    for part in RUN_FILES:
        if os.path.lexists(run / part):
            remove(run / part)
    return argparse.Namespace(**vars(args) | {"out": run})


def start_run(args: argparse.Namespace, ranks: Ranks, held: contextlib.ExitStack) -> Trainer:
    with ranks.together():
        config = make_config(args.preset, flag_values(args))
        run = args.out or RUNS / f"{time.strftime('%Y%m%d-%H%M%S')}-{'dense' if config.dense else 'moe'}"
        check_ranks(config, ranks)
        if ranks.first:
            if run.exists() and not run.is_dir():
                raise UsageError(f"--out {run} is a file; a run needs a folder")
            refuse_second_run(run)
    config, run = ranks.broadcast((config, run))
    set_threads(config, ranks.launch)
    trainer = Trainer(config, run, args.live, ranks)
    with ranks.together():
        if ranks.first:
            run.mkdir(parents=True, exist_ok=True)
            held.enter_context(locked(run / LOCK))
            refuse_second_run(run)  # another process may have started one meanwhile
            if ranks.launch.name:
                with drafted(run / LAUNCH) as file:
                    file.write(ranks.launch.name)
            config.save(run / "config.json")
    return trainer


def refuse_second_run(run: Path) -> None:
    if any(os.path.lexists(run / part) for part in RUN_FILES):
        raise UsageError(f"{run} holds a run already: use --resume {run}, or choose another --out")


def resume_run(args: argparse.Namespace, ranks: Ranks, held: contextlib.ExitStack) -> Trainer:
    """The trainer of a run, at its newest checkpoint.  Flags that would make it another run are refused."""
    run = config = None
    with ranks.together():
        if ranks.first:
            run, config = opened_run(args, held)
    run, config = ranks.broadcast((run, config))
    with ranks.together():
        check_ranks(config, ranks)
    set_threads(config, ranks.launch)
    trainer = Trainer(config, run, args.live, ranks)
    trainer.resume()
    with ranks.together():
        if ranks.first:
            config.save(run / "config.json")
    return trainer


def opened_run(args: argparse.Namespace, held: contextlib.ExitStack) -> tuple[Path, TrainConfig]:
    """Lock the run to resume; return its folder and its settings."""
    if args.out and args.resume is not True and args.out.resolve() != args.resume.resolve():
        raise UsageError(f"--resume names {args.resume} but --out names {args.out}: give one of them")
    run = args.resume if args.resume is not True else args.out or newest_run()
    TrainConfig.load(run / "config.json")  # before a lock file appears in a folder that is no run
    held.enter_context(locked(run / LOCK))
    for leftover in run.glob(f"{UNFINISHED}*"):
        remove(leftover)
    own, made = TrainConfig.load(run / "config.json"), checkpoints(run / "checkpoints")
    config = resumed_config(own, args)
    if "decay_steps" not in flag_values(args):
        config = paced(own, config, step_of(made[-1]) if made else 0)
    return run, config


def resumed_config(own: TrainConfig, args: argparse.Namespace) -> TrainConfig:
    """Return the run's own settings, with the flags that may change.  Other flags must repeat the run's."""
    values = flag_values(args)
    asked = (vars(PRESETS[args.preset]) if args.preset else {}) | values
    same = vars(own).items() | {("dtype", "auto")}
    if changed := [n for n, value in asked.items() if n not in RESUMABLE and (n, value) not in same]:
        kept, free = (", ".join(map(flag, names)) for names in (changed, RESUMABLE))
        raise UsageError(f"--resume keeps the run's own {kept}; it takes {free}; --out starts another run")
    return make_config("cpu", vars(own) | {name: values[name] for name in RESUMABLE if name in values})


def paced(own: TrainConfig, config: TrainConfig, step: int) -> TrainConfig:
    """Return `config`, with the run's own course of the learning rate if more steps would make that jump."""
    before, after = (learning_rate(each, step + 1) for each in (own, config))
    if after <= 1.1 * before:
        return config
    end = own.decay_end
    print(f"rate     {before:.2g} after step {step}, and --min-lr from step {end} on, where it was to end;"
          f" with --decay-steps {config.steps} it would jump to {after:.2g}")  # fmt: skip
    return dataclasses.replace(config, decay_steps=end)


def newest_run() -> Path:
    """The run under runs/ that saved a checkpoint last."""
    found = [folder.parent for folder in RUNS.glob("*/checkpoints")]
    if not found:
        raise UsageError(f"there is no run with a checkpoint under {RUNS}/")
    return max(found, key=lambda run: (run / "checkpoints").stat().st_mtime)


def describe(trainer: Trainer) -> None:
    config, corpus = trainer.config, trainer.corpus
    total = sum(p.numel() for p in trainer.model.parameters())
    kind = "dense" if config.dense else f"{config.num_experts} experts, {config.top_k} active"
    say(f"run      {trainer.run}")
    say(f"model    {kind}; {total:,} parameters, {active_params(trainer.model, config):,} active")
    say(f"text     {corpus.files} files; {len(corpus.train) / 1e6:.2f} MB for training,"
        f" {len(corpus.val) / 1e6:.2f} MB for validation")  # fmt: skip
    several = f"{trainer.ranks.size} processes, " if trainer.ranks.size > 1 else ""
    say(f"machine  {several}{config.device}, {config.dtype}; steps {trainer.step} to {config.steps},"
        f" {config.tokens_per_step} bytes each")  # fmt: skip
