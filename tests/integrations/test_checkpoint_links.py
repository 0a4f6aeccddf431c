"""`convert` reads no file that a link of the checkpoint's folder names outside of it."""

import json
import shutil

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("safetensors", reason="safetensors is not installed")

from integrations.checkpoints import INDEX, save

from moe_aiter.cli import main
from moe_aiter.integrations.checkpoints import CheckpointError, convert


@pytest.mark.parametrize("name", ["notes.txt", "config.json", "model.safetensors", "dangling"])
def test_a_link_out_of_the_folder_is_refused(name, tmp_path, capsys):
    theirs = tmp_path / "theirs"
    save(theirs, "mixtral")
    (tmp_path / "secret").write_text("secret")
    (theirs / name).unlink(missing_ok=True)
    (theirs / name).symlink_to("../nowhere" if name == "dangling" else "../secret")
    with pytest.raises(CheckpointError, match=f"{name} is a link out of the folder, to /"):
        convert(theirs, tmp_path / "ours")
    assert main(["convert", str(theirs), str(tmp_path / "ours")]) == 2
    assert "link out of the folder" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["secret", "theirs"]


def test_a_link_inside_the_folder_is_followed(tmp_path):
    theirs = tmp_path / "theirs"
    save(theirs, "mixtral")
    (theirs / "notes.txt").write_text("notes")
    (theirs / "more.txt").symlink_to("notes.txt")
    (tmp_path / "link").symlink_to("theirs")  # the folder that the user names may be a link
    convert(tmp_path / "link", tmp_path / "ours")
    assert (tmp_path / "ours" / "more.txt").read_text() == "notes"


def test_a_snapshot_of_the_cache_of_hugging_face(tmp_path):
    """`snapshots/REVISION/file` is a link to `../../blobs/SUM`; a link out of `models--NAME` is refused."""
    save(tmp_path / "plain", "mixtral")
    snapshot = tmp_path / "hub" / "models--a--b" / "snapshots" / "0123"
    blobs = snapshot.parents[1] / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, path in enumerate(sorted((tmp_path / "plain").iterdir())):
        shutil.copyfile(path, blobs / str(number))
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    convert(snapshot, tmp_path / "ours")
    convert(tmp_path / "plain", tmp_path / "same")
    files = {path.name: path.read_bytes() for path in (tmp_path / "ours").iterdir()}
    assert files == {path.name: path.read_bytes() for path in (tmp_path / "same").iterdir()}
    (tmp_path / "hub" / "token").write_text("secret")
    (snapshot / "token").symlink_to("../../../token")
    with pytest.raises(CheckpointError, match="token is a link out of the folder"):
        convert(snapshot, tmp_path / "again")


def test_a_zero_byte_in_the_index_is_one_line(tmp_path):
    save(tmp_path / "theirs", "mixtral")
    (tmp_path / "theirs" / INDEX).write_text(json.dumps({"weight_map": {"x": "a\0b.safetensors"}}))
    with pytest.raises(CheckpointError, match="it has no weight_map of names to files"):
        convert(tmp_path / "theirs", tmp_path / "ours")
