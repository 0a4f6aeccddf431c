"""What a stranger may send: pickles that run code, and things that are no files."""

import contextlib
import io
import os
import pathlib
import pickle
import socket
from concurrent import futures

import torch

SECONDS = 8  # in which any reader has ended


class Plant:
    """Whoever unpickles this makes an empty file."""

    def __init__(self, path: pathlib.Path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def pickles(mark: pathlib.Path) -> dict[str, bytes]:
    """Pickles that make the file `mark` where they are run."""
    plant, dumped = Plant(mark), io.BytesIO()
    torch.save({"weight": plant}, dumped)
    legacy = io.BytesIO()
    torch.save(plant, legacy, _use_new_zipfile_serialization=False)
    system = f"touch {mark}"
    by_name = f"cos\nsystem\n(V{system}\ntR.".encode()
    old = f"(S'{system}'\nios\nsystem\n.".encode()  # INST
    return {
        "pickle": pickle.dumps(plant),
        "in a dict": pickle.dumps({"state": [plant]}, protocol=2),
        "torch.save": dumped.getvalue(),
        "legacy torch.save": legacy.getvalue(),
        "global": by_name,
        "inst": old,
    }


@contextlib.contextmanager
def no_file(kind: str, path: pathlib.Path):
    """Put a pipe, a socket, a folder, or a link to a device or to a pipe at `path`."""
    with contextlib.ExitStack() as held:
        if kind == "pipe":
            os.mkfifo(path)
        elif kind == "link to a pipe":
            elsewhere = path.with_name("elsewhere")
            os.mkfifo(elsewhere)
            held.callback(elsewhere.unlink)
            path.symlink_to("elsewhere")
        elif kind == "device":
            path.symlink_to("/dev/null")
        elif kind == "folder":
            path.mkdir()
        elif kind == "socket":
            here = os.getcwd()
            os.chdir(path.parent)  # the name of a socket may have 107 bytes
            held.enter_context(socket.socket(socket.AF_UNIX)).bind(path.name)
            os.chdir(here)
        yield


def error_of(call, pipe: pathlib.Path) -> BaseException | None:
    """The error of a call, on a thread of its own; a call that waits for `pipe` fails the test."""
    pool = futures.ThreadPoolExecutor(1)
    try:
        return pool.submit(call).exception(SECONDS)
    except futures.TimeoutError:
        os.close(os.open(pipe, os.O_RDWR | os.O_NONBLOCK))  # which ends the wait
        raise AssertionError(f"it waits for {pipe}") from None
    finally:
        pool.shutdown(wait=False)
