"""The training loop, and what it leaves in the run folder."""

import math
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from ..routing.losses import load_balance_loss, z_loss
from ..routing.stats import load_statistics
from .checkpoint import load_checkpoint, newest_checkpoint, save_checkpoint, sync
from .data import load_corpus, train_batch, val_batch
from .errors import UsageError, need
from .metrics import Metrics, peak_flops, truncate_metrics
from .model import Transformer, flops_per_token
from .optimizer import learning_rate, make_optimizer, set_learning_rate
from .presets import DTYPES, TrainConfig
from .sample import generate
from .stop import Stop


class Trainer:
    """A model, its optimizer, its text and its run folder, at some step."""

    def __init__(self, config: TrainConfig, run: Path):
        self.config, self.run, self.step = config, run, 0
        self.device = torch.device(config.device)
        torch.manual_seed(config.seed)
        self.corpus = load_corpus(config.data, config.val_fraction, config.sequence).to(self.device)
        self.model = Transformer(config).to(self.device)
        self.forward = torch.compile(self.model) if config.compile else self.model
        self.optimizer = make_optimizer(self.model, config)

    def resume(self) -> None:
        """Continue from the newest checkpoint of the run folder."""
        path = newest_checkpoint(self.run / "checkpoints")
        state = load_checkpoint(path, self.model, self.optimizer)
        if state["fingerprint"] != self.corpus.fingerprint:
            raise UsageError(f"{path} was trained on other text than --data (or this Python) gives now")
        self.step = state["step"]
        truncate_metrics(self.run / "metrics.jsonl", self.step)

    def train(self) -> int:
        """Run the steps that are left; returns the exit status, 0 unless a signal stopped it."""
        config = self.config
        flops = flops_per_token(self.model, config) * config.tokens_per_step
        peak = peak_flops(self.device) if config.dtype == "bfloat16" else None
        metrics = Metrics(self.run / "metrics.jsonl", config.tokens_per_step, flops, peak)
        bar = need("tqdm").tqdm(total=config.steps, initial=self.step, unit="step", dynamic_ncols=True)
        with Stop() as stop, bar:
            while self.step < config.steps:
                row, tensors = self.take_step()
                last = self.step == config.steps
                if last or self.step % config.val_every == 0:
                    row["val_loss"] = self.validate()
                    row["val_bits_per_byte"] = row["val_loss"] / math.log(2)
                metrics.add(row, tensors)
                status = stop.status  # read once: a signal that comes later waits for the next step
                save = last or status or self.step % config.save_every == 0
                if save or self.step % config.log_every == 0:
                    self.report(bar, metrics.flush())
                if save:
                    self.save()
                if status:
                    return status
        return 0

    def report(self, bar, row: dict) -> None:
        """Move the progress bar to this step."""
        if not math.isfinite(row["loss"]):
            raise UsageError(f"the loss is {row['loss']} at step {self.step}: try a smaller --lr")
        parts = [f"loss {row['loss']:.3f}", f"{row['bits_per_byte']:.2f} bits/byte"]
        parts += [f"{row['tokens_per_s'] / 1000:.1f}k tokens/s"]
        if "imbalance" in row:
            parts += [f"imbalance {max(row['imbalance']):.2f}"]
        if "mfu" in row:
            parts += [f"MFU {row['mfu']:.0%}"]
        bar.set_postfix_str(", ".join(parts), refresh=False)
        bar.update(self.step - bar.n)

    def take_step(self) -> tuple[dict, dict[str, Tensor]]:
        """One optimizer step; returns what to log, numbers and tensors that may still be on their way."""
        config = self.config
        self.step += 1
        rate = learning_rate(config, self.step)
        set_learning_rate(self.optimizer, rate)
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
        dtype = DTYPES[self.config.dtype]
        with torch.autocast(self.device.type, dtype, enabled=dtype != torch.float32):
            logits, routings = self.forward(inputs)
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten()), routings

    @torch.no_grad()
    def validate(self) -> float:
        config = self.config
        self.model.eval()
        losses = []
        for index in range(config.val_batches):
            batch = val_batch(self.corpus.val, config.batch, config.sequence, index, config.val_batches)
            losses.append(self.loss(*batch)[0])
        self.model.train()
        return torch.stack(losses).mean().item()

    def save(self) -> None:
        sync(self.run / "metrics.jsonl")
        folder = self.run / "checkpoints"
        save_checkpoint(folder, self.step, self.model, self.optimizer, fingerprint=self.corpus.fingerprint)

    def write_sample(self) -> str:
        config = self.config
        self.model.eval()
        dtype = DTYPES[config.dtype]
        with torch.autocast(self.device.type, dtype, enabled=dtype != torch.float32):
            sample = generate(self.model, config.sample_bytes, config.temperature, config.seed)
        text = sample.replace(b"\0", b"\n").decode(errors="replace")
        (self.run / "sample.txt").write_text(text + "\n")
        return text


def mean(losses: Iterable[Tensor]) -> Tensor:
    return torch.stack(list(losses)).mean()
