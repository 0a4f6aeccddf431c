"""Run the tests of other projects on moe_aiter, from checkouts of theirs, and print a table.

    python tests/upstream/run.py aiter=../aiter grouped_gemm=../grouped_gemm

Nothing is fetched.  Each suite runs in a process of its own, in which the project's import names lead to
moe_aiter: see README.md.
"""

import argparse
import json
import pathlib
import shlex
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
SUITES = {  # the checkout's test files that concern what moe_aiter has
    "aiter": ["op_tests/triton_tests/test_gmm.py"],
    "grouped_gemm": ["grouped_gemm/ops_test.py"],
    "scattermoe": ["tests/test_mlp.py"],
    "liger": ["test/transformers/test_fused_moe.py"],
    "flashinfer": ["tests/gemm/test_group_gemm.py", "tests/gemm/test_bmm_fp8.py"],
    "torchtitan": [
        "tests/unit_tests/test_moe.py",
        "tests/unit_tests/test_compile_moe.py",
        "tests/unit_tests/test_inference_moe.py",
    ],
}
COLUMNS = "suite", "file", "passed", "failed", "skipped", "not applicable"


def run_file(suite: str, checkout: pathlib.Path, name: str, arguments: list[str]) -> dict:
    """What pytest says of one test file: counts, and reasons with theirs."""
    if not (checkout / name).is_file():
        return {"failed": 1, "reasons": {"failed: the checkout has no such file": 1}}
    with tempfile.TemporaryDirectory() as folder:
        report = pathlib.Path(folder, "report.json")
        code = (
            "import sys, pytest; "
            f"sys.path[:0] = [{str(HERE / 'shims')!r}, {str(checkout)!r}, {str(REPOSITORY)!r}]; "
            "sys.exit(pytest.main(sys.argv[1:]))"
        )
        # without the project's pytest settings and its conftest.py, which may need its build
        how = ["-q", "-p", "upstream_plugin", "-p", "no:cacheprovider", "-c", str(HERE / "upstream.ini")]
        how += ["--noconftest", "--rootdir", str(checkout), "--import-mode=importlib"]
        how += ["--suite", suite, "--checkout", str(checkout), "--report", str(report)]
        command = [sys.executable, "-c", code, *how, str(checkout / name), *arguments]
        done = subprocess.run(command, cwd=checkout, capture_output=True, text=True)
        if not report.exists():
            last = (done.stdout + done.stderr).strip().splitlines()[-1:]
            return {"failed": 1, "reasons": {f"failed: pytest ended with {done.returncode}: {last}": 1}}
        return json.loads(report.read_text())


def show(rows: list[tuple]) -> str:
    """Rows as a Markdown table; the first row is the header."""
    lines = ["| " + " | ".join(map(str, row)) + " |" for row in rows]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkouts", nargs="+", help=f"NAME=PATH, a NAME of {', '.join(SUITES)}")
    parser.add_argument("--pytest", default="", help="more arguments for pytest, such as '-k bias'")
    given = parser.parse_args()
    rows, reasons = [COLUMNS], []
    for checkout in given.checkouts:
        suite, _, path = checkout.partition("=")
        if suite not in SUITES or not pathlib.Path(path or ".").is_dir() or not path:
            parser.error(f"{checkout} must be NAME=PATH, a folder, with a NAME of {', '.join(SUITES)}")
        for name in SUITES[suite]:
            found = run_file(suite, pathlib.Path(path).resolve(), name, shlex.split(given.pytest))
            counts = (found.get(column.replace(" ", "_"), 0) for column in COLUMNS[2:])
            rows.append((suite, name, *counts))
            reasons += [f"{name}: {n} {why}" for why, n in sorted(found["reasons"].items())]
    print(show(rows))
    print(*(f"* {reason}" for reason in reasons), sep="\n")
    return int(any(row[3] for row in rows[1:]))


if __name__ == "__main__":
    sys.exit(main())
