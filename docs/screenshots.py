"""Take pictures of web pages with Chromium, 1366 and 390 px wide, light and dark, and look for defects.

    python docs/screenshots.py              # reports of runs, and docs/report.png, of the first
    python docs/screenshots.py --site site  # each page of the site that `make docs` writes
    npm pack axe-core && tar xf axe-core-*.tgz  # for --axe package/axe.min.js, which looks at accessibility

These are errors: a page that is wider than the window, writes to the console, or asks for anything that is
no file; and each violation that axe finds.
"""

import argparse
import base64
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).parent.parent
BROWSERS = "chromium", "chromium-browser", "google-chrome"
FLAGS = ["--headless=new", "--no-sandbox", "--hide-scrollbars", "--allow-file-access-from-files"]
WIDTHS = {1366: 900, 390: 844}  # a desktop and a phone, and their heights
SCHEMES = "light", "dark"
LOCAL = "file:", "data:", "blob:", "about:", "chrome:"
SETTLED = "new Promise(done => setTimeout(done, 700))"  # fonts, and plots that resize
FORGET = "localStorage.clear()"  # the site's theme keeps the scheme of the first page there
WIDTH = "document.documentElement.scrollWidth"
WHOLE = "[0, 0, document.documentElement.clientWidth, document.documentElement.scrollHeight]"
AXE = """axe.run().then(found => found.violations.map(
    each => `${each.id}: ${each.help} (${each.nodes.length}: ${each.nodes[0].target})`))"""
RUN = ROOT / "build" / "small"
MODEL = "--preset cpu --layers 2 --hidden 64 --intermediate 64 --num-experts 8 --threads 1 --val-every 30"
TRAIN = f"{MODEL} --data moe_aiter --steps 200 --out build/small", "--steps 300 --resume build/small"
REPORTS = {  # name -> runs in one page
    "loss": ("moe", "dense"),
    "loss_fp8": ("gpu-bfloat16", "gpu-e4m3", "gpu-e4m3_all"),
}
TOP = "[0, 0, innerWidth, 2020]"  # x, y, width and height
NO_BUTTONS = "document.querySelectorAll('.modebar-container').forEach(each => each.remove())"
COLORS = 256


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--site", type=pathlib.Path, metavar="DIR", help="folder of the built site")
    parser.add_argument("--out", type=pathlib.Path, default="build/pages", help="for pictures [build/pages]")
    parser.add_argument("--axe", type=pathlib.Path, metavar="FILE", help="axe.min.js of axe-core")
    args = parser.parse_args()
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        parser.error(f"no browser on PATH: install one of {', '.join(BROWSERS)}")
    if args.site and not (args.site / "index.html").is_file():
        parser.error(f"{args.site} has no index.html: run `make docs` first")
    args.out.mkdir(parents=True, exist_ok=True)
    problems = []
    with tempfile.TemporaryDirectory() as folder:
        browser = Browser(program, folder, args.axe and args.axe.read_text())
        try:
            pages = (
                site_pages(args.site) if args.site else {"report": train()} | reports(pathlib.Path(folder))
            )
            for name, page in pages.items():
                problems += take_all(browser, page, str(args.out / name), switch=args.site is None)
            if args.site is None:
                draw(browser, pages["report"], ROOT / "docs" / "report.png")
        finally:
            browser.close()
    print("\n".join(problems) or f"pictures in {args.out}")
    return bool(problems)


def site_pages(site: pathlib.Path) -> dict[str, pathlib.Path]:
    """Return picture name -> page."""
    pages = sorted(site.rglob("index.html"))
    return {"_".join(page.relative_to(site).parent.parts) or "Start": page for page in pages}


def train() -> pathlib.Path:
    """Train for less than a minute, with a pause; return the report."""
    shutil.rmtree(RUN, ignore_errors=True)
    for words in TRAIN:
        moe_aiter("train", *words.split())
    return RUN / "report.html"


def reports(folder: pathlib.Path) -> dict[str, pathlib.Path]:
    """Write the pages about the runs in docs/runs."""
    pages = {name: folder / f"{name}.html" for name in REPORTS}
    for name, page in pages.items():
        moe_aiter("report", *(f"docs/runs/{run}" for run in REPORTS[name]), "--out", str(page))
    return pages


def moe_aiter(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "moe_aiter.cli", *words], cwd=ROOT, check=True)


