"""A table in the terminal that follows what a `Monitor` reads."""

from typing import TextIO

import numpy as np

from ..kernels.base.check import checked
from .monitor import LayerStatistics

BARS = " ▁▂▃▄▅▆▇█", " .:-=+*#@"  # for a terminal, and for one that has only ASCII
WIDE = 110  # columns of a terminal that has room for twice the bars


class LiveTable:
    """A row for each layer, drawn again in place by each `show`; where there is no terminal, once at the end.

        with Monitor(model) as monitor, LiveTable() as table:
            ...
                table.show(monitor.read(), f"step {step}")

    The bars are the load of the experts, in their order: half height is the mean, full height twice that or
    more, and an expert without a token has none.  Of more than 16 experts, or 32 in a wide terminal,
    neighbours share a bar, which is their mean.  Then the entropy, max_violation, dead_experts, drop_rate,
    and where there are any bias_range, logit_norm and logit_max of `LayerStatistics`.

    Into `file`, by default stderr, by the package rich; raises ImportError where that is missing.
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

    def __exit__(self, *_) -> None:
        self.live.stop()


def new_table(statistics: dict[str, LayerStatistics], width: int, ascii_only: bool):
    """The statistics as a table of rich's."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, padding=0)
    columns = {"layer": list(statistics)} | columns_of(list(statistics.values()), width, ascii_only)
    columns = {name: cells for name, cells in columns.items() if any(cells)}
    for name in columns:  # where there is little room the names of layers go on in a second line
        left = name in ("layer", "load")
        table.add_column(name, justify="left" if left else "right", no_wrap=name != "layer", overflow="fold")
    for cells in zip(*columns.values(), strict=True):
        table.add_row(*map(Text, cells))  # a plain string could hold marks of style
    return table


def columns_of(layers: list[LayerStatistics], width: int, ascii_only: bool) -> dict[str, list[str]]:
    """What the table says of each layer, by column; an empty text where there is nothing to say."""
    return {
        "load": [bars(s.load, width, ascii_only) for s in layers],
        "entropy": [f"{s.entropy:.3f}" for s in layers],
        "MaxVio": [f"{s.max_violation:.2f}" for s in layers],
        "dead": [str(s.dead_experts) for s in layers],
        "dropped": [f"{s.drop_rate:.1%}" for s in layers],
        "bias": ["{:+.3f} {:+.3f}".format(*s.bias_range) if s.bias_range else "" for s in layers],
        "norm": ["" if s.logit_norm is None else f"{s.logit_norm:.2f}" for s in layers],
        "|logit|": ["" if s.logit_max is None else f"{s.logit_max:.2f}" for s in layers],
    }


def bars(load: np.ndarray, width: int, ascii_only: bool = False) -> str:
    """The load (E,) as a character for each expert, or for each few of them, at most `width`."""
    parts = np.array_split(load * len(load), min(len(load), width))  # multiples of the mean
    steps = BARS[ascii_only]
    heights = [float(part.mean()) / 2 * (len(steps) - 1) for part in parts]
    # a bar for every expert that has a token
    return "".join(steps[min(max(round(h), h > 0), len(steps) - 1)] for h in heights)
