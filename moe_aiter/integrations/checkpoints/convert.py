"""Convert a checkpoint from one layout to the other."""

import contextlib
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ...files import FULL, drafted_folder
from ...kernels.base.check import check_known, checked
from ...layers.moe import MoE
from .blocks import new_moe
from .files import Checkpoint, CheckpointError, check_target, write_checkpoint
from .formula import Formula, difference, tolerance
from .plan import Plan, plan_to_ours, plan_to_theirs
from .quantised import dequantised

SHARD = 5 * 10**9  # bytes
LAYOUTS = "moe_aiter", "huggingface", "hub"
Progress = Callable[[str, int, int], None]  # what is counted, how many are done, of how many


@dataclass
class Report:
    """The result of a conversion."""

    converted: int  # tensors of the source that belong to an MoE
    copied: int  # and those that do not
    written: int  # tensors of the target
    files: list[str]  # that hold them
    left_out: list[str]  # weights in the source folder that are none of the checkpoint's
    differences: dict[str, float] = field(default_factory=dict)  # of each MoE from the formula, if checked
    kept: dict[str, str] = field(default_factory=dict)  # layers with experts that stay as they are, and why


@checked
def convert(
    source: str | Path, target: str | Path, to: str = "moe_aiter", *, shard_bytes: int = SHARD,
    check: bool = True, progress: Progress | None = None,
) -> Report:  # fmt: skip
    """Convert the checkpoint in the folder `source` into a new one in `target`.

    to="moe_aiter"    from a family of docs/convert.md, Qwen3-MoE for example, in safetensors: each block of
                      experts gets the keys of `MoE`, such as model.layers.3.mlp.router.weight; all other keys
                      and files stay.  config.json gets what `load_moe` and the way back need.
    to="huggingface"  back; every tensor has the same bytes as before
    to="hub"          back, with the keys of the hub, which vLLM and SGLang load, also if the first source was
                      in the fused format of transformers 5, which they refuse

    Dtypes stay, and nothing is rounded, unless the source is quantised in a format of docs/convert.md: its
    weights, those outside of the MoE layers too, are dequantised to the dtype of config.json.  Tensors are
    read and written one by one, those of experts matrix by matrix, in files of at most `shard_bytes`; a
    larger tensor has a file of its own.  With `check`, each MoE is then built from the files of our layout
    and compared with its family's formula, computed from the other layout.

    Raises CheckpointError, a ValueError, with every reason in `problems`: keys that are missing, unknown,
    misshapen or of mixed dtypes, weights quantised otherwise, a damaged file, an unknown model, a layer that
    differs from the formula, a `target` that is not empty; and OSError, for a full disk with the size of the
    new checkpoint.  Then `target` is as it was before.  ImportError if safetensors is missing.
    """
    check_known("to", to, LAYOUTS)
    target = check_target(target, shard_bytes, progress)
    found = Checkpoint(source)
    found = dequantised(found) if to == "moe_aiter" else found
    plan = plan_to_ours(found) if to == "moe_aiter" else plan_to_theirs(found, to == "hub")

    def compare(new: Checkpoint, layer: str) -> tuple[float, float]:
        ours, theirs = (new, found) if to == "moe_aiter" else (found, new)
        moe = read_moe(ours, layer, plan)
        settings = plan.family.settings(theirs.config)
        formula = Formula(plan.family, plan.fused, settings, plan.reader(theirs, layer))
        return difference(moe, formula), tolerance(moe.experts.down.dtype)

    return write_converted(found, target, plan, compare if check else None, shard_bytes, progress)


def read_moe(checkpoint: Checkpoint, layer: str, plan: Plan) -> MoE:
    """The MoE of a layer in our layout, on the mapped file."""
    pieces = plan.family.pieces(plan.kwargs, plan.fused)
    moe = new_moe(plan.kwargs, {piece.name: checkpoint.read(f"{layer}.{piece.name}") for piece in pieces})
    return moe.eval()


def write_converted(
    source: Checkpoint, target: Path, plan: Plan,
    compare: Callable[[Checkpoint, str], tuple[float, float]] | None, shard_bytes: int,
    progress: Progress | None,
) -> Report:  # fmt: skip
    """Write what `plan` says, and `compare` each layer, before `target` is there."""
    progress = progress or (lambda *count: None)
    others, left_out = source.other_files()
    total, done = sum(output.spec.bytes for output in plan.outputs), 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        progress("bytes", done, total)

    with sized(target, total + sum(path.stat().st_size for path in others)), drafted_folder(target) as draft:
        files = write_checkpoint(draft, plan.outputs, plan.config, shard_bytes, advance)
        for path in others:
            shutil.copyfile(path, draft / path.name)
        names = [path.name for path in left_out]
        kept = dict.fromkeys(plan.kept, plan.family.keeps)
        report = Report(plan.converted, plan.copied, len(plan.outputs), files, names, kept=kept)
        new = Checkpoint(draft)
        if compare is not None:
            report.differences = compare_all(new, plan, compare, progress)
        new.close()
        source.close()
    return report


@contextlib.contextmanager
def sized(target: Path, total: int) -> Iterator[None]:
    """Put `target`, its size and what is free there into the error of a full disk."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        free = shutil.disk_usage(next(path for path in target.parents if path.exists())).free
        sizes = f"the new checkpoint takes {total:,} bytes, and {free:,} are free there"
        raise OSError(error.errno, f"{error.strerror}: {sizes}", str(target)) from error


def compare_all(new: Checkpoint, plan: Plan, compare: Callable, progress: Progress) -> dict[str, float]:
    differences, problems = {}, []
    for done, layer in enumerate(plan.layers, 1):
        differences[layer], limit = compare(new, layer)
        if not differences[layer] <= limit:  # NaN is not
            found = f"{differences[layer]:.1e}, more than {limit:.1e}"
            problems.append(f"{layer} differs from the formula of {plan.family.name} by {found}")
        progress("layers", done, len(plan.layers))
    if problems:
        raise CheckpointError("what was written does not compute what was read", problems)
    return differences
