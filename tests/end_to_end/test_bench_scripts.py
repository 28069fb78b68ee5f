"""What the benchmarks assert, on hand-made figures; they themselves are run by name."""

import json
import re
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.quick


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "bench")
    import precision

    return precision


def run(name, loss, **figures):
    return {"name": name, "loss": loss, "each": [figures]}


def overflow(**figures):
    good = {
        "scale_init": 16.0,
        "scales": [8.0, *[4.0] * 10, *[8.0] * 9],
        "skipped": 2,
        "trained": [5.0, *[4.0] * 17, 2.0, 2.0],
    }
    return run("fp16 overflow", 1.0, **good | figures)


def failed(bench, *runs):
    return [check.name for check in bench.checks_of({each["name"]: each for each in runs}, True) if not check.held]


@pytest.mark.parametrize(
    ("figures", "missed"),
    [
        ({}, None),
        ({"scales": [16.0] * 20}, "least loss scale by the first"),
        ({"skipped": 20}, "updates skipped by all"),
        ({"scales": [8.0, *[4.0] * 19]}, "least loss scale by the greatest after it"),
        ({"trained": [5.0] * 20}, "training loss, last tenth by first update"),
        ({"trained": [5.0, *[4.0] * 17, float("nan"), 2.0]}, "training loss, last tenth by first update"),
    ],
)
def test_recovery_from_an_overflow(bench, figures, missed):
    found = failed(bench, overflow(**figures))
    assert not found if missed is None else f"fp16 overflow, {missed}" in found
    both = overflow()
    both["each"] += overflow(**figures)["each"]  # one seed that does not recover is enough
    assert failed(bench, both) == found


def test_roundings_are_compared_where_updates_are_small(bench):
    slow = [run("fp32 slow", 2.0), run("bf16_params slow", 2.0)]
    assert not failed(bench, *slow, run("bf16_params nearest slow", 2.08))
    assert failed(bench, *slow, run("bf16_params nearest slow", 2.0)) == [
        "held-out loss, slow, stochastic rounding by nearest"
    ]
    assert len(failed(bench, slow[0], run("bf16_params slow", 2.2), run("bf16_params nearest slow", 2.4))) == 1
    assert not bench.checks_of(
        {each["name"]: each for each in (run("fp32", 1.0), run("bf16_params nearest", 9.0))}, True
    )


def test_an_overflow_ends_within_two_per_cent_of_float32(bench):
    assert not failed(bench, run("fp32", 0.985), overflow())
    assert failed(bench, run("fp32", 0.975), overflow())


@pytest.fixture
def benches(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "bench")
    import sizes
    import speed

    return sizes, speed


@pytest.mark.parametrize(
    ("rounds", "pays"),
    [([[0.9], [0.95], [0.97]], True), ([[0.9], [0.95], [1.01]], False), ([[0.995], [0.995], [0.995]], False)],
)
def test_a_lever_pays_beyond_noise(benches, rounds, pays):
    from interleave import Samples

    assert benches[1].pays_off(Samples(rounds).over(Samples([[1.0]] * 3))) is pays


def test_every_lever_names_keys_there_are(benches):
    from bytescope.train.program.config_files import override
    from support.toy import small_config

    for lever, variants in benches[1].LEVERS.items():
        assert variants, lever
        for keys in variants.values():
            config = small_config()
            for key, value in keys.items():
                override(config, key, str(value))


def figures(ours=1.0, peer=1.0, peak_bytes=80e9):
    ready = {"tokens": 1000, "flops": 55, "peak_flops": 100}
    return {"ours": {"ready": ready, "median_s": ours, "last": {"peak_bytes": peak_bytes}}, "peer": {"median_s": peer}}


@pytest.mark.parametrize(
    ("name", "found", "missed"),
    [
        ("124M", figures(), []),
        ("124M", figures(ours=1.05, peer=1.0), ["124M: tokens/s, the peer's by ours"]),
        ("124M", figures(ours=1.2, peer=1.3), ["124M: asked MFU by ours"]),
        ("1.5B", figures(), []),
        ("8B", figures(), ["8B: asked MFU by ours"]),
        ("8B", figures(ours=0.9, peer=0.9, peak_bytes=82e9), ["8B: GB at the peak"]),
        ("1B", figures(ours=9.0, peer=9.0), []),
    ],
)
def test_bars_of_the_sizes(benches, name, found, missed):
    row, checks = benches[0].measured(name, found)
    assert [check.name for check in checks if not check.held] == missed
    assert row["held"] == ("NO" if missed else "yes")


@pytest.fixture
def outputs(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "bench")
    import outputs

    return outputs


PAGE = """<!doctype html><html><head><title>tiny</title><style>.a {}</style></head><body><h1>tiny, {peak} B</h1>
<a href="{path}">report</a><script type="application/json" id="data">{{"peak": {peak}, "rows": [[1, {row}]]}}</script>
<script>draw(1)</script></body></html>"""


