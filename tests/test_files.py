"""Drafts, locks and JSON: a file is whole or as it was, and one process at a time holds a lock."""

import errno
import os
import signal
import time

import pytest

from moe_aiter import files
from moe_aiter.files import drafted, drafted_folder, locked, read_json, remove


def test_a_draft_replaces_the_file_at_the_end(tmp_path):
    path = tmp_path / "page"
    path.write_text("old")
    with drafted(path) as file:
        file.write("néw")
        assert path.read_text() == "old"
    assert path.read_text(encoding="utf-8") == "néw" and os.listdir(tmp_path) == ["page"]
    with drafted(path, "wb") as file:
        file.write(b"\0\r\n")
    assert path.read_bytes() == b"\0\r\n"


def test_a_new_file_has_the_mode_of_any_other(tmp_path):
    (tmp_path / "other").touch()
    with drafted(tmp_path / "page"):
        pass
    assert (tmp_path / "page").stat().st_mode == (tmp_path / "other").stat().st_mode


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_a_failed_draft_is_removed(error, tmp_path):
    (tmp_path / "page").write_text("old")
    with pytest.raises(type(error)), drafted(tmp_path / "page") as file:
        file.write("new")
        raise error
    with pytest.raises(type(error)), drafted_folder(tmp_path / "folder") as draft:
        (draft / "part").touch()
        raise error
    assert os.listdir(tmp_path) == ["page"] and (tmp_path / "page").read_text() == "old"


def test_a_full_disk_at_the_last_moment_removes_the_draft(tmp_path, monkeypatch):
    def full(handle):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    for draft in (drafted, drafted_folder):
        with pytest.raises(OSError, match=r"No space left on device: .*new'"), draft(tmp_path / "new"):
            pass
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("link", ["page", "unfinished-page-fixed"])
def test_what_a_link_names_is_not_overwritten(link, tmp_path, monkeypatch):
    monkeypatch.setattr(files.secrets, "token_hex", lambda count: "fixed")
    (tmp_path / "mine").write_text("mine")
    (tmp_path / link).symlink_to("mine")
    if link == "page":
        with drafted(tmp_path / "page") as file:
            file.write("new")
        assert not (tmp_path / "page").is_symlink()
    else:
        with pytest.raises(FileExistsError, match="page'"), drafted(tmp_path / "page"):
            pass
    assert (tmp_path / "mine").read_text() == "mine"


def test_a_folder_takes_the_place_of_an_empty_one_only(tmp_path):
    target = tmp_path / "folder"
    for there in (False, True):
        if there:
            (target / "part").unlink()
        with drafted_folder(target) as draft:
            (draft / "part").write_text("x")
        assert os.listdir(tmp_path) == ["folder"] and os.listdir(target) == ["part"]
    with pytest.raises(OSError), drafted_folder(target):
        pass
    assert os.listdir(tmp_path) == ["folder"] and os.listdir(target) == ["part"]


def test_remove_spares_what_a_link_names(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "part").touch()
    (tmp_path / "link").symlink_to("mine")
    (tmp_path / "file").touch()
    for name in ("link", "file"):
        remove(tmp_path / name)
    assert os.listdir(tmp_path) == ["mine"] and os.listdir(tmp_path / "mine") == ["part"]
    remove(tmp_path / "mine")
    assert not os.listdir(tmp_path)


def forked(work) -> int:
    """The id of a new process that does `work`, and ends."""
    if child := os.fork():
        return child
    try:
        work()
        os._exit(0)
    finally:
        os._exit(1)


def test_a_lock_names_its_holder_and_ends_with_it(tmp_path):
    """By SIGKILL here."""
    path = tmp_path / "lock"

    def hold():
        with locked(path):
            time.sleep(60)

    child = forked(hold)
    while not path.exists() or path.read_text() != str(child):
        time.sleep(0.001)
    with pytest.raises(BlockingIOError, match=f"in use by process {child}: '.*lock'"), locked(path):
        pass
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with locked(path):
        assert path.read_text() == str(os.getpid())
        with pytest.raises(BlockingIOError, match=f"process {os.getpid()}"), locked(path, seconds=0.05):
            pass
    assert not path.exists()


def test_a_lock_is_held_by_one_process_at_a_time(tmp_path):
    count = tmp_path / "count"
    count.write_text("0")

    def add():
        for _ in range(20):
            with locked(tmp_path / "lock", seconds=30):
                count.write_text(str(int(count.read_text()) + 1))

    children = [forked(add) for _ in range(4)]
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 4
    assert count.read_text() == "80" and os.listdir(tmp_path) == ["count"]


def test_a_lock_file_that_is_a_link_is_refused(tmp_path):
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "lock").symlink_to("mine")
    with pytest.raises(OSError), locked(tmp_path / "lock"):
        pass
    assert (tmp_path / "mine").read_text() == "mine"


def test_a_system_without_locks_warns(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(files, "fcntl", None)
    with locked(tmp_path / "lock"):
        pass
    assert "other processes are not locked out" in caplog.text and not os.listdir(tmp_path)


@pytest.mark.parametrize("text", [b"[" * 10**5, b"{", b"\xff", b"[1, 2"])
def test_what_is_not_json_is_a_value_error_of_one_line(text, tmp_path):
    (tmp_path / "x.json").write_bytes(text)
    with pytest.raises(ValueError) as caught:
        read_json(tmp_path / "x.json")
    assert "\n" not in str(caught.value)
