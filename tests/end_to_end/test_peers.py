"""The table beside MaxText (tests/bench/peers.py): its rows, interrupted runs, ratios and page. Nothing is compiled."""

import dataclasses
import json
import subprocess

import pytest

from bytescope.memory.units import GIB
from bytescope.train.plan.config_factory import FACTORY
from support.bench_scripts import bench_script

pytestmark = pytest.mark.quick


@pytest.fixture
def peers():
    return bench_script("peers")


@pytest.fixture
def rows(peers):
    scanned, unrolled = peers.ROWS[0], peers.ROWS[6]
    assert scanned.scan and not unrolled.scan
    return scanned, unrolled


def cell(peers, row, setting, gib, seconds):
    return peers.Cell(peers.name_of(row), setting, allocated_bytes=int(gib * GIB), seconds=seconds)


def finished(peers, rows):
    """Cells of a row in which each setting of MaxText is better in one figure, and of an unrolled row that misses."""
    scanned, unrolled = rows
    cells = [
        cell(peers, scanned, peers.DEFAULTS, 20, 0.4),
        cell(peers, scanned, peers.BY_LAYER, 16, 0.5),
        cell(peers, scanned, peers.MATCHED, 16, 0.408),
        cell(peers, scanned, peers.CONFIG_LOSS, 12, 0.4),
        cell(peers, unrolled, peers.DEFAULTS, 10, 0.4),
        cell(peers, unrolled, peers.MATCHED, 11, 0.42),
        peers.Cell(peers.name_of(unrolled), peers.CONFIG_LOSS, "not compiled after 25 minutes"),
    ]
    return {(each.row, each.setting): each for each in cells}


def test_rows_have_names_of_their_own_and_config_accepts_our_keys_of_every_cell(peers):
    assert len({peers.name_of(row) for row in peers.ROWS}) == len(peers.ROWS)
    for row in peers.ROWS:
        for setting in (peers.MATCHED, peers.CONFIG_LOSS):
            FACTORY.check(peers.our_keys(row, setting))


def test_both_sides_have_the_same_task(peers):
    for row in peers.ROWS:
        ours, theirs = peers.our_keys(row, peers.MATCHED), peers.maxtext_keys(row, peers.DEFAULTS)
        flat = FACTORY.resolve(ours)
        assert str(flat["data.seq_len"]) == theirs["max_target_length"]
        assert str(flat["batch.micro"]) == theirs["per_device_batch_size"]
        assert str(flat["model.scan"]).lower() == theirs["scan_layers"]
        assert flat["precision.logits"] == "bfloat16"
        assert flat["loss.kind"] == ("chunked" if "num_vocab_tiling" in theirs else "full")


def test_run_continues_after_finished_cells(peers, rows, tmp_path, monkeypatch):
    path, compiled = tmp_path / "cells.jsonl", []

    def run_cell(row, setting, report_file, limit):
        if len(compiled) == 2:
            raise KeyboardInterrupt
        compiled.append((peers.name_of(row), setting))
        return peers.Cell(*compiled[-1], error="refused" if len(compiled) == 1 else "")

    monkeypatch.setattr(peers, "run_cell", run_cell)
    with pytest.raises(KeyboardInterrupt):
        peers.compile_missing(rows, path, None, 25, False)
    with path.open("a") as file:
        file.write('{"row": "llama')  # interrupted while writing
    assert set(peers.read_cells(path)) == set(compiled)
    left = [(peers.name_of(row), setting) for row, setting in peers.missing_cells(rows, peers.read_cells(path))]
    assert len(left) == 5 and not set(left) & set(compiled)
    again = [(peers.name_of(row), setting) for row, setting in peers.missing_cells(rows, peers.read_cells(path), True)]
    assert set(again) == {*left, compiled[0]}
    monkeypatch.setattr(peers, "run_cell", lambda row, setting, *rest: peers.Cell(peers.name_of(row), setting))
    peers.compile_missing(rows, path, None, 25, False)  # cells after the partial line are read
    assert not list(peers.missing_cells(rows, peers.read_cells(path)))


