"""Every reader of files and words that others write: good inputs, damage for them, and what it may refuse."""

import functools
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from random import Random

import numpy as np

from bytescope.memory.errors import ReportError, in_one_line
from bytescope.train.errors import UserError
from support.formats import gpu_space
from support.fuzz import mutations
from support.fuzz.harness import Reader, captured
from support.fuzz.training_data import (
    arrays,
    damaged_array,
    index,
    read_array,
    read_bin,
    read_index,
    read_text,
    read_tokenizer,
    tokenizer,
)

CONFIG = "tiny"


class Printed(ValueError):
    """A command told a mistake in one line of stderr and returned 2."""


def command(*words: str) -> None:
    """Runs a command line; raises Printed where it refuses, AssertionError where it does so in another way."""
    from bytescope.train import cli

    with captured() as shown:
        code = cli.main(list(words))
        out, err = shown()
    assert code in (0, 1, 2), f"exit code {code}"
    if code == 2:
        assert err.startswith("error: ") and len(err.splitlines()) == 1, f"stderr {err!r:.200}"
        raise Printed(err.strip())
    assert out and not err, f"stderr {err!r:.200}"


def strict(value: object) -> str:
    """JSON that a browser can read; raises ValueError for NaN and Infinity."""
    return json.dumps(value, allow_nan=False)


def rarely(data: bytes, one_in: int = 8) -> bool:
    """Whether a case is one of those for which a page is made too; the input alone decides."""
    return sum(data[:64]) % one_in == 0


# ---- compiled programs, traces, reports -------------------------------------------------------------

@functools.cache
def program() -> bytes:
    """The HloProto of a small scan."""
    from bytescope.memory.devices.compiler import compile_lowered
    from support import programs

    return compile_lowered(programs.scan()).proto


def read_hlo(data: bytes, folder: Path) -> None:
    (folder / "step.hlo.pb").write_bytes(data)
    command("report", f"--hlo={folder / 'step.hlo.pb'}", "--target=h100", f"--json={folder / 'r.json'}")
    report = json.loads((folder / "r.json").read_text(), parse_constant=_no_constant)
    assert sum(report["breakdown"].values()) == report["allocated_bytes"]


def _no_constant(text: str) -> None:
    raise AssertionError(f"{text} in the JSON")


@functools.cache
def trace() -> bytes:
    """The XSpace of one GPU, with the program above in it."""
    return gpu_space(program(), {"dot": "dot.1", "fusion": "fusion.1"})


def read_trace(data: bytes, folder: Path) -> None:
    (folder / "card.xplane.pb").write_bytes(data)
    page = [f"--html={folder / 't.html'}"] if rarely(data) else []
    command("trace", str(folder / "card.xplane.pb"), f"--json={folder / 't.json'}", *page)
    json.loads((folder / "t.json").read_text(), parse_constant=_no_constant)


@functools.cache
def report() -> bytes:
    """The JSON of a report on the program, with a step's work, on a target whose rates are known."""
    from bytescope.memory.analyze import report_of
    from bytescope.memory.costs import roofline
    from bytescope.memory.devices import targets
    from bytescope.memory.program import compilation_of

    found = report_of(compilation_of(program()), target=targets.parse("h100:8")).to_json()
    found["buffers"], found["timeline"] = found["buffers"][:12], found["timeline"][:20]
    found["work"] = {phase: {"flops": {"bf16": 1e12}, "product_bytes": 1e9, "other_bytes": 1e9, "to_host_bytes": 5,
                             "collective_bytes": {"in_host": 1e6, "between_hosts": 0},
                             "hidden_collective_bytes": {"in_host": 1e6}} for phase in ("forward", "backward")}
    found["roofline"] = roofline.of_answer(found).to_json()
    found["config"], found["versions"] = {"model.n_layers": 2, "train.steps": 3}, {"jax": "0.10.2"}
    return strict(found).encode()


@functools.cache
def beside() -> Path:
    """A folder with the good report and the good trace, for what reads two files."""
    folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
    (folder / "good.json").write_bytes(report())
    (folder / "good.xplane.pb").write_bytes(trace())
    return folder


