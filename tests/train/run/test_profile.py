"""--profile: the flag, the files it leaves, the table it prints, and a loss curve that knows nothing of it."""

import gzip
import html
import io
import json

import jax
import pytest
from rich.console import Console

from bytescope.memory.__main__ import main as memory_main
from bytescope.memory.profile import xplane
from bytescope.train.run import loop
from bytescope.train.run.profile import ProfiledUpdates
from bytescope.train.user_errors import UserError
from support.command_line import train as main
from support.json_results import read_result
from support.toy import compiled_once, small_config

TIMED = ("tokens_per_s", "step_time_s", "data_wait_s", "mfu", "hfu", "memory", "host_memory")


def train(folder, source, asked="", steps=6, extend=False):
    """What one start of a small run on 8 devices prints; `asked`: the value of --profile."""
    config = small_config(
        {
            "data.source": str(source),
            "model.vocab_size": 256,
            "train.steps": steps,
            "train.log_every": 1,
            "train.eval_every": 3,
            "train.eval_sequences": 8,
            "train.checkpoint_every": 0,
            "train.sample_tokens": 0,
            "model.n_layers": 2,
            "batch.micro": 1,
            "batch.accumulation": 2,
        }
    )
    out = io.StringIO()
    loop.run(
        config,
        workdir=folder,
        extend=extend,
        console=Console(file=out, width=100),
        asked=ProfiledUpdates.parse(asked) if asked else ProfiledUpdates(""),
    )
    return out.getvalue()


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Text, folders of a run without and one with a trace of its updates 3 and 4, what the second one printed."""
    place = tmp_path_factory.mktemp("profile")
    source = place / "corpus.txt"
    source.write_text("".join(f"{n} bottles and {n * n} more\n" for n in range(3000)))
    with pytest.MonkeyPatch.context() as patch:
        compiled_once(patch)
        train(place / "plain", source)
        return source, place / "plain", place / "traced", train(place / "traced", source, "2")


@pytest.fixture(scope="module")
def breakdown(runs):
    return json.loads((runs[2] / "profile.json").read_text())


def session(folder):
    return xplane.find(folder / "profile").parent


def curve(folder):
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [{key: value for key, value in row.items() if key not in TIMED} for row in lines]


def test_the_loss_curve_is_untouched(runs):
    _, plain, traced, _ = runs
    assert curve(traced) == curve(plain) and len(curve(plain)) == 9  # the last one has the host memory
    assert not (plain / "profile").exists() and not (plain / "profile.json").exists()


def test_files_are_where_the_viewers_look_and_hold_scope_names(runs):
    folder = session(runs[2])
    assert folder.parent == runs[2] / "profile" / "plugins" / "profile"
    planes = list(jax.profiler.ProfileData.from_file(str(xplane.find(folder))).planes)
    events = [event for plane in planes for line in plane.lines for event in line.events]
    assert {"update", "host/wait_for_data", "host/put_on_devices", "host/wait_for_metrics", "host/evaluation"} <= {
        event.name for event in events
    }
    assert b"attention/core" in xplane.find(folder).read_bytes()
    with gzip.open(folder / "perfetto_trace.json.gz", "rt") as file:
        found = [event.get("args", {}) for event in json.load(file)["traceEvents"]]
    assert any(arguments.get("hlo_module") == "jit_step" for arguments in found)


def test_the_page_of_the_run_shows_its_trace(runs, breakdown):
    page = html.unescape(" ".join((runs[2] / "index.html").read_text().split()))
    updates = f"updates 3-4 · mean of {breakdown['devices']} devices"
    for expected in ("✓ finished", updates, "held-out loss", "Where an update's time goes", "seq_len"):
        assert expected in page, expected
    assert breakdown["instructions"][0]["name"] in page
    assert "Where an update's time goes" not in (runs[1] / "index.html").read_text()


def test_sums_are_the_wall_time(breakdown):
    cells, near = breakdown["cells"], lambda value: pytest.approx(value, rel=1e-9)
    assert breakdown["steps"] == [3, 4] and breakdown["devices"] == 8 and breakdown["calls_per_update"] == 2
    assert sum(cell["seconds"] for cell in cells) == near(breakdown["busy"])
    assert sum(row["seconds"] for row in breakdown["instructions"]) == near(breakdown["busy"])
    assert breakdown["busy"] + breakdown["idle"] == near(breakdown["total"])
    assert sum(row["seconds"] for row in breakdown["host"]) == near(breakdown["total"])
    assert sum(row["device_idle_seconds"] for row in breakdown["host"]) == near(breakdown["idle"])
    assert breakdown["without_pauses"] < breakdown["total"]  # update 3 was evaluated
    assert 0 < breakdown["predicted_seconds_low"] < breakdown["predicted_seconds"] < breakdown["predicted_seconds_high"]
    assert breakdown["at_least_seconds"] > 0


def test_instructions_are_counted_and_placed(breakdown):
    rows = breakdown["instructions"]
    assert {"attention", "mlp", "loss", "optimizer", "embed", "collectives", "other programs"} <= {
        row["component"] for row in rows
    }
    assert {row["phase"] for row in rows} == {"forward", "backward", "recompute", "optimizer", "other"}
    # Gradients are reduced on 8 devices; a layer's products run in 2 updates of 2 calls with 2 layers on each.
    assert any(row["opcode"] == "all-reduce" for row in rows)
    # The broadcast that begins a stack of gradients has the name of the products that fill it.
    products = [
        row
        for row in rows
        if row["component"] == "mlp" and row["path"].endswith("dot_general") and row["opcode"] != "broadcast"
    ]
    counts = {row["count"] for row in products}
    # From 0.12 on XLA compiles the two layers of a loop on the CPU apart, in part: such a product has two instructions.
    assert counts == {8 * 2 * 2 * 2} or (jax.__version_info__ >= (0, 12) and counts == {8 * 2 * 2, 8 * 2 * 2 * 2})


def test_the_table_is_on_the_screen_and_again_from_the_files(runs, breakdown, capsys, tmp_path):
    _, _, traced, out = runs
    landmarks = [
        "updates 3-4",
        "attention",
        "busy",
        "idle",
        "whole update",
        "wait for data",
        "longest instructions",
        "predicted ",
        "trace ",
        "step      6/6",
    ]
    start = out.index("where an update's time goes")
    places = [out.index(landmark, start) for landmark in landmarks]
    assert places[-1] == max(places)
    assert (
        memory_main(
            [
                "report",
                str(traced),
                f"--trace={traced / 'profile'}",
                f"--json={tmp_path / 'again.json'}",
            ]
        )
        == 0
    )
    shown = capsys.readouterr().out
    table = out[start : out.index("predicted ", start)]
    assert shown.startswith(table) and max(map(len, table.splitlines())) == 100
    again = read_result(tmp_path / "again.json")
    taken = dict.fromkeys(key for key in breakdown if key.startswith(("predicted", "at_least", "comparison")))
    assert {**again, **taken} == {**breakdown, **taken} and len(taken) == 5


@pytest.mark.exhaustive
def test_a_resumed_run_traces_its_own_updates(runs, tmp_path):
    source, _, traced, _ = runs
    with pytest.raises(UserError, match="--profile=4-7 begins at update 4, but this run has already done 6"):
        train(traced, source, "4-7", steps=9, extend=True)
    out = train(traced, source, "9-9", steps=9, extend=True)
    assert "resumed at step 6" in out and " update 9 ·" in out
    assert json.loads((traced / "profile.json").read_text())["steps"] == [9]
    assert len(list((traced / "profile").rglob("*.xplane.pb"))) == 2


@pytest.mark.parametrize(
    ("text", "found"), [("3", range(13, 16)), ("1", range(13, 14)), ("11-20", range(11, 21)), ("12-12", range(12, 13))]
)
def test_updates_of_a_start(text, found):
    assert ProfiledUpdates.parse(text).updates(10, 20) == found


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *[(text, "is neither a number of updates nor a range") for text in ("", "0", "-3", "3-", "three", "1.5")],
        ("9-7", "ends before it begins"),
        ("399", "asks for update 401"),
        ("400-401", "asks for update 401"),
        ("1-9999", "asks for update 9999"),
    ],
)
def test_mistakes_are_one_line_and_leave_nothing(text, message, tmp_path, capsys):
    assert main([f"--profile={text}", f"--workdir={tmp_path / 'run'}", "--config.train.cache_dir=none"]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1 and not (tmp_path / "run").exists()
