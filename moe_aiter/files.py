"""Reading plain files alone; files that are whole or absent, locks, JSON; and optional packages."""

import contextlib
import errno
import importlib.metadata
import json
import logging
import os
import secrets
import shutil
import stat
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
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # of a full disk, or what a user or a file may take of it
NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0)  # Windows has no such flag
NO_WAIT = getattr(os, "O_NONBLOCK", 0)  # nor this one: a pipe is opened at once
AnyPath = str | os.PathLike  # of text
KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def need(module: str, extra: str, error: type[Exception] = ImportError) -> ModuleType:
    """Import a module of that extra, or raise `error`, which says how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as missing:
        package = module.partition(".")[0]
        raise error(f"{package} is missing: pip install '.[{extra}]' in the source tree") from missing


def version(distribution: str, otherwise: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return otherwise


def plain(path: AnyPath, within: Path | None = None) -> AnyPath:
    """Return `path` if it is a plain file, or a link to one; with `within`, to one in that folder.

    Raises OSError, which says what else it is: a reader would wait for a pipe, never reach the end of some
    devices, and may change a device by opening it.
    """
    check_mode(os.stat(path).st_mode, path)
    if within is not None and not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(within)):
        raise OSError(errno.EINVAL, f"it is a link out of the folder, to {os.path.realpath(path)}", str(path))
    return path


def check_mode(mode: int, path: AnyPath) -> None:
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode):
        kind = KINDS.get(stat.S_IFMT(mode), "something else")
        raise OSError(errno.EINVAL, f"it is {kind}, not a plain file", str(path))


def opened(path: AnyPath, mode: str = "r", within: Path | None = None, **options) -> IO:
    """Open a plain file (see `plain`) as `open` does, to read it or to add to it.  Text is UTF-8."""
    if "a" not in mode or os.path.lexists(path):
        plain(path, within)
    if "b" not in mode:
        options = {"encoding": "utf-8"} | options
    return open(path, mode, opener=lambda name, flags: os.open(name, flags | NO_WAIT, 0o666), **options)


def read_text(path: AnyPath, within: Path | None = None, errors: str = "strict") -> str:
    with opened(path, within=within, errors=errors) as file:
        return file.read()


def is_name(file) -> bool:
    """Whether this is the name of a file in the folder itself, and not a path."""
    if not isinstance(file, str) or "\0" in file:
        return False
    try:
        os.fsencode(file)
    except UnicodeEncodeError:
        return False
    return file == os.path.basename(file) and file not in ("", ".", "..")


def sync(path: Path) -> None:
    """Wait until a file or folder is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def named(path: Path) -> Iterator[None]:
    """Put `path` into the error of a full disk, which a write raises without a name."""
    try:
        yield
    except OSError as error:
        if error.errno in FULL and error.filename is None:
            error.filename = str(path)
        raise


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
        with named(path), open(handle, mode, **options) as file:
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
        with named(path):
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
        handle = os.open(path, os.O_RDWR | os.O_CREAT | NO_FOLLOW | NO_WAIT, 0o666)
        try:
            check_mode(os.fstat(handle).st_mode, path)
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


def read_json(path: Path, within: Path | None = None):
    """Return the content of a JSON file, a plain one (see `plain`).

    Raises OSError, or ValueError if the file is not JSON in UTF-8.
    """
    try:
        return json.loads(read_text(path, within))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
