"""Run moe_aiter in the packages of its users, and print a table.

    python tests/upstream/trainers.py                     # the packages that are installed
    python tests/upstream/trainers.py --stubs trl verl    # stubs/ in place of packages, two trainers
    python tests/upstream/trainers.py peft --out results.csv    # also appends rows to a file

It runs in an environment that has moe_aiter and the packages; `PYTHONPATH=.` gives this checkout.
environments.py makes such environments.

A tiny model trains by the interface of each trainer, on moe_aiter and on eager experts.  The table has the
largest difference of a gradient in float32, of all numbers as large as the largest in its tensor, and of a
loss in 20 steps in bfloat16.  Trainers with a loop of their own have the difference of losses in float32 in
place of gradients.  Other packages have tests in this repository: the table counts them.
"""

import argparse
import contextlib
import copy
import csv
import functools
import importlib
import importlib.metadata
import inspect
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import traceback
import unittest.mock

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast, Qwen3MoeConfig

from benchmarks.tables import markdown, newest, replaced
from moe_aiter.bench.measure import PEER_ERRORS, WHERE, append, check_columns, provenance
from moe_aiter.files import opened
from moe_aiter.integrations.transformers import NAME, check, register, unregister

HERE = pathlib.Path(__file__).resolve().parent
REPOSITORY, STUBS = HERE.parents[1], HERE / "stubs"
CSV = REPOSITORY / "benchmarks" / "results" / "packages.csv"
PAGE = REPOSITORY / "docs" / "integrations.md"
VOCAB, STEPS = 32, 20
LIMITS = {"float32": 1e-5, "bfloat16": 1e-3}
ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
DEFAULT = PreTrainedModel.get_correct_experts_implementation
adamw = functools.partial(torch.optim.AdamW, lr=1e-3)


# trainers that load the model


def axolotl(folder):
    """its plugin manager, then the calls of its loader"""
    from axolotl.integrations.base import PluginManager
    from axolotl.utils.dict import DictDefault

    cfg = DictDefault({"plugins": ["moe_aiter.integrations.axolotl.Plugin"]})
    manager = PluginManager.get_instance()
    for plugin in cfg.plugins:
        manager.register(plugin)
    manager.pre_model_load(cfg)
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.set_experts_implementation(cfg.experts_implementation)  # as axolotl.loaders.model does
    return model


def ms_swift(folder):
    """`import_external_file`, `get_model_processor`"""
    from swift.model import get_model_processor
    from swift.utils import import_external_file

    plugin = pathlib.Path(folder, "plugin.py")
    plugin.write_text("import moe_aiter.integrations.auto\n")
    import_external_file(str(plugin))
    return get_model_processor(folder, torch_dtype=torch.float32)[0]


def verl(folder):
    """`HFModelConfig`, then the call of its FSDP engine"""
    from verl.workers.config import HFModelConfig

    override = {"attn_implementation": "sdpa"}
    model = HFModelConfig(path=folder, external_lib="moe_aiter.integrations.auto", override_config=override)
    return AutoModelForCausalLM.from_pretrained(  # as verl.workers.engine.fsdp does
        pretrained_model_name_or_path=folder, torch_dtype=torch.float32, config=model.hf_config
    )


def trl(folder):
    """`SFTTrainer.train`"""
    import trl

    register()
    kwargs = {"experts_implementation": NAME}
    args = trl.SFTConfig(
        folder, model_init_kwargs=kwargs, max_steps=2, report_to="none", save_strategy="no",
        use_cpu=True, bf16=False, learning_rate=1e-9,
    )  # fmt: skip
    data = [{"input_ids": batch[0].tolist()} for batch in batches()]
    if hasattr(trl, "__path__"):
        from datasets import Dataset

        data = Dataset.from_list(data)
    trainer = trl.SFTTrainer(folder, args=args, train_dataset=data)
    assert {path.path for path in check(trainer.model).values()} == {"fused"}
    trainer.train()
    assert len(trainer.state.log_history) > 0
    return AutoModelForCausalLM.from_pretrained(folder, **trainer.args.model_init_kwargs)


