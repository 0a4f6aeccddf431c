"""What docs/speed.md and the README say: how much faster a step is for each model, and with how much memory.

Two figures are compared where one run measured both: same device, date and commit.
"""

import dataclasses
import pathlib

from moe_aiter.bench.layer import INVARIANT, compared
from moe_aiter.bench.problem import DEFAULT

from .tables import (
    CEILING,
    grouped,
    markdown,
    quack,
    reading,
    rows_of,
    run_of,
    short_name,
    sustained,
    versions,
    waits,
    written,
)

MODELS, WHOLE, TRIALS, LAYERS = "models.csv", "whole_model.csv", "trials.csv", "layer.csv"
BASELINE = "Hugging Face's grouped_mm"
HEAD = (
    "tokens/s",
    "tokens/s, grouped_mm",
    "times as fast",
    "peak GiB",
    "peak GiB, grouped_mm",
)  # of whole models
LAYER, GRAPH = "layer: moe_aiter MoE", "layer: moe_aiter MoE, CUDA graph"
FP8 = "layer: moe_aiter MoE, FP8 (e4m3)"
HF_LAYER, HF_EXPERTS = "layer: Hugging Face Qwen3-MoE, grouped_mm", "Hugging Face experts, grouped_mm"
OURS = "moe_aiter"
OF_SHAPES = {"C": "Qwen3-30B-A3B", "D": "Mixtral 8x7B", "E": "OLMoE-1B-7B"}  # shape of `bench layer` -> model
DTYPE = "bfloat16"
GAIN_LESS = """\
The chart shows the experts of one layer. Whole models gain less, because attention, embeddings and the
optimizer take time too.
"""
SETTING = "device", "dtype", "layers", "tokens", "date", "commit"


@dataclasses.dataclass(frozen=True)
class Gain:
    """A step of ours, of Hugging Face and of the fastest other code, for one model on one device."""

    model: str
    what: str  # is measured: experts, layer or layer in a graph
    ours: dict
    theirs: dict | None
    other: dict | None

    @property
    def device(self) -> str:
        return self.ours["device"]

    @property
    def times(self) -> float:
        return sustained(self.theirs) / sustained(self.ours)


def gain_of(model: str, what: str, run: dict[str, dict], ours: str, theirs: str) -> Gain:
    """Compare the rows of one run, contender -> row."""
    others = [r for name, r in run.items() if OURS not in name and CEILING not in name and name != theirs]
    return Gain(model, what, run[ours], run.get(theirs), min(others, key=sustained, default=None))


def timed(rows: list[dict]) -> list[dict[str, dict]]:
    """The runs of these rows, oldest first: contender -> row with a time."""
    runs = grouped([r for r in rows if r["step_ms"]], run_of)
    return [{r["contender"]: r for r in run} for _, run in runs]


def gains_of_models(source: pathlib.Path) -> list[Gain]:
    """The last run of each published model on each device, by the model's name.

    A checkpoint counts with its first sizes: those of tensor parallelism come later in the list.
    """
    found, sizes = [], {}
    with reading(source):
        shown = [r for r in rows_of(source) if r["dtype"] == DTYPE]
        for (_, model), rows in grouped(shown, lambda r: (r["device"], r["model"])):
            first = sizes.setdefault(rows[0]["checkpoint"], model)
            runs = [run for run in timed(rows) if HF_EXPERTS in run]
            ours = [name for run in runs[-1:] for name in run if name.startswith("moe_aiter experts, ")]
            if ours and rows[0]["checkpoint"] and model == first:
                found.append(gain_of(model, "experts", runs[-1], ours[0], HF_EXPERTS))
    return sorted(found, key=lambda gain: gain.model.casefold())


def usual(rows: list[dict]) -> list[dict]:
    """The rows of layers that the page compares: other dtypes and routings have pages of their own."""
    return [r for r in rows if r["dtype"] == DTYPE and r["routing"] in ("", "normal")]


def gains_of_layers(rows: list[dict]) -> list[Gain]:
    """For each device and model the last run of whole layers that measured ours and most of the others.

    Where no other code ran beside our layer, a run of our layer in a CUDA graph follows, if others ran there.
    """
    found = []
    rows = [r for r in usual(rows) if r["shape"] in OF_SHAPES]
    for (_, shape), part in grouped(rows, lambda r: (r["device"], r["shape"])):
        for ours, what in ((LAYER, "layer"), (GRAPH, "layer, graph")):
            runs = [run for run in timed(part) if ours in run]
            gains = [gain_of(OF_SHAPES[shape], what, run, ours, HF_LAYER) for run in runs]
            best = max(reversed(gains), key=lambda g: (bool(g.theirs), bool(g.other)), default=None)
            if best and (ours == LAYER or best.other):
                found.append(best)
            if best and best.other:
                break
    return found


def example(gains: list[Gain]) -> str:
    """The line with which the command ends, for the largest gain of a whole layer."""
    gain = max((g for g in gains if g.theirs and g.what == "layer"), key=lambda g: g.times, default=None)
    if not gain:
        return ""
    numbers = "step_ms", "step_host_ms", "peak_mib"
    rows = [
        row | {name: float(row[name]) for name in numbers if row[name]} for row in (gain.ours, gain.theirs)
    ]
    rows = [{name: value for name, value in row.items() if value} for row in rows]
    line = f"{gain.ours['shape']}: {compared(*rows)}"
    where = f"the shape {gain.ours['shape']}, a layer of {gain.model}, on {on(gain.ours)}"
    return f"For {where}:\n\n    {line}\n"


def whole_models(source: pathlib.Path) -> list[list[tuple[dict, dict]]]:
    """The runs of full training on a GPU: pairs of a model's rows, with our experts and with grouped_mm."""
    with reading(source):
        rows = [r for r in rows_of(source) if r["training"] == "full" and r["peak_gib"]]
        runs = [pairs(run) for _, run in grouped(rows, lambda r: tuple(r[name] for name in SETTING))]
    return [run for run in runs if run]


def pairs(rows: list[dict]) -> list[tuple[dict, dict]]:
    """The last rows of each model with our experts and with grouped_mm, if there are both."""
    last = {(r["model"], r["contender"]): r for r in rows}
    found = [(last.get((m, OURS)), last.get((m, "grouped_mm"))) for m in {r["model"]: None for r in rows}]
    return [pair for pair in found if all(pair)]


def whole_table(source: pathlib.Path) -> str:
    """The last run of each device as a table; "" without one."""
    last = {run[0][0]["device"]: run for run in whole_models(source)}
    with reading(source):
        return "\n".join([GAIN_LESS, *map(whole_run, last.values())]) if last else ""


def whole_run(run: list[tuple[dict, dict]]) -> str:
    table = [["model", *HEAD]]
    for ours, theirs in run:
        speeds, peaks = ([r[name] for r in (ours, theirs)] for name in ("tokens_per_s", "peak_gib"))
        times = float(speeds[0]) / float(speeds[1])
        table.append([ours["model"], *speeds, f"{times:.2f}", *map(written, peaks)])
    device, dtype, layers, tokens, *_ = (run[0][0][name] for name in SETTING)
    return (
        f"A training step in transformers with AdamW, {layers} layers of the published widths, {tokens} "
        f"tokens, one {device}, {dtype} ({versions([r for pair in run for r in pair])}):\n\n{markdown(table)}"
    )


def speed_table(gains: list[Gain], whole: list[list[tuple[dict, dict]]]) -> str:
    """A row for each model, device and way to measure."""
    speeds = {}  # of whole models: (model, device) -> ours / theirs, of the last run
    for ours, theirs in (pair for run in whole for pair in run):
        speeds[plain(ours["model"]), ours["device"]] = f"{ours['tokens_per_s']} / {theirs['tokens_per_s']}"
    head = "model", "GPU", "what, tokens", "ours, ms", "HF, ms", "best other, ms", "times HF", "GB, ours / HF"
    table = [[*head, "whole model, tokens/s, ours / HF"]]
    for g in sorted(gains, key=lambda gain: (gain.model.casefold(), gain.device, gain.what)):
        row = [g.model, short_name(g.device), f"{g.what}, {g.ours['tokens']}", milliseconds(g.ours)]
        row += [milliseconds(g.theirs), other(g.other), f"{g.times:.1f}" if g.theirs else "–"]
        row.append(f"{gigabytes(g.ours)} / {gigabytes(g.theirs)}")
        table.append([*row, speeds.pop((plain(g.model), g.device), "–")])
    return f"{unmeasured(gains)}{markdown(table)}\n{' '.join(sources(gains))}\n"


