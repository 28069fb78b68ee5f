"""The user's own runs: CSV files, run directories, what differs, rates that are corrected by them, and a sixth run."""

import json
import queue

import pytest

from bytescope.memory import cli
from bytescope.memory.compare import worker_pool
from bytescope.memory.devices import targets
from bytescope.memory.records import schedule_records
from bytescope.memory.records.report_record import Description, ReportRecord
from bytescope.memory.records.schedule_records import MOVING, PRODUCT, ScheduledKernel
from bytescope.memory.seconds import chip_rates, rates, run_fit
from bytescope.memory.seconds.schedule_walk import walk
from bytescope.train.program import config_files
from bytescope.train.run import measured_runs
from support.json_results import read_result

pytestmark = pytest.mark.quick

KIND = "NVIDIA H100 80GB HBM3"
H100 = chip_rates.rates_of_kind(KIND)
# The measured machine: its matrix products are slower than published, its memory is faster.
MACHINE = run_fit.apply_factors(H100, {"products": 1.5, "memory": 0.9})
# (layers, micro-batch, noise of the measurement)
SHAPES = [(2, 8, 1.02), (8, 1, 0.97), (4, 4, 1.01), (16, 2, 1.0), (3, 16, 0.98), (6, 6, 1.03)]


def schedule(layers, micro):
    """More layers compute more, a larger micro-batch moves more."""
    product = ScheduledKernel(PRODUCT, "forward", 10**8, 2**39, "bfloat16", (1, 8192, 8192, 4096), times=layers)
    return (product, ScheduledKernel(MOVING, "forward", 2**30, times=micro))


def seconds_of(layers, micro, noise):
    return noise * walk(schedule(layers, micro), MACHINE).seconds


class Pool:
    """Answers at once, without a compile."""

    def __init__(self, *_, **__):
        self.answers = queue.SimpleQueue()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def submit(self, jobs):
        for job in jobs:
            steps = schedule(job.resolved["model.n_layers"], job.resolved["batch.micro"])
            answer = {
                "status": "ok",
                "schedule": schedule_records.to_json(steps),
                "target": targets.parse(job.target).to_json(),
                "allocated_bytes": 2**30,
                "calls_per_update": 1,
                "versions": {"jax": "1"},
            }
            self.answers.put((job, answer if job.resolved["model.n_layers"] < 99 else {"status": "too large"}))


@pytest.fixture(autouse=True)
def pool(monkeypatch, tmp_path):
    monkeypatch.setattr(worker_pool, "Pool", Pool)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    yield
    rates.use(None)


