"""READMEs and guides are true: commands parse, links lead somewhere, scripts and manifests are valid."""

import argparse
import ast
import itertools
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from bytescope.memory import cli
from bytescope.memory.commands.budgets import read_budgets
from bytescope.memory.commands.moved import MOVED
from bytescope.memory.commands.registry import COMMANDS
from bytescope.memory.devices import targets
from bytescope.memory.devices.platform import JAX_FRACTION
from support import oracles

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parents[2]
FRONT = ROOT / "README.md"
TOP = (".github", "configs", "memory", "model", "tests", "train")
READMES = sorted([*ROOT.glob("*.md"), *itertools.chain.from_iterable((ROOT / top).rglob("*.md") for top in TOP)])
READERS = {"my.py", "conftest.py", "train.py", "scripts/train.py", "launch.py", "bytescope_program.py"}
READERS |= {"step.py", "step_before.py", "same_losses.py"}
READERS |= {"metrics.py", "nanodo/main.py", "nanodo/train.py"}  # of other projects
# What may stand before a command, and what ends it.
STARTERS = ("srun", "mpirun", "nice", "time")
ENDS = ("&&", "||", "|", ";", "&", ">", "2>")


def relative(path):
    return path.relative_to(ROOT).as_posix()


def blocks(text):
    """The fenced blocks of a page: (language, text)."""
    return re.findall(r"^```(\w*)\n(.*?)^```", text, flags=re.M | re.S)


def unfenced(text):
    """A page without its fenced blocks."""
    return re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)


def prose(text):
    """A page without its fenced blocks and its inline code."""
    return re.sub(r"`[^`\n]*`", "", unfenced(text))


def command_lines(text):
    """The lines of a page's blocks as a shell would read them: without prompts, with continuations joined."""
    for language, block in blocks(text):
        if language not in ("", "sh", "bash", "console"):
            continue
        for line in re.sub(r"\\\n\s*", " ", block).splitlines():
            yield line.strip().removeprefix("$ ")


def commands(text):
    """The command lines of `bytescope` and its modules in a page's blocks, each as the arguments of the front."""
    found = []
    for line in command_lines(text):
        if not re.search(r"(^|[\s/])bytescope[.\s]", line):
            continue
        for words in simple_commands(shlex.split(line, comments=True)):
            while words and words[0] in STARTERS:
                words = words[1:]
            if words and Path(words[0]).name == "bytescope":
                found.append(words[1:])
            elif words[1:3] == ["-m", "bytescope.memory"]:
                found.append(words[3:])
    return found


def simple_commands(words):
    """Words of a line, cut where the shell starts another command or redirects the output."""
    for is_end, group in itertools.groupby(words, lambda word: word in ENDS):
        if not is_end:
            yield list(group)


def parsed(argv):
    """The command's arguments by the parser that runs it; of its version, help or completion none."""
    if argv and (argv[-1] in ("--version", "--help") or argv[0] == "--print-completion"):
        return argparse.Namespace()
    return cli.parse(argv)


def slugs(text):
    """The anchors of a page's headings, as GitHub makes them."""
    seen, found = {}, set()
    for heading in re.findall(r"^#{1,6} +(.*?)\s*#*$", unfenced(text), flags=re.M):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").replace("\\", "")
        slug = re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-")
        found.add(f"{slug}-{seen[slug]}" if slug in seen else slug)
        seen[slug] = seen.get(slug, 0) + 1
    return found


def broken_links(page, text):
    """Relative links and pictures of a page that lead nowhere, and anchors that no heading has."""
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(text)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        other = (page.parent / path).resolve() if path else page
        exists = other.exists() and other.is_relative_to(ROOT)
        if not exists or (anchor and anchor not in slugs(text if other == page else other.read_text(encoding="utf-8"))):
            broken.append(target)
    return broken