def unmeasured(gains: list[Gain]) -> str:
    """A sentence for each device on which Hugging Face's code never ran beside ours."""
    beside = {short_name(g.device) for g in gains if g.theirs}
    alone = [name for name in dict.fromkeys(short_name(g.device) for g in gains) if name not in beside]
    text = (
        "On one {}, Hugging Face's code has not been measured beside ours: "
        "[measure it](#not-in-the-list).\n\n"
    )
    return "".join(text.format(name) for name in alone)


def sources(gains: list[Gain]) -> list[str]:
    """Which versions and commits the figures are of."""
    rows = [row for g in gains for row in (g.ours, g.theirs, g.other) if row]
    sonic = [row for row in rows if "SonicMoE" in row["contender"]]
    named = [(r["contender"].removeprefix("layer: "), r["torch"], quack(r)) for r in sonic]
    texts = [f"{name} ran on torch {torch} with {version}." for name, torch, version in sorted(set(named))]
    return [f"Measured with {versions(rows)}.", *texts]


def plain(model: str) -> str:
    return model.replace(" ", "-")


def milliseconds(row: dict | None, name: str = "step") -> str:
    """The time of a step, and the GPU's in brackets where the host takes longer."""
    if not row:
        return "–"
    gpu = f" ({written(row[f'{name}_ms'])})" if waits(row, name) else ""
    return written(sustained(row, name)) + gpu


def other(row: dict | None) -> str:
    if not row:
        return "–"
    name = row["contender"].removeprefix("layer: ").split(" grouped_mm, ")[-1].split(" grouped_mm")[0]
    return f"{milliseconds(row)} {name.split()[0]}"


def gigabytes(row: dict | None) -> str:
    return f"{float(row['peak_mib']) * 2**20 / 1e9:.1f}" if row and row["peak_mib"] else "–"


def slower(rows: list[dict], gains: list[Gain]) -> str:
    """A list of where ours gains least or loses, with figures that the results decide."""
    rows = usual(rows)
    lines = [few_tokens(rows), small_models(gains), small_in_fp8(rows), on_a_cpu(rows)]
    return "".join(f"* {line}\n" for line in lines if line)


def last_runs(rows: list[dict], names: set[str]) -> list[dict[str, dict]]:
    """The last run of each device and shape that has all of these contenders."""
    found = []
    for _, part in grouped(rows, lambda r: (r["device"], r["shape"])):
        found += [run for run in timed(part) if names <= run.keys()][-1:]
    return found


def few_tokens(rows: list[dict]) -> str:
    """The run in which the fastest peer beats our layer most."""
    lost = []
    for run in last_runs(rows, {LAYER, GRAPH}):
        gain = gain_of("", "", run, LAYER, "")
        if gain.other and sustained(gain.other) < sustained(gain.ours):
            lost.append((sustained(gain.ours) / sustained(gain.other), len(lost), run, gain))
    if not lost:
        return ""
    *_, run, gain = max(lost)
    return (
        f"**Few tokens.** The host needs longer to launch the kernels than the GPU to run them. With "
        f"{sizes(gain.ours)} on {on(gain.ours)}, a step takes {in_words(gain.ours)} with ours "
        f"and {in_words(gain.other)} with "
        f"{gain.other['contender']}. In a CUDA graph, ours takes {in_words(run[GRAPH])}."
    )


def on(row: dict) -> str:
    return f"one {short_name(row['device'])}"


def small_in_fp8(rows: list[dict]) -> str:
    """The shapes whose step takes longer in FP8 than in bfloat16."""
    runs = [run for run in last_runs(rows, {LAYER, FP8}) if run[LAYER]["shape"] in DEFAULT["cuda"]]
    runs = [run for run in runs if run[LAYER]["device"] == runs[0][LAYER]["device"]]
    lost = [run for run in runs if sustained(run[FP8]) > sustained(run[LAYER])]
    won = [run for run in runs if run not in lost]
    if not lost:
        return ""
    shown = sorted(lost, key=lambda run: int(run[LAYER]["intermediate"]))
    said = [
        f"{in_words(run[FP8])}, in bfloat16 {in_words(run[LAYER])}, with {sizes(run[LAYER])}" for run in shown
    ]
    least = min(int(run[LAYER]["intermediate"]) for run in won) if won else 0
    gain = max((sustained(run[LAYER]) / sustained(run[FP8]) for run in won), default=0)
    better = f" FP8 is faster for {len(won)} of {len(runs)} shapes, up to {gain:.2f} times" if won else ""
    return (
        f"**FP8 with small experts or few tokens.** On {on(shown[0][LAYER])}, a step takes in FP8 "
        f"{'; '.join(said)}." + (f"{better}; their experts are at least {least} wide." if won else "")
    )