def llamafactory(folder):
    """`get_train_args`, `load_model`"""
    importlib.import_module("moe_aiter.integrations.auto")  # the first line of the script that the page shows
    from llamafactory.hparams import get_train_args
    from llamafactory.model import load_model, load_tokenizer

    args = {"model_name_or_path": folder, "stage": "pt", "do_train": True, "output_dir": f"{folder}/out"}
    args |= {"finetuning_type": "full", "dataset": "none", "template": "default", "report_to": "none"}
    model_args, _, _, finetuning_args, _ = get_train_args(args)
    tokenizer = load_tokenizer(model_args)["tokenizer"]
    return load_model(tokenizer, model_args, finetuning_args, is_trainable=True).float()


# trainers with a loop


def lightning(make, optimizer):
    """`Trainer.fit`"""
    import lightning

    losses = []

    class Module(lightning.LightningModule):
        def configure_model(self):
            self.model = make()

        def training_step(self, batch, batch_idx):
            loss = self.model(batch, labels=batch).loss
            losses.append(loss.item())
            return loss

        def configure_optimizers(self):
            return optimizer(self.model.parameters())

    off = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(accelerator="cpu", max_steps=STEPS, enable_model_summary=False, **off)
    trainer.fit(Module(), torch.utils.data.DataLoader(batches(), batch_size=None))
    return losses


def accelerate(make, optimizer):
    """`prepare`, `backward`"""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = make()
    loader = torch.utils.data.DataLoader(batches(), batch_size=None)
    model, optimizer, loader = accelerator.prepare(model, optimizer(model.parameters()), loader)
    losses = []
    for batch in loader:
        loss = model(batch, labels=batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@unittest.mock.patch.dict(os.environ, ALONE)
def deepspeed(make, optimizer):
    """ZeRO-3 of one process"""
    import deepspeed

    model = make()
    config = {"train_micro_batch_size_per_gpu": 8, "zero_optimization": {"stage": 3}}
    config |= {"zero_allow_untested_optimizer": True, "bf16": {"enabled": model.dtype == torch.bfloat16}}
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer(model.parameters()), config=config)
    losses = []
    for batch in batches():
        loss = engine(batch, labels=batch).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def prime_rl(folder):
    """one layer: its loop over experts, and our function in place of its fused kernel"""
    from prime_rl.trainer.models.layers import moe

    from moe_aiter.integrations.prime_rl import run_experts

    class FusedMoE:
        @staticmethod
        def apply(x, w1, w2, w3, expert_ids, scores, num_experts, mxfp8):
            return run_experts(x, w1, w2, w3, expert_ids, scores, num_experts)

    moe._FusedMoE = FusedMoE
    layers = [moe.MoE(16, 24, num_experts=6, top_k=2)]
    layers.append(copy.deepcopy(layers[0]))
    layers[1].fused_kernel = "bf16"
    return layers


def kernels(folder):
    """`get_local_kernel` of the folder that `make hub` writes: its `MoE` beside the package's"""
    from kernels import get_local_kernel

    import moe_aiter

    target = pathlib.Path(folder, "hub")
    subprocess.run([sys.executable, REPOSITORY / "hub.py", target], check=True, stdout=subprocess.DEVNULL)
    name = ["moe_aiter"] * (
        "package_name" in inspect.signature(get_local_kernel).parameters
    )  # older versions
    layers = [package.MoE(16, 24, 6, 2) for package in (get_local_kernel(target, *name), moe_aiter)]
    layers[0].load_state_dict(layers[1].state_dict())
    return layers


LOADERS = [axolotl, ms_swift, verl, trl, llamafactory]
LOOPS = [lightning, accelerate, deepspeed]
LAYERS = [prime_rl, kernels]
PACKAGES = {"ms_swift": "ms-swift", "prime_rl": "prime-rl"}
MODULES = {"ms_swift": "swift"}
TESTS = {  # of a package: files of this repository
    "transformers": [
        *(f"integrations/test_transformers{end}.py" for end in ("", "_check", "_gates", "_models")),
        "integrations/test_auto.py",
        "integrations/test_other_experts.py",
    ],
    "peft": [f"integrations/test_{name}.py" for name in ("peft", "lora", "transformers_peft")],
    "torchtitan": [f"integrations/test_torchtitan{end}.py" for end in ("", "_routes", "_parallel")],
    "torchao": ["integrations/test_torchao.py"],
    "bitsandbytes": ["layers/test_four_bit.py"],
}
ROW = ["package", "version", "why", "transformers", "torch", "scenario", *LIMITS, "result"]
FIELDS = [*(name for name in WHERE if name not in ("dtype", *ROW)), *ROW]  # of a CSV
COLUMNS = [*ROW[:3], "result", *LIMITS, *ROW[3:6]]  # of a table: a page shows the first ones, and scrolls


