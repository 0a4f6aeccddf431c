"""`python -m benchmarks report`: tables and plots, made from the CSV.

The README and docs/speed.md, skew.md and rl.md get blocks between markers; benchmarks/figures gets all.
"""

import argparse
import pathlib

from moe_aiter.bench.layer import ADDED
from moe_aiter.bench.measure import refuse
from moe_aiter.files import read_text

from . import pages, plots, skew, speed
from .tables import BEGIN, END, Damaged, newest, reading, replaced, rows_of

CSV = pathlib.Path("benchmarks/results/layer.csv")
FIGURES = pathlib.Path("benchmarks", "figures")
SPEED, SKEW, RL = (pathlib.Path("docs", name) for name in ("speed.md", "skew.md", "rl.md"))
SHARED = "parallel.csv"
BLOCKS = "map", "table", "slower", "answer"  # of docs/speed.md
MORE = """Your model on your GPU: [speed](docs/speed.md). Other shapes, other code, other products:
[figures](benchmarks/figures/README.md).
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--csv", type=pathlib.Path, default=CSV, help=f"results of bench layer [{CSV}]")
    parser.add_argument(
        "--readme",
        type=pathlib.Path,
        default=pathlib.Path("README.md"),
        help="file to update, beside benchmarks/figures and docs [README.md]",
    )
    parser.set_defaults(prog=parser.prog)


def main(args: argparse.Namespace) -> int:
    """Rewrite `--readme` and docs/speed.md between markers, figures and plots; 2 where it is not possible."""
    try:
        update(args.csv, args.readme)
    except Damaged as error:
        return refuse(args, str(error))
    return 0


def update(source: pathlib.Path, document: pathlib.Path) -> None:
    if not source.exists():
        raise Damaged(f"there is no {source}; `make bench` writes it")
    if source.name in (*pages.REPORTS, pages.FAMILIES):
        raise Damaged(f"--csv is that of `bench layer`; {source.name} beside it is read too")
    texts = documents(source, document)
    with reading(source):
        rows, gains = read(source), speed.gains_of_models(source.with_name(speed.MODELS))
        plots.draw(last(rows), gains, document.parent / "docs", source.with_name(SHARED))
    for path, text in texts.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def documents(source: pathlib.Path, document: pathlib.Path) -> dict[pathlib.Path, str]:
    """The text of each file that the report writes; pages of docs only where they are."""
    folder, texts = source.parent, {}
    text = read_text(document)
    if END not in text.partition(BEGIN)[2]:
        raise Damaged(f"{document} lacks {BEGIN} and, behind it, {END}")
    with reading(source):
        rows = read(source)
        texts[document] = replaced(text, summary(folder))
        for name, page in pages.pages(rows, folder).items():
            texts[document.parent / FIGURES / name] = page
        blocks = {SPEED: dict(zip(BLOCKS, answers(rows, folder), strict=True))}
        blocks[SKEW] = {"skew": skew.block(folder / SHARED, ".")}
        blocks[RL] = {"price": speed.price(folder / speed.TRIALS)}
        for path in filter(pathlib.Path.exists, (document.parent / page for page in blocks)):
            text = read_text(path)
            for name, part in blocks[path.relative_to(document.parent)].items():
                text = replaced(text, part, f"<!-- {name}: begin -->", f"<!-- {name}: end -->")
            texts[path] = text
    return texts


def read(source: pathlib.Path) -> list[dict]:
    rows = [dict.fromkeys(ADDED, "") | row for row in rows_of(source)]
    if not rows:
        raise ValueError("no figures")
    return rows


def last(rows: list[dict]) -> list[dict]:
    """The last row of each contender for each device, dtype, routing and shape."""
    return newest(rows, lambda r: (*pages.kind(r), r["shape"], r["contender"]))


def summary(folder: pathlib.Path) -> str:
    """For the README: the chart of models and a table of whole models, if there are results, and links."""
    chart = plots.map_image(speed.gains_of_models(folder / speed.MODELS), "docs")
    table = speed.whole_table(folder / speed.WHOLE)
    return "\n".join([*chart, *[table] * bool(table), MORE])


def answers(rows: list[dict], folder: pathlib.Path) -> tuple[str, str, str, str]:
    """The blocks of docs/speed.md."""
    gains, layers = speed.gains_of_models(folder / speed.MODELS), speed.gains_of_layers(rows)
    table = speed.speed_table([*gains, *layers], speed.whole_models(folder / speed.WHOLE))
    chart = "".join(plots.map_image(gains, "."))
    slower = speed.slower(rows, gains) + skew.sentence(folder / SHARED)
    return chart, table, slower, speed.example(layers)