def small_models(gains: list[Gain]) -> str:
    """The models of the chart for which other code is faster than ours."""
    lost = [g for g in gains if g.other and sustained(g.other) < sustained(g.ours)]
    said = (
        f"{g.model} on {on(g.ours)} {in_words(g.ours)} instead of {in_words(g.other)} "
        f"with {g.other['contender']}"
        for g in lost
    )
    return f"**Small experts.** A step takes for {'; '.join(said)}." if lost else ""


def on_a_cpu(rows: list[dict]) -> str:
    """The last run on a CPU, beside Hugging Face's."""
    runs = last_runs([r for r in rows if short_name(r["device"]) == "CPU"], {LAYER, HF_LAYER})
    if not runs:
        return ""
    ours, theirs = (runs[-1][name] for name in (LAYER, HF_LAYER))
    return (
        f"**A CPU.** All implementations are slow. On {ours['device']}, a step takes {in_words(ours)} with "
        f"ours and {in_words(theirs)} with {BASELINE}, with {sizes(ours)}."
    )


def in_words(row: dict) -> str:
    gpu = f" (the GPU {written(row['step_ms'])} ms)" if waits(row) else ""
    return f"{written(sustained(row))} ms{gpu}"


def sizes(row: dict) -> str:
    return "T, H, I, E, k = " + ", ".join(
        row[s] for s in ("tokens", "hidden", "intermediate", "experts", "top_k")
    )


def price(source: pathlib.Path) -> str:
    """The tables of docs/rl.md: how much longer a layer takes with batch invariance.

    There is one for each device and dtype, of the last run of each shape that measured all: of those in
    `source`, and after them those that `moe-aiter bench layer --invariant` wrote to layer.csv beside it.
    """
    kinds = {kind: f"layer in a CUDA graph, {kind}, ms" for kind in ("inference", "step")}
    tables: dict[tuple, dict[str, list[dict]]] = {}
    with reading(layers := source.with_name(LAYERS)):
        later = [trial for row in usual(rows_of(layers)) for trial in trials_of(row, kinds)]
    with reading(source):
        rows = [row for row in rows_of(source) if row["kernel"] in kinds.values()] + later
        for where, part in grouped(rows, lambda r: (r["device"], r["dtype"], r["shape"], *run_of(r))):
            if len({(row["kernel"], row["variant"]) for row in part}) == 2 * len(kinds):
                tables.setdefault(where[:2], {})[where[2]] = part
        return "\n".join(price_table(*where, runs, kinds) for where, runs in tables.items())


def trials_of(row: dict, kinds: dict[str, str]) -> list[dict]:
    """Return a row of a layer in a CUDA graph as the rows that trials have of it; none of another."""
    variant = {GRAPH: "as it comes", GRAPH + INVARIANT: "batch invariant"}.get(row["contender"])
    times = {name: row[f"{kind}_ms"] for kind, name in kinds.items() if variant and row[f"{kind}_ms"]}
    return [row | {"kernel": name, "variant": variant, "value": ms} for name, ms in times.items()]


def price_table(device: str, dtype: str, runs: dict[str, list[dict]], kinds: dict[str, str]) -> str:
    found = [["layer", *(f"{kind}, % longer" for kind in kinds)]]
    for shape, run in runs.items():
        ms = {(row["kernel"], row["variant"]): float(row["value"]) for row in run}
        pairs = ((ms[name, "batch invariant"], ms[name, "as it comes"]) for name in kinds.values())
        found.append([shape.replace(",", ", "), *(f"{100 * (a / b - 1):.1f}" for a, b in pairs)])
    measured = versions([row for run in runs.values() for row in run])
    return f"{device}, {dtype} ({measured}):\n\n{markdown(found)}"
