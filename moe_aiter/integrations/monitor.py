"""A `Monitor` for transformers' models, and a callback that logs its numbers in transformers' Trainer."""

import torch
from torch import nn

from ..files import need
from ..kernels.base.check import check_group, checked
from ..layers.monitor import Monitor, Recorder, scalars_of
from ..layers.route_replay import ForeignLayer
from ..routing.plan import make_plan
from ..routing.router import Routing
from .transformers import down_of, experts_in, is_experts

__all__ = ["ExpertsMonitor", "MonitorCallback", "watch"]

TrainerCallback = need("transformers", "hf").TrainerCallback


class ExpertsMonitor(Monitor):
    """A `Monitor` that also counts the experts of transformers' models.

    It counts every module whose class has transformers' decorator `use_experts_implementation`, whichever
    implementation runs.  transformers' routers do not report logits and selection biases, so logit_norm,
    logit_max, logsumexp and bias_range are None.  Negative ids are not counted, nor is the id E, which marks
    experts of other ranks under expert parallelism, nor what `replay_routes` drops.
    """

    def find(self, model: nn.Module) -> dict[str, nn.Module]:
        return super().find(model) | experts_in(model)

    def attach(self, layer: nn.Module) -> Recorder:
        if not is_experts(layer):
            return super().attach(layer)
        weight = down_of(layer)  # (E, H, I) or (E, I, H)
        self.attachment.put(layer, "monitor", Recorder(weight.shape[0], weight.device, self.evaluation))
        self.attachment.hook(layer.register_forward_pre_hook(record_experts, with_kwargs=True))
        return layer.monitor


def record_experts(module: nn.Module, args: tuple, kwargs: dict) -> None:
    """A hook.  It asks the module for its recorder, since a copy of the module has the hook alone."""
    recorder = module.monitor
    if recorder is None:
        return
    expert_ids = (kwargs["top_k_index"] if "top_k_index" in kwargs else args[1]).detach()
    none, routes = expert_ids == recorder.num_experts, getattr(module, "routes", None)
    if isinstance(routes, ForeignLayer):
        none = none | routes.drops(expert_ids)
    expert_ids = expert_ids.masked_fill(none, -1)
    chosen = make_plan(expert_ids, recorder.num_experts).group_sizes
    routing = Routing(expert_ids, None, None, None)
    recorder.record(routing, chosen, chosen, None, module.training)


class MonitorCallback(TrainerCallback):
    """Add the scalars of each layer to the training logs of transformers' Trainer.

    The scalars are those of `Monitor.log`, over the steps since the last log; with `group`, summed over its
    ranks.  The Trainer's own reporters see them only if this callback precedes them: use `watch`.
    """

    @checked
    def __init__(self, *, prefix: str = "moe", group: "torch.distributed.ProcessGroup | None" = None):
        check_group(group=group)
        self.prefix, self.group, self.monitor = prefix, group, None

    def on_train_begin(self, args, state, control, model: nn.Module, **_) -> None:
        if self.monitor is not None:  # a training that broke off has no end
            self.monitor.remove()
        self.monitor = ExpertsMonitor(model, group=self.group)

    def on_log(self, args, state, control, logs: dict, **_) -> None:
        if self.monitor is not None and "loss" in logs:  # not those of an evaluation
            scalars = {f"{self.prefix}/{k}": v for k, v in scalars_of(self.monitor.read()).items()}
            logs.update(scalars)
            state.log_history[-1].update(scalars)
            self.monitor.reset()

    def on_train_end(self, args, state, control, **_) -> None:
        self.monitor.remove()
        self.monitor = None


def watch(trainer, **options) -> MonitorCallback:
    """Give a transformers Trainer a `MonitorCallback` with these options, in front of its reporters."""
    if not hasattr(trainer, "callback_handler"):
        raise TypeError(f"trainer must be a transformers Trainer, not {type(trainer).__name__}")
    callback = MonitorCallback(**options)
    trainer.callback_handler.callbacks.insert(0, callback)
    return callback
