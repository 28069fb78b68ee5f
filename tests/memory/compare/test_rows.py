"""Comparisons of hand-made rows: expansion, Pareto front, best row, the table and the page."""

import dataclasses
import io
import json

import pytest
from rich.console import Console

from bytescope.memory.compare import compare_columns, compare_text, grids, worker
from bytescope.memory.compare import compare_rows as plan_rows
from bytescope.memory.devices import targets
from bytescope.memory.errors import ReportError
from bytescope.memory.records import schedule_records
from bytescope.memory.records.report_record import Buffer, ReportRecord, TimelinePoint
from bytescope.memory.records.result import plain
from bytescope.memory.records.schedule_records import ScheduledKernel
from bytescope.memory.seconds import step_prediction
from bytescope.memory.view.elements import rates_notes
from bytescope.train.plan.config_grid import ConfigRow as Row
from bytescope.train.plan.config_grid import policy_keys, policy_words
from support.rows import GIB, row, some_rows

pytestmark = pytest.mark.quick


def json_of(*rows_and_facts, **more):
    return plain(plan_rows.make_result(*rows_and_facts, **more))


@pytest.fixture
def rows():
    return some_rows()


# ---- pure -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("1024,2048", ["1024", "2048"]),
        ("(a,b),c", ["(a,b)", "c"]),
        ("x", ["x"]),
        ("( a, b ), (c)", ["( a, b )", "(c)"]),
    ],
)
def test_values_of_a_grid(text, values):
    assert grids.parse_grid(f"--config.remat.save={text}") == ("remat.save", values)


@pytest.mark.parametrize("text", ["data.seq_len", "=1", "a=", "a=1,,2", "a=1,"])
def test_a_grid_that_is_none(text):
    with pytest.raises(ReportError, match="--grid=KEY=V1,V2"):
        grids.parse_grid(text)


def test_grids_multiply_and_repetitions_count_once():
    found = grids.expand([("a", ["1", "2"]), ("b", ["x", "y", "x"]), ("a", ["2", "3"])])
    assert [tuple(one.items()) for one in found] == [(("a", a), ("b", b)) for a in ("1", "2", "3") for b in ("x", "y")]
    assert grids.expand([]) == [{}]


def test_the_front_and_the_best(rows):
    marked = plan_rows.mark_pareto(rows)
    assert [r.pareto for r in marked] == [False, True, False, True, False], "what exceeds is no candidate"
    assert plan_rows.best(marked).overrides == {"remat.policy": "dots"}
    assert plan_rows.flags(plan_rows.best(marked)) == "--config.remat.policy=dots"
    # Without a limit that matters, the one that recomputes nothing; of two of those, the smaller.
    roomy = [row("none", 60, limit=100), row("other", 50, limit=100), row("full", 12, 0.3, limit=100)]
    assert plan_rows.best(roomy).overrides == {"remat.policy": "other"}
    assert [r.pareto for r in plan_rows.mark_pareto(roomy)] == [False, True, True]
    assert plan_rows.best([row("none", 60)]) is None and plan_rows.best([]) is None