def missing_files(page, text):
    """Python files that a page names and that are not there: paths from the root or from the page, or the bare name
    of any file. Names in capitals and READERS stand for files of the reader."""
    known = {path.name for top in TOP for path in (ROOT / top).rglob("*.py")}
    fenced = [block for language, block in blocks(text) if language != "diff"]  # patches of other projects
    code = " ".join([*re.findall(r"`([^`\n]+)`", unfenced(text)), *fenced])
    names = {name for name in re.findall(r"(?<![\w/.-])[\w/]+\.py\b", code) if not re.search(r"[A-Z]{3}", name)}
    return sorted(
        name for name in names - known - READERS if not (ROOT / name).is_file() and not (page.parent / name).is_file()
    )


@pytest.mark.parametrize("page", READMES, ids=relative)
def test_every_command_parses(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()  # the script of the guides, and their run
    (tmp_path / "runs" / "tiny").mkdir(parents=True)
    (tmp_path / "runs" / "tiny" / "metrics.jsonl").touch()
    mistakes = []
    for argv in commands(page.read_text(encoding="utf-8")):
        try:
            parsed(argv)
        except ValueError as error:
            assert hasattr(error, "exit_code"), argv
            mistakes.append(f"bytescope {shlex.join(argv)}: {error}")
    assert not mistakes


def test_no_page_and_no_message_installs_the_package_from_pypi():
    """It is not there: pip gets it from a checkout or from a repository."""
    sources = [path for top in ("configs", "memory", "model", "train") for path in (ROOT / top).rglob("*.py")]
    pages = [page for page in READMES if page.name != "CHANGELOG.md"]
    advised = r"pip install ([^\n`]*\bbytescope\[[\w,]+\](?! @ git)|bytescope\b)"
    assert not [relative(path) for path in [*pages, *sources] if re.search(advised, path.read_text(encoding="utf-8"))]
    assert re.search(advised, "pip install -e . 'bytescope[cuda]'") and re.search(advised, "pip install bytescope")


def test_the_front_page_has_its_commands_and_leads_to_all_others():
    text = FRONT.read_text(encoding="utf-8")
    # The reports are among what test_every_command_parses reads.
    assert [words[0] for words in commands(text)] == ["report", "report", "train", "fit"]
    assert commands(text)[:2] == [["report", "step.py:program", "h100"], ["report", "llama_8b", "h100:8"]]
    reference = (ROOT / "train" / "reference" / "commands.md").read_text(encoding="utf-8")
    sections = [command.part_of or name for name, command in COMMANDS.items()]
    assert re.findall(r"^## (.+)", reference, flags=re.M) == sections


def test_the_reference_pages_are_current(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tests" / "bench")
    import reference

    assert not reference.stale_pages(), "run python tests/bench/reference.py"


def test_a_stale_reference_page_is_seen(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(ROOT / "tests" / "bench")
    import reference

    page = tmp_path / "keys.md"
    page.write_text(reference.keys_page().replace("remat.policy", "remat.polciy"), encoding="utf-8")
    monkeypatch.setattr(reference, "PAGES", {page: reference.keys_page, tmp_path / "gone.md": reference.targets_page})
    assert reference.stale_pages() == [page, tmp_path / "gone.md"]


@pytest.mark.parametrize("page", READMES, ids=relative)
def test_files_and_commands_named_in_a_line_exist(page):
    text = page.read_text(encoding="utf-8")
    known = {name for name, command in COMMANDS.items() if not command.part_of} | {"COMMAND"}
    if page.name in ("CHANGELOG.md", "RESULTS.md"):  # they tell of earlier versions
        known |= {*COMMANDS, *MOVED}
    unknown = [word for word in re.findall(r"`bytescope ([a-zA-Z][\w-]*)", text) if word not in known]
    assert not missing_files(page, text) + unknown


@pytest.mark.parametrize("page", READMES, ids=relative)
def test_library_examples_compile(page):
    for language, block in blocks(page.read_text(encoding="utf-8")):
        if language == "python":
            assert compile(block, relative(page), "exec")


@pytest.mark.parametrize("page", READMES, ids=relative)
def test_links_lead_somewhere(page):
    assert not broken_links(page, page.read_text(encoding="utf-8"))


def test_the_front_page_leads_to_every_other_page():
    text = FRONT.read_text(encoding="utf-8")
    linked = {(ROOT / target.partition("#")[0]).resolve() for target in re.findall(r"\]\(([^)\s]+)\)", prose(text))}
    tables = {"outputs_expected.md"}  # read by a script
    reports = ROOT / "tests" / "bench" / "upstream"  # the guide to MaxText leads to its README
    assert {path for path in READMES if path != FRONT and path.name not in tables and path.parent != reports} <= linked


def test_the_guide_to_maxtext_leads_to_the_reports():
    reports = ROOT / "tests" / "bench" / "upstream"
    assert "](../../tests/bench/upstream/README.md)" in (ROOT / "memory/guides/maxtext.md").read_text(encoding="utf-8")
    linked = set(re.findall(r"\]\(([^)\s]+)\)", prose((reports / "README.md").read_text(encoding="utf-8"))))
    assert {path.name for path in reports.glob("*.md")} - {"README.md"} <= linked


def test_the_lists_of_the_architecture_page_are_current(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tests" / "bench")
    import structure

    current = structure.PAGE.read_text(encoding="utf-8") == structure.architecture_page()
    assert current, "run python tests/bench/structure.py --tree"


def test_files_named_in_docstrings_of_packages_exist():
    missing = []
    for path in itertools.chain.from_iterable((ROOT / top).rglob("__init__.py") for top in TOP):
        docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        for name in re.findall(r"(?<![\w/.])[a-z_][a-z0-9_/]*\.py\b", docstring):
            # A name is relative to the package, to a package around it, to a package in it, or to the root.
            around = [folder / name for folder in path.parents if folder.is_relative_to(ROOT)]
            if not any(file.is_file() for file in [*around, *path.parent.glob(f"*/{name}")]):
                missing.append(f"{relative(path)}: {name}")
    assert not missing


def test_the_front_page_is_short():
    text = FRONT.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 190
    assert len(text.split()) <= 800
    assert (ROOT / "memory" / "report.png").stat().st_size < 150_000


# ---- the scripts and manifests of the guides

GUIDES = [page for page in READMES if page.parent.name == "guides"]


def blocks_of(language):
    """(page, text) of each fenced block of a language in the guides."""
    found = []
    for page in GUIDES:
        for name, text in blocks(page.read_text(encoding="utf-8")):
            if name == language:
                found.append((page, text))
    return found


def names(blocks):
    return [f"{page.stem}-{number}" for number, (page, _) in enumerate(blocks)]


SCRIPTS = blocks_of("sh")
MANIFESTS = [(page, text) for page, text in blocks_of("yaml") if "apiVersion" in text]
WORKFLOWS = [(page, text) for page, text in blocks_of("yaml") if "jobs:" in text]
HOOKS = [(page, text) for page, text in blocks_of("yaml") if "repos:" in text]
BUDGETS = [(page, text) for page, text in blocks_of("toml") if "tool.bytescope.budgets" in text]


def test_there_are_guides_with_scripts_manifests_and_workflows():
    assert len(GUIDES) >= 9 and SCRIPTS and MANIFESTS and WORKFLOWS and HOOKS and BUDGETS
    assert len(MANIFESTS + WORKFLOWS + HOOKS) == len(blocks_of("yaml"))


@pytest.mark.parametrize(("page", "text"), SCRIPTS, ids=names(SCRIPTS))
def test_bash_parses_every_script(page, text):
    done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True)
    assert not done.returncode, done.stderr


@pytest.mark.oracle("shellcheck")
@pytest.mark.parametrize(("page", "text"), SCRIPTS, ids=names(SCRIPTS))
def test_shellcheck_has_no_complaint(page, text):
    # SC1091: the virtual environment that a script activates is not here.
    command = [oracles.shellcheck(), "--shell=bash", "--exclude=SC1091", "-"]
    done = subprocess.run(command, input=text, capture_output=True, text=True)
    assert not done.returncode, done.stdout


@pytest.mark.oracle("kubernetes")
@pytest.mark.parametrize(("page", "text"), MANIFESTS, ids=names(MANIFESTS))
def test_manifests_match_the_schema_of_kubernetes(page, text):
    import kubernetes_validate

    for manifest in yaml.safe_load_all(text):
        kubernetes_validate.validate(manifest, "1.31", strict=True)


@pytest.mark.oracle("jsonschema")
@pytest.mark.parametrize(("page", "text"), WORKFLOWS, ids=names(WORKFLOWS))
def test_workflows_match_the_schema_of_github(page, text, tmp_path):
    (tmp_path / "workflow.yml").write_text(text)
    oracles.check_schema("vendor.github-workflows", [tmp_path / "workflow.yml"])


@pytest.mark.parametrize(("page", "text"), HOOKS, ids=names(HOOKS))
def test_hooks_are_in_the_manifest(page, text):
    known = {hook["id"] for hook in yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())}
    assert {hook["id"] for repo in yaml.safe_load(text)["repos"] for hook in repo["hooks"]} <= known


@pytest.mark.parametrize(("page", "text"), BUDGETS, ids=names(BUDGETS))
def test_budgets_are_read(page, text, tmp_path):
    (tmp_path / "pyproject.toml").write_text(text)
    for budget in read_budgets(tmp_path / "pyproject.toml"):
        available = targets.parse(budget.target, JAX_FRACTION).limit_bytes
        assert 0 < budget.limit_bytes(available) <= available


@pytest.mark.oracle("kubernetes")
def test_a_wrong_manifest_is_seen():
    import kubernetes_validate

    ((_, text), *_) = MANIFESTS
    manifest = next(part for part in yaml.safe_load_all(text) if part["kind"] == "Job")
    manifest["spec"]["completion"] = manifest["spec"].pop("completions")
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(manifest, "1.31", strict=True)


# ---- what the checks above can see

SHELL = r"""
```
$ bytescope compare tiny cpu:8 --grid=data.seq_len=64,128 \
    --remat='none,custom(v)+offload(block_in)'     # two policies
python3 -m venv .venv && .venv/bin/pip install -e . && .venv/bin/bytescope train
srun bytescope train tiny | tee log
python -m bytescope.memory report tiny > out.txt
bytescope-like things, and peaks of 19.73 GiB
```
```python
bytescope = None
```
"""


def test_commands_are_read_as_a_shell_reads_them():
    assert commands(SHELL) == [
        ["compare", "tiny", "cpu:8", "--grid=data.seq_len=64,128", "--remat=none,custom(v)+offload(block_in)"],
        ["train"],
        ["train", "tiny"],
        ["report", "tiny"],
    ]


@pytest.mark.parametrize(
    "line",
    [
        "bytescope reprot tiny",
        "bytescope report tiny --htlm=a.html",
        "bytescope report tiny h100:8 third",
        "bytescope report tiny --config=char",
        "bytescope train --confg=tiny",
        "bytescope prepare --source=texts",
        "bytescope diff one.json",
        "bytescope fit tiny --budgets=many",
    ],
)
def test_a_mistake_in_a_command_is_seen(line):
    (argv,) = commands(f"```\n{line}\n```\n")
    with pytest.raises(ValueError) as raised:
        parsed(argv)
    assert raised.value.exit_code == 2


@pytest.mark.parametrize(
    "line",
    [
        "bytescope report tiny --html=a.html",
        "bytescope train --config.train.steps=5",
        "bytescope list keys --grep=remat",
        "bytescope --version",
    ],
)
def test_a_right_command_is_not_a_mistake(line):
    (argv,) = commands(f"```\n{line}\n```\n")
    assert parsed(argv) is not None


def test_broken_links_are_seen():
    text = (
        "# A page\n## Two `words`, one\n[a](README.md) [b](nowhere.md) [c](#two-words-one) [d](#three)\n"
        "![e](memory/none.png) [f](https://x.org/) `[g](gone.md)` [h](../outside.md) [i](README.md#absent)\n"
        "```\n[j](code.md)\n```\n"
    )
    assert broken_links(FRONT, text) == ["nowhere.md", "#three", "memory/none.png", "../outside.md", "README.md#absent"]


def test_files_that_are_gone_are_seen():
    text = "`gone.py`, `units.py`, `memory/units.py`, `memory/hlo/gone.py`, `my.py`, `commands/NAME.py`\n"
    assert missing_files(FRONT, text) == ["gone.py", "memory/hlo/gone.py"]
