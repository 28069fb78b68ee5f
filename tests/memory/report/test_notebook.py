"""A notebook that is run: what its output areas hold."""

import os
import re

import pytest

from support.browser import Page
from support.oracles import require

CELLS = {
    "report": """
import jax
import jax.numpy as jnp
from bytescope import memory

def step(params, x):
    with jax.named_scope("mlp"):
        loss = lambda params: (jnp.tanh(x @ params["w"]) @ params["v"]).sum()
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))

spec = jax.ShapeDtypeStruct
params = {"w": spec((64, 256), "float32"), "v": spec((256, 64), "float32")}
arguments = (params, spec((32, 64), "float32"))
report = memory.analyze(step, *arguments, donate_argnums=0)
report""",
    "printed": "print(report)",
    "table": "report.table()",
    "diff": "report.diff(memory.analyze(step, *arguments))",
    "show": "report.show()",
    "error": "memory.analyze(\n    step, *arguments, target='h2000')",
    "guard": "memory.assert_fits(report, '1KiB')",
    "live": "memory.live()",
}


@pytest.fixture(scope="module")
def outputs():
    """Name of a cell -> its outputs, from a kernel."""
    require("notebook")
    import nbformat
    from nbclient import NotebookClient

    cells = [nbformat.v4.new_code_cell(source.strip()) for source in CELLS.values()]
    notebook = nbformat.v4.new_notebook(cells=cells)
    environ = {**os.environ, "PYDEVD_DISABLE_FILE_VALIDATION": "1"}
    NotebookClient(notebook, timeout=120, allow_errors=True).execute(env=environ)
    return {name: cell.outputs for name, cell in zip(CELLS, notebook.cells)}


def shown(outputs, name):
    """The text and the HTML of a cell that shows one object."""
    (output,) = outputs[name]
    assert output.output_type in ("execute_result", "display_data"), output
    return output.data["text/plain"], output.data["text/html"]


@pytest.mark.exhaustive
def test_objects_show_themselves(outputs):
    for name in ("report", "table", "diff", "live"):
        text, piece = shown(outputs, name)
        assert "\x1b" not in text and piece.startswith("<pre") and len(piece) < 60_000
    for name in ("printed", "show"):
        (printed,) = outputs[name]
        assert printed.output_type == "stream" and " on local (cpu)" in printed.text


@pytest.mark.exhaustive
def test_a_buffer_is_found_in_its_cell(outputs):
    words = " ".join(Page(shown(outputs, "table")[1]).words)
    assert re.search(r"In\[1\]:[78]\b", words) and "params['w']" in words


@pytest.mark.exhaustive
def test_a_mistake_is_its_message(outputs):
    for name, kind, message in (
        ("error", "ReportError", "unknown target 'h2000': did you mean h200?"),
        ("guard", "GuardError", "jit_step takes "),
    ):
        (output,) = outputs[name]
        said = "\n".join(output.traceback).splitlines()
        assert output.ename == kind and said[0].startswith(f"{kind}: {message}") and len(said) == 1