def test_every_task_has_its_own_best():
    found = plan_rows.best_of_each(
        [
            row("none", 60),
            row("full", 12, 0.3),
            row("none", 30, keys={"data.seq_len": 8}),
            row("full", 6, 0.3, keys={"data.seq_len": 8}),
        ]
    )
    assert [(r.allocated_bytes // GIB, *r.overrides.values()) for r in found] == [(12, "full"), (30, "none", 8)]


def test_no_row_of_one_task_is_recommended_over_another_task():
    """A shorter sequence that recomputes nothing is not a better way to train a longer one."""
    two = [
        row("none", 10, keys={"data.seq_len": 8}),
        row("full", 12, 0.3, keys={"data.seq_len": 64}),
        row("none", 99, keys={"data.seq_len": 128}),
    ]
    assert plan_rows.best(two) is None
    out = json_of(two, {}, {}, config="tiny", given="--config.seed=1")
    assert out["best"] is None and (out["config"], out["given"]) == ("tiny", "--config.seed=1")
    assert [(one["task"], one["flags"]) for one in out["best_of_each"]] == [
        ("seq_len=8", "--config.remat.policy=none --config.data.seq_len=8"),
        ("seq_len=64", "--config.remat.policy=full --config.data.seq_len=64"),
    ]
    text = printed(two)
    assert "best that fits" not in text and "best of each task" in text and "none of these" not in text


def test_a_row_has_its_prediction_and_the_bound_beside_it():
    """A product of 1 PFLOP on each device, twice per update; the bound is that of the data sheet's peak."""
    target = targets.parse("h100:8").to_json()
    peak = target["peak_flops"]["bf16"]
    steps = (ScheduledKernel("product", "forward", 0, 10**15, "bfloat16", (1, 8192, 8192, 8192)),)
    answer = {
        "status": "ok",
        "work": {"forward": {"flops": {"bf16": 1e15}}},
        "schedule": schedule_records.to_json(steps),
        "target": target,
        "model_flops": 8 * 10**15,
        "calls_per_update": 2,
        "tokens_per_update": 4096,
        "batch": "1 x 2",
        "policy": policy_words(
            [
                {"layers": 4, "policy": "custom", "save": ["v", "up"], "offload": ["q"]},
                {"layers": 1, "policy": "none"},
            ]
        ),
    }
    found = Row.from_answer({}, answer)
    wanted = step_prediction.predict(steps, target, 2, 4096, 8 * 10**15)
    assert (found.predicted_seconds, found.predicted_seconds_low, found.predicted_seconds_high) == (
        wanted.seconds,
        wanted.low,
        wanted.high,
    ) and wanted.low < wanted.seconds < wanted.high
    assert (found.predicted_tokens_per_s, found.predicted_mfu) == (wanted.tokens_per_s, wanted.mfu)
    assert found.least_seconds == pytest.approx(2e15 / peak) and found.least_seconds < found.predicted_seconds
    assert found.rates == wanted.rates and "h100" in found.rates
    assert (found.batch, found.policy) == ("1 x 2", "4 x v+up+q@host, 1 x none")
    kept = Row.from_answer({}, json.loads(json.dumps(dataclasses.asdict(found))))
    assert kept == found, "out of its own JSON"
    bound = Row.from_answer({}, {**answer, "schedule": []})
    assert bound.predicted_seconds is bound.predicted_mfu is None and bound.least_seconds == found.least_seconds


def predicted(policy, gib, share, seconds, **more):
    """A row that takes so many seconds for 4096 tokens."""
    return row(policy, gib, share, predicted_seconds=seconds, predicted_tokens_per_s=4096 / seconds, **more)


def test_the_fastest_predicted_is_the_best_whatever_it_recomputes():
    some = [
        predicted("none", 30, 0.0, 1.1),
        predicted("dots", 20, 0.05, 1.0),
        predicted("full", 10, 0.3, 1.3),
        predicted("worse", 25, 0.1, 1.2),
    ]
    assert plan_rows.best(some).overrides == {"remat.policy": "dots"} and not plan_rows.tied(some, some[1])
    assert [r.pareto for r in plan_rows.mark_pareto(some)] == [False, True, True, False]
    assert plan_rows.best([predicted("none", 60, 0.0, 1.0), predicted("full", 10, 0.3, 1.5)]).overrides == {
        "remat.policy": "full"
    }, "what exceeds is no candidate"


def test_of_a_tie_the_least_recomputation_then_the_least_memory():
    """Within 3 %; and no chain of ties leads to a row that is slower than that."""
    some = [
        predicted("a", 30, 0.1, 1.0),
        predicted("b", 20, 0.05, 1.02),
        predicted("c", 25, 0.05, 1.01),
        predicted("d", 10, 0.0, 1.05),
    ]
    winner = plan_rows.best(some)
    assert winner.overrides == {"remat.policy": "b"}
    assert [r.overrides["remat.policy"] for r in plan_rows.tied(some, winner)] == ["a", "c"]
    assert plan_rows.best(some[::-1]).overrides == winner.overrides, "in any order"
    assert all(r.pareto for r in plan_rows.mark_pareto(some)), "in bytes and seconds as they are"
    text = printed(some)
    assert "tied within 3% of its predicted time: a; c; chosen for less recomputation" in text.replace("\n", " ")
    assert "★" not in text, "all of them are Pareto-optimal"


def test_host_memory_is_memory_and_whole_per_cents_decide():
    """A plan that moves tensors to the host does not take less; 0.1 % of recomputation is nothing."""
    some = [predicted("here", 20, 0.0, 1.0), predicted("away", 12, 0.0, 1.0), predicted("less", 10, 0.004, 1.02)]
    some[1] = dataclasses.replace(some[1], host_bytes=9 * GIB)
    assert plan_rows.best(some[:2]).overrides == {"remat.policy": "here"}
    assert plan_rows.best(some).overrides == {"remat.policy": "less"}


def test_predicted_seconds_stand_with_their_spread_and_the_rates_once():
    more = {
        "predicted_seconds_low": 0.65,
        "predicted_seconds_high": 0.81,
        "predicted_mfu": 0.4321,
        "rates": "measured on h100: products",
    }
    text = printed([predicted("none", 30, 0.0, 0.7213, **more), predicted("full", 10, 0.3, 0.9, **more)])
    assert "0.721, 0.65 to 0.81" in text and "5,679" in text and "43.2%" in text
    assert text.count("measured on h100: products") == 1 and "at least" not in text
    other = predicted("full", 10, 0.3, 0.9, **more | {"rates": "measured on a100: memory", "predicted_mfu": None})
    text = printed([predicted("none", 30, 0.0, 0.7213, **more | {"predicted_mfu": None}), other])
    words = "predicted s, with its spread, tokens/s: measured on h100: products; measured on a100: memory"
    assert words in " ".join(text.split()), "one line for all devices, without the column that is missing"


def test_rows_beyond_xlas_limit_are_named_if_others_are_below_it():
    rows = [row("none", 30, xla_recomputes=True), row("dots", 20), row("full", 10)]
    sentence = plan_rows.beyond_xla_limit(rows)
    assert sentence.startswith("XLA's rematerialization pass recomputes values in 1 of 3 programs (policy none), ")
    assert sentence in " ".join(printed(rows).split())
    assert plan_rows.beyond_xla_limit(rows[1:]) == plan_rows.beyond_xla_limit(rows[:1]) == ""
    many = [row(str(number), 30, xla_recomputes=number > 0) for number in range(6)]
    assert "(policies 1; 2; 3 and 2 more)" in plan_rows.beyond_xla_limit(many)
    off = [row("none", 30, xla_margin_bytes=-1), row("dots", 20, xla_margin_bytes=5), row("full", 10)]
    assert plan_rows.beyond_xla_limit(off).startswith("above XLA's memory limit: 1 of 3 programs (policy none); ")
    assert plan_rows.beyond_xla_limit(off[:1]) == plan_rows.beyond_xla_limit(off[1:]) == ""


def test_equals_are_both_on_the_front():
    assert all(r.pareto for r in plan_rows.mark_pareto([row("none", 5), row("dots", 5)]))


def test_other_tasks_are_no_rivals():
    """A smaller model is not a better way to run a larger one; another mesh is."""
    models = [row(gib=10, keys={"model.n_layers": 32}), row(gib=5, keys={"model.n_layers": 16})]
    meshes = [row(gib=10, keys={"mesh.fsdp": 4}), row(gib=5, keys={"mesh.fsdp": 8})]
    assert [r.pareto for r in plan_rows.mark_pareto(models)] == [True, True]
    assert [r.pareto for r in plan_rows.mark_pareto(meshes)] == [False, True]


def test_measured_time_decides_where_there_is_one():
    def timed(policy, gib, share, seconds):
        measured = {"step_seconds": seconds, "tokens_per_s": 100 / seconds, "peak_bytes": None}
        return row(policy, gib, share, measured=measured)

    marked = plan_rows.mark_pareto([timed("none", 30, 0.0, 2.0), timed("full", 10, 0.3, 1.5)])
    assert [r.pareto for r in marked] == [False, True]  # less memory, and on this device faster
    assert plan_rows.best(marked).overrides == {"remat.policy": "full"}


def test_rows_without_counted_flops_are_compared_by_bytes():
    unknown = [dataclasses.replace(row(gib=gib), recompute_flops_fraction=None, model_flops=None) for gib in (9, 3)]
    assert [r.pareto for r in plan_rows.mark_pareto(unknown)] == [False, True]
    assert plan_rows.best(unknown).allocated_bytes == 3 * GIB and compare_columns.hfu_over_mfu(vars(unknown[0])) is None


def test_flags_are_quoted_and_typed():
    one = row(
        "custom", keys={"remat.save": ["qkv", "mlp up"], "model.scan": False, "config": "a b.py", "target": "cpu:8"}
    )
    assert plan_rows.flags(one) == (
        "--config.remat.policy=custom '--config.remat.save=(qkv,mlp up)' --config.model.scan=false"
    )


def test_a_policy_stands_with_its_names():
    one = row("custom", keys={"remat.save": ["v", "context"], "remat.offload": []})
    two = row("custom", keys={"remat.save": ["v"], "remat.offload": ["block_in"]})
    rows = [one, two, row("custom"), row("full")]
    assert plan_rows.varying(rows) == ["remat.policy"] == plan_rows.varying([one, two])
    assert [plan_rows.label(r, ["remat.policy"]) for r in rows] == [
        "custom(v,context)",
        "custom(v)+offload(block_in)",
        "custom",
        "full",
    ]
    assert plan_rows.flags(one).split()[1] == "'--config.remat.save=(v,context)'"
    assert plan_rows.varying([Row({"remat.save": [name]}) for name in "ab"]) == ["remat.save"]


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        ("full", {"remat.policy": "full"}),
        ("custom", {"remat.policy": "custom"}),
        ("custom(a, b)", {"remat.policy": "custom", "remat.save": "(a,b)", "remat.offload": "()"}),
        ("custom(a)+offload(b)", {"remat.policy": "custom", "remat.save": "(a)", "remat.offload": "(b)"}),
        ("custom + offload(b,c)", {"remat.policy": "custom", "remat.save": "()", "remat.offload": "(b,c)"}),
    ],
)
def test_policies_as_keys(text, keys):
    assert policy_keys(text) == keys


