"""Kills, flipped bits and hostile files: nothing that was saved is lost, run or waited for.

    python -m tests.fuzz.storage --kills 100 --flips 100 --hostile 60

Each case has a number; `--first N` repeats from there.  The exit status is 1 if a case fails.
"""

import argparse
import contextlib
import io
import os
import pathlib
import random
import signal
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))  # the tests say `from hostile import ...`
sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "examples"))

import test_readers
import torch
from hostile import KINDS, error_of, no_file, pickles
from language_model.checkpoint import checkpoints, load_checkpoint, load_newest, step_of
from language_model.metrics import read_metrics
from language_model.model import Transformer
from language_model.presets import PRESETS
from language_model.tests import test_readers as of_runs
from language_model.tests.test_readers import STATE, STEP, mend_sums, write_state
from language_model.trainer import make_optimizer

from moe_aiter import cli, files

READERS = test_readers.READERS | of_runs.READERS
TAKE_FOLDERS = test_readers.TAKE_FOLDERS | of_runs.TAKE_FOLDERS
RUN = pathlib.Path("long")
START = "train", "--preset", "test", "--data", "text.txt", "--out", str(RUN), "--steps", "1000000"
OFTEN = "--save-every", "2", "--val-every", "1000", "--sample-bytes", "0"


def fresh():
    model = Transformer(PRESETS["test"])
    return model, make_optimizer(model, PRESETS["test"])


def child(words: tuple[str, ...], seconds: float) -> None:
    """Run a command in a process of its own, which is killed after so many seconds."""
    if (number := os.fork()) == 0:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 1)
            os.dup2(nowhere.fileno(), 2)
            os._exit(cli.main(list(words)))
    time.sleep(seconds)
    if os.waitpid(number, os.WNOHANG)[0]:
        raise AssertionError(f"{' '.join(words)} has ended by itself")
    os.kill(number, signal.SIGKILL)
    os.waitpid(number, 0)


def kill(draw: random.Random) -> None:
    """Train, kill it at any moment, and go on: the newest checkpoint is whole, and no older than before."""
    before = [step_of(path) for path in checkpoints(RUN / "checkpoints")]
    child(("train", "--resume", str(RUN)) if before else START + OFTEN, 0.3 + draw.random())
    after = checkpoints(RUN / "checkpoints")
    if not after:
        files.remove(RUN)  # it had not come so far
        return
    step = step_of(after[-1])
    assert step >= max(before, default=0), f"step {max(before)} is lost: the newest is {step}"
    assert load_checkpoint(after[-1], *fresh())["step"] == step
    steps = [row["step"] for row in read_metrics(RUN / "metrics.jsonl") if row["step"] <= step]
    assert steps == list(range(1, step + 1)), "lines of the metrics are lost"


def flip(draw: random.Random) -> None:
    """Flip a bit of the newest checkpoint, which gives way to the one before."""
    newest, before = pathlib.Path("run/checkpoints/step-00000002"), pathlib.Path(STEP)
    files_of = sorted(newest.iterdir())
    path = files_of[draw.randrange(len(files_of))]
    data = path.read_bytes()
    bit = draw.randrange(8 * len(data))
    path.write_bytes(data[: bit // 8] + bytes([data[bit // 8] ^ 1 << bit % 8]) + data[bit // 8 + 1 :])
    printed = io.StringIO()
    with contextlib.redirect_stderr(printed):
        found = load_newest(newest.parent, *fresh())["step"]
    path.write_bytes(data)
    assert found == step_of(before), f"bit {bit} of {path.name} was not seen"
    assert printed.getvalue().count("\n") == 1, printed.getvalue()


def attack(draw: random.Random) -> None:
    """Put no file, a pickle, noise, or a damaged file where a reader reads."""
    name = draw.choice(list(READERS))
    place, call = READERS[name]
    path, mark = pathlib.Path(place).absolute(), pathlib.Path("mark").absolute()
    whole = path.read_bytes() if path.exists() else b'{"step": 1, "loss": 2}'
    kind = draw.choice([k for k in KINDS if k != "folder" or name not in TAKE_FOLDERS] + ["file"] * 5)
    contents = [
        *pickles(mark).values(),
        draw.randbytes(draw.randrange(200)),
        whole[: draw.randrange(len(whole))],
    ]
    contents += [b"[" * 10**5, b'{"step": 1e400}', b"\0" * 100, b"\xff\xfe" + whole]
    kept = path.exists()
    path.unlink(missing_ok=True)
    printed = io.StringIO()
    with no_file(kind, path) if kind != "file" else contextlib.nullcontext():
        if kind == "file":
            path.write_bytes(draw.choice(contents))
            mend_sums(path)
        with contextlib.redirect_stderr(printed), contextlib.redirect_stdout(printed):
            error = error_of(call, path)
    if os.path.lexists(path):
        files.remove(path)
    if kept:
        path.write_bytes(whole)
    assert not mark.exists(), f"{name}: it has run a file"
    said = str(error) if error else printed.getvalue().strip()
    assert "Traceback" not in said and "\n" not in said, f"{name}, {kind}: {said}"
    known = OSError, ValueError, RuntimeError
    assert error is None or isinstance(error, known), f"{name}, {kind}: {error!r}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.storage", description=__doc__)
    cases = {"kills": kill, "flips": flip, "hostile": attack}
    for name in cases:
        parser.add_argument(f"--{name}", type=int, default=0, metavar="N", help="how many cases")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="number of the first case")
    given, failures = parser.parse_args(), 0
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for readers in (test_readers, of_runs):
            readers.make(pathlib.Path(folder))
        pathlib.Path("text.txt").write_text("".join(f"{i} times {i} is {i * i}\n" for i in range(2000)))
        second = pathlib.Path("run/checkpoints/step-00000002")
        files.shutil.copytree(STEP, second)
        (second / STATE).unlink()
        write_state(second, {"step": 2, "fingerprint": None})
        for name, case in cases.items():
            for number in range(given.first, given.first + getattr(given, name)):
                try:
                    case(random.Random(number))
                except AssertionError as failure:
                    failures += 1
                    print(f"{name} {number}: {failure}", flush=True)
            print(f"{getattr(given, name)} {name}, {failures} failures so far", flush=True)
        if given.kills:
            print(f"the run that was killed has made {step_of(checkpoints(RUN / 'checkpoints')[-1])} steps")
        os.chdir("/")
    return int(failures > 0)


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # a thread that still waits does not keep the program