def read_report(data: bytes, folder: Path) -> None:
    path, good = folder / "r.json", beside()
    path.write_bytes(data)
    page = [f"--html={folder / 'd.html'}"] if rarely(data) else []
    command("diff", str(good / "good.json"), str(path), *page)
    if rarely(data):
        from bytescope.memory import records
        from bytescope.memory.pages import report as report_page

        found = records.load(path)
        strict(report_page.page_data(found))
        report_page.render(found)
    command("trace", str(good / "good.xplane.pb"), f"--report={path}", f"--json={folder / 't.json'}")
    json.loads((folder / "t.json").read_text(), parse_constant=_no_constant)


# ---- words of a command line ------------------------------------------------------------------------

def damaged_words(data: bytes, rng: Random) -> bytes:
    return mutations.damaged_text(data.decode(), rng).encode("utf-8", "surrogatepass")


def words(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")


def override_lines() -> list[bytes]:
    return [line.encode() for line in (
        "--config.model.n_layers=4", "--config.remat.policy=custom\n--config.remat.save=q,k",
        "--config.remat.layers=0-1:none", "--config.optimizer.name=adamw", "--config.optimizer.learning_rate=3e-4",
        "--config.model.rope_scaling=8,1.0,4.0,8192", "--config.mesh.fsdp=-1", "--config.train.steps=7",
        "--config.model.scan=false", "--config.xla.gemm=cublas",
        "--config.remat.budget=20GiB", "--config.precision.preset=bf16",
        "--config.batch.accumulation_schedule=0:1,10:4", "--config.seed=0",
        "--config.data.source=stdlib", "--config.model.vocab_size=256")]


def read_overrides(data: bytes, folder: Path) -> None:
    from bytescope.train import config
    from bytescope.train.planning.adapter import Adapter

    _, overrides = config.split_overrides(words(data).split("\n"))
    Adapter().check(CONFIG, overrides)
    strict(Adapter().config(CONFIG, overrides))


def read_target(data: bytes, folder: Path) -> None:
    from bytescope.memory.devices import targets

    strict(targets.parse(words(data)).to_json())


def read_words(data: bytes, folder: Path) -> None:
    """What flags hold: sizes, counts, grids, policies, levers, stages, updates. The first letter says which."""
    from bytescope.memory.commands.estimate import parse_count
    from bytescope.memory.devices.limits import budget_of
    from bytescope.memory.plan import fit_space, levers, rows
    from bytescope.memory.units import human, parse_bytes
    from bytescope.train.run.profile import Asked

    def every_policy(text: str) -> None:
        for policy in rows.split_values(text):
            rows.policy_keys(policy)

    readers: dict[str, Callable[[str], object]] = {
        "s": lambda text: human(parse_bytes(text)), "b": lambda text: budget_of(text, 2**34, "--budget"),
        "n": lambda text: f"{parse_count(text):,.0f}", "g": rows.parse_grid, "r": every_policy, "l": fit_space.choose,
        "t": levers.choose, "u": Asked.parse}
    text = words(data)
    readers.get(text[:1], parse_bytes)(text[1:])


def flag_values() -> list[bytes]:
    return [b"s72GiB", b"s512 MB", b"s1.5tb", b"b10GiB", b"n7e9", b"n350m", b"n7_000_000", b"gdata.seq_len=1024,2048",
            b"gconfig=a,b", b"rnone,full,custom(q,k)+offload(block_in)", b"lremat,micro", b"tfp32,bf16,full",
            b"u100-103"]


# ---- what a run leaves ------------------------------------------------------------------------------

def metrics_rows() -> list[bytes]:
    rows = [{"step": step, "loss": 2.5, "data_wait_s": 0.0, "memory": {"peak": 3}} for step in range(1, 9)]
    rows[3]["eval_loss"] = 2.4
    return ["".join(json.dumps(row) + "\n" for row in rows).encode()]


def read_metrics(data: bytes, folder: Path) -> None:
    """A row that is no row is left out; nothing is refused."""
    from bytescope.train.run.metrics import MetricsLog, has_evaluation
    from bytescope.train.run.workdir import METRICS

    path = folder / METRICS
    path.write_bytes(data)
    has_evaluation(path, 4)
    MetricsLog(path, 6).close()
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert all(row["step"] <= 6 for row in rows)


def identity() -> object:
    from bytescope.train.config import load
    from bytescope.train.run.workdir import Identity

    return Identity.of(load(CONFIG), 8, "fingerprint")


@functools.cache
def run_config() -> bytes:
    import dataclasses

    return json.dumps(dataclasses.asdict(identity()), indent=1).encode()


def read_run_config(data: bytes, folder: Path) -> None:
    from bytescope.train.run.workdir import claim

    (folder / "config.json").write_bytes(data)
    claim(folder, identity(), extend=False)


@functools.cache
def run_files() -> list[bytes]:
    """The files of a run directory, each with its name in a line before it."""
    folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
    (folder / "card.xplane.pb").write_bytes(trace())
    command("trace", str(folder / "card.xplane.pb"), f"--json={folder / 'profile.json'}")
    files = {"metrics.jsonl": metrics_rows()[0], "config.json": run_config(), "memory.json": report(),
             "profile.json": (folder / "profile.json").read_bytes()}
    return [name.encode() + b"\n" + content for name, content in files.items()]


def damaged_file(data: bytes, rng: Random) -> bytes:
    name, content = data.split(b"\n", 1)
    damage = mutations.damaged_lines if name.endswith(b"l") else mutations.damaged_json
    return name + b"\n" + damage(content, rng)


def read_run(data: bytes, folder: Path) -> None:
    """Files that are damaged are left out, with a warning; nothing is refused."""
    from bytescope.memory.pages import run as run_page
    from bytescope.memory.profile import run_directory

    for file in (*run_files(), data):
        name, content = file.split(b"\n", 1)
        (folder / name.decode()).write_bytes(content)
    found = run_directory.read(folder)
    strict(run_page.page_data(found))
    assert run_page.render(found) and all(len(in_one_line(problem).splitlines()) == 1 for problem in found.problems)


@functools.cache
def row() -> bytes:
    from bytescope.memory.plan import cache

    found = json.loads(report())
    kept = ("peak_bytes", "allocated_bytes", "breakdown", "limit_bytes", "fits", "work", "target", "versions")
    answer = {"status": "ok", "settled": {"model.attention": "naive"}, "calls_per_update": 1, "tokens_per_update": 512,
              **{key: found[key] for key in kept}}
    folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
    cache.write(folder, "row", answer)
    return (folder / "row.json").read_bytes()


def read_row(data: bytes, folder: Path) -> None:
    """A damaged row counts as absent; nothing is refused."""
    from bytescope.memory.plan import cache, rows

    (folder / "row.json").write_bytes(data)
    answer = cache.read(folder, "row")
    if answer is not None:
        strict(rows.to_json([rows.Row.of({"remat.policy": "full"}, answer)], answer["target"], answer["versions"]))


def _listed(seed: Callable[[], bytes]) -> Callable[[], list[bytes]]:
    return lambda: [seed()]


READERS = {reader.name: reader for reader in (
    Reader("hlo", _listed(program), mutations.damaged_bytes, read_hlo, (Printed,), 300),
    Reader("trace", _listed(trace), mutations.damaged_bytes, read_trace, (Printed,), 400),
    Reader("report", _listed(report), mutations.damaged_json, read_report, (Printed,), 350),
    Reader("overrides", override_lines, damaged_words, read_overrides, (UserError, ReportError), 300),
    Reader("targets", lambda: [b"h100", b"h100:8", b"h100:2x8", b"v5e:4x4", b"v5p:2x2x1", b"cpu:8", b"rtx4090"],
           damaged_words, read_target, (ReportError,), 4000),
    Reader("flags", flag_values, damaged_words, read_words, (UserError, ReportError), 8000),
    Reader("npy", arrays, damaged_array, read_array, (UserError,), 800),
    Reader("bin", _listed(lambda: (np.arange(600, dtype="<u2") % 256).tobytes()), mutations.damaged_bytes, read_bin,
           (UserError,), 400),
    Reader("index", _listed(index), mutations.damaged_json, read_index, (UserError,), 300),
    Reader("tokenizer", _listed(tokenizer), mutations.damaged_json, read_tokenizer, (UserError,), 500),
    Reader("text", _listed(lambda: ("größe, line\n" * 40).encode()), mutations.damaged_bytes, read_text,
           (UserError,), 400),
    Reader("metrics", metrics_rows, mutations.damaged_lines, read_metrics, (), 150),
    Reader("run_config", _listed(run_config), mutations.damaged_json, read_run_config, (UserError,), 250),
    Reader("run", run_files, damaged_file, read_run, (), 150),
    Reader("row", _listed(row), mutations.damaged_bytes, read_row, (), 500),
)}


def prepare() -> None:
    """Makes all good inputs, and starts jax with them: under the limit of memory it would abort the process."""
    for reader in READERS.values():
        reader.seeds()
    beside()
