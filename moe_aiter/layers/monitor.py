"""Statistics of a model's routers: summed on the device, read on demand, shown in the terminal."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, TextIO

import numpy as np
import torch
from torch import Tensor, nn

from ..kernels.base.check import check_group, checked
from ..private_api import COMPILED
from ..routing.balance import SCALARS, count_choices, record_routing, sum_over_ranks
from ..routing.losses import load_statistics
from ..routing.router import Routing
from .attached import Attachment, NotCopied, plain_name
from .moe import MoE, device_of

BARS = " ▁▂▃▄▅▆▇█", " .:-=+*#@"  # for a terminal, and for one that has only ASCII
WIDE = 110  # columns of a terminal that has room for twice the bars


# statistics


class LayerStatistics(NamedTuple):
    """Routing statistics of one layer since the monitor was reset, as numbers and NumPy arrays.

    Without any token, the load and its figures are 0, and every expert is dead.
    """

    tokens: int  # without padding
    choices: np.ndarray  # (E,) int64, of each expert, before any is dropped
    load: np.ndarray  # (E,) float32, each expert's share of the choices; sums to 1
    entropy: float  # of the load, over log E: 1 at balance, 0 when one expert takes all
    max_violation: float  # the largest load over the mean, minus 1 (MaxVio of arXiv 2408.15664)
    dead_experts: int  # those that no token chose
    drop_rate: float  # share of the choices that were over the capacity
    bias_range: tuple[float, float] | None  # smallest and largest selection bias; None without one
    logit_norm: float | None  # mean over the tokens of the Euclidean norm of their E logits
    logit_max: float | None  # the largest |logit|
    logsumexp: float | None  # mean over the tokens of log sum_e exp(logit); None where no logits are seen
    mismatch_rate: float | None = None  # share of replayed choices that the router would not make
    token_mismatch_rate: float | None = None  # share of tokens with such a choice; None without replay

    def scalars(self) -> dict[str, float]:
        """Return the scalar statistics by name, for a log, without those that are None."""
        values = self._asdict()
        bias = values.pop("bias_range")
        if bias is not None:
            values["bias_min"], values["bias_max"] = bias
        return {k: v for k, v in values.items() if v is not None and not isinstance(v, np.ndarray)}


class Monitor(AbstractContextManager["Monitor"]):
    """Record the expert load and router statistics of every `MoE` in `model`, until `remove`.

        with Monitor(model) as monitor:
            for step, batch in enumerate(batches):
                ...
                if step % 100 == 0:
                    monitor.log(writer, step)

    Each layer adds to a few numbers on its device, in each forward pass in training mode, or with
    `evaluation=True` in every forward pass.  Nothing synchronises until `read`.  Outputs and gradients stay
    the same to the bit.  Under activation checkpointing, torch.compile and CUDA graphs, a forward pass counts
    once.  A CUDA graph that was captured without the monitor does not record: create the monitor first.
    Copies and checkpoints of the model do not contain the monitor.

    `group` is a process group.  `read` then sums over its ranks, and all ranks must call `read` together.

    Raises ValueError for a model without a layer to count, and for a model that has a monitor already.
    """

    @checked
    def __init__(
        self, model: nn.Module, *, evaluation: bool = False,
        group: "torch.distributed.ProcessGroup | None" = None,
    ):  # fmt: skip
        check_group(group=group)
        self.evaluation, self.group = evaluation, group
        layers = {
            plain_name(name, (COMPILED,)) or type(m).__name__: m for name, m in self.find(model).items()
        }
        if not layers:
            raise ValueError(f"{type(model).__name__} has no layer that a monitor can count")
        for name, layer in layers.items():
            if getattr(layer, "monitor", None) is not None:
                raise ValueError(f"{name} has a monitor already: remove() that one first")
        self.layers, self.attachment = layers, Attachment()
        self.recorders = {name: self.attach(layer) for name, layer in layers.items()}

    def find(self, model: nn.Module) -> dict[str, nn.Module]:
        """Return the layers to count, by their names in the model."""
        return {name: m for name, m in model.named_modules() if isinstance(m, MoE)}

    def attach(self, layer: Any) -> "Recorder":
        recorder = Recorder(layer.num_routed, device_of(layer), self.evaluation)
        self.attachment.put(layer, "monitor", recorder)
        return recorder

    def read(self) -> dict[str, LayerStatistics]:
        """Return the statistics of each layer, by name; synchronises once, however many layers there are.

        With a `group`, there are two all-reduces on each device: one of the sums, one of the largest logits.
        """
        totals = [torch.cat([r.replayed.to(r.totals), r.totals]) for r in self.recorders.values()]
        if self.group is not None:
            totals = by_device(totals, lambda group: totals_over_ranks(group, self.group))
        biases = [selection_bias_of(layer) for layer in self.layers.values()]
        totals = [torch.cat([t, bias.to(t)]) for t, bias in zip(totals, biases, strict=True)]
        totals = by_device(totals, lambda group: list(torch.cat(group).cpu().split([len(t) for t in group])))
        return {
            name: statistics_of(t, recorder.num_experts)
            for (name, recorder), t in zip(self.recorders.items(), totals, strict=True)
        }

    def reset(self) -> None:
        """Set all counts to zero."""
        for recorder in self.recorders.values():
            recorder.totals.zero_()
            recorder.replayed.zero_()

    @checked
    def log(
        self, sink: object, step: int | None = None, *, prefix: str = "moe"
    ) -> dict[str, LayerStatistics]:
        """Read the statistics, pass their scalars to `sink`, reset the counts, and return the statistics.

        Scalars are called "{prefix}/{layer}/{name of the scalar}".  `sink` is a TensorBoard SummaryWriter or
        any object with add_scalar(tag, value, step); a W&B run or any object with log(dict, step=step); or a
        function of (dict, step).
        Raises TypeError for anything else.
        """
        statistics = self.read()
        write = writer_of(sink)
        write({f"{prefix}/{k}": v for k, v in scalars_of(statistics).items()}, step)
        self.reset()
        return statistics

    def remove(self) -> None:
        """Detach from the model; `read` still returns what was counted."""
        self.attachment.close()

    def __exit__(self, *_: object) -> None:
        self.remove()


class Recorder(NotCopied):
    """The sums of one layer."""

    def __init__(self, num_experts: int, device: torch.device, evaluation: bool):
        self.num_experts, self.evaluation = num_experts, evaluation
        device = torch.device("cpu") if device.type == "meta" else device
        with torch.inference_mode(False):  # of which a tensor would be of no use outside it
            self.totals = torch.zeros(2 * num_experts + SCALARS, dtype=torch.float64, device=device)
            self.replayed = torch.zeros(4, dtype=torch.int64, device=device)  # see `record_replay`

    def record(
        self, routing: Routing, chosen: Tensor, kept: Tensor, mask: Tensor | None, training: bool
    ) -> None:
        """Add what was routed: the choices of each expert (E,) before any was dropped, and those kept."""
        if (training or self.evaluation) and not chosen.is_meta:  # there, nothing is chosen
            if self.totals.device != chosen.device:  # the model was moved
                with torch.inference_mode(False):
                    self.totals = self.totals.to(chosen.device)
            record_routing(self.totals, routing.expert_ids, chosen, kept, routing.logits, mask)

    def record_replay(self, counts: Tensor, training: bool) -> None:
        """Add counts (4,) int64 of a replay: choices that the router would not make, choices, tokens with
        such a choice, tokens."""
        if training or self.evaluation:
            if self.replayed.device != counts.device:
                with torch.inference_mode(False):
                    self.replayed = self.replayed.to(counts.device)
            count_choices(self.replayed, counts)


def scalars_of(statistics: dict[str, LayerStatistics]) -> dict[str, float]:
    """All scalars of all layers: "{layer}/{name}"."""
    return {f"{layer}/{k}": v for layer, s in statistics.items() for k, v in s.scalars().items()}


def writer_of(sink: object) -> Callable[[dict[str, float], int | None], object]:
    if hasattr(sink, "add_scalar"):
        return lambda scalars, step: [sink.add_scalar(k, v, step) for k, v in scalars.items()]
    if hasattr(sink, "log"):
        return lambda scalars, step: sink.log(scalars, step=step)
    if callable(sink):
        return sink
    raise TypeError(f"sink must have add_scalar or log, or be a function, not {type(sink).__name__}")


def statistics_of(totals: Tensor, num_experts: int) -> LayerStatistics:
    """Return the statistics of a recorder's sums, which the selection bias (E,) may follow; on the CPU."""
    replayed, totals = totals.tensor_split([4])
    choices, dropped, rest = totals.tensor_split([num_experts, 2 * num_experts])
    scalars, bias = rest.tensor_split([SCALARS])
    load = load_statistics(choices)
    tokens, seen, norm, logsumexp, largest = scalars.tolist()
    other, used, tokens_other, tokens_used = replayed.tolist()
    return LayerStatistics(
        tokens=int(tokens),
        choices=choices.long().numpy(),
        load=load.load.numpy(),
        entropy=load.entropy.item(),
        max_violation=load.imbalance.item(),
        dead_experts=int(load.idle.item()),
        drop_rate=dropped.sum().item() / max(choices.sum().item(), 1),
        bias_range=(bias.min().item(), bias.max().item()) if len(bias) else None,
        logit_norm=norm / seen if seen else None,
        logit_max=largest if seen else None,
        logsumexp=logsumexp / seen if seen else None,
        mismatch_rate=other / used if used else None,
        token_mismatch_rate=tokens_other / tokens_used if tokens_used else None,
    )


