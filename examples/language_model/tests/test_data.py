"""The text: what is found, how it is split, how batches are drawn."""

import pytest
import torch
from language_model import UsageError
from language_model.data import find_stdlib, held_out, load_corpus, train_batch, val_batch

pytestmark = pytest.mark.full


@pytest.fixture
def folder(tmp_path):
    """Sixty small files of which each line names its file."""
    for i in range(60):
        (tmp_path / "text" / f"sub{i % 3}").mkdir(parents=True, exist_ok=True)
        (tmp_path / "text" / f"sub{i % 3}" / f"{i}.txt").write_text(f"file {i}\n" * 40)
    return tmp_path / "text"


def text_of(part: torch.Tensor) -> str:
    return bytes(part.tolist()).decode()


def test_default_corpus_is_the_standard_library():
    names = list(find_stdlib())
    assert len(names) > 200 and names == sorted(names)
    assert {"argparse.py", "json/decoder.py", "asyncio/tasks.py"} <= set(names)
    assert not [name for name in names if "site-packages" in name or "/test/" in f"/{name}"]


def test_both_sides_of_the_default_corpus_are_real_text():
    corpus = load_corpus((), 0.05, 256)
    share = len(corpus.val) / (len(corpus.val) + len(corpus.train))
    assert len(corpus.train) > 2e6 and 0.01 < share < 0.15
    assert corpus.fingerprint == load_corpus((), 0.05, 256).fingerprint


def test_split_is_by_file_disjoint_and_complete(folder):
    corpus = load_corpus((str(folder),), 0.3, 16)
    sides = [set(text_of(part).replace("\0", "").splitlines()) for part in (corpus.train, corpus.val)]
    assert not sides[0] & sides[1]
    assert sides[0] | sides[1] == {f"file {i}" for i in range(60)}
    assert corpus.files == 60


def test_side_of_a_file_depends_on_its_name_alone(folder):
    """These sides are fixed for ever: a run is compared with runs on other machines and other days."""
    sides = {name: held_out(name, 0.5) for name in ("a.py", "b.py", "c.py", "json/decoder.py")}
    assert sides == {"a.py": False, "b.py": True, "c.py": False, "json/decoder.py": True}
    before = load_corpus((str(folder),), 0.3, 16)
    (folder / "zzz.txt").write_text("one more file\n" * 40)
    after = load_corpus((str(folder),), 0.3, 16)
    for side in ("train", "val"):
        assert text_of(getattr(before, side)) in text_of(getattr(after, side))
    assert before.fingerprint != after.fingerprint


def test_a_larger_fraction_holds_out_the_same_files_and_more():
    names = [f"file{i}.py" for i in range(1000)]
    small, large = ({name for name in names if held_out(name, share)} for share in (0.1, 0.2))
    assert small < large and 60 < len(small) < 140 and 150 < len(large) < 250


def test_one_file_is_cut_near_its_end(tmp_path):
    path = tmp_path / "book.txt"
    path.write_text("".join(f"line {i}\n" for i in range(1000)))
    corpus = load_corpus((str(path),), 0.1, 32)
    assert text_of(corpus.train) + text_of(corpus.val) == "\0" + path.read_text()
    assert len(corpus.val) == round(0.1 * (path.stat().st_size + 1))


def test_files_that_are_not_text_are_left_out(folder):
    (folder / "image.bin").write_bytes(b"\0\1\2" * 100)
    (folder / "latin.txt").write_bytes(b"caf\xe9" * 100)
    (folder / ".hidden").write_text("secret" * 100)
    (folder / "__pycache__").mkdir()
    (folder / "__pycache__" / "x.txt").write_text("secret" * 100)
    (folder / "empty.txt").touch()
    corpus = load_corpus((str(folder),), 0.3, 16)
    assert corpus.files == 60 and "secret" not in text_of(corpus.train) + text_of(corpus.val)


def test_errors_name_what_is_wrong(tmp_path):
    with pytest.raises(UsageError, match="nowhere: no such file or folder"):
        load_corpus((str(tmp_path / "nowhere"),), 0.1, 16)
    with pytest.raises(UsageError, match="no text file there"):
        load_corpus((str(tmp_path),), 0.1, 16)
    (tmp_path / "short.txt").write_text("short")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="empty: no text file there"):
        load_corpus((str(tmp_path / "short.txt"), str(tmp_path / "empty")), 0.1, 2)
    with pytest.raises(UsageError, match="has 5 bytes but a sequence needs 17"):
        load_corpus((str(tmp_path / "short.txt"),), 0.1, 16)


def test_two_files_of_one_name_are_not_one(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.txt").write_text(f"{name}\n" * 100)
    paths = [str(tmp_path / name / "x.txt") for name in ("a", "b")]
    with pytest.raises(UsageError, match=r"a/x.txt and .*b/x.txt are both named x.txt"):
        load_corpus(tuple(paths), 0.1, 16)
    assert load_corpus((paths[0], paths[0]), 0.1, 16).files == 1


def test_batches_depend_on_seed_and_step_alone():
    text = torch.arange(5000).to(torch.uint8)
    inputs, targets = train_batch(text, 8, 32, seed=1, step=7)
    assert inputs.shape == targets.shape == (8, 32) and inputs.dtype == torch.int64
    torch.rand(3)
    assert torch.equal(inputs, train_batch(text, 8, 32, seed=1, step=7)[0])
    assert not torch.equal(inputs, train_batch(text, 8, 32, seed=1, step=8)[0])
    assert not torch.equal(inputs, train_batch(text, 8, 32, seed=2, step=7)[0])


def test_targets_are_the_next_bytes():
    text = torch.arange(200).to(torch.uint8)
    inputs, targets = train_batch(text, 64, 32, seed=0, step=1)
    assert torch.equal(targets, inputs + 1)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])


def test_every_byte_can_be_drawn():
    text = torch.arange(40).to(torch.uint8)
    drawn = torch.cat([torch.cat(train_batch(text, 8, 32, seed=0, step=step)) for step in range(40)])
    assert set(drawn.flatten().tolist()) == set(range(40))


def test_validation_windows_spread_over_the_text_without_a_seed():
    text = torch.arange(250).to(torch.uint8)
    batches = [val_batch(text, 2, 24, index, 5) for index in range(5)]
    starts = sorted(row[0].item() for inputs, _ in batches for row in inputs)
    assert starts[0] == 0 and starts[-1] == 250 - 25 and len(set(starts)) == 10
