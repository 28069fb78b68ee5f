"""Draws the picture of the README pages: the page of a report in a headless browser.

    python tests/bench/picture.py                # writes memory/report.png
    python tests/bench/picture.py --out=FILE --config=llama_70b --target=h100:8x8 [--size=900,580]

A picture contains the text that it shows, as a text chunk of the PNG. `stale_pictures` compares that text with a report
of today, so a test notices a picture whose figures or words have changed; `python tests/bench/excerpts.py` draws stale
ones again.

Needs the `cuda` extra and Chromium on the path; no GPU. With Pillow the PNG gets a palette of 256 colors, which is a
third of the size. The exit code is 1 if a step fails, or if a file has more than --limit bytes: a front page must load
at once.
"""

import argparse
import dataclasses
import re
import shlex
import shutil
import struct
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path

from outputs import Page

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
ROOT = Path(__file__).resolve().parents[2]
COMMAND = "bytescope report llama_8b h100:8"
# What the command writes beside its text: the report and its page.
JSON, HTML = "report.json", "report.html"
# Seconds of the page's own clock after which it is drawn, and of ours after which the browser is ended.
SETTLED_S, TIMEOUT_S = 10, 120
PNG_HEAD = b"\x89PNG\r\n\x1a\n"
TEXT_KEY = b"Description"
# Versions of packages: they change without a change of what is shown.
VERSIONS = re.compile(r"\b(python|[a-z][\w-]*) \d+\.\d[\w.]*(?= ·|$)|\b(jax|jaxlib) \d[\w.]*")
# How Page writes the text of an attribute, which a picture does not show.
TOOLTIP = re.compile(r"\[[a-z]+ [a-z-]+: [^\]]*\]")


@dataclasses.dataclass(frozen=True)
class View:
    """How a picture shows the report: the size of the window as W,H in pixels, and the first line of text that the
    picture does not have to show."""

    size: str
    end: str


PAGE_VIEW = View("1180,1440", "One step, point by point")
PICTURES = {ROOT / "memory" / "report.png": PAGE_VIEW}


def stale_pictures(folder: Path) -> list[Path]:
    """Returns the pictures that show another text than the report of COMMAND in `folder`, which has JSON and HTML."""
    html = (folder / HTML).read_text(encoding="utf-8")
    return [path for path, view in PICTURES.items() if recorded_text(path) != visible_text(html, view)]


def visible_text(html: str, view: View) -> str:
    """Returns the text at the top of a page, without versions and tooltips."""
    lines = []
    for line in Page.read(html).lines:
        if line.startswith(view.end):
            break
        if text := VERSIONS.sub("#", TOOLTIP.sub("", line)).strip():
            lines.append(text)
    return "\n".join(lines)


def recorded_text(path: Path) -> str:
    """Returns the text that a picture says it shows; "" if it says nothing."""
    for kind, data in chunks(path.read_bytes()):
        if kind == b"iTXt" and data.startswith(TEXT_KEY + b"\0"):
            return data[len(TEXT_KEY) + 5 :].decode()
    return ""


def record_text(path: Path, text: str) -> None:
    """Writes the text into a PNG as an iTXt chunk (PNG 1.2, section 4.2.3) behind its header."""
    out = PNG_HEAD
    for kind, data in chunks(path.read_bytes()):
        out += chunk(kind, data)
        if kind == b"IHDR":
            out += chunk(b"iTXt", TEXT_KEY + b"\0\0\0\0\0" + text.encode())
    path.write_bytes(out)


def chunks(png: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yields the kind and the data of each chunk of a PNG."""
    at = len(PNG_HEAD)
    while at < len(png):
        size, kind = struct.unpack_from(">I4s", png, at)
        yield kind, png[at + 8 : at + 8 + size]
        at += 12 + size


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def draw(path: Path, folder: Path, view: View | None = None) -> None:
    """Draws the report in `folder`. Raises CalledProcessError or TimeoutExpired if the browser fails."""
    view = view or PICTURES[path]
    page = folder / HTML
    screenshot(page, view.size, path, folder / "profile")
    reduce_colors(path)
    record_text(path, visible_text(page.read_text(encoding="utf-8"), view))


def screenshot(page: Path, size: str, out: Path, profile: Path) -> None:
    """Writes the top left `size` pixels of a page as PNG. Exits with code 1 if there is no browser."""
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        sys.exit(f"none of {', '.join(BROWSERS)} is on the path: apt install chromium")
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
            page.resolve().as_uri(),
        ],
        check=True,
        timeout=TIMEOUT_S,
        capture_output=True,
    )


def reduce_colors(out: Path) -> None:
    """Rewrites a PNG with a palette of 256 colors; without Pillow the file stays as it is."""
    try:
        from PIL import Image
    except ImportError:
        return
    with Image.open(out) as image:
        reduced = image.convert("RGB").quantize(256, dither=Image.Dither.NONE)
    reduced.save(out, optimize=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--config", default="llama_8b", help="a config file or shipped name (default: llama_8b)")
    parser.add_argument("--target", default="h100:8", help="what to compile for (default: h100:8)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="PNG to write (default: the pictures of the READMEs)")
    parser.add_argument("--size", metavar="W,H", help="size of the window in pixels, with --out (default: 1180,1440)")
    parser.add_argument("--limit", type=int, default=150_000, metavar="BYTES", help="maximum size (default: 150000)")
    return parser.parse_args()


def main() -> int:
    """Compiles the report, draws it, and checks the sizes of the files."""
    args = parse_arguments()
    views = PICTURES
    if args.out:
        views = {args.out: dataclasses.replace(PAGE_VIEW, size=args.size or PAGE_VIEW.size)}
    _, command, *_ = shlex.split(COMMAND)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        argv = [args.config, args.target, f"--html={folder / HTML}"]
        argv = [sys.executable, "-m", "bytescope.memory", command, *argv, f"--json={folder / JSON}"]
        subprocess.run(argv, check=True, stdout=subprocess.DEVNULL)
        for path, view in views.items():
            draw(path, folder, view)
    too_large = False
    for path in views:
        size = path.stat().st_size
        print(f"{path}: {size:,} bytes")
        if size > args.limit:
            print(f"more than {args.limit:,} bytes: install Pillow, or choose a smaller --size", file=sys.stderr)
            too_large = True
    return 1 if too_large else 0


if __name__ == "__main__":
    sys.exit(main())
