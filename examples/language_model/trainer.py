"""The training loop, and the files that it writes to the run folder."""

import contextlib
import math
import signal
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_aiter import LayerStatistics, LiveTable, Monitor, load_balance_loss, load_statistics, z_loss
from moe_aiter.config import say
from moe_aiter.files import drafted, sync

from . import UsageError, need
from .checkpoint import load_newest, save_checkpoint
from .data import load_corpus, train_batch, val_batch
from .metrics import Metrics, log_rows, peak_flops, truncate_metrics
from .model import VOCAB, Transformer, flops_per_token, generate, readable
from .presets import DTYPES, TrainConfig
from .ranks import ALONE, Ranks

LOSSES = {"loss": "the loss", "val_loss": "the validation loss"}
TO_MEND = "try a smaller --lr, or a longer --warmup, in a new run"
SIGNALS = [s for s in signal.Signals if s.name in ("SIGINT", "SIGTERM", "SIGHUP")]  # Windows has no SIGHUP
FIRST_SAVE = 60  # seconds of training after which there is a checkpoint, however long --save-every is
MONITORED = "entropy", "dead_experts", "logit_norm", "logit_max", "logsumexp"  # written for each layer


class Trainer:
    """A model, its optimizer, its text and its run folder, at some step.

    `live` shows a table of the layers while it trains, in place of a bar.  Each of `ranks` computes its part
    of a batch; the first one alone writes and shows what all have computed.
    """

    def __init__(self, config: TrainConfig, run: Path, live: bool = False, ranks: Ranks = ALONE):
        self.config, self.run, self.live, self.ranks, self.step = config, run, live, ranks, 0
        self.device = ranks.device(config.device)
        torch.manual_seed(config.seed)
        self.rows, self.mesh = ranks.rows(config.batch), None
        with ranks.together():
            self.corpus = load_corpus(config.data, config.val_fraction, config.sequence).to(self.device)
            # the logits: a huge batch fails here
            torch.empty(config.tokens_per_step // ranks.size, VOCAB, device=self.device)
            self.model = Transformer(config).to(self.device)
        if ranks.size > 1:
            from .sharded import share

            self.mesh = share(self.model, config, ranks)
        self.monitor = None if config.dense else Monitor(self.model, group=ranks.group)
        self.forward = torch.compile(self.model) if config.compile else self.model
        self.optimizer = make_optimizer(self.model, config)

    def resume(self) -> None:
        """Continue from the newest checkpoint of the run folder that can be read."""
        state = load_newest(self.run / "checkpoints", self.model, self.optimizer, self.ranks)
        self.step = state["step"]
        with self.ranks.together():
            if state.get("fingerprint") != self.corpus.fingerprint:
                text = f"{self.run} was trained on other text than --data (or this Python) gives now"
                raise UsageError(text)
            if self.step > self.config.steps:
                text = f"--steps is {self.config.steps} but {self.run} has made {self.step} already"
                raise UsageError(text)
            if self.ranks.first:
                dropped = truncate_metrics(self.run / "metrics.jsonl", self.step)
                if lost := lost_numbers(dropped):
                    text = f"{self.run} ended because {lost[0]}, and the same steps follow: {TO_MEND}"
                    say(f"moe-aiter train: warning: {text}", file=sys.stderr)

    def train(self, log: Callable | None = None) -> int:
        """Run the steps that are left; returns the exit status, 0 unless a signal stopped it.

        `log(numbers, step=)` takes the numbers of each step.
        """
        config, ranks = self.config, self.ranks
        flops = flops_per_token(self.model, config) * config.tokens_per_step
        peak = peak_flops(self.device) if config.dtype == "bfloat16" else None
        peak = peak and peak * ranks.size
        metrics = Metrics(self.run / "metrics.jsonl", config.tokens_per_step, flops, peak)
        first_save = time.perf_counter() + FIRST_SAVE
        with Stop() as stop, self.display() as display:
            while self.step < config.steps:
                metrics.add(*self.take_step())
                early = ranks.first and time.perf_counter() > first_save
                # read once: a signal that comes later waits for the next step
                status, early = ranks.largest(stop.status, early)
                last = self.step == config.steps
                validates = last or self.step % config.val_every == 0
                saves = last or status or early or self.step % config.save_every == 0
                if validates or saves or self.step % config.log_every == 0:
                    rows, layers = metrics.collect(), self.read_monitor()
                    if layers:
                        rows[-1] |= {name: [getattr(s, name) for s in layers.values()] for name in MONITORED}
                    rows[-1] |= self.validate() if validates else {}
                    if ranks.first:
                        metrics.write(rows)
                    if log is not None:
                        log_rows(log, rows, layers)
                    self.check(rows, saves)
                    if ranks.first:
                        self.report(display, rows[-1], layers)
                if saves:
                    self.save()
                    first_save = math.inf
                if status:
                    return status
                if validates or saves:
                    metrics.restart_clock()  # those were not training
        return 0

    def display(self):
        """Return the table or the bar, as a context; nothing on other ranks than the first."""
        if not self.ranks.first:
            return contextlib.nullcontext()
        if self.live:
            return LiveTable()
        seconds = 0.1 if sys.stderr.isatty() else 10  # between two updates; a log file needs few
        keywords = {"unit": "step", "dynamic_ncols": True, "mininterval": seconds}
        return need("tqdm").tqdm(total=self.config.steps, initial=self.step, **keywords)

    def check(self, rows: list[dict], saves: bool) -> None:
        """End the run, on all ranks, at the first loss, or weight that would be saved, that is no number."""
        lost = lost_numbers(rows)
        finite = not saves or all(own_part(weight).isfinite().all() for weight in self.model.parameters())
        if any(self.ranks.largest(not finite)):
            lost.append(f"a weight is not finite at step {self.step}")
        if lost:
            raise UsageError(f"{lost[0]}: {TO_MEND}; --resume would repeat these steps")

    def read_monitor(self) -> dict[str, LayerStatistics]:
        """Return each MoE layer's statistics since the last call; none for a dense model."""
        layers = {} if self.monitor is None else self.monitor.read()
        if layers:
            self.monitor.reset()
        return layers

    def report(self, display, row: dict, layers: dict[str, LayerStatistics]) -> None:
        """Move the progress bar to this step, or draw the table anew."""
        figures = [f"loss {row['loss']:.3f}", f"{row['bits_per_byte']:.2f} bits/byte"]
        figures += [f"{row['tokens_per_s'] / 1000:.1f}k tokens/s"]
        if "imbalance" in row:
            figures += [f"imbalance {max(row['imbalance']):.2f}"]
        if "mfu" in row:
            figures += [f"MFU {row['mfu']:.0%}"]
        text = ", ".join(figures)
        if self.live:
            display.show(layers, f"step {self.step} of {self.config.steps}: {text}")
        else:
            display.set_postfix_str(text, refresh=False)
            display.update(self.step - display.n)

    def take_step(self) -> tuple[dict, dict[str, Tensor]]:
        """One optimizer step; returns what to log, numbers and tensors that may still be on their way."""
        config = self.config
        self.step += 1
        rate = learning_rate(config, self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        text = self.corpus.train
        batch = train_batch(text, config.batch, config.sequence, config.seed, self.step, self.rows)
        loss, routings = self.loss(*batch)
        total, losses, tensors = loss, {"loss": loss}, {}
        if routings:
            load = self.ranks.sum(torch.stack([r.plan.group_sizes for r in routings]))  # (layers, E)
            balance = mean(
                load_balance_loss(r.routing.scores, group_sizes=sizes)
                for r, sizes in zip(routings, load, strict=True)
            )
            z = mean(z_loss(r.routing.logits) for r in routings)
            total = loss + config.balance_coef * balance + config.z_coef * z
            losses |= {"balance_loss": balance, "z_loss": z}
            tensors["imbalance"] = load_statistics(load).imbalance
            if self.step % max(1, config.steps // 200) == 0 or self.step == 1:
                tensors["load"] = load
        total.backward()
        means = self.ranks.mean(torch.stack([loss.detach() for loss in losses.values()]))
        tensors = dict(zip(losses, means, strict=True)) | tensors
        tensors["grad_norm"] = self.clip_gradients()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return {"step": self.step, "lr": rate}, tensors

    def clip_gradients(self) -> Tensor:
        """Clip the gradients, those of the whole batch, and return their norm before that."""
        if self.mesh is None:
            return torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip)
        from .sharded import clip_gradients

        return clip_gradients(self.model, self.config, self.mesh)

    def loss(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, list]:
        """Mean cross-entropy in nats per byte, and the routing of each MoE layer."""
        with autocast(self.config):
            logits, routings = self.forward(inputs)
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten()), routings

    @torch.no_grad()
    def validate(self) -> dict[str, float]:
        config = self.config
        self.model.eval()
        losses = []
        for index in range(config.val_batches):
            text, count = self.corpus.val, config.val_batches
            batch = val_batch(text, config.batch, config.sequence, index, count, self.rows)
            losses.append(self.loss(*batch)[0])
        self.model.train()
        loss = self.ranks.mean(mean(losses)).item()
        return {"val_loss": loss, "val_bits_per_byte": loss / math.log(2)}

    def save(self) -> None:
        if self.ranks.first:
            sync(self.run / "metrics.jsonl")
        folder, fingerprint = self.run / "checkpoints", self.corpus.fingerprint
        save_checkpoint(folder, self.step, self.model, self.optimizer, fingerprint, self.ranks)

    def write_sample(self) -> str:
        text = sample(self.model, self.config)  # by all ranks, each of which has a part of the model
        if self.ranks.first:
            with drafted(self.run / "sample.txt", errors="replace") as file:
                file.write(text + "\n")
        return text


def sample(model: Transformer, config: TrainConfig, prompt: bytes = b"") -> str:
    """Return `prompt` and the model's continuation, by default a text from its start."""
    model.eval()
    with autocast(config):
        text = generate(model, config.sample_bytes, config.temperature, config.seed, prompt or b"\0")
    return readable(prompt + text)


def autocast(config: TrainConfig) -> torch.autocast:
    """Matmuls in the run's dtype; weights, norms, softmax and losses stay float32."""
    dtype = DTYPES[config.dtype]
    return torch.autocast(torch.device(config.device).type, dtype, enabled=dtype != torch.float32)


class Stop:
    """Stop on Ctrl-C (SIGINT), SIGTERM and SIGHUP (the terminal is closed) between two steps.

    Inside the `with` block the first signal is noted; a second one ends the process at once.  Under nohup,
    SIGHUP stays ignored.

    `status` is then the exit status that a shell expects, 128 + signal: 130 after Ctrl-C, 143 after SIGTERM.
    """

    def __init__(self):
        self.status = 0

    def __enter__(self) -> "Stop":
        nohup = [s for s in SIGNALS if s.name == "SIGHUP" and signal.getsignal(s) is signal.SIG_IGN]
        self.before = {number: signal.signal(number, self.note) for number in SIGNALS if number not in nohup}
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def note(self, number: int, _: FrameType | None) -> None:
        self.status = 128 + number
        for each in self.before:
            signal.signal(each, signal.SIG_DFL)


# AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101) with warmup and a cosine (2017, arXiv 1608.03983)


def make_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """Matrices decay; gains and other vectors do not.  A fused optimizer takes groups of one mesh each."""
    groups: dict = {}
    for p in sorted(model.parameters(), key=lambda p: p.dim() < 2):
        decay = config.weight_decay if p.dim() >= 2 else 0.0
        groups.setdefault((decay, getattr(p, "device_mesh", None)), []).append(p)
    groups = [{"params": params, "weight_decay": decay} for (decay, _), params in groups.items()]
    betas = config.beta1, config.beta2
    return torch.optim.AdamW(groups, lr=config.lr, betas=betas, fused=True)


def learning_rate(config: TrainConfig, step: int) -> float:
    """The rate of step 1 and on: a line up to `lr`, a cosine down to `min_lr * lr`, which then stays."""
    steps = config.decay_end
    warmup = max(1, round(config.warmup * steps))
    if step <= warmup:
        return config.lr * step / warmup
    progress = min(1.0, (step - warmup) / max(1, steps - warmup))
    share = config.min_lr + (1 - config.min_lr) * 0.5 * (1 + math.cos(math.pi * progress))
    return config.lr * share


def own_part(weight: Tensor) -> Tensor:
    """Return the part of a shared weight that this rank has, and another weight as it is."""
    return weight.to_local() if hasattr(weight, "to_local") else weight


def lost_numbers(rows: list[dict]) -> list[str]:
    """What in these lines of metrics.jsonl is no number."""
    losses = [(row["step"], LOSSES[name], row[name]) for row in rows for name in LOSSES if name in row]
    return [f"{name} is {value} at step {step}" for step, name, value in losses if not math.isfinite(value)]


def mean(losses: Iterable[Tensor]) -> Tensor:
    return torch.stack(list(losses)).mean()