def make_run(place, layers, micro, seconds, *, kind=KIND, devices=1, waiting=0.0):
    """The files of a run of `bytescope train` with 30 updates; the first two are slow, every tenth is odd."""
    place.mkdir(parents=True)
    values = [("model.n_layers", str(layers)), ("batch.micro", str(micro)), ("train.steps", "30"), ("seed", "5")]
    config = config_files.load_flat("tiny", values)
    (place / "config.json").write_text(json.dumps({"config": config, "global_rows": micro}))
    rows = []
    for step in range(1, 31):
        taken = 9.0 if step < 3 else 5 * seconds if step % 10 == 0 else seconds
        row = {"step": step, "loss": 1.0, "batch_tokens": 128, "step_time_s": taken + waiting, "data_wait_s": waiting}
        rows.append(row | {"memory": {"peak_bytes": 3.0 * 2**30} if step > 2 else {}})
    (place / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    target = {"name": "local", "platform": "cuda", "kind": kind, "n_devices": devices, "devices_per_host": 8}
    changes = (f"model.n_layers={layers}", "train.steps=30")
    ReportRecord(1, 1, {}, target=target, subject=Description("tiny", changes=changes)).save(place / "memory.json")
    return place


def write_csv(path, shapes, extra=""):
    lines = ["config,target,seconds,bytes,notes,model.n_layers,batch.micro"]
    for layers, micro, noise in shapes:
        lines.append(f"tiny,h100,{seconds_of(layers, micro, noise):.6g},,,{layers},{micro}")
    path.write_text("\n".join(lines) + "\n" + extra)
    return path


# ---- files


def test_a_file_of_runs_is_read(tmp_path):
    path = tmp_path / "runs.csv"
    path.write_text(
        "\ufefftarget,seconds,model.n_layers ,bytes,notes,mesh.tensor\r\n"
        'h100:2x8,0.5,12,61.5GiB,"slow, old",2\r\n'
        ",,,,,\r\n"
        "cpu:2,,,2000000,,\r\n"
    )
    one, other = measured_runs.read_runs(str(path))
    assert (one.config, one.chip, one.overrides) == ("base", "h100", {"model.n_layers": "12", "mesh.tensor": "2"})
    assert one.peak_bytes == int(61.5 * 2**30) and one.setup == "n_layers=12, tensor=2, slow, old"
    assert (other.target, other.chip, other.seconds, other.peak_bytes) == ("cpu:2", "cpu", None, 2_000_000)
    assert other.id == f"{path}:4" and other.overrides == {}


def test_a_row_names_a_shipped_config_a_run_or_weights(tmp_path):
    make_run(tmp_path / "run", 3, 4, 0.5)
    (tmp_path / "tiny.py").write_text("raise SystemExit('a row was executed')\n")
    (tmp_path / "runs.csv").write_text("config,target,seconds,batch.micro\nrun,h100,1,8\ntiny,h100,1,8\n")
    run, tiny = measured_runs.read_runs("runs.csv")
    assert (run.model, run.config, run.overrides["model.n_layers"], run.overrides["batch.micro"]) == (
        "run",
        "base",
        "3",
        "8",
    )
    assert (tiny.model, tiny.config, tiny.overrides) == ("tiny", "tiny", {"batch.micro": "8"})


@pytest.mark.parametrize("name", ["evil.py", "evil", "./evil.py", "{folder}/evil.py", "tiny.py"])
def test_a_row_runs_no_python_file(tmp_path, name, capsys):
    for file in ("evil.py", "tiny.py"):
        (tmp_path / file).write_text("open('executed', 'w').close()\nraise SystemExit(0)\n")
    name = name.format(folder=tmp_path)
    (tmp_path / "runs.csv").write_text(f"config,target,seconds\n{name},h100,1\n")
    assert cli.main(["calibrate", "--runs=runs.csv"]) == 2
    assert (
        f"line 2: config={name} is neither a shipped config, a run directory nor hf:FOLDER" in capsys.readouterr().err
    )
    assert not (tmp_path / "executed").exists()


def test_a_run_directory_is_a_measured_run(tmp_path):
    make_run(tmp_path / "runs" / "a", 3, 4, 0.5, devices=16)
    make_run(tmp_path / "runs" / "b", 6, 4, 0.25, waiting=0.1)
    (tmp_path / "runs" / "notes").mkdir()
    one, other = measured_runs.read_runs(str(tmp_path / "runs"))
    assert one.seconds == 0.5 and one.peak_bytes == 3 << 30 and one.target == "h100:2x8"
    assert one.model == "tiny" and one.setup == "a, model.n_layers=3"
    assert other.seconds == pytest.approx(0.25) and other.target == "h100:1"
    # The config of the run, without what decides nothing of its program.
    assert config_files.load_flat("base", [*one.overrides.items()]) == config_files.load_flat(
        "tiny",
        [("model.n_layers", "3"), ("batch.micro", "4")]
        + [
            (key, config_files.as_text(value))
            for key, value in config_files.load_flat("base").items()
            if "train." in key
        ],
    )
    assert [row.id for row in measured_runs.read_runs(f"{tmp_path}/runs/b,{tmp_path}/runs/a")] == [other.id, one.id]


def test_a_chip_without_rates_is_refused(tmp_path, capsys):
    make_run(tmp_path / "a", 3, 4, 0.5, kind="Abacus")
    assert cli.main(["calibrate", "--runs=a"]) == 2
    assert "ran on Abacus, which bytescope list targets does not have" in capsys.readouterr().err


# ---- the command


def test_the_command_says_what_differs_and_corrects_rates(tmp_path, capsys):
    write_csv(tmp_path / "runs.csv", SHAPES, "tiny,h100,,1GiB,,4,4\n")
    assert cli.main(["calibrate", "--runs=runs.csv", "--json=v.json"]) == 0
    out = capsys.readouterr().out
    assert "corrected rates of h100 (measured runs: 6, programs: 6)" in out
    found = read_result("v.json")["runs"]
    assert found["fit"]["factors"]["products"] == pytest.approx(1.5, rel=0.1)
    assert found["fit"]["factors"]["memory"] == pytest.approx(0.9, rel=0.15)
    (group,) = found["groups"]
    assert group["name"] == "tiny on h100" and group["cause"] == "products" and group["cause_seconds"] > 0.1
    assert group["before"] < 0.95 and group["after"] == pytest.approx(1, abs=0.03)
    assert found["later"][0] < 1 < found["later"][1] < 1.2
    last = found["rows"][-1]
    assert (last["ratio"], last["run"]["peak_bytes"], last["allocated_bytes"]) == (None, 2**30, 2**30)


def test_runs_outside_their_interval_are_counted(tmp_path, capsys):
    write_csv(tmp_path / "runs.csv", [(2, 8, 0.9), (4, 4, 0.75), (8, 1, 9.0)])
    assert cli.main(["calibrate", "--runs=runs.csv"]) == 0
    assert "2 of 3 runs took a time within their interval; four of five are expected" in capsys.readouterr().out


def test_seconds_in_another_unit_are_refused(tmp_path, capsys):
    write_csv(tmp_path / "runs.csv", [(2, 8, 1000.0)])
    assert cli.main(["calibrate", "--runs=runs.csv"]) == 2
    message = capsys.readouterr().err
    assert "runs.csv:2: measured 4.71 s, predicted 0.0042 s" in message and "give seconds per update" in message


def test_a_run_that_does_not_compile_is_named(tmp_path, capsys):
    write_csv(tmp_path / "runs.csv", [(2, 8, 1.0), (99, 8, 1.0)])
    assert cli.main(["calibrate", "--runs=runs.csv"]) == 2
    assert "runs.csv:3 cannot be compiled (too large): leave this run out" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("source", "sixth"),
    [
        ("runs", 0),
        ("runs.csv", 3),
        *[pytest.param("runs.csv", sixth, marks=pytest.mark.exhaustive) for sixth in (0, 1, 2, 4, 5)],
    ],
)
def test_five_runs_predict_a_sixth_within_its_interval(tmp_path, capsys, source, sixth):
    known = [shape for number, shape in enumerate(SHAPES) if number != sixth]
    write_csv(tmp_path / "runs.csv", known)
    for number, (layers, micro, noise) in enumerate(known):
        make_run(tmp_path / "runs" / f"{number}", layers, micro, seconds_of(layers, micro, noise))
    assert cli.main(["calibrate", f"--runs={source}", "--out=rates.json", "--json=c.json"]) == 0
    assert "(measured runs: 5, programs: 5)" in capsys.readouterr().out
    found = rates.load("rates.json")
    assert read_result("c.json")["run_factors"] == found.run_factors and len(found.run_ratios) == 5
    assert found.source == f"{H100.source}; corrected by 5 runs of {source}" and found.measured["device"] == KIND
    write_csv(tmp_path / "sixth.csv", [SHAPES[sixth]])
    assert cli.main(["calibrate", "--runs=sixth.csv", "--json=v.json", "--rates=rates.json"]) == 0
    (row,) = read_result("v.json")["runs"]["rows"]
    low, high = row["prediction"]["low"], row["prediction"]["high"]
    assert low <= row["run"]["seconds"] <= high
    assert row["ratio"] == pytest.approx(1, abs=0.15) and high / low < 1.6
    assert rates.load("v.json").run_ratios  # the JSON is a rates file too
    # The rates of a file are corrected again, and other commands read it.
    assert cli.main(["calibrate", "--runs=sixth.csv", "--rates=rates.json", "--out=again.json"]) == 0
    assert rates.load("again.json").source.count("corrected by") == 1
    capsys.readouterr()