def test_lists_of_policies_split_outside_parentheses():
    policies = ["none", "custom(q_rot,v,context)", "custom(attn_out)+offload(block_in)"]
    assert grids.split_values(",".join(policies)) == policies


@pytest.mark.parametrize(("peak", "kept"), [(1, 7), (2, 5), (4, 7), (0, 7)])
def test_residuals_are_those_of_the_highest_point_that_holds_any(peak, kept):
    """Alive at 1, 2 and 3 with 7, 5 and 4 bytes; a peak in the update (4) or before them (0) holds none."""
    held = (("a", 2, 1), ("b", 1, 2), ("c", 4, 3))
    buffers = (
        *(Buffer(name, size, category="residuals", start=1, end=end) for name, size, end in held),
        Buffer("g", 9, category="gradients", end=4),
        Buffer("h", 9, category="residuals", start=0, end=4, memory="host"),
    )
    heights = [10, 30, 20, 10, 20]
    heights[peak] = 40
    timeline = tuple(TimelinePoint(i, bytes, "", "") for i, bytes in enumerate(heights))
    assert worker.residual_bytes(ReportRecord(40, 40, {}, timeline, buffers)) == kept
    assert worker.residual_bytes(ReportRecord(40, 40, {}, timeline)) == 0


# ---- the terminal -----------------------------------------------------------------------------------