def test_slow_and_failed_cells_are_recorded(peers, rows, monkeypatch):
    def slow(command, timeout, **rest):
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(peers.subprocess, "run", slow)
    assert peers.run_cell(rows[0], peers.MATCHED, "", 25).error == "not compiled after 25 minutes"
    found = subprocess.CompletedProcess([], 1, "", "Traceback\nReportError: refused")
    monkeypatch.setattr(peers.subprocess, "run", lambda *command, **rest: found)
    assert peers.run_cell(rows[0], peers.MATCHED, "", 25).error == "ReportError: refused"


def test_ratios_are_to_the_better_setting_of_each_figure(peers, rows):
    first, second, unrolled = peers.ratios_of(rows, finished(peers, rows))
    assert first.better == pytest.approx({"allocated_bytes": 1.0, "seconds": 1.02})
    assert first.defaults == pytest.approx({"allocated_bytes": 0.8, "seconds": 1.02})
    assert second.better == pytest.approx({"allocated_bytes": 0.75, "seconds": 1.0}) and not second.missed
    assert unrolled.better == pytest.approx({"allocated_bytes": 1.1, "seconds": 1.05})
    assert unrolled.missed == ["allocated bytes", "predicted seconds"]


def test_summary_lists_medians_and_missed_aims(peers, rows):
    lines = peers.summary_of(rows, finished(peers, rows))
    assert "ours matched, allocated bytes by MaxText's better setting: median 1.050, 1.000 to 1.100 (2 rows)" in lines
    assert any(line.startswith("ours matched, aim") and line.endswith("missed (2 of 2 rows)") for line in lines)
    assert any(line.startswith("ours, aim") and line.endswith("met (1 of 2 rows)") for line in lines)
    (missed,) = [line for line in lines if "misses the aim" in line and "unrolled" in line]
    assert missed.endswith("(bytes 1.100, seconds 1.050)")
    assert lines[0] == "6 cells are compiled, 1 failed, 0 are missing"


def test_show_prints_the_table_and_writes_a_page(peers, rows, tmp_path, monkeypatch, capsys):
    path, page = tmp_path / "cells.jsonl", tmp_path / "page.html"
    cells = finished(peers, rows)
    key = (peers.name_of(rows[0]), peers.MATCHED)
    cells[key] = dataclasses.replace(cells[key], versions={"python": "3.12.3", "jax": "0.10.2"})
    path.write_text("".join(json.dumps(dataclasses.asdict(each)) + "\n" for each in cells.values()))
    monkeypatch.setattr("sys.argv", ["peers.py", "--show", f"--cells={path}", f"--html={page}"])
    assert peers.main() == 0
    shown = capsys.readouterr().out
    assert "| row | step | allocated GiB |" in shown and "| llama2-7b full | MaxText by layer | 16.00 |" in shown
    assert "not compiled after 25 minutes" in shown and "not compiled yet" in shown
    assert "compiled with: python 3.12.3, jax 0.10.2" in shown
    text = page.read_text()
    assert "Ours divided by MaxText" in text and "not compiled after 25 minutes" in text
    assert text.count('<table class="ledger sortable"') == 2
    assert ">allocated</th>" in text and ">16.00 GiB</td>" in text and ">allocated GiB<" not in text


def test_child_imports_the_package_maxtext_not_the_script(peers, rows, monkeypatch):
    commands = []
    found = subprocess.CompletedProcess([], 1, "", "stopped")
    monkeypatch.setattr(peers.subprocess, "run", lambda command, **rest: commands.append(command) or found)
    peers.run_cell(rows[0], peers.DEFAULTS, "", 25)
    flags = commands[0][: commands[0].index(peers.__file__)]
    monkeypatch.undo()
    folder = peers.Path(peers.__file__).parent
    probe = "import importlib.util; print(importlib.util.find_spec('maxtext'))"
    done = subprocess.run([*flags, "-c", probe], cwd=folder, capture_output=True, text=True, check=True)
    assert str(folder / "maxtext.py") not in done.stdout