def selection_bias_of(layer: nn.Module) -> Tensor:
    bias = getattr(getattr(layer, "router", None), "selection_bias", None)
    return torch.empty(0) if bias is None else bias


def by_device(tensors: list[Tensor], change: Callable[[list[Tensor]], list[Tensor]]) -> list[Tensor]:
    """`change` of all tensors of a device at once, in the order of the tensors."""
    changed = list(tensors)
    for device in dict.fromkeys(t.device for t in tensors):
        positions = [i for i, t in enumerate(tensors) if t.device == device]
        for i, t in zip(positions, change([tensors[i] for i in positions]), strict=True):
            changed[i] = t
    return changed


def totals_over_ranks(totals: list[Tensor], group: "torch.distributed.ProcessGroup | None") -> list[Tensor]:
    sums = sum_over_ranks([t[:-1] for t in totals], group)
    largest = torch.stack([t[-1] for t in totals])
    torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX, group=group)
    return [torch.cat([t, m[None]]) for t, m in zip(sums, largest, strict=True)]


# the table in the terminal


class LiveTable:
    """Show the statistics of all layers as a table in the terminal; each `show` redraws the table in place.

        with Monitor(model) as monitor, LiveTable() as table:
            ...
                table.show(monitor.read(), f"step {step}")

    If the output is not a terminal, the table is printed once, at the end.

    Each layer has a row.  Its bars are the load of the experts, in their order: half height is the mean, full
    height is twice the mean or more, and an expert without a token has no bar.  With more than 16 experts, or
    32 in a wide terminal, neighbours share a bar, which shows their mean.  The other columns are the entropy,
    max_violation, dead_experts and drop_rate of `LayerStatistics`, and its bias_range, logit_norm,
    mismatch_rate and logit_max if a layer has them.

    `file` is stderr by default.
    Raises ImportError if the package rich is missing.
    """

    def __init__(self, file: TextIO | None = None):
        try:
            from rich.console import Console
            from rich.live import Live
        except ImportError as error:
            raise ImportError("LiveTable needs the package rich: pip install rich") from error
        if file is not None and not hasattr(file, "write"):
            raise TypeError(f"file must be a text file, not {type(file).__name__}")
        self.console = Console(file=file, stderr=file is None)
        self.live = Live(console=self.console, auto_refresh=False)

    @checked
    def show(self, statistics: dict[str, LayerStatistics], title: str = "") -> None:
        """Draw the statistics of layers, by name, as `Monitor.read` and `Monitor.log` return them."""
        from rich.console import Group
        from rich.text import Text

        if not isinstance(statistics, dict):
            raise TypeError(f"statistics must be a dict of layers', not {type(statistics).__name__}")
        width = 16 if self.console.width < WIDE else 32
        table = new_table(statistics, width, self.console.options.ascii_only)
        self.live.update(Group(*([Text(title)] if title else []), table), refresh=True)

    def __enter__(self) -> "LiveTable":
        self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.live.stop()


