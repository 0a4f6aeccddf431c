"""The order of calls in Lightning 2.6.6."""

import torch
from torch import nn


class LightningModule(nn.Module):
    pass


class Trainer:
    def __init__(
        self, *, accelerator="auto", max_steps=-1, logger=None, enable_checkpointing=None,
        enable_progress_bar=None, enable_model_summary=None,
    ):  # fmt: skip
        self.max_steps = max_steps

    def fit(self, model: LightningModule, train_dataloaders):
        model.configure_model()
        optimizer = model.configure_optimizers()
        for i, batch in zip(range(self.max_steps), train_dataloaders, strict=False):
            with torch.enable_grad():
                loss = model.training_step(batch, i)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
