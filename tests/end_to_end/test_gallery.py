"""The gallery: its list resolves, and what it calls held is."""

import ast
from pathlib import Path

import jax
import pytest

from bytescope.memory.records.audit_record import KINDS
from bytescope.memory.records.report_record import Buffer, Finding, ReportRecord

pytestmark = pytest.mark.quick

BENCH = Path(__file__).parents[1] / "bench"
# Files of programs that need jax, flax and optax alone, which the package itself needs.
OWN = ("linen_models", "linen_sharded", "nnx_models", "parallel", "pallas_kernels", "plain_jax")


@pytest.fixture(scope="module")
def gallery():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCH)
        import gallery

        yield gallery


def written(module):
    """Names of a file's programs: functions without arguments that say what they are."""
    tree = ast.parse((BENCH / "programs" / f"{module}.py").read_text())
    return {
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
        and ast.get_docstring(node)
        and not node.args.args
        and not node.name.startswith("_")
    }


def test_the_list_is_what_is_written(gallery):
    files = [path.stem for path in (BENCH / "programs").glob("*.py")]
    assert set(gallery.PROGRAMS) == {f"{module}:{name}" for module in files for name in written(module)}
    assert set(OWN) <= set(files)


@pytest.mark.parametrize("module", OWN)
def test_programs_are_a_step_and_its_arguments(gallery, module, monkeypatch):
    monkeypatch.syspath_prepend(BENCH / "programs")
    for name in sorted(written(module)):
        step, args, *rest = gallery.load(f"{module}:{name}")()
        assert callable(step) and isinstance(args, tuple), name
        leaves = jax.tree.leaves(args)
        assert leaves and all(hasattr(leaf, "shape") and hasattr(leaf, "dtype") for leaf in leaves), name
        assert not rest or set(rest[0]) <= {"donate_argnums"}, name


def report(**changes):
    buffers = (
        Buffer("w", 60, (15,), "float32", "params", "argument", at_peak=True),
        Buffer("a", 30, (7,), "float32", "workspace", "forward", source="a.py:1", at_peak=True),
        Buffer("b", 10, (2,), "float32", "workspace", "forward", at_peak=True),
        Buffer("c", 99, (9,), "float32", "workspace", "forward"),
    )
    return ReportRecord(
        **{
            "peak_bytes": 100,
            "allocated_bytes": 104,
            "buffers": buffers,
            "breakdown": {"params": 60, "workspace": 40, "fragmentation": 4},
            "findings": (Finding("not_donated", 60, "60 B is not donated", "donate it"),),
            **changes,
        }
    )


def test_what_a_row_says(gallery):
    row = gallery.Row("plain:one", "cpu")
    gallery.fill(row, report())
    assert row.adds_up and row.held and row.placed == 0.75 and row.roles == {"params": ["w"]}
    assert [b["name"] for b in row.unplaced] == ["b"]
    row.xprof = (100.0, 104.0)
    assert row.equal and row.held
    text = gallery.table([row])
    assert "params 60%" in text and "75.0%" in text and "not_donated" in text and "equal" in text
    assert "60 B is not donated. donate it" in gallery.details(row)
    row.xprof = (100.0, 105.0)
    assert not row.held and "**differs**" in gallery.table([row])


def test_findings_are_those_that_a_person_read(gallery):
    row = gallery.Row("plain_jax:decode_kept", "h200")
    gallery.fill(row, report())
    assert row.held and not row.unread and not row.missed
    row.findings.append({"kind": "full_logits", "bytes": 1, "message": "", "remedy": ""})
    assert row.unread == ["full_logits"] and not row.held and "**unread**" in gallery.table([row])
    row.findings.clear()
    assert row.missed == ["not_donated"] and not row.held and "**missed** not_donated" in gallery.table([row])
    row.program = "mine.py:step"
    assert row.held


def test_what_was_read_is_of_programs_and_targets_there_are(gallery):
    import gallery_list

    from bytescope.memory.findings.finding_rules import RULES

    kinds = {rule.__name__ for rule in RULES} | {f"audit_{kind}" for kind in KINDS}
    for program, targets in gallery_list.READ.items():
        assert program in gallery.PROGRAMS
        assert set(targets) <= {"*", *gallery.TARGETS, *(gallery.SHARDED if gallery.PROGRAMS[program] else ())}
        assert all(set(found) <= kinds for found in targets.values())


@pytest.mark.parametrize(
    "changes",
    [{"peak_bytes": 99}, {"allocated_bytes": 105}, {"breakdown": {"params": 61, "workspace": 39, "fragmentation": 4}}],
)
def test_rows_add_up_to_the_byte(gallery, changes):
    row = gallery.Row("plain:one", "cpu")
    gallery.fill(row, report(**changes))
    assert not row.adds_up and not row.held


def test_one_program_that_fails_costs_its_row_alone(gallery, tmp_path):
    (tmp_path / "mine.py").write_text(
        "import os\n"
        "def dies():\n    os._exit(3)\n"
        "def raises():\n    raise ValueError('no such size')\n"
        "def missing():\n    import not_a_library\n"
    )
    names = [f"{tmp_path / 'mine.py'}:{name}" for name in ("raises", "dies", "missing")]
    rows = {row.program: row for row in gallery.collect("cpu", names, tmp_path, 60)}
    assert [rows[name].failed for name in names] == [
        "ValueError: no such size",
        rows[names[1]].failed,
        "not_a_library is not installed",
    ]
    assert rows[names[1]].failed.startswith("exit code 3") and not any(row.held for row in rows.values())


def test_sharded_programs_are_compiled_for_eight(gallery):
    names = ["plain_jax:dqn", "plain_jax:gan", "parallel:pmap"]
    assert list(gallery.batches(names, None)) == [
        ("cpu", names[:2]),
        ("h200", names[:2]),
        ("cpu", names[2:]),
        ("h200", names[2:]),
        ("h100:8", names[2:]),
    ]
    assert list(gallery.batches(names, ["l4"])) == [("l4", names[:2]), ("l4", names[2:])]
