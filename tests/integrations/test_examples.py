"""The examples run, and what they train learns."""

import json
import pathlib
import re
import shutil

import forked
import pytest
import torch

ROOT = pathlib.Path(__file__).parent.parent.parent
SMALL = {"hidden": 64, "num-experts": 4, "top-k": 2, "layers": 1, "sequence": 32, "batch": 4, "steps": 24}


def run(example, *flags, ranks=0):
    return forked.run(ROOT / "examples" / f"{example}.py", *flags, ranks=ranks, CUDA_VISIBLE_DEVICES="")


def output(example, *flags, **options):
    done = run(example, *flags, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout


def hf_finetune(*flags):
    return run("hf_finetune", *(f"--{name}={value}" for name, value in SMALL.items()), *flags)


def test_train_from_scratch(tmp_path):
    """A resumed run is the run that was not interrupted, to the bit."""
    flags = "--steps=12", "--every=6"
    printed = output("train_from_scratch", *flags, f"--out={tmp_path}/once")
    first, last = (float(loss) for loss in re.findall(r"loss ([\d.]+)", printed))
    assert last < first - 0.2 and "blocks.1.mlp: load [" in printed
    output("train_from_scratch", *flags, f"--out={tmp_path}/twice", f"--resume={tmp_path}/once/6.pt")
    once, twice = (torch.load(tmp_path / out / "12.pt")["model"] for out in ("once", "twice"))
    assert all(torch.equal(twice[key], weight) for key, weight in once.items())


def test_expert_parallel(tmp_path):
    """Two processes train, and one continues as two would."""
    pytest.importorskip("safetensors", reason="safetensors is not installed")
    printed = output("expert_parallel", "--ep=2", "--steps=4", f"--out={tmp_path}", ranks=2)
    first = float(re.search(r"step 4: loss ([\d.]+)", printed)[1])
    losses = []
    for processes in (2, 1):
        out = tmp_path / str(processes)
        shutil.copytree(tmp_path / "4", out / "4")
        flags = f"--ep={processes}", "--steps=6", "--resume=4", f"--out={out}"
        printed = output("expert_parallel", *flags, ranks=processes)
        losses.append(float(re.search(r"step 6: loss ([\d.]+)", printed)[1]))
    assert losses[0] < first and abs(losses[0] - losses[1]) < 0.01


def replay_routing(*flags):
    printed = output("replay_routing", *flags)
    names = "reward", "of log-probabilities", "with replay"
    return [[float(number) for number in re.findall(rf"{name} ([\d.]+)", printed)] for name in names]


def test_replay_routing():
    rewards, without, replayed = replay_routing("--steps=5")
    assert rewards[-1] > rewards[0] + 0.1
    assert max(replayed) < 0.05 and max(without) > 2 * max(replayed)
    assert replay_routing("--steps=1", "--rollout-dtype=float32")[2][0] < 1e-5


def rl_same_bits(*flags):
    """The rewards, the smallest and largest ratios, and the percentages of tokens with other experts."""
    printed = output("rl_same_bits", *flags)
    found = (re.findall(rf"(?:{words}) ([\d.]+)", printed) for words in ("reward", "token:|to", "experts"))
    return [[float(number) for number in numbers] for numbers in found]


def test_rl_same_bits():
    rewards, ratios, others = rl_same_bits("--steps=4")
    assert rewards[-1] > rewards[0] + 0.05 and ratios == [1] * 8 and others == [0] * 4
    assert rl_same_bits("--steps=1", "--dtype=bfloat16")[1:] == [[1, 1], [0]]
    assert 0 < max(abs(ratio - 1) for ratio in rl_same_bits("--steps=1", "--no-invariance")[1]) < 1e-5


def test_upcycle():
    pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("safetensors", reason="safetensors is not installed")
    printed = output("upcycle", "--steps=6")
    dense, moe, trained = (float(loss) for loss in re.findall(r"loss ([\d.]+)", printed))
    assert abs(dense - moe) <= 1e-4 and trained < moe - 0.2
    assert float(re.search(r"logits: (\S+)", printed)[1]) < 1e-5


def test_hf_lora(tmp_path):
    pytest.importorskip("peft", reason="PEFT is not installed")
    printed = output("hf_lora", "--steps=10", f"--out={tmp_path}")
    losses = [float(loss) for loss in re.findall(r"'loss': '?([\d.]+)", printed)]
    assert losses[-1] < losses[0] - 0.5 and "two products" in printed
    assert (tmp_path / "adapter_model.safetensors").exists()


def test_explore(tmp_path):
    """The notebook's code runs, and the notebook is kept without outputs."""
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    notebook = json.loads((ROOT / "examples" / "explore.ipynb").read_text())
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] or cell["execution_count"] for cell in cells)
    (tmp_path / "explore.py").write_text("\n".join("".join(cell["source"]) for cell in cells))
    printed = output(tmp_path / "explore")
    losses = re.findall(r"loss ([\d.]+) at the start, ([\d.]+) at the end", printed)
    assert len(losses) == 2 and all(float(last) < float(first) / 10 for first, last in losses)


@pytest.mark.parametrize("experts", ["moe_aiter", "grouped_mm", "eager"])
def test_hf_finetune(experts):
    pytest.importorskip("transformers", reason="transformers is not installed")
    done = hf_finetune("--experts", experts)
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", done.stdout)]
    assert losses[-1] < losses[0] - 0.5
    assert re.search(r"step 24: loss [\d.]+, [\d.]+ steps/s", done.stdout)


def test_hf_finetune_on_a_text(tmp_path):
    pytest.importorskip("transformers", reason="transformers is not installed")
    text = tmp_path / "text.txt"
    text.write_text("abc" * 100)
    assert hf_finetune("--text", text).returncode == 0
    text.write_text("abc")
    done = hf_finetune("--text", text)
    assert done.returncode and "the text has 3 bytes, but a sequence needs 33" in done.stderr


@pytest.mark.parametrize(
    "flag, said",
    [("--text=none.txt", "no file none.txt"), ("--top-k=9", "num-experts"), ("--steps=0", "step")],
)
def test_a_mistake_is_one_line(flag, said):
    pytest.importorskip("transformers", reason="transformers is not installed")
    done = hf_finetune(flag)
    assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr
