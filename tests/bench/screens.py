"""Screenshots of pages as people meet them: three widths, light, dark, on paper, and to readers with deuteranopia.

    python tests/bench/screens.py --out=screens                         # makes a page of each kind first, from `tiny`
    python tests/bench/screens.py --out=screens report.html fit.html    # pages that are there, or a folder of them

Needs Chromium on the path. For every page and view a PNG of the whole page lies in the folder afterwards, and the page
as a browser prints it as PDF. Exit code 1 where a page scrolls sideways on a phone, or a script of it fails.

On paper means: with the rules of `@media print`, in A4's width. Deuteranopia is the matrix of severity 1.0 of Machado,
Oliveira and Fernandes 2009, on linear RGB.
"""

import argparse
import html
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
PHONE, TABLET, DESKTOP, PAPER = 390, 800, 1440, 718
# Name of a view -> (width in pixels, fragment of the address, what is changed of the page).
VIEWS = {
    **{
        f"{theme}-{width}": (width, f"#theme={theme}", "")
        for theme in ("light", "dark")
        for width in (DESKTOP, TABLET, PHONE)
    },
    **{f"deuteranopia-{width}": (width, "#theme=light", "deuteranopia") for width in (DESKTOP, TABLET, PHONE)},
    "deuteranopia-dark-1440": (DESKTOP, "#theme=dark", "deuteranopia"),
    "print": (PAPER, "#theme=light", "print"),
    "print-from-dark": (PAPER, "#theme=dark", "print"),
}
# A page of each kind from the smallest config: arguments of bytescope, where {} is the folder.
COMMANDS = (
    "report tiny cpu --json={}/one.json --html={}/report.html",
    "report tiny cpu:8 --config.batch.micro=2 --json={}/other.json --html={}/report8.html",
    "compare tiny cpu --remat=none,full,dots --html={}/compare.html",
    "compare tiny cpu --levers --html={}/levers.html",
    "fit tiny cpu --budget=64MiB --max-compiles=12 --html={}/fit.html",
    "fit tiny cpu --budgets=3 --html={}/front.html",
    "estimate llama_8b --html={}/estimate.html",
)
FILTER = """<svg width="0" height="0" style="position:absolute">
<filter id="eyes" color-interpolation-filters="linearRGB"><feColorMatrix values="0.367322 0.860646 -0.227968 0 0
  0.280085 0.672501 0.047413 0 0  -0.011820 0.042940 0.968881 0 0  0 0 0 1 0"/></filter></svg>
<style>html { filter: url(#eyes); }</style>"""
# Tells the page around it how large the page is, and what sticks out of it.
PROBE = """<script>{
  const root = document.documentElement;
  addEventListener("error", (e) => { root.dataset.failed = e.message; });
  // What lies in a box that scrolls by itself may be wider than the page.
  const boxed = (node) => node && node !== document.body
    && (getComputedStyle(node).overflowX !== "visible" || boxed(node.parentElement));
  const named = (node) => node.tagName.toLowerCase() + (node.id && "#" + node.id);
  addEventListener("load", () => setTimeout(() => {
    const page = document.scrollingElement, out = [...document.querySelectorAll("body *")]
      .filter((node) => node.getBoundingClientRect().right > innerWidth + 1 && !boxed(node.parentElement));
    parent.postMessage({ width: page.scrollWidth, height: page.scrollHeight, inner: innerWidth,
      out: out.slice(0, 4).map(named), ready: root.dataset.ready, failed: root.dataset.failed }, "*");
  }, 600));
}</script>"""
# A window is never narrower than 500 pixels: the page lies in a frame of the width that is wanted.
AROUND = """<!doctype html><meta charset="utf-8"><style>body {{ margin: 0; background: #888; }}
iframe {{ border: 0; display: block; width: {width}px; height: {height}px; }}</style>
<script>addEventListener("message", (e) => {{ document.title = JSON.stringify(e.data); }});</script>
<iframe src="{source}"></iframe>"""
HANGS_S, TALLEST = 120, 16_000


def changed(text: str, how: str) -> str:
    """The page's text with the probe in it, and as it is on paper or to eyes with deuteranopia."""
    # Its policy allows only the scripts and styles that it was made with.
    text = re.sub('<meta http-equiv="Content-Security-Policy"[^>]*>', "", text)
    if how == "print":
        text = text.replace("@media screen", "@media not all").replace("@media print", "@media all")
        text = text.replace("</body>", "<script>dispatchEvent(new Event('beforeprint'))</script></body>", 1)
    if how == "deuteranopia":
        text = text.replace("<body>", "<body>" + FILTER, 1)
    return text.replace("</title>", "</title>" + PROBE, 1)