def test_a_cpu_is_measured_and_then_corrected(tmp_path, monkeypatch, capsys):
    from bytescope.memory.commands import calibrate_command
    from bytescope.memory.devices import targets

    cpu = targets.parse("cpu").to_json()
    measured = rates.select(cpu)
    monkeypatch.setattr(calibrate_command, "measure_rates", lambda args: (measured, targets.parse("cpu")))
    truth = run_fit.apply_factors(measured, {"products": 2.0, "memory": 2.0})
    lines = ["config,target,seconds,model.n_layers,batch.micro"]
    for layers, micro, _ in SHAPES:
        lines.append(f"tiny,cpu,{walk(schedule(layers, micro), truth).seconds},{layers},{micro}")
    (tmp_path / "runs.csv").write_text("\n".join(lines) + "\n")
    assert cli.main(["calibrate", "--runs=runs.csv", "--out=rates.json"]) == 0
    found = rates.load("rates.json")
    assert found.run_factors == pytest.approx({"products": 2.0, "memory": 2.0}, rel=0.05)
    assert cli.main(["calibrate", "--runs=runs.csv", "--json=v.json", "--rates=rates.json"]) == 0
    rows = read_result("v.json")["runs"]["rows"]
    assert [row["ratio"] for row in rows] == pytest.approx([1.0] * 6, abs=0.04)
    assert rows[0]["prediction"]["high"] / rows[0]["prediction"]["low"] < 1.1
    capsys.readouterr()
