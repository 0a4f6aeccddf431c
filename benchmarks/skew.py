"""Expert parallelism with skewed routing, in percent of its rate with normal routing.

Both rates are of one contender in one run: same date, commit, device and ranks.
"""

import pathlib

from .parallel import SYMMETRIC
from .tables import (
    grouped,
    markdown,
    narrow,
    newest,
    of_balance,
    reading,
    rows_of,
    short_name,
    versions,
    written,
)

CHART = "skew.svg"
TITLE = "A step under a Zipf law, in percent of the rate with normal routing"
PASSES = "forward_of_balance", "step_of_balance"
PLACE = "device", "dtype", "ranks", "ep"
LENDS = f"{SYMMETRIC}, guests "


def rows_of_parallel(source: pathlib.Path) -> list[dict]:
    """Return the rows of the CSV with the exponent of each Zipf law: 1 before there was a column."""
    usual = {"zipf": "1"}
    return [row | {"skew": row.get("skew") or usual.get(row["routing"], "")} for row in rows_of(source)]


def skewed(source: pathlib.Path) -> list[dict]:
    """Return the newest row of each contender, law, shape and kind of machine, with shares, by exponents."""
    about = *PLACE, "routing", "skew", "shape", "contender"
    with reading(source):
        rows = newest(of_balance(rows_of_parallel(source)), lambda row: tuple(row[name] for name in about))
        return sorted(rows, key=lambda row: (row["routing"] == "one-rank", float(row["skew"] or 0)))


def place_of(row: dict) -> tuple[str, ...]:
    return tuple(row[name] for name in PLACE)


def law_of(row: dict) -> str:
    return {"zipf": f"zipf, exponent {row['skew']}"}.get(row["routing"], row["routing"])


def guests_of(row: dict) -> str:
    """Return the guest slots of a row of ours through symmetric memory, "" of another row."""
    name = row["contender"]
    return "0" if name == SYMMETRIC else name.removeprefix(LENDS) if name.startswith(LENDS) else ""


def option(guests: str) -> str:
    return f"guests={guests}" if guests.isdigit() else f'guests="{guests}"'


def order_of(guests: str) -> tuple[bool, int]:
    """Numbers first, then "auto"."""
    return not guests.isdigit(), int(guests) if guests.isdigit() else 0


def of_guests(source: pathlib.Path) -> list[dict]:
    """Return the skewed rows through symmetric memory of one kind of machine: the last that lends, if any."""
    rows = [row for row in skewed(source) if guests_of(row)]
    lend = [row for row in rows if guests_of(row) != "0"] or rows
    last = max(lend, key=lambda row: row["date"], default=None)
    return [row for row in rows if place_of(row) == place_of(last)]


def page_part(source: pathlib.Path) -> str:
    """Return the tables of a page: a row for each law and contender, a column for each shape."""
    parts = []
    for place, rows in grouped(skewed(source), place_of):
        device, dtype, ranks, ep = place
        parts.append(f"**{device}**, {dtype}, ranks {ranks}, ep {ep} ({versions(rows)})\n")
        lines = grouped(rows, lambda row: (law_of(row), row["contender"]))
        head = "percent of the rate with normal routing, forward / step"
        parts.append(table([head], [([", ".join(line)], own) for line, own in lines], PASSES))
    return "\n".join(["## Skewed beside normal routing\n", *parts]) if parts else ""


def table(head: list[str], lines: list[tuple[list[str], list[dict]]], figures: tuple[str, ...]) -> str:
    """Return a table with a column for each shape; each line has its first cells and its rows."""
    shapes = sorted({row["shape"] for _, rows in lines for row in rows})
    found = [[*head, *shapes]]
    for first, rows in lines:
        cells = {row["shape"]: " / ".join(written(row[name]) for name in figures) for row in rows}
        found.append([*first, *(cells.get(shape, "–") for shape in shapes)])
    return narrow(found) if len(head) == 1 else markdown(found)


def curves(source: pathlib.Path) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """Guests -> shape -> (exponent, percent of a step) for the plot; empty before guests were measured."""
    found: dict[str, dict[str, list[tuple[float, float]]]] = {}
    rows = [row for row in of_guests(source) if row["routing"] == "zipf"]
    for row in sorted(rows, key=lambda row: (order_of(guests_of(row)), row["shape"])):
        points = found.setdefault(guests_of(row), {}).setdefault(f"shape {row['shape']}", [])
        points.append((float(row["skew"]), row["step_of_balance"]))
    return found if found.keys() - {"0"} else {}


def machine(source: pathlib.Path) -> str:
    """Return the GPUs of `of_guests` in a few words, as "2 H100s, bfloat16"."""
    row = of_guests(source)[0]
    return f"{row['ranks']} {short_name(row['device'])}s, {row['dtype']}"


def block(source: pathlib.Path, folder: str) -> str:
    """Return the plot, if guests were measured, and the table of steps for docs/skew.md."""
    rows = of_guests(source)
    if not rows:
        return ""
    chart = [f"![{TITLE}]({folder}/{CHART})\n"] * bool(curves(source))
    shown = [row for row in rows if row["skew"] in ("", "1")] or rows  # the plot has the other exponents
    lines = [
        ([law, guests], own)
        for law, part in grouped(shown, law_of)
        for guests, own in sorted(grouped(part, guests_of), key=lambda line: order_of(line[0]))
    ]
    text = f"A step on {machine(source)}, in percent of the rate with normal routing ({versions(rows)}):\n"
    return "\n".join([*chart, text, table(["routing", "`guests`"], lines, PASSES[1:])])


def sentence(source: pathlib.Path) -> str:
    """Return the line of docs/speed.md; "" without a Zipf law of exponent 1."""
    rows = [row for row in of_guests(source) if row["skew"] == "1"]
    if not rows:
        return ""
    parts = sorted(grouped(rows, guests_of), key=lambda part: order_of(part[0]))
    said = (f"{span(own)} % with `{option(guests)}`" for guests, own in parts)
    count = len({row["shape"] for row in rows})
    layers = f"{count} layer{'s' * (count > 1)}"
    page = "../benchmarks/figures/parallel.md#skewed-beside-normal-routing"
    return (
        "* **Skewed routing on several GPUs.** The GPU with the most rows sets the time of a step. On "
        f"{machine(source)}, a step under a Zipf law has this share of the rate with normal routing: "
        f"{', '.join(said)} ([{layers}]({page})). `guests` is the number "
        "of [experts that a GPU can borrow](skew.md).\n"
    )


def span(rows: list[dict]) -> str:
    least, most = (f(row["step_of_balance"] for row in rows) for f in (min, max))
    return written(least) if written(least) == written(most) else f"{written(least)} to {written(most)}"
