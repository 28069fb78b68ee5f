"""READMEs and guides quote what the code prints: output of commands, pictures of the report, lines of source files."""

import itertools
import re
import shlex
from pathlib import Path

import pytest

from support.bench_scripts import bench_script

excerpts, picture = bench_script("excerpts"), bench_script("picture")
ROOT = Path(__file__).parents[2]
FRONT = ROOT / "README.md"

EXCERPTS = excerpts.all_excerpts()
FRONT_COMMANDS = {excerpt.checked_command for excerpt in EXCERPTS if excerpt.page == FRONT}
RUN = {excerpt.checked_command for excerpt in EXCERPTS if not excerpt.slow} - FRONT_COMMANDS


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    return excerpts.Outputs(tmp_path_factory.mktemp("outputs"))


def relative(path):
    return path.relative_to(ROOT).as_posix()


@pytest.mark.quick
@pytest.mark.parametrize("page", excerpts.PAGES, ids=relative)
def test_every_quoted_output_is_below_the_comment_that_names_its_command(page):
    text = page.read_text(encoding="utf-8")
    assert not re.findall(r"^\$ .*", excerpts.without_blocks(text), flags=re.M), "add <!-- output: COMMAND -->"
    for excerpt in excerpts.read_excerpts(page, text):
        if excerpt.prompt:
            typed = shlex.split(excerpt.prompt.removeprefix("$ ").replace("\\\n", " "), comments=True)
            assert typed == shlex.split(excerpt.command)


@pytest.mark.quick
@pytest.mark.parametrize("page", excerpts.PAGES, ids=relative)
def test_references_to_lines_of_source_files_are_current(page):
    stale = excerpts.stale_references(page, page.read_text(encoding="utf-8"))
    assert not stale, "run python tests/bench/excerpts.py"


@pytest.mark.oracle("cuda")
@pytest.mark.parametrize("command", sorted(FRONT_COMMANDS))
def test_the_front_page_shows_what_its_commands_print(outputs, command):
    assert not stale_excerpts(outputs, command), "run python tests/bench/excerpts.py"


@pytest.mark.oracle("cuda")
def test_the_pictures_show_what_the_report_shows(outputs):
    assert outputs[excerpts.PICTURED]
    if excerpts.is_quoted_version():
        assert not picture.stale_pictures(outputs.folder_of(excerpts.PICTURED)), "run python tests/bench/excerpts.py"


@pytest.mark.oracle("cuda")
def test_the_program_of_the_front_page_fits_after_its_change(outputs):
    """Whatever the version of jax, the report blames the block, and the change frees three quarters of the memory."""
    assert "! Block keeps " in outputs[excerpts.BEFORE] and "@nnx.remat" in outputs[excerpts.BEFORE]
    verdict = re.compile(r"^(EXCEEDS|FITS) +predicted ([\d.]+) GiB of ([\d.]+) GiB", re.M)
    before, after = (verdict.search(outputs[command]) for command in (excerpts.BEFORE, excerpts.AFTER))
    assert (before[1], after[1]) == ("EXCEEDS", "FITS")
    assert float(before[2]) > float(before[3]) == float(after[3])
    assert 4 * float(after[2]) < float(before[2])


@pytest.mark.quick
def test_the_program_of_the_front_page_is_the_file_that_is_compiled():
    text = FRONT.read_text(encoding="utf-8")
    source = excerpts.FRONT_PROGRAM.read_text(encoding="utf-8")
    assert f"```python\n{source}```\n" in text
    changed = excerpts.apply_front_diff(source).splitlines()
    added = [line for line in changed if line not in source.splitlines()]
    assert added == ["    @nnx.remat"]
    assert changed[changed.index(added[0]) + 1] == "    def __call__(self, x):"
    with pytest.raises(ValueError, match="0 places"):
        excerpts.apply_front_diff("")


@pytest.mark.exhaustive
@pytest.mark.oracle("cuda")
@pytest.mark.parametrize("command", sorted(RUN))
def test_quoted_output_is_what_the_command_prints(outputs, command):
    assert not stale_excerpts(outputs, command), "run python tests/bench/excerpts.py"


def stale_excerpts(outputs, command):
    """The differences of all excerpts of a command from what it prints."""
    found = [excerpt.differences(outputs[command]) for excerpt in EXCERPTS if excerpt.checked_command == command]
    assert found
    return list(itertools.chain.from_iterable(found))


PAGE_WITH_OUTPUT = """
<!-- output: bytescope report tiny
lines: tiny..limit, ..., params -->
```
$ bytescope report tiny
tiny on cpu  jax 0.9.0
limit 2.00 GiB
...
params  1.00 GiB
```
"""
OUTPUT = "tiny on cpu  jax 0.10.2\nlimit 2.00 GiB\n\n  params  1.00 GiB\n"


def quoted(text):
    (excerpt,) = excerpts.read_excerpts(FRONT, text)
    return excerpt


@pytest.mark.quick
def test_a_stale_excerpt_is_seen(monkeypatch):
    monkeypatch.setattr(excerpts, "is_quoted_version", lambda: True)
    excerpt = quoted(PAGE_WITH_OUTPUT.replace("\nparams  1", "\n  params  1"))
    assert not excerpt.differences(OUTPUT)
    assert excerpt.differences(OUTPUT, versions_matter=True)
    assert "+limit 3.00 GiB" in excerpt.differences(OUTPUT.replace("2.00", "3.00"))
    assert excerpt.differences(OUTPUT.replace("params", "weights")) == [
        "README.md: bytescope report tiny: no line begins with 'params'"
    ]
    assert quoted(PAGE_WITH_OUTPUT).differences(OUTPUT)  # the indentation of the last line


@pytest.mark.quick
def test_only_the_words_of_measured_output_are_compared():
    excerpt = quoted(PAGE_WITH_OUTPUT.replace("params -->", "params\ncheck: bytescope report char -->"))
    assert excerpt.checked_command == "bytescope report char"
    assert not excerpt.differences(OUTPUT.replace("2.00", "9.00"))
    (difference,) = excerpt.differences("limit and params")
    assert difference == "README.md: bytescope report char does not print cpu, jax, on, tiny"


@pytest.mark.quick
def test_stale_references_to_source_lines_are_seen_and_renumbered():
    lines = (ROOT / "model" / "block.py").read_text(encoding="utf-8").splitlines()
    number = lines.index("class Block(nnx.Module):") + 1
    right = f"`model/block.py:{number}`<!-- line: class Block( -->"
    assert not excerpts.stale_references(FRONT, right)
    for wrong in (
        f"`block.py:{number}`",
        f"`block.py:{number + 1}`<!-- line: class Block( -->",
        "block.py:1 <!-- line: not there -->",
    ):
        assert len(excerpts.stale_references(FRONT, wrong)) == 1
    assert excerpts.renumbered(FRONT, right.replace(f":{number}", ":1")) == right


@pytest.mark.quick
def test_a_picture_contains_its_text(tmp_path):
    copy = tmp_path / "copy.png"
    copy.write_bytes((ROOT / "memory" / "report.png").read_bytes())
    picture.record_text(copy, "10 GiB ✓")
    assert picture.recorded_text(copy) == "10 GiB ✓"
    html = '<p title="8 bytes">8 B</p><p>jax 0.10.2 · flax 0.12.1</p><p>Findings</p><p>none</p>'
    assert picture.visible_text(html, picture.View("9,9", "Findings")) == "8 B\n# · #"