class Browser:
    """Chromium without a window; `folder` holds its profile and the pages that it is shown."""

    def __init__(self, program: str, folder: Path):
        self.program, self.folder = program, folder

    def run(self, *options: str, page: Path) -> str:
        """What it prints. Raises CalledProcessError or TimeoutExpired."""
        done = subprocess.run(
            [
                self.program,
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--disable-background-networking",
                "--no-first-run",
                "--hide-scrollbars",
                "--force-device-scale-factor=1",
                "--virtual-time-budget=5000",
                f"--user-data-dir={self.folder / 'profile'}",
                *options,
                page.as_uri(),
            ],
            check=True,
            timeout=HANGS_S,
            capture_output=True,
        )
        return done.stdout.decode("utf-8", "replace")

    def look(self, text: str, view: str, out: Path) -> dict:
        """Writes the PNG of a page's text in one of `VIEWS`; returns what the probe found."""
        width, fragment, how = VIEWS[view]
        shown, around = self.folder / "shown.html", self.folder / "around.html"
        shown.write_text(changed(text, how), encoding="utf-8")
        around.write_text(AROUND.format(width=width, height=1000, source="shown.html" + fragment), encoding="utf-8")
        seen = re.search(
            r"<title>(.*?)</title>", self.run("--dump-dom", f"--window-size={max(width, 500)},1000", page=around), re.S
        )
        found = json.loads(html.unescape(seen[1])) if seen else {"failed": "the page says nothing", "height": 1000}
        height = min(found["height"], TALLEST)
        around.write_text(AROUND.format(width=width, height=height, source="shown.html" + fragment), encoding="utf-8")
        self.run(f"--screenshot={out.resolve()}", f"--window-size={max(width, 500)},{height}", page=around)
        return found


def made(folder: Path) -> list[Path]:
    """A page of each kind. Raises CalledProcessError for a command that fails."""
    for command in COMMANDS:
        words = [sys.executable, "-m", "bytescope.memory", *command.replace("{}", str(folder)).split()]
        done = subprocess.run(words, stdout=subprocess.DEVNULL, check=False)
        if done.returncode not in (0, 1, 3):  # 1: what differs, 3: what does not fit
            raise subprocess.CalledProcessError(done.returncode, words)
    return sorted(folder.glob("*.html"))


def faults(found: dict, width: int) -> list[str]:
    """What is wrong with a page in a view, a sentence each."""
    wrong = [f"a script fails: {found['failed']}"] if found.get("failed") else []
    if not found.get("ready") and not wrong:
        wrong.append("its script does not come to its end")
    if found.get("width", 0) > found.get("inner", width):
        wrong.append(f"scrolls sideways: {found['width']} of {width} pixels ({', '.join(found.get('out', []))})")
    return wrong


def main() -> int:
    """Makes or finds the pages, and looks at each in every view."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("pages", nargs="*", type=Path, help="HTML files, or folders of them (default: makes some)")
    parser.add_argument("--out", type=Path, default=Path("screens"), help="a folder for the PNGs (default: screens)")
    parser.add_argument("--views", default=",".join(VIEWS), help="which of the views (default: all)")
    args = parser.parse_args()
    program = next(filter(None, map(shutil.which, BROWSERS)), None) or sys.exit("no Chromium: apt install chromium")
    args.out.mkdir(parents=True, exist_ok=True)
    bad = 0
    with tempfile.TemporaryDirectory() as folder:
        browser = Browser(program, Path(folder))
        given = [file for path in args.pages for file in (sorted(path.glob("*.html")) if path.is_dir() else [path])]
        for file in given or made(Path(folder)):
            text = file.read_text(encoding="utf-8")
            for view in args.views.split(","):
                wrong = faults(browser.look(text, view, args.out / f"{file.stem}-{view}.png"), VIEWS[view][0])
                bad += len(wrong)
                print(f"{file.name:<20} {view:<24} {'; '.join(wrong) or 'ok'}", flush=True)
            paper = (args.out / file.stem).resolve()
            browser.run(f"--print-to-pdf={paper}.pdf", "--no-pdf-header-footer", page=file.resolve())
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
