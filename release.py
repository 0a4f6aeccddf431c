"""Check that a tag may be published, and print what the changelog says about it.

python release.py v0.3.0                                 # before you push the tag
python release.py v0.3.0 https://github.com/OWNER/NAME   # as .github/workflows/wheels.yml does
"""

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent


def found(root: pathlib.Path, path: str, pattern: str) -> str:
    """Return what the first group of `pattern` matches in a file, "" if nothing."""
    match = re.search(pattern, (root / path).read_text(encoding="utf-8"), re.M)
    return match[1] if match else ""


def newest(changes: str) -> tuple[str, str, str]:
    """Return the first version of a changelog, its date and its entries."""
    match = re.search(r"^## \[(.*)\] - (.*)\n((?:(?!## ).*\n)*)", changes, re.M)
    return match.groups() if match else ("", "", "")


def problems(tag: str, address: str = "", root: pathlib.Path = ROOT) -> list[str]:
    """Return a line for each reason not to publish `tag` from the repository at `address`."""
    lines = []
    version = found(root, "moe_aiter/config.py", r'^VERSION = "(.*)"$')
    if tag != f"v{version}":
        lines.append(f"the tag is {tag}, but moe_aiter/config.py has version {version}: use v{version}")
    cited = found(root, "CITATION.cff", r"^version: (.*)$")
    if cited != version:
        lines.append(f"CITATION.cff has version {cited}: write {version}")
    changed, date, entries = newest((root / "CHANGELOG.md").read_text(encoding="utf-8"))
    if changed != version:
        lines.append(f"the newest version in CHANGELOG.md is {changed}: write {version}")
    if not re.fullmatch(r"\d{4}-\d\d-\d\d", date):
        lines.append(f"the newest version in CHANGELOG.md is dated {date}: write the day as YYYY-MM-DD")
    if not re.search(r"^\* ", entries, re.M):
        lines.append(f"CHANGELOG.md has no entries for {changed}")
    linked = found(root, "setup.py", r'^REPOSITORY = "(.*?)"')
    if not linked or address not in ("", linked):
        lines.append(f'REPOSITORY in setup.py is "{linked}": write the address of this repository {address}')
    return lines


def main(argv: list[str]) -> int:
    if not 1 <= len(argv) <= 2:
        print("usage: python release.py TAG [ADDRESS]", file=sys.stderr)
        return 2
    wrong = problems(*argv)
    for line in wrong:
        print(f"release: {line}", file=sys.stderr)
    if not wrong:
        print(newest((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"))[2].strip())
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