def take_all(browser: "Browser", page: pathlib.Path, name: str, switch: bool) -> list[str]:
    """Take the four pictures; return what is wrong with the page.

    With `switch`, the page opens in the other color scheme, and has to follow when the scheme changes.
    """
    problems = []
    for width, height in WIDTHS.items():
        for scheme in SCHEMES:
            found = browser.open(page, width, height, SCHEMES[scheme == "light"] if switch else scheme)
            if switch:
                browser.set_scheme(scheme)
                browser.evaluate(SETTLED)
            found += browser.look(pathlib.Path(f"{name}_{width}_{scheme}.png"))
            problems += [f"{name} at {width} px, {scheme}: {problem}" for problem in found]
    return problems


def draw(browser: "Browser", page: pathlib.Path, picture: pathlib.Path) -> None:
    """Draw the top of the page for the documentation."""
    from PIL import Image

    browser.open(page, 1040, 900, "light")
    browser.evaluate(NO_BUTTONS)
    browser.look(picture, TOP, scale=1.5)
    Image.open(picture).quantize(COLORS).save(picture, optimize=True)


class Browser:
    """A page in Chromium, which takes commands of its DevTools protocol from one pipe and answers on another.

    Each message is JSON and ends with a zero byte.  `axe` is the source of axe-core.
    """

    def __init__(self, program: str, folder: str, axe: str | None):
        self.axe, self.number, self.session, self.rest, self.events = axe, 0, {}, b"", []
        commands, self.commands = os.pipe()
        self.answers, answers = os.pipe()

        def at_3_and_4() -> None:  # where Chromium looks for them
            os.dup2(commands, 3)
            os.dup2(answers, 4)

        flags = [*FLAGS, "--remote-debugging-pipe", f"--user-data-dir={folder}/browser"]
        self.process = subprocess.Popen(
            [program, *flags], preexec_fn=at_3_and_4, pass_fds=(3, 4), stderr=subprocess.DEVNULL
        )
        os.close(commands)
        os.close(answers)
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.session = {"sessionId": session}
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call("Page.addScriptToEvaluateOnNewDocument", source=FORGET)

    def close(self) -> None:
        self.session = {}
        self.call("Browser.close")
        self.process.wait()

    def receive(self) -> dict:
        while b"\0" not in self.rest:
            data = os.read(self.answers, 1 << 20)
            if not data:
                raise RuntimeError("the browser has ended")
            self.rest += data
        message, _, self.rest = self.rest.partition(b"\0")
        return json.loads(message)

    def call(self, method: str, **params) -> dict:
        self.number += 1
        message = {"id": self.number, "method": method, "params": params} | self.session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self.commands, data) :]
        while (answer := self.receive()).get("id") != self.number:
            self.events.append(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        return answer["result"]

    def evaluate(self, script: str):
        """Return the value of the script, or of the promise that it gives."""
        done = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in done:
            raise RuntimeError(done["exceptionDetails"]["exception"].get("description", script[:80]))
        return done["result"].get("value")

    def set_scheme(self, scheme: str) -> None:
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.call("Emulation.setEmulatedMedia", features=[feature])

    def open(self, page: pathlib.Path, width: int, height: int, scheme: str) -> list[str]:
        """Load the page in a window of this size; return what it writes to the console, and its requests."""
        self.width, phone = width, width < 500
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": phone}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self.set_scheme(scheme)
        self.events.clear()
        self.call("Page.navigate", url=page.resolve().as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self.receive())
        self.evaluate(SETTLED)
        return [text for event in self.events if (text := problem(event))]

    def look(self, picture: pathlib.Path, part: str = WHOLE, scale: float = 1) -> list[str]:
        """Take a picture of a part of the page; return what is wrong with the page."""
        clip = dict(zip(("x", "y", "width", "height"), self.evaluate(part), strict=True)) | {"scale": scale}
        taken = self.call("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
        picture.write_bytes(base64.b64decode(taken["data"]))
        wide = self.evaluate(WIDTH)
        problems = [f"the page is {wide} px wide"] if wide > self.width else []
        if self.axe:
            self.evaluate(self.axe)
            problems += self.evaluate(AXE)
        return problems


def problem(event: dict) -> str | None:
    """Return what is wrong in an event of the DevTools protocol."""
    kind, params = event.get("method"), event.get("params", {})
    if kind == "Runtime.consoleAPICalled":
        return "console: " + " ".join(str(each.get("value", each["type"])) for each in params["args"])
    if kind == "Runtime.exceptionThrown":
        details = params["exceptionDetails"]
        return "error: " + details.get("exception", {}).get("description", details["text"])
    if kind == "Log.entryAdded":
        return f"console: {params['entry']['text']}"
    if kind == "Network.requestWillBeSent" and not params["request"]["url"].startswith(LOCAL):
        return f"request: {params['request']['url']}"
    return None


if __name__ == "__main__":
    sys.exit(main())