def batches() -> list[torch.Tensor]:
    made = torch.Generator().manual_seed(0)
    return [torch.randint(2, VOCAB, (8, 32), generator=made) for _ in range(STEPS)]


@functools.cache
def saved() -> tempfile.TemporaryDirectory:
    """A model with its tokenizer, whose words are numbers."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    torch.manual_seed(0)
    kept = tempfile.TemporaryDirectory()
    folder = kept.name
    sizes = {"hidden_size": 16, "moe_intermediate_size": 24, "num_experts": 6, "num_experts_per_tok": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "num_hidden_layers": 1}
    config = Qwen3MoeConfig(vocab_size=VOCAB, initializer_range=0.05, pad_token_id=0, **sizes, **heads)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    words = Tokenizer(WordLevel({str(i): i for i in range(VOCAB)}, unk_token="0"))
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="1").save_pretrained(folder)
    return kept


def losses_of(model: nn.Module, optimizer) -> list[float]:
    optimizer, losses = optimizer(model.parameters()), []
    for batch in batches():
        loss = model(batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def gradients(loss: torch.Tensor, model: nn.Module) -> list[torch.Tensor]:
    loss.backward()
    grads = [p.grad for p in model.parameters()]
    model.zero_grad()
    return grads


def farthest_loss(got: list[float], want: list[float]) -> float:
    assert len(got) == len(want) == STEPS
    return max(abs(a - b) for a, b in zip(got, want, strict=True))


def farthest(got, want) -> float:
    pairs = zip(got, want, strict=True)
    return max((a - b).abs().max().item() / (b.abs().max().item() or 1.0) for a, b in pairs)


def forget() -> None:
    """Undo what the trainer before has registered."""
    unregister()
    sys.modules.pop("moe_aiter.integrations.auto", None)
    PreTrainedModel.get_correct_experts_implementation = DEFAULT


def run_loader(load, folder: str) -> dict[str, float]:
    ours = load(folder)
    assert {path.path for path in check(ours).values()} == {"fused"}
    (grads, losses), (their_grads, their_losses) = trained(ours), eager(folder)
    return {"float32": farthest(grads, their_grads), "bfloat16": farthest_loss(losses, their_losses)}


def trained(model: nn.Module) -> tuple[list[torch.Tensor], list[float]]:
    """The gradients of a step in float32, and the losses of all steps in bfloat16."""
    batch = batches()[0]
    grads = gradients(model(batch, labels=batch).loss, model)
    return grads, losses_of(model.bfloat16(), adamw)


@functools.cache
def eager(folder: str) -> tuple[list[torch.Tensor], list[float]]:
    return trained(AutoModelForCausalLM.from_pretrained(folder, experts_implementation="eager"))


def run_loop(fit, folder: str) -> dict[str, float]:
    register()
    found = {}
    for dtype in LIMITS:
        losses = []
        for name in (NAME, "eager"):
            make = functools.partial(
                AutoModelForCausalLM.from_pretrained, folder, experts_implementation=name,
                dtype=getattr(torch, dtype),
            )  # fmt: skip
            losses.append(fit(make, adamw))
        found[dtype] = farthest_loss(*losses)
    return found


def run_layer(make, folder: str) -> dict[str, float]:
    layers = make(folder)
    x = torch.randn(2, 16, 16)
    grads = [gradients(layer(x).square().mean(), layer) for layer in layers]
    losses = []
    for layer in layers:
        layer.bfloat16()
        optimizer, seen = adamw(layer.parameters()), []
        for _ in range(STEPS):
            loss = layer(x.bfloat16()).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss.item())
        losses.append(seen)
    return {"float32": farthest(*grads), "bfloat16": farthest_loss(*losses)}


def run_tests(files: list[str], _: str) -> dict[str, str]:
    """What pytest counts, or its last line if it counts nothing."""
    how = ["-q", "-p", "no:cacheprovider", "-m", "not gpu and not full"]
    command = [sys.executable, "-m", "pytest", *how, *files]
    done = subprocess.run(command, cwd=REPOSITORY / "tests", capture_output=True, text=True)
    print(done.stdout, done.stderr)
    *_, last = done.stdout.splitlines() or done.stderr.splitlines()
    return {"result": re.sub(r"(, \d+ warnings?)? in .*", "", last)}


RUNS = {f.__name__: (run_loader, f) for f in LOADERS} | {f.__name__: (run_loop, f) for f in LOOPS}
RUNS |= {f.__name__: (run_layer, f) for f in LAYERS} | {name: (run_tests, t) for name, t in TESTS.items()}
ORDER = {PACKAGES.get(name, name): i for i, name in enumerate(RUNS)}


def result_of(name: str) -> dict:
    """The cells of a row: the differences, and what they mean; or why there are none."""
    run, how = RUNS[name]
    try:
        found = run(how, saved().name)
    except PEER_ERRORS as error:
        traceback.print_exc()
        return {"result": could_not(f"{type(error).__name__}: {error}")}
    far = any(found.get(dtype, 0) > limit for dtype, limit in LIMITS.items())
    return {"result": "differs" if far else "equal"} | found


def could_not(reason: str) -> str:
    return f"could not run: {' '.join(reason.split())[:150]}"


def is_good(result: str) -> bool:
    return result == "equal" or (" passed" in result and not re.search("failed|error", result))


def scenario(name: str) -> str:
    files = (f"`{pathlib.Path(path).name}`" for path in TESTS.get(name, ()))
    return ", ".join(files) or RUNS[name][1].__doc__


def version_of(package: str) -> str:
    """The version, with the commit of a package that was installed from git; raises PackageNotFoundError."""
    found = importlib.metadata.distribution(package)
    origin = json.loads(found.read_text("direct_url.json") or "{}")
    commit = origin.get("vcs_info", {}).get("commit_id", "")[:8]
    return f"{found.version} ({commit})" if commit else found.version


def table_of(rows: list[dict]) -> str:
    """A row for each package and reason for its version, the last such row of `rows`."""
    last = newest(rows, lambda row: (row["package"], row["why"]))
    last = sorted(last, key=lambda row: (ORDER[row["package"]], row["why"] != "newest"))
    cells = ([str(row[column]).replace("|", "/") or "–" for column in COLUMNS] for row in last)
    return markdown([COLUMNS, *cells])


def page(text: str, source: pathlib.Path) -> str:
    """The text of docs/integrations.md with the table of a CSV between its markers."""
    with opened(source, newline="") as file:
        return replaced(text, table_of(list(csv.DictReader(file))))


def known(name: str) -> str:
    """An argument of a command line, also as the package is written, `ms-swift`."""
    if (found := name.replace("-", "_")) not in RUNS:
        raise argparse.ArgumentTypeError(f"unknown package {name!r}; known: {', '.join(RUNS)}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = f"of {', '.join(RUNS)} [all]"
    parser.add_argument("packages", nargs="*", type=known, metavar="NAME", help=names)
    parser.add_argument("--stubs", action="store_true", help="use the stubs in place of packages")
    parser.add_argument("--json", action="store_true", help="print the rows alone, as JSON")
    parser.add_argument("--out", type=pathlib.Path, metavar="CSV", help="append the rows to this file [none]")
    parser.add_argument("--why", default="", help="why these versions, for the rows, such as `newest` [none]")
    parser.add_argument("--commit", help="commit to record [the one that git reports]")
    given = parser.parse_args()
    check_columns(given.out, FIELDS)
    stubs = {path.stem for path in STUBS.iterdir()} if given.stubs else set()
    sys.path[:0] = [str(STUBS)] * given.stubs
    where = provenance(torch.device("cpu"), "", given.commit)
    where = {name: where[name] for name in FIELDS if name in where} | {"why": given.why}
    where["transformers"] = importlib.metadata.version("transformers")
    rows = []
    for name in given.packages or RUNS:
        package = PACKAGES.get(name, name)
        try:
            version = "stub" if MODULES.get(name, name) in stubs else version_of(package)
        except importlib.metadata.PackageNotFoundError:
            print(f"skipping {package}: it is not installed", file=sys.stderr)
            continue
        forget()
        with contextlib.redirect_stdout(sys.stderr):
            found = result_of(name)
        cells = {k: f"{v:.1e}" if isinstance(v, float) else v for k, v in found.items()}
        rows.append(where | {"package": package, "version": version, "scenario": scenario(name)})
        rows[-1] |= dict.fromkeys(LIMITS, "") | cells
        if given.out:
            append(given.out, rows[-1:], FIELDS)
    print(json.dumps(rows) if given.json else table_of(rows))
    return int(not all(is_good(row["result"]) for row in rows))


if __name__ == "__main__":
    sys.exit(main())
