"""Supervised fine-tuning in TRL 1.16.0, which loads a model that it gets by name."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from transformers import AutoModelForCausalLM


@dataclass
class SFTConfig:
    output_dir: str
    model_init_kwargs: dict[str, Any] | None = None
    max_steps: int = -1
    per_device_train_batch_size: int = 8
    learning_rate: float = 2e-5
    logging_steps: float = 10
    report_to: str = "none"
    use_cpu: bool = False
    bf16: bool | None = None
    save_strategy: str = "steps"
    seed: int = field(default=42)


class SFTTrainer:
    def __init__(self, model, args: SFTConfig, train_dataset):
        kwargs = {"dtype": "float32", **(args.model_init_kwargs or {})}
        kwargs["dtype"] = getattr(torch, kwargs["dtype"])
        self.model = AutoModelForCausalLM.from_pretrained(model, **kwargs)
        self.args, self.data, self.state = args, train_dataset, SimpleNamespace(log_history=[])

    def train(self):
        optimizer = torch.optim.AdamW(self.model.parameters(), self.args.learning_rate)
        for step in range(self.args.max_steps):
            tokens = torch.tensor([self.data[step % len(self.data)]["input_ids"]])
            loss = self.model(tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            self.state.log_history.append({"loss": loss.item()})
