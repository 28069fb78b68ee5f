"""Rewrites the generated lists in memory/ARCHITECTURE.md: the layers, and the folders with what they are for.

    python tests/bench/structure.py --tree

The layers are declared in tests/support/layers.py. tests/test_rooms.py enforces them.
"""

import argparse
import ast
import os
import re
import runpy
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.import_graph import SourceTree

ROOT = Path(__file__).parents[2]
LAYERS = Path("tests", "support", "layers.py")
# The page with two generated lists, each between two markers.
PAGE = ROOT / "memory" / "ARCHITECTURE.md"
MARKERS = {
    name: (f"<!-- {name}: python tests/bench/structure.py --tree -->", f"<!-- end of the {name} -->")
    for name in ("layers", "tree")
}


def folder_tree(tree: SourceTree, page: Path) -> str:
    """A nested list with a line for each folder: a link from the page, and the first sentence of its docstring."""
    lines = []
    for name, module in tree.modules.items():
        if module.is_package:
            folder = module.path.parent
            paragraph = (ast.get_docstring(module.syntax) or "").partition("\n\n")[0]
            sentence = re.split(r"(?<=[.!?])\s", " ".join(paragraph.split()))[0].rstrip(".")
            link = os.path.relpath(folder, page.parent)
            lines.append(f"{'  ' * name.count('.')}- [{folder.name}/]({link}): {sentence}")
    return "\n".join(lines)


def layer_block(layers: Mapping[str, Any]) -> str:
    """A block with the imports of each package, and its layers from the lowest up."""
    lines = []
    for package, allowed in layers["PACKAGES"].items():
        lines.append(f"{package:<9}imports {', '.join(sorted(allowed - {package})) or 'no other package'}")
        # The room of a package's own __init__.py has the name of the package.
        names = [
            [room.partition(".")[2] or "__init__" for room in layer] for layer in layers["LAYERS"].get(package, ())
        ]
        joined = " < ".join(", ".join(layer) for layer in names)
        lines += textwrap.wrap(joined, 118, initial_indent=" " * 9, subsequent_indent=" " * 9, break_on_hyphens=False)
    return "\n".join(["```", *lines, "```"])


def architecture_page() -> str:
    """The text of the architecture page with the lists that this tree has now."""
    tree = SourceTree(ROOT)
    lists = {"layers": layer_block(runpy.run_path(str(ROOT / LAYERS))), "tree": folder_tree(tree, PAGE)}
    text = PAGE.read_text(encoding="utf-8")
    for name, (begin, end) in MARKERS.items():
        if text.count(begin) != 1 or text.count(end) != 1:
            raise SystemExit(f"{PAGE} has no place for the {name}: put the lines {begin} and {end} into it")
        before, _, rest = text.partition(begin)
        text = f"{before}{begin}\n\n{lists[name]}\n\n{end}{rest.partition(end)[2]}"
    return text


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", action="store_true", required=True, help="rewrite the lists")
    parser.parse_args()
    PAGE.write_text(architecture_page(), encoding="utf-8")
    print(f"{PAGE.relative_to(ROOT)} written")
