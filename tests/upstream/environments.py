"""Run trainers.py with the newest and the oldest versions of packages, and write docs/integrations.md.

    python tests/upstream/environments.py          # all environments, an hour
    python tests/upstream/environments.py peft     # those of one package
    python tests/upstream/environments.py --page   # no environment: only write the page

`PYTHONPATH=.` gives this checkout.  Each environment is a folder that is removed after its run.  pip installs
moe_aiter's dependencies, the torch of this environment, and the packages of one line of ENVIRONMENTS.  The
rows go to benchmarks/results/packages.csv; the page gets the last ones.
"""

import argparse
import datetime
import importlib.metadata
import os
import pathlib
import re
import subprocess
import sys
import tempfile

from trainers import CSV, FIELDS, PACKAGES, PAGE, REPOSITORY, RUNS, could_not, known, page, scenario

from moe_aiter.bench.measure import append, git_commit
from moe_aiter.files import read_text

BASE = ["triton", "einops", "numpy", "safetensors", "pytest", "transformers>=5.7"]
GITHUB = "git+https://github.com"
ENVIRONMENTS = [  # names of trainers.py; why these versions; what pip installs, of each name first
    (
        "trl lightning accelerate deepspeed transformers peft torchao bitsandbytes kernels",
        "newest",
        "trl lightning accelerate deepspeed transformers peft torchao bitsandbytes kernels",
    ),
    ("trl accelerate", "LLaMA-Factory pins it", "trl==0.24.0 accelerate==1.11.0 transformers==5.8.0"),
    ("trl", "ms-swift pins it", "trl==0.29.1"),
    ("lightning", "NeMo 3.0 pins it", "lightning==2.4.0"),
    ("deepspeed", "LLaMA-Factory pins it", "deepspeed==0.18.4"),
    ("peft", "LLaMA-Factory pins it", "peft==0.18.1 transformers==5.8.0"),
    ("transformers peft", "oldest that moe_aiter takes", "transformers==5.7.0 peft==0.20.0"),
    ("torchao bitsandbytes", "axolotl 0.17 pins it", "torchao==0.17.0 bitsandbytes==0.49.1"),
    ("kernels", "oldest that is tested", "kernels==0.12.0"),
    ("axolotl", "newest", "axolotl==0.19.0"),
    (  # pip tries every version of s3fs and gcsfs, for hours, if it is not told one
        "axolotl",
        "oldest with transformers 5.7",
        "axolotl==0.17.0 fsspec==2026.2.0 s3fs==2026.2.0 gcsfs==2026.2.0",
    ),
    ("ms_swift", "newest", "ms-swift==4.6.0"),
    ("ms_swift", "oldest with transformers 5.7", "ms-swift==4.2.0"),
    ("verl", "newest", "verl==0.9.1"),
    ("verl", "oldest that runs transformers 5", "verl==0.7.1 transformers==5.9.0"),
    ("llamafactory", "newest", "llamafactory==0.9.5"),
    (  # with builds of torchvision and torch that fit
        "llamafactory",
        "main branch",
        "torch==2.14.1 torchvision==0.29.1 "
        f"llamafactory@{GITHUB}/hiyouga/LLaMA-Factory@ff6d4d12eeb035d6ce06805a5733dd7b29f2ac30",
    ),
    ("torchtitan", "newest", "torchtitan==0.3.0"),
    (
        "torchtitan",
        "main branch",
        f"torchtitan@{GITHUB}/pytorch/torchtitan@b5bcd76c66d0acb1a08b176d9639425bc55e0b2a",
    ),
    (
        "prime_rl",
        "main branch",
        f"prime-rl@{GITHUB}/PrimeIntellect-ai/prime-rl@559b44772e471d1538537b8805cc77f3824a5e64",
    ),
]


def install(python: pathlib.Path, requirements: list[str]) -> str:
    """Return why pip cannot install them, or "" if it has."""
    torch = f"torch=={importlib.metadata.version('torch').partition('+')[0]}"
    torch = [] if any(line.startswith("torch==") for line in requirements) else [torch]
    command = [python, "-m", "pip", "install", "-q", *torch, *BASE, *requirements]
    done = subprocess.run(command, capture_output=True, text=True)
    errors = re.findall(r"^ERROR: (?!Ignored the following)(.*)", done.stderr, re.M)
    return (errors or [done.stderr])[0] if done.returncode else ""


def refused(name: str, why: str, requirements: list[str], reason: str, commit: str) -> dict:
    """The row of a package that cannot be installed; its version is the one that was asked for."""
    package, day = PACKAGES.get(name, name), datetime.date.today().isoformat()
    line = next((line for line in requirements if re.match(rf"{package}\b", line)), package)
    row = dict.fromkeys(FIELDS, "") | {"date": day, "commit": commit, "package": package, "why": why}
    row["version"] = re.sub(r".*[=@]", "", line)[:12]
    return row | {"scenario": scenario(name), "result": could_not(reason)}


def run(names: list[str], why: str, requirements: list[str], out: pathlib.Path, commit: str) -> int:
    """Append a row for each package; returns 1 if a result is bad, else 0."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        python = pathlib.Path(folder, "bin", "python")
        reason, status = install(python, requirements), 0
        if not reason:
            script, path = REPOSITORY / "tests" / "upstream" / "trainers.py", {"PYTHONPATH": str(REPOSITORY)}
            command = [python, script, *names, "--out", out, "--why", why, "--commit", commit]
            done = subprocess.run(command, env=os.environ | path, capture_output=True, text=True)
            print(done.stdout, done.stderr)
            status = done.returncode
            if not done.stdout:  # it ended before its table
                reason = done.stderr.splitlines()[-1]
    if reason:
        append(out, [refused(name, why, requirements, reason, commit) for name in names], FIELDS)
    return status


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = f"of {', '.join(RUNS)} [all]"
    parser.add_argument("packages", nargs="*", type=known, metavar="NAME", help=names)
    parser.add_argument("--page", action="store_true", help="only write the page")
    given = parser.parse_args()
    wanted, commit, status = set(given.packages or RUNS), git_commit(), 0
    for names, why, requirements in ENVIRONMENTS if not given.page else ():
        if chosen := [name for name in names.split() if name in wanted]:
            status |= run(chosen, why, requirements.split(), CSV, commit)
    PAGE.write_text(page(read_text(PAGE), CSV))
    return status


if __name__ == "__main__":
    sys.exit(main())