def printed(rows, width=100, **more):
    console = Console(width=width, file=io.StringIO())
    compare_text.show(plan_rows.mark_pareto(rows), {"name": "h200:8"}, {"jax": "9"}, console=console, **more)
    return console.file.getvalue()


def test_the_table(rows):
    text = printed(rows, missing=3)
    lines = {line.split()[0]: line for line in text.splitlines() if line}
    assert "exceeds" in lines["none"] and "fits ★" in lines["dots"]
    assert "★" not in lines["none"] + lines["worse"] and "★ Pareto-optimal: no row of the same task" in text
    assert "33.3%" in lines["full"] and "1.333" in lines["full"] and "12.00" in lines["full"]
    assert "choose another" in text and "best that fits:\n  --config.remat.policy=dots" in text
    assert "3 combinations left" in text and "GiB" in text


def test_a_table_that_continues_below_repeats_all_keys_and_marks_only_what_differs():
    grid = [
        Row.from_answer({"batch.micro": micro, "data.seq_len": length}, vars(row("none", gib)) | {"overrides": {}})
        for gib, (micro, length) in enumerate(((4, 64), (4, 128), (8, 64)), 10)
    ]
    for width in (40, 60):
        text = printed(grid, width=width)
        heads = [line.split() for line in text.splitlines() if line.startswith("micro")]
        assert len(heads) > 1 and all(head[:2] == ["micro", "seq_len"] for head in heads)
    assert "★" not in text and "bold" not in text, "each row is a task of its own"


