"""The example notebooks run, and the byte figures in their committed outputs are current."""

import copy
from importlib import metadata
from pathlib import Path

import pytest

from support.bench_scripts import bench_script

FOLDER = Path(__file__).parents[2] / "memory" / "examples"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


@pytest.fixture
def examples():
    return bench_script("examples")


# By default tests/memory/report/test_notebook.py runs a notebook; these compile more programs.
@pytest.mark.exhaustive
@pytest.mark.oracle("notebook", "cuda", "equinox")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_with_the_figures_it_shows(examples, path):
    committed = examples.read(path)
    executed = examples.execute(committed)
    if examples.jaxlib_of(committed) == metadata.version("jaxlib"):  # other compilers use other numbers of bytes
        changed = examples.differences(committed, executed)
        assert not changed, f"run python tests/bench/examples.py {path.stem}\n" + "\n".join(changed)


@pytest.mark.quick
@pytest.mark.oracle("notebook")
def test_a_changed_byte_figure_is_seen_and_changed_seconds_are_not(examples):
    from nbformat import v4

    lines = "jaxlib 0.10.2\ntakes 12.34 GiB, 1,234 bytes\npredicted 1.13 s"
    table = v4.new_output("execute_result", {"text/html": "<td>576.06 MiB</td>", "text/plain": "576.06 MiB"})
    cells = [
        v4.new_markdown_cell("It takes 99 GiB."),
        v4.new_code_cell("run()", outputs=[v4.new_output("stream", text=lines)]),
        v4.new_code_cell("table", outputs=[table]),
    ]
    notebook = v4.new_notebook(cells=cells)
    assert examples.jaxlib_of(notebook) == "0.10.2"
    other = copy.deepcopy(notebook)
    other.cells[1].outputs[0].text = lines.replace("1.13 s", "1.14 s").replace("0.10.2", "0.11.0")
    assert examples.differences(notebook, other) == []
    other.cells[1].outputs[0].text = lines.replace("12.34", "12.35")
    other.cells[2].outputs[0].data["text/html"] = "<td>576.06 KiB</td>"
    assert examples.differences(notebook, other) == [
        "cell 2: 12.34 GiB, 1,234 bytes is now 12.35 GiB, 1,234 bytes",
        "cell 3: 576.06 MiB, 576.06 MiB is now 576.06 KiB, 576.06 MiB",
    ]
    assert examples.differences(notebook, notebook) == []


@pytest.mark.quick
@pytest.mark.oracle("notebook")
def test_notebooks_are_small_and_committed_with_outputs(examples):
    assert len(NOTEBOOKS) == 3
    for path in FOLDER.glob("*.ipynb"):
        notebook = examples.read(path)
        code = [cell for cell in notebook.cells if cell.cell_type == "code"]
        assert path.stat().st_size < 200_000 and examples.jaxlib_of(notebook)
        assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
        assert not any(output.get("name") == "stderr" for cell in code for output in cell.outputs)
        assert "ipykernel_" not in path.read_text(encoding="utf-8")
