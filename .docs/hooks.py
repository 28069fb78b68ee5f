"""Hooks of mkdocs: bring the Markdown of the tree into the site, and refuse a site that loads anything from elsewhere.

mkdocs wants all pages in one folder beside its config. Ours are beside the code that they describe, so every Markdown
file of the tree is added under its own path. A link to a source file or a folder leads to a page that is generated
here: the highlighted file, the notebook, or the docstrings of the folder's modules.
"""

import ast
import json
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("configs", "memory", "model", "train")
FOLDERS = (*PACKAGES, ".github", "tests")
# Pages that a script reads.
NOT_PUBLISHED = ("tests/bench/outputs_expected.md",)
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)\s#]+)")
FENCE = re.compile(r"^```.*?^```\s*$", re.M | re.S)
# An element or a style sheet that makes the browser load something from another host.
FOREIGN = re.compile(r"<(?:link|script|img|iframe|source)\b[^>]*\b(?:href|src)=[\"']?(?:https?:)?//[^>]*>")
FOREIGN_STYLE = re.compile(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//[^)\"';]*")


@event_priority(100)  # before mkdocstrings reads its paths
def on_config(config: Any) -> Any:
    """Chooses an output folder outside of the tree and lets mkdocstrings find the packages by their installed names."""
    if Path(config.site_dir) == ROOT / ".docs" / "site":  # the default
        config.site_dir = str(Path(tempfile.gettempdir()) / "bytescope-site")
    names = Path(tempfile.mkdtemp(prefix="bytescope-names-"))
    (names / "bytescope").mkdir()
    for package in PACKAGES:
        (names / "bytescope" / package).symlink_to(ROOT / package)
    config.plugins["mkdocstrings"].config.handlers["python"]["paths"] = [str(names)]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Adds the Markdown files of the tree, their pictures, and a page for each file or folder that they link to."""
    pages = {"README.md": ROOT / "README.md"}
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.md")):
            pages[path.relative_to(ROOT).as_posix()] = path
    texts = {uri: path.read_text(encoding="utf-8") for uri, path in pages.items() if uri not in NOT_PUBLISHED}
    for uri, text in texts.items():
        add(files, config, uri, text)
    for uri, text in texts.items():
        for match in LINK.finditer(FENCE.sub("", text)):
            target = resolve(uri, match[1])
            source = ROOT / target
            if source.suffix == ".png" and source.is_file() and not files.get_file_from_path(target):
                files.append(File.generated(config, target, abs_src_path=str(source)))
            elif page_of(target) not in files.src_uris and source.is_file():
                add(files, config, page_of(target), file_page(target))
            elif page_of(target) not in files.src_uris and source.is_dir():
                add(files, config, page_of(target), folder_page(target))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Points links at the generated pages and indents nested lists by four columns, as Python-Markdown needs them."""
    if page.file.src_uri == "api/memory.md":
        return api_page(markdown)
    pieces, end = [], 0
    for fence in FENCE.finditer(markdown):
        pieces += [adapt(markdown[end : fence.start()], page.file.src_uri, files), fence[0]]
        end = fence.end()
    return "".join([*pieces, adapt(markdown[end:], page.file.src_uri, files)])


def on_post_build(config: Any) -> None:
    """Raises PluginError if a page or style sheet of the site loads something from another host."""
    mistakes = []
    for path in sorted(Path(config.site_dir).rglob("*.*")):
        pattern = {".html": FOREIGN, ".css": FOREIGN_STYLE}.get(path.suffix)
        if pattern is not None:
            for match in pattern.finditer(path.read_text(encoding="utf-8")):
                mistakes.append(f"{path.relative_to(config.site_dir)}: {match[0][:120]}")
    if mistakes:
        raise PluginError("the site loads from another host:\n" + "\n".join(mistakes))


def add(files: Files, config: Any, uri: str, text: str) -> None:
    """Adds a page. Hosts of static pages leave out hidden folders, so .github is published as development."""
    file = File.generated(config, uri, content=text)
    if uri.startswith(".github/"):
        file.dest_uri = file.dest_uri.replace(".github", "development", 1)
    files.append(file)


def resolve(uri: str, link: str) -> str:
    """Returns the path from the root that a relative link of a page leads to."""
    parts: list[str] = []
    for part in (PurePosixPath(uri).parent / link).parts:
        if part == "..":
            parts.pop()
        else:
            parts.append(part)
    return "/".join(parts)


def page_of(target: str) -> str:
    """Returns the page that stands for a file or folder of the tree."""
    path = ROOT / target
    if path.is_dir():
        return f"{target}/README.md" if (path / "README.md").is_file() else f"{target}/index.md"
    return target if path.suffix in (".md", ".png") else f"{target}.md"


def adapt(text: str, uri: str, files: Files) -> str:
    """Returns text without fenced blocks as Python-Markdown should read it."""

    def replace(match: re.Match[str]) -> str:
        target = resolve(uri, match[1])
        if target in files.src_uris or not (ROOT / target).exists():
            return match[1]
        up = "../" * (len(PurePosixPath(uri).parts) - 1)
        return up + page_of(target)

    text = re.sub(r"^( +)(?=[-*] )", r"\1\1", text, flags=re.M)
    return LINK.sub(replace, text)


def file_page(target: str) -> str:
    """Returns the page of a source file: its highlighted text, left out of the search. A notebook becomes a page."""
    text = (ROOT / target).read_text(encoding="utf-8")
    if target.endswith(".ipynb"):
        return notebook_page(text)
    language = {".py": "python", ".yml": "yaml"}.get(PurePosixPath(target).suffix, "text")
    return f'{hidden(target)}~~~~~~ {{.{language} linenums="1"}}\n{text}~~~~~~\n'


def notebook_page(text: str) -> str:
    """Returns the text, the code and the printed output of a notebook."""
    pieces = []
    for cell in json.loads(text)["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            pieces.append(source)
            continue
        pieces.append(f"~~~~~~ python\n{source}\n~~~~~~")
        printed = ""
        for output in cell["outputs"]:
            printed += "".join(output.get("text") or output.get("data", {}).get("text/plain", "")).rstrip("\n") + "\n"
        if printed.strip():
            pieces.append(f"~~~~~~ text\n{printed}~~~~~~")
    return "\n\n".join(pieces) + "\n"


def folder_page(target: str) -> str:
    """Returns the page of a folder: its docstring, and its modules with the first paragraph of each docstring."""
    folder = ROOT / target
    lines = [hidden(target)]
    if (folder / "__init__.py").is_file():
        lines.append(docstring(folder / "__init__.py") + "\n")
    for path in sorted(folder.iterdir()):
        if path.suffix == ".py" and path.name != "__init__.py":
            paragraph = docstring(path).partition("\n\n")[0]
            lines.append(f"- `{path.name}`: {' '.join(paragraph.split())}")
        elif path.suffix == ".yml":
            lines.append(f"- `{path.name}`")
    return "\n".join(lines) + "\n"


def hidden(target: str) -> str:
    """Returns the head of a generated page that the search does not list."""
    return f"---\nsearch: {{exclude: true}}\n---\n# `{target}`\n\n"


def docstring(path: Path) -> str:
    return ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""


def api_page(markdown: str) -> str:
    """Lists the names of `bytescope.memory.__all__` on the page of its API."""
    entries: dict[str, list[str]] = {"PUBLIC_CLASSES": [], "PUBLIC_FUNCTIONS": []}
    for name in public_names():
        entries["PUBLIC_CLASSES" if name[0].isupper() else "PUBLIC_FUNCTIONS"].append(f"::: bytescope.memory.{name}")
    for word, directives in entries.items():
        markdown = markdown.replace(word, "\n\n".join(directives))
    return markdown


def public_names() -> Iterator[str]:
    module = ast.parse((ROOT / "memory" / "__init__.py").read_text(encoding="utf-8"))
    for node in module.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            yield from ast.literal_eval(node.value)
