"""The picture of the front page: the top of the HTML report of Llama 8B over eight H100, in a headless browser.

    python tests/bench/picture.py                          # writes memory/report.png
    python tests/bench/picture.py --out=FILE --config=llama_70b --target=h100:8x8
    python tests/bench/picture.py --notebook --size=900,460 --out=memory/notebook.png    # what a notebook shows of it

Needs the `cuda` extra and Chromium on the path; no GPU. Where Pillow is installed the PNG gets a palette of 256
colours, a third of the size. Run it when the report's page or its figures change. Exit code 1 where a step of it
fails, or the file has more than --limit bytes: a front page loads at once.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from bytescope import memory

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
PICTURE = Path(__file__).parents[2] / "memory" / "report.png"
# Seconds of the page's own clock after which it is drawn, and of ours after which the browser hangs.
SETTLED_S, HANGS_S = 10, 120


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--config", default="llama_8b", help="a config file or shipped name (default: llama_8b)")
    parser.add_argument("--target", default="h100:8", help="what to compile for (default: h100:8)")
    parser.add_argument("--out", type=Path, default=PICTURE, help="the PNG to write (default: memory/report.png)")
    parser.add_argument("--size", default="1180,1060", metavar="W,H", help="of the window, in pixels")
    parser.add_argument("--notebook", action="store_true", help="the piece for a notebook in the place of the page")
    parser.add_argument("--limit", type=int, default=150_000, metavar="BYTES", help="of the file (default: 150000)")
    return parser.parse_args()


def browser() -> str:
    """The path of a browser that can take a screenshot. Exits with code 1 where there is none."""
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    return found or sys.exit(f"none of {', '.join(BROWSERS)} is on the path: apt install chromium")


def report(config: str, target: str, page: Path) -> None:
    """Writes the HTML page of a config's report. Raises CalledProcessError when it cannot be compiled."""
    subprocess.run(
        [
            sys.executable,
            "-m",
            "bytescope.memory",
            "report",
            f"--config={config}",
            f"--target={target}",
            f"--html={page}",
        ],
        check=True,
        stdout=subprocess.DEVNULL,
    )


def piece(config: str, target: str, page: Path) -> None:
    """Writes a page with what a notebook shows of a config's report. Raises CalledProcessError as `report` does."""
    saved = page.with_suffix(".json")
    subprocess.run(
        [
            sys.executable,
            "-m",
            "bytescope.memory",
            "report",
            f"--config={config}",
            f"--target={target}",
            f"--json={saved}",
        ],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    text = memory.load(saved)._repr_html_()
    page.write_text(f'<!doctype html><meta charset="utf-8"><body data-jp-theme-light="true">{text}</body>')


def screenshot(program: str, page: Path, size: str, out: Path, profile: Path) -> None:
    """Writes the top left `size` pixels of a page as PNG. Raises CalledProcessError or TimeoutExpired."""
    subprocess.run(
        [
            program,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-background-networking",
            "--no-first-run",
            "--hide-scrollbars",
            "--force-device-scale-factor=1",
            f"--user-data-dir={profile}",
            f"--window-size={size}",
            f"--virtual-time-budget={SETTLED_S * 1000}",
            f"--screenshot={out.resolve()}",
            page.as_uri(),
        ],
        check=True,
        timeout=HANGS_S,
        capture_output=True,
    )


def reduce_colours(out: Path) -> None:
    """Rewrites a PNG with a palette of 256 colours; without Pillow it stays as it is."""
    try:
        from PIL import Image
    except ImportError:
        return
    with Image.open(out) as image:
        reduced = image.convert("RGB").quantize(256, dither=Image.Dither.NONE)
    reduced.save(out, optimize=True)


def main() -> int:
    """Compiles, draws, and judges the size of the file."""
    args = arguments()
    program = browser()
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "report.html"
        (piece if args.notebook else report)(args.config, args.target, page)
        screenshot(program, page, args.size, args.out, Path(folder) / "profile")
    reduce_colours(args.out)
    size = args.out.stat().st_size
    print(f"{args.out}: {size:,} bytes")
    if size > args.limit:
        print(f"more than {args.limit:,} bytes: install Pillow, or choose a smaller --size", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
