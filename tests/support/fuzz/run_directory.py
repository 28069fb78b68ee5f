"""The readers of what a run leaves in its directory, and `compare` in its cache."""

import functools
import json
import tempfile
from pathlib import Path
from random import Random

from bytescope.memory.errors import in_one_line
from bytescope.memory.records.result import plain
from support.fuzz import mutations
from support.fuzz.command import CONFIG, command, strict
from support.fuzz.reports import report, trace


def metrics_rows() -> list[bytes]:
    rows = [{"step": step, "loss": 2.5, "data_wait_s": 0.0, "memory": {"peak": 3}} for step in range(1, 9)]
    rows[3]["eval_loss"] = 2.4
    return ["".join(json.dumps(row) + "\n" for row in rows).encode()]


def read_metrics(data: bytes, folder: Path) -> None:
    """A row that is no row is left out; nothing is refused."""
    from bytescope.train.run.metrics import MetricsLog, has_evaluation
    from bytescope.train.source import METRICS

    path = folder / METRICS
    path.write_bytes(data)
    has_evaluation(path, 4)
    MetricsLog(path, 6).close()
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert all(row["step"] <= 6 for row in rows)


def identity() -> object:
    from bytescope.train.checkpoints.workdir import Identity
    from bytescope.train.program.config_files import load

    return Identity.from_config(load(CONFIG), 8, "fingerprint")


@functools.cache
def run_config() -> bytes:
    import dataclasses

    return json.dumps(dataclasses.asdict(identity()), indent=1).encode()


def read_run_config(data: bytes, folder: Path) -> None:
    from bytescope.train.checkpoints.workdir import claim

    (folder / "config.json").write_bytes(data)
    claim(folder, identity(), extend=False)


@functools.cache
def run_files() -> list[bytes]:
    """The files of a run directory, each with its name in a line before it."""
    folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
    (folder / "card.xplane.pb").write_bytes(trace())
    command("report", str(folder / "card.xplane.pb"), f"--json={folder / 'profile.json'}")
    files = {
        "metrics.jsonl": metrics_rows()[0],
        "config.json": run_config(),
        "memory.json": report(),
        "profile.json": (folder / "profile.json").read_bytes(),
    }
    return [name.encode() + b"\n" + content for name, content in files.items()]


def damaged_file(data: bytes, rng: Random) -> bytes:
    name, content = data.split(b"\n", 1)
    damage = mutations.damaged_lines if name.endswith(b"l") else mutations.damaged_json
    return name + b"\n" + damage(content, rng)


def read_run(data: bytes, folder: Path) -> None:
    """Files that are damaged are left out, with a warning; nothing is refused."""
    from bytescope.train.run import run_directory
    from bytescope.train.run import run_directory_page as run_page

    for file in (*run_files(), data):
        name, content = file.split(b"\n", 1)
        (folder / name.decode()).write_bytes(content)
    found = run_directory.read(folder)
    strict(run_page.page_data(found))
    assert run_page.render(found) and all(len(in_one_line(problem).splitlines()) == 1 for problem in found.problems)


@functools.cache
def row() -> bytes:
    from bytescope.memory.compare import row_cache

    found = json.loads(report())
    kept = ("peak_bytes", "allocated_bytes", "breakdown", "limit_bytes", "fits", "work", "target", "versions")
    answer = {
        "status": "ok",
        "settled": {"model.attention": "naive"},
        "calls_per_update": 1,
        "tokens_per_update": 512,
        **{key: found[key] for key in kept},
    }
    folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
    row_cache.write(folder, "row", answer)
    return (folder / "row.json").read_bytes()


def read_row(data: bytes, folder: Path) -> None:
    """A damaged row counts as absent; nothing is refused."""
    from bytescope.memory.compare import compare_rows as rows
    from bytescope.memory.compare import row_cache

    (folder / "row.json").write_bytes(data)
    answer = row_cache.read(folder, "row")
    if answer is not None:
        row = rows.Row.from_answer({"remat.policy": "full"}, answer)
        strict(plain(rows.make_result([row], answer["target"], answer["versions"])))