def new_table(statistics: dict[str, LayerStatistics], width: int, ascii_only: bool) -> Any:
    """The statistics as a table of rich's, which may be missing."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, padding=0)
    columns = {"layer": list(statistics)} | table_columns(list(statistics.values()), width, ascii_only)
    columns = {name: cells for name, cells in columns.items() if any(cells)}
    for name in columns:  # where there is little room the names of layers go on in a second line
        left = name in ("layer", "load")
        table.add_column(name, justify="left" if left else "right", no_wrap=name != "layer", overflow="fold")
    for cells in zip(*columns.values(), strict=True):
        table.add_row(*map(Text, cells))  # a plain string could hold marks of style
    return table


def table_columns(layers: list[LayerStatistics], width: int, ascii_only: bool) -> dict[str, list[str]]:
    """Return the table's cells for each layer, by column; a cell without a value is empty."""
    return {
        "load": [bars(s.load, width, ascii_only) for s in layers],
        "entropy": [f"{s.entropy:.3f}" for s in layers],
        "MaxVio": [f"{s.max_violation:.2f}" for s in layers],
        "dead": [str(s.dead_experts) for s in layers],
        "dropped": [f"{s.drop_rate:.1%}" for s in layers],
        "bias": ["{:+.3f} {:+.3f}".format(*s.bias_range) if s.bias_range else "" for s in layers],
        "norm": ["" if s.logit_norm is None else f"{s.logit_norm:.2f}" for s in layers],
        "mismatch": ["" if s.mismatch_rate is None else f"{s.mismatch_rate:.1%}" for s in layers],
        "|logit|": ["" if s.logit_max is None else f"{s.logit_max:.2f}" for s in layers],
    }


def bars(load: np.ndarray, width: int, ascii_only: bool = False) -> str:
    """The load (E,) as a character for each expert, or for each few of them, at most `width`."""
    bins = np.array_split(load * len(load), min(len(load), width))  # multiples of the mean
    steps = BARS[ascii_only]
    heights = [float(bin.mean()) / 2 * (len(steps) - 1) for bin in bins]
    # a bar for every expert that has a token
    return "".join(steps[min(max(round(h), h > 0), len(steps) - 1)] for h in heights)
