"""AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101) with warmup and a cosine (2017, arXiv 1608.03983)."""

import math

import torch
from torch import nn

from .presets import TrainConfig


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


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate
