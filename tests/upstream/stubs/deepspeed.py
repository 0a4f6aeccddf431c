"""ZeRO-3 of DeepSpeed 0.19.8: a parameter is there only while its module runs."""

import torch
from torch import nn


class Engine(nn.Module):
    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer):
        super().__init__()
        self.module, self.optimizer = module, optimizer
        self.whole = {p: p.data for p in module.parameters()}
        for part in module.modules():
            if own := list(part.parameters(recurse=False)):
                part.register_forward_pre_hook(lambda *_, own=own: self.gather(own))
                part.register_forward_hook(lambda *_, own=own: self.release(own))
                part.register_full_backward_pre_hook(lambda *_, own=own: self.gather(own))
        self.device = next(iter(self.whole)).device
        self.release(self.whole)

    def gather(self, parameters):
        for p in parameters:
            p.data = self.whole[p]

    def release(self, parameters):
        for p in parameters:
            p.data = p.data.new_empty(0)

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    def backward(self, loss):
        loss.backward()

    def step(self):
        self.gather(self.whole)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.release(self.whole)


def initialize(*, model: nn.Module, optimizer: torch.optim.Optimizer, config: dict) -> tuple:
    """The engine, the optimizer, the loader of the data and the schedule."""
    assert config["zero_optimization"]["stage"] == 3
    return Engine(model, optimizer), optimizer, None, None
