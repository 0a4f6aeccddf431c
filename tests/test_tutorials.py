"""Each tutorial runs as a reader follows it: its Python blocks are one program."""

import pathlib
import re
import shlex

import forked
import pytest

ROOT = pathlib.Path(__file__).parent.parent
PAGES = {page.stem: page.read_text() for page in sorted((ROOT / "docs").glob("tutorial_*.md"))}
PARALLEL = "tutorial_expert_parallel"


def blocks(name, language):
    return re.findall(rf"^```{language}\n(.*?)^```", PAGES[name], re.S | re.M)


def program(name, folder):
    """Return the file of a page's Python blocks, one after the other."""
    file = folder / "train.py"
    file.write_text("\n".join(blocks(name, "python")))
    return file


def test_every_block_is_run():
    assert {name for name in PAGES if blocks(name, "bash")} == {PARALLEL}
    languages = re.findall(r"^```(\w*)\n.*?^```", "".join(PAGES.values()), re.S | re.M)
    assert {*languages} == {"python", "bash"}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", sorted({*PAGES} - {PARALLEL}))
def test_tutorial(name, device, tmp_path):
    if "from peft" in PAGES[name]:
        pytest.importorskip("peft", reason="PEFT is not installed")
    variables = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
    done = forked.run(program(name, tmp_path), cwd=tmp_path, **variables)
    assert done.returncode == 0, done.stderr


def losses(text):
    """Return what the program printed: the loss of each step and number of ranks."""
    return {(int(s), int(r)): float(n) for s, r, n in re.findall(r"step (\d+), (\d) ranks: loss (\S+)", text)}


@pytest.mark.ranks
def test_tutorial_expert_parallel(tmp_path):
    """Two ranks save; four ranks, one rank and two hosts load, with the same loss."""
    script = program(PARALLEL, tmp_path)
    found, hosts = {}, []
    for command in "".join(blocks(PARALLEL, "bash")).splitlines():
        torchrun, *words = shlex.split(command)
        assert torchrun == "torchrun"
        if "--nnodes" in words:
            hosts.append(words)
            continue
        standalone, option, ranks, file, *rest = words
        assert (standalone, option, file) == ("--standalone", "--nproc-per-node", script.name)
        done = forked.run(script, *rest, cwd=tmp_path, ranks=int(ranks), CUDA_VISIBLE_DEVICES="")
        assert done.returncode == 0, done.stderr
        found |= losses(done.stdout)
    assert found.keys() == {(0, 2), (20, 2), (20, 4), (20, 1)}
    on_two_hosts = losses(forked.on_hosts(hosts, tmp_path))
    loaded = [found[20, 4], found[20, 1], on_two_hosts[20, 2]]
    assert loaded == pytest.approx([found[20, 2]] * 3, abs=2e-4)  # printed with four digits
    assert on_two_hosts[30, 2] < found[20, 2] < found[0, 2]