def save_case(outputs, folder, *, peak=8, row=2, shown="3.50 MiB", path="/tmp/a/run", line=7, time="10:11:12"):
    """Saves a hand-made case: what a command printed, a JSON file and a page."""
    work, target = folder / "work", folder / "saved" / "cpu" / "tiny"
    work.mkdir(parents=True)
    target.mkdir(parents=True)
    buffers = [{"bytes": peak, "source": f"model/mlp.py:{line}", "path": path}]
    (work / "tiny.json").write_text(json.dumps({"peak_bytes": peak, "written": f"2026-01-02 {time}", "rows": buffers}))
    page = PAGE.replace("{{", "{").replace("}}", "}")
    for name, value in (("peak", peak), ("row", row), ("path", path)):
        page = page.replace(f"{{{name}}}", str(value))
    (work / "tiny.html").write_text(page)
    (target / "exit.txt").write_text("0\n")
    (target / "stdout.txt").write_text(f"tiny\npeak   {shown}\nmlp  model/mlp.py:{line}\nwritten {path} at {time}\n")
    outputs.save_files(work, ["tiny.html", "tiny.json"], target)
    return folder / "saved"


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({}, None),
        ({"path": "/home/other/elsewhere/run"}, None),
        ({"line": 1234}, None),
        ({"time": "23:59:58"}, None),
        ({"shown": "3.51 MiB"}, "cpu/tiny stdout.txt\n  line 2: \n    -peak   3.50 MiB\n    +peak   3.51 MiB"),
        ({"row": 3}, "cpu/tiny files/tiny.html.data.json\n  $.data.rows[0][1]: 2 -> 3"),
        ({"peak": 9}, "cpu/tiny files/tiny.json\n  $.peak_bytes: 8 -> 9"),
        ({"peak": 9}, "cpu/tiny files/tiny.html.text.txt\n  line 2: \n    -tiny, 8 B\n    +tiny, 9 B"),
    ],
)
def test_saved_outputs_are_compared(outputs, tmp_path, capsys, changes, place):
    before = save_case(outputs, tmp_path / "before")
    after = save_case(outputs, tmp_path / "after", **changes)
    assert outputs.main(["compare", str(before), str(after)]) == (0 if place is None else 1)
    assert (place or "no difference") in capsys.readouterr().out


def test_expected_differences_and_missing_cases_of_saved_outputs(outputs, tmp_path, capsys):
    before, after = save_case(outputs, tmp_path / "before"), save_case(outputs, tmp_path / "after", row=3)
    expected = tmp_path / "expected.md"
    expected.write_text(
        "| case | file | pattern | reason |\n|---|---|---|---|\n| cpu/* | *.data.json | `rows.*2 -> 3` | a row |\n"
    )
    arguments = ["compare", str(before), str(after), f"--expected={expected}"]
    assert outputs.main(arguments) == 0
    assert "expected: a row (1 times)" in capsys.readouterr().out
    (after / "cpu" / "tiny" / "exit.txt").write_text("3\n")
    (after / "cpu" / "tiny" / "files" / "tiny.json").unlink()
    assert outputs.main(arguments) == 1
    shown = capsys.readouterr().out
    assert "cpu/tiny exit.txt" in shown and "cpu/tiny files/tiny.json\n  file: only before" in shown
    assert outputs.main(["compare", str(before), str(tmp_path / "absent")]) == 2


RECORD = {"exit": 0, "figures": {"peak": 8, "seconds": 0.5, "tokens": [1, 2], "verdict": "fits"}}


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({}, None),
        ({"peak": 9}, "peak: 8 -> 9"),
        ({"seconds": 0.5 * (1 + 1e-12)}, None),
        ({"seconds": 0.5001}, "seconds: 0.5 -> 0.5001"),
        ({"tokens": [1, 3]}, "tokens: [1, 2] -> [1, 3]"),
        ({"peak": None, "peak_bytes": 8}, None),  # under a new key
        ({"peak": None, "peak_bytes": 7}, "peak: 8 is gone"),
    ],
)
def test_figures_are_compared(outputs, changes, line):
    import figures

    after = {key: figure for key, figure in (RECORD["figures"] | changes).items() if figure is not None}
    assert list(figures.differences(RECORD, {"exit": 0, "figures": after}, 1e-9)) == [line] * (line is not None)
    assert list(figures.differences(RECORD, RECORD | {"exit": 3}, 1e-9)) == ["exit code: 0 -> 3"]


def test_figures_of_json(outputs):
    import figures

    rows = [{"bytes": i, "shape": [8], "name": f"b{i}"} for i in range(9)]
    value = {
        "verdict": "fits",
        "note": "two words",
        "versions": {"jax": 1},
        "rows": rows,
        "few": rows[:2],
        "numbers": [1, 2],
    }
    assert dict(figures.figures_of(value, re.compile("name"))) == {
        "verdict": "fits",
        "rows.count": 9,
        "rows.sum.bytes": 36,
        "few.0.bytes": 0,
        "few.1.bytes": 1,
        "numbers": [1, 2],
    }


def test_outputs_are_saved_through_the_executable(outputs, tmp_path):
    import outputs_cases

    assert outputs.main(["save", str(tmp_path), "--only=absent"]) == 2

    group = outputs.Group("lists", tmp_path / "work", tmp_path, Path(sys.executable).parent / "bytescope", {})
    outputs_cases.write_input_files(group.work, None)
    outputs.run_case(group, outputs_cases.case("policies", "list policies --json=a.json"))
    saved = tmp_path / "lists" / "policies"
    assert (saved / "exit.txt").read_text() == "0\n" and "selective" in (saved / "stdout.txt").read_text()
    assert json.loads((saved / "files" / "a.json").read_text())


def test_the_coverage_of_intervals_is_that_of_the_front_page(monkeypatch, capsys):
    """From committed ratios, without a compile: 74.5 % of 791 runs, and 53.7 % of 177."""
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "bench" / "validation")
    import intervals

    monkeypatch.setattr(sys, "argv", ["intervals.py"])
    intervals.main()
    held_out, others = (line.split()[2:] for line in capsys.readouterr().out.splitlines()[-2:])
    assert held_out == ["791", "0", "74.5%", "397", "87.7%", "5.06"]
    assert others == ["177", "54", "53.7%", "77", "76.6%", "2.53"]
