"""Files that are whole or absent, locks between processes, JSON; and optional packages."""

import contextlib
import errno
import importlib
import json
import logging
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import IO

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

log = logging.getLogger("moe_aiter")

UNFINISHED = "unfinished-"  # how the name of a draft begins
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP)  # of a file system without locks
NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0)  # Windows has no such flag


def need(module: str, extra: str, error: type[Exception] = ImportError) -> ModuleType:
    """Import a module of that extra, or raise `error`, which says how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as missing:
        package = module.partition(".")[0]
        raise error(f"{package} is missing: pip install '.[{extra}]' in the source tree") from missing


def sync(path: Path) -> None:
    """Wait until a file or folder is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def drafted(path: Path, mode: str = "w", **options) -> Iterator[IO]:
    """Open a draft beside `path`, and rename it to `path` when the block ends.

    Readers see the old file or the new one, never a part.  If the block raises (a full disk, for example) the
    draft is removed and `path` stays as it was.  A link at `path` is replaced, its target is not touched.
    `mode` and `options` are those of `open`; text is UTF-8.
    """
    if "b" not in mode:
        options = {"encoding": "utf-8"} | options
    draft = draft_of(path)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | NO_FOLLOW | getattr(os, "O_BINARY", 0)
    try:
        handle = os.open(draft, flags, 0o666)
    except OSError as error:
        error.filename = str(path)  # the name that the user gave
        raise
    try:
        with open(handle, mode, **options) as file:
            yield file
            file.flush()
            os.fsync(handle)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


@contextlib.contextmanager
def drafted_folder(path: Path) -> Iterator[Path]:
    """Make a draft of the folder `path`, and rename it to `path` when the block ends.

    By then `path` must be absent or empty.  If the block raises, the draft is removed.
    """
    draft = draft_of(path)
    draft.mkdir(parents=True)
    try:
        yield draft
        for part in (*draft.iterdir(), draft):
            sync(part)
        draft.rename(path)
        sync(path.parent)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def draft_of(path: Path) -> Path:
    return path.with_name(f"{UNFINISHED}{path.name}-{secrets.token_hex(4)}")


def remove(path: Path) -> None:
    """Remove a file, a link (its target stays) or a folder with all that it holds."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


@contextlib.contextmanager
def locked(path: Path, seconds: float = 0) -> Iterator[None]:
    """Hold the lock file `path` during the block; at most one process does.

    Waits up to `seconds` for another holder, then raises BlockingIOError, which names the holder's process.
    The system releases the lock when the holder ends, however it ends; a file that is left behind is not
    locked.  Without locks (Windows, some network file systems) a warning says so, and the block runs.
    """
    handle = acquire(path, time.monotonic() + seconds)
    if handle is None:
        yield
        return
    try:
        os.ftruncate(handle, 0)
        os.pwrite(handle, str(os.getpid()).encode(), 0)
        yield
    finally:
        path.unlink(missing_ok=True)  # while it is still locked: see acquire
        os.close(handle)


def acquire(path: Path, deadline: float) -> int | None:
    """The descriptor of the locked file, or None where files cannot be locked."""
    if fcntl is None:
        log.warning("%s: this system has no fcntl, so other processes are not locked out", path)
        return None
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | NO_FOLLOW, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if is_at(handle, path):
                return handle
            os.close(handle)  # the holder before has removed this file, which locks nothing now
        except BlockingIOError:
            holder = os.pread(handle, 20, 0).decode(errors="replace") or "another"
            os.close(handle)
            if time.monotonic() >= deadline:
                raise BlockingIOError(errno.EAGAIN, f"in use by process {holder}", str(path)) from None
            time.sleep(0.01)
        except OSError as error:
            os.close(handle)
            if error.errno not in NO_LOCKS:
                raise
            log.warning("%s: %s, so other processes are not locked out", path, error.strerror)
            return None


def is_at(handle: int, path: Path) -> bool:
    """Whether the open file is the one that `path` names now."""
    try:
        return os.path.samestat(os.fstat(handle), os.lstat(path))
    except FileNotFoundError:
        return False


def read_json(path: Path):
    """Return the content of a JSON file.  Raises OSError, or ValueError if the file is not JSON in UTF-8."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
