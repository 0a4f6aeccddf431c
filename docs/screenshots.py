"""Take pictures of web pages with Chromium.

    python docs/screenshots.py              # docs/report.png, the report of a short run
    python docs/screenshots.py --site site  # each page of the site that `make docs` writes, in build/pages

A page that is wider than the window, or that writes to the console, is an error.
"""

import argparse
import pathlib
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).parent.parent
BROWSERS = "chromium", "chromium-browser", "google-chrome"
FLAGS = ["--headless=new", "--no-sandbox", "--hide-scrollbars", "--allow-file-access-from-files"]
FLAGS += ["--enable-logging=stderr", "--dump-dom"]
SMALLEST = 500  # Chromium's narrowest window; a frame can be narrower
FRAME = """<body style="margin: 0">
<iframe src="{page}" style="border: 0; width: {width}px; height: {height}px"></iframe>
<script>onload = () => {{
const page = document.querySelector("iframe").contentDocument.documentElement;
if (page.scrollWidth > page.clientWidth) console.error(`the page is ${{page.scrollWidth}} px wide`);
}}</script>"""
WIDTHS = 1366, 390  # a desktop, a phone
RUN = "--preset cpu --layers 2 --hidden 64 --intermediate 64 --num-experts 8 --threads 1 --steps 300"
RUN += " --val-every 30 --data moe_aiter"
COLORS = 128


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--site", type=pathlib.Path, metavar="DIR", help="folder of the built site")
    parser.add_argument(
        "--out", type=pathlib.Path, default="build/pages", help="for its pictures [build/pages]"
    )
    args = parser.parse_args()
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        parser.error(f"no browser on PATH: install one of {', '.join(BROWSERS)}")
    if args.site is None:
        return report(browser)
    if not (args.site / "index.html").is_file():
        parser.error(f"{args.site} has no index.html: run `make docs` first")
    args.out.mkdir(parents=True, exist_ok=True)
    problems = []
    for page in sorted(args.site.rglob("index.html")):
        name = "_".join(page.relative_to(args.site).parent.parts) or "Start"
        for width in WIDTHS:
            found = take(browser, page, args.out / f"{name}_{width}.png", width, 3000)
            problems.extend(f"{name} at {width} px: {problem}" for problem in found)
    print("\n".join(problems) or f"pictures in {args.out}")
    return bool(problems)


def report(browser: str) -> int:
    """Train for less than a minute and draw the report of the run."""
    from PIL import Image

    with tempfile.TemporaryDirectory() as folder:
        run = pathlib.Path(folder) / "small"
        train = [sys.executable, "-m", "moe_aiter.cli", "train", *RUN.split(), "--out", run]
        subprocess.run(train, cwd=ROOT, check=True)
        picture = ROOT / "docs" / "report.png"
        problems = take(browser, run / "report.html", picture, 800, 1830)
    Image.open(picture).quantize(COLORS).save(picture, optimize=True)
    print("\n".join(problems) or picture)
    return bool(problems)


def take(browser: str, page: pathlib.Path, picture: pathlib.Path, width: int, height: int) -> list[str]:
    """Draw the top of `page`; return what the browser's console says."""
    with tempfile.TemporaryDirectory() as folder:
        frame = pathlib.Path(folder) / "frame.html"
        frame.write_text(FRAME.format(page=page.resolve().as_uri(), width=width, height=height))
        window = f"--window-size={max(width, SMALLEST)},{height}"
        flags = [*FLAGS, window, f"--user-data-dir={folder}", f"--screenshot={picture.resolve()}"]
        done = subprocess.run([browser, *flags, frame.as_uri()], check=True, text=True, capture_output=True)
    return [line.partition("] ")[2] for line in done.stderr.splitlines() if ":CONSOLE" in line]


if __name__ == "__main__":
    sys.exit(main())
