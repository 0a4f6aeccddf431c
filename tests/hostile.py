"""What a stranger may send: pickles that run code, and things that are no files.  Readers refuse both."""

import contextlib
import io
import os
import pathlib
import pickle
import re
import socket
from collections.abc import Callable, Collection
from concurrent import futures

import torch

from moe_aiter import files

SECONDS = 8  # in which any reader has ended
KINDS = ["pipe", "link to a pipe", "device", "folder", "socket"]
LINK = "a link out of the folder|Too many levels"
SAYS = {
    "pipe": "it is a pipe, not a plain file|no text file there",
    "link to a pipe": f"it is a pipe, not a plain file|no text file there|{LINK}",
    "device": f"it is a device, not a plain file|no text file there|{LINK}",
    "folder": "Is a directory",
    "socket": "it is a socket, not a plain file|no text file there|No such device or address",
}
Readers = dict[str, tuple[str, Callable]]  # name: (the file, a call that reads it)


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


def assert_no_file_is_refused(readers: Readers, kind: str, folder: pathlib.Path, capsys) -> None:
    """Each reader says in one line, and at once, that its file is of this kind."""
    for name, (path, call) in readers.items():
        path = folder / path
        if os.path.lexists(path):
            path.rename(folder / "aside")
        with no_file(kind, path):
            error = error_of(call, path)
        printed = capsys.readouterr().err.strip()
        message = printed if error is None else str(error)
        assert re.search(SAYS[kind], message), f"{name}: {error!r} {printed}"
        assert "\n" not in message, f"{name}: {message}"
        files.remove(path)
        if (folder / "aside").exists():
            (folder / "aside").rename(path)


def assert_no_pickle_is_run(
    readers: Readers,
    folder: pathlib.Path,
    capsys,
    silent: Collection[str],
    then: Callable[[pathlib.Path], None] = lambda path: None,
) -> None:
    """No reader runs its file, and all but the `silent` ones refuse it; `then` follows each change of it."""
    mark = folder / "mark"
    for name, (path, call) in readers.items():
        path = folder / path
        whole = path.read_bytes() if path.exists() else None
        for kind, content in pickles(mark).items():
            path.write_bytes(content)
            then(path)
            error = error_of(call, path)
            assert not mark.exists(), f"{name} has run a {kind}"
            message = str(error or capsys.readouterr().err.strip())
            assert message or name in silent, f"{name} has read a {kind}"
            assert "weights_only" not in message and "\n" not in message, f"{name}: {message}"
        path.unlink(missing_ok=True)
        if whole is not None:
            path.write_bytes(whole)