def test_long_names_are_broken_not_cut():
    text = printed(
        [
            row("custom", gib, keys={"remat.save": ["q_rot", "v", "context", "attn_out", last]})
            for gib, last in ((9, "up"), (10, "gate"))
        ]
    )
    assert "attn_out,up)" in text and "attn_out,gate)" in text and max(map(len, text.splitlines())) <= 100


def test_the_unit_is_one_that_every_row_has():
    assert plan_rows.unit_of([row(gib=9000), row(gib=0.11)]) == ("GiB", GIB)
    assert plan_rows.unit_of([row(gib=9000), row(gib=0.09), Row({})]) == ("MiB", 2**20)
    assert plan_rows.unit_of([]) == ("B", 1) and "9,000.00" in printed([row(gib=9000), row("full", gib=0.2)])


def test_the_command_to_copy_is_never_cut():
    long = row(
        keys={
            "config": "configs/a_long_name_of_a_file.py",
            "model.attention": "naive",
            "data.seq_len": 16384,
            "mesh.sequence_parallel": True,
            "mesh.strategy": "zero3",
        }
    )
    assert len(plan_rows.flags(long)) > 100
    told = printed([long]).partition("best that fits:\n")[2].partition("\n\n")[0]
    assert told.replace(" \\\n   ", "").split() == plan_rows.flags(long).split()


def test_hfu_over_mfu_is_shown_where_there_is_room(rows):
    assert "HFU/MFU" in printed(rows).splitlines()[2]


def test_of_equal_rows_a_policy_with_a_name_is_the_best():
    named = predicted("minimal", 20, 0.05, 1.01)
    for keys in ({"remat.policy": "full", "remat.layers": "(0-32:v+q_rot)"}, {"remat.policy": "custom"}):
        listed = dataclasses.replace(predicted("", 20, 0.05, 1.0), overrides=keys)
        assert plan_rows.best([listed, named]) is plan_rows.best([named, listed]) is named
    smaller = dataclasses.replace(listed, allocated_bytes=named.allocated_bytes - 1)
    assert plan_rows.best([named, smaller]) is smaller


def test_one_reason_is_told_once():
    text = printed([Row({"remat.policy": name}, status="no such mesh") for name in "abc"])
    assert text.count("no such mesh") == 1 and "a and 2 more: " in text


def test_a_row_without_predicted_seconds_says_why():
    answer = {
        "status": "ok",
        "target": {"name": "rtx4090", "platform": "gpu", "kind": "NVIDIA GeForce RTX 4090"},
        "allocated_bytes": GIB,
        "schedule": [],
    }
    found = [Row.from_answer({"remat.policy": name}, answer) for name in "ab"]
    why = "the schedule of this program is not known, or has too many operations"
    assert f"a and 1 more: no seconds are predicted: {why}" in " ".join(printed(found).split())
    assert rates_notes(json_of(found, {}, {})["rows"]) == [f"Rows without predicted seconds: {why}."]
    assert Row.from_answer({}, answer | {"status": "no such mesh"}).unpredicted == ""


def test_a_wide_table_goes_on_below_and_leaves_nothing_out():
    measured = {"step_seconds": 1.23456, "tokens_per_s": 123456.0, "peak_bytes": 7.77 * GIB}
    wide = [
        row(
            p,
            10 + i,
            i / 10,
            measured=measured,
            keys={"data.seq_len": 1024 * (i + 1), "mesh.fsdp": 2**i, "config": f"configs/a_long_name_of_a_file_{i}.py"},
        )
        for i, p in enumerate(("none", "full", "dots_no_batch"))
    ]
    text = printed(wide)
    assert max(map(len, text.splitlines())) <= 100
    assert text.count("1.235") == text.count("123,456") == text.count("7.77") == 3 and text.count("step s") == 1
    assert text.count("\ndots_no_batch ") == 2, "each block names its rows"
