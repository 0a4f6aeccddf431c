"""The training loop, and the files that it writes to the run folder."""

import math
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from types import FrameType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..files import drafted, sync
from ..layers import LayerStatistics, LiveTable, Monitor
from ..routing.losses import load_balance_loss, load_statistics, z_loss
from . import UsageError, need
from .checkpoint import load_newest, save_checkpoint
from .data import load_corpus, train_batch, val_batch
from .metrics import Metrics, log_rows, peak_flops, truncate_metrics
from .model import VOCAB, Transformer, flops_per_token, generate, readable
from .presets import DTYPES, TrainConfig

LOSSES = {"loss": "the loss", "val_loss": "the validation loss"}
SIGNALS = [s for s in signal.Signals if s.name in ("SIGINT", "SIGTERM", "SIGHUP")]  # Windows has no SIGHUP
FIRST_SAVE = 60  # seconds of training after which there is a checkpoint, however long --save-every is
MONITORED = "entropy", "dead_experts", "logit_norm", "logit_max", "logsumexp"  # written for each layer


class Trainer:
    """A model, its optimizer, its text and its run folder, at some step.

    `live` shows a table of the layers while it trains, in place of a bar.
    """

    def __init__(self, config: TrainConfig, run: Path, live: bool = False):
        self.config, self.run, self.live, self.step = config, run, live, 0
        self.device = torch.device(config.device)
        torch.manual_seed(config.seed)
        self.corpus = load_corpus(config.data, config.val_fraction, config.sequence).to(self.device)
        torch.empty(config.tokens_per_step, VOCAB, device=self.device)  # its logits: a huge batch fails here
        self.model = Transformer(config).to(self.device)
        self.monitor = None if config.dense else Monitor(self.model)
        self.forward = torch.compile(self.model) if config.compile else self.model
        self.optimizer = make_optimizer(self.model, config)

    def resume(self) -> None:
        """Continue from the newest checkpoint of the run folder that can be read."""
        state = load_newest(self.run / "checkpoints", self.model, self.optimizer)
        if state.get("fingerprint") != self.corpus.fingerprint:
            raise UsageError(f"{self.run} was trained on other text than --data (or this Python) gives now")
        self.step = state["step"]
        if self.step > self.config.steps:
            raise UsageError(f"--steps is {self.config.steps} but {self.run} has made {self.step} already")
        truncate_metrics(self.run / "metrics.jsonl", self.step)

    def train(self, log: object = None) -> int:
        """Run the steps that are left; returns the exit status, 0 unless a signal stopped it.

        `log` takes the numbers of each step; see `Monitor.log` for its kinds.
        """
        config = self.config
        flops = flops_per_token(self.model, config) * config.tokens_per_step
        peak = peak_flops(self.device) if config.dtype == "bfloat16" else None
        metrics = Metrics(self.run / "metrics.jsonl", config.tokens_per_step, flops, peak)
        first_save = time.perf_counter() + FIRST_SAVE
        with Stop() as stop, LiveTable() if self.live else self.progress_bar() as display:
            while self.step < config.steps:
                metrics.add(*self.take_step())
                status = stop.status  # read once: a signal that comes later waits for the next step
                last = self.step == config.steps
                validates = last or self.step % config.val_every == 0
                early = time.perf_counter() > first_save
                saves = last or status or early or self.step % config.save_every == 0
                if validates or saves or self.step % config.log_every == 0:
                    rows, layers = metrics.collect(), self.read_monitor()
                    if layers:
                        rows[-1] |= {name: [getattr(s, name) for s in layers.values()] for name in MONITORED}
                    rows[-1] |= self.validate() if validates else {}
                    metrics.write(rows)
                    if log is not None:
                        log_rows(log, rows, layers)
                    self.check(rows, saves)
                    self.report(display, rows[-1], layers)
                if saves:
                    self.save()
                    first_save = math.inf
                if status:
                    return status
                if validates or saves:
                    metrics.restart_clock()  # those were not training
        return 0

    def progress_bar(self):
        seconds = 0.1 if sys.stderr.isatty() else 10  # between two updates; a log file needs few
        keywords = {"unit": "step", "dynamic_ncols": True, "mininterval": seconds}
        return need("tqdm").tqdm(total=self.config.steps, initial=self.step, **keywords)

    def check(self, rows: list[dict], saves: bool) -> None:
        """End the run at the first loss, or weight that would be saved, that is no number."""
        losses = [(row["step"], LOSSES[name], row[name]) for row in rows for name in LOSSES if name in row]
        lost = [(step, name, value) for step, name, value in losses if not math.isfinite(value)]
        if saves and not all(weight.isfinite().all() for weight in self.model.parameters()):
            lost.append((self.step, "a weight", "not finite"))
        if lost:
            step, name, value = lost[0]
            raise UsageError(f"{name} is {value} at step {step}: try a smaller --lr, or a longer --warmup")

    def read_monitor(self) -> dict[str, LayerStatistics]:
        """What each MoE layer routed since this was last asked; nothing in a dense model."""
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
        loss, routings = self.loss(*train_batch(text, config.batch, config.sequence, config.seed, self.step))
        total, tensors = loss, {"loss": loss.detach()}
        if routings:
            load = torch.stack([r.plan.group_sizes for r in routings])  # (layers, E)
            balance = mean(
                load_balance_loss(r.routing.scores, group_sizes=r.plan.group_sizes) for r in routings
            )
            z = mean(z_loss(r.routing.logits) for r in routings)
            total = loss + config.balance_coef * balance + config.z_coef * z
            tensors |= {"balance_loss": balance.detach(), "z_loss": z.detach()}
            tensors["imbalance"] = load_statistics(load).imbalance
            if self.step % max(1, config.steps // 200) == 0 or self.step == 1:
                tensors["load"] = load
        total.backward()
        tensors["grad_norm"] = torch.nn.utils.clip_grad_norm_(self.model.parameters(), config.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return {"step": self.step, "lr": rate}, tensors

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
            batch = val_batch(self.corpus.val, config.batch, config.sequence, index, config.val_batches)
            losses.append(self.loss(*batch)[0])
        self.model.train()
        loss = mean(losses).item()
        return {"val_loss": loss, "val_bits_per_byte": loss / math.log(2)}

    def save(self) -> None:
        sync(self.run / "metrics.jsonl")
        folder = self.run / "checkpoints"
        save_checkpoint(folder, self.step, self.model, self.optimizer, fingerprint=self.corpus.fingerprint)

    def write_sample(self) -> str:
        text = sample(self.model, self.config)
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
    """Matrices decay; gains and other vectors do not."""
    matrices = {
        "params": [p for p in model.parameters() if p.dim() >= 2],
        "weight_decay": config.weight_decay,
    }
    vectors = {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0}
    betas = config.beta1, config.beta2
    return torch.optim.AdamW([matrices, vectors], lr=config.lr, betas=betas, fused=True)


def learning_rate(config: TrainConfig, step: int) -> float:
    """The rate of step 1 ... config.steps: a line up to `lr`, then a cosine down to `min_lr * lr`."""
    warmup = max(1, round(config.warmup * config.steps))
    if step <= warmup:
        return config.lr * step / warmup
    progress = (step - warmup) / max(1, config.steps - warmup)
    share = config.min_lr + (1 - config.min_lr) * 0.5 * (1 + math.cos(math.pi * progress))
    return config.lr * share


def mean(losses: Iterable[Tensor]) -> Tensor:
    return torch.stack(list(losses)).mean()
