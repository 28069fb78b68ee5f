"""A run directory and its page: what is read, what is missing or damaged, links, curves and escaping."""

import json
import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bytescope.memory.__main__ import main
from bytescope.memory.records.report_record import Description, Finding, ReportRecord
from bytescope.train.run import run_directory
from bytescope.train.run import run_directory_page as run_page
from support.browser import HOSTILE, body, browse, literally, one_file
from support.pages.sweep import check_page

GIB = 2**30
REPORT = ReportRecord(
    3 * GIB,
    4 * GIB,
    {"params": 3 * GIB, "fragmentation": GIB},
    limit_bytes=8 * GIB,
    fits=True,
    verdict="fits",
    subject=Description("tiny", batch="8 sequences", policy="full"),
    target={"name": "local", "platform": "cpu"},
    versions={"jax": "0.10.2"},
    prediction={
        "seconds": 0.7213,
        "seconds_low": 0.6451,
        "seconds_high": 0.8194,
        "by_phase": {},
        "by_term": {},
        "bound_by": "products",
        "rates": "by hand",
    },
    findings=(Finding("logits", GIB, "logits are alive", "chunk the loss", "--config.loss.kind=chunked"),),
)
BREAKDOWN = {
    "program": "jit_step",
    "steps": [3],
    "devices": 1,
    "total": 1.0,
    "without_pauses": 1.0,
    "busy": 0.75,
    "idle": 0.25,
    "cells": [{"phase": "forward", "component": "mlp", "seconds": 0.75}],
    "host": [{"name": "wait_for_data", "seconds": 0.5, "device_idle_seconds": 0.25, "count": 1}],
    "instructions": [],
    "predicted_seconds": None,
}


def row(step):
    return {
        "step": step,
        "loss": 8 / step,
        "grad_norm": None,
        "lr": 0.25,
        "tokens_per_s": 100.0 * step,
        "step_time_s": 0.5,
        "memory": {"in_use_bytes": 5.0 * GIB, "peak_bytes": 6.0 * GIB, "predicted_bytes": 7.5 * GIB},
    }


def make_run(folder, steps=4, planned=4, config=None):
    """The files of a run with an evaluation at every other step."""
    folder.mkdir(parents=True)
    config = {"train.steps": planned, "seed": 0, "model.d_ff": 48, "remat.save": []} if config is None else config
    (folder / "config.json").write_text(json.dumps({"config": config, "global_rows": 8, "data": "abc"}))
    rows = [row(step) for step in range(1, steps + 1)]
    rows += [{"step": step, "eval_loss": abs(step - 3.0), "eval_tokens": 9} for step in range(2, steps + 1, 2)]
    rows.append({"step": steps, "host_memory": {"predicted": {"train": 2 * GIB}, "measured": {"train": 7 * GIB // 4}}})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    REPORT.save(folder / "memory.json")
    (folder / "profile.json").write_text(json.dumps(BREAKDOWN))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = make_run(tmp_path_factory.mktemp("runs") / "tiny")
    (place / "memory.html").touch()
    return place


def plain_json(text):
    """Fails for data with NaN or Infinity, which no browser reads."""
    json.loads(one_file(text).scripts[1], parse_constant=lambda word: pytest.fail(f"a browser does not read {word}"))


def words_of(text, links=()):
    return " ".join(" ".join(one_file(text, links).words).split())


def test_the_page_shows_the_run(folder):
    text = run_page.render(run_directory.read(folder))
    words = words_of(text, ["memory.html"])
    for expected in (
        "tiny · local · per device",
        "batch: 8 sequences",
        "policy: full",
        "✓ finished",
        "steps 4 of 4",
        "held-out loss 1.0000 the best of the run",
        "train loss 2.0000 at step 4",
        "tokens/s 250 500 ms per update, medians",
        "predicted update 0.721 s 0.65 to 0.82 s; rates: by hand",
        "measured memory 6.00 GiB of all CPU devices of the process; predicted 7.50 GiB",
        "the full report of the step",
        "logits are alive chunk the loss --config.loss.kind=chunked",
        "jit_step · update 3 · 1 device",
        "device idle 25.0 %",
        "model d_ff 48",
        "remat save none",
        "train 2.00 GiB 1.75 GiB",
    ):
        assert expected in words, expected
    data = one_file(text, ["memory.html"]).data
    assert data["curves"]["loss"] == [[1, 2, 3, 4], [8, 4, 8 / 3, 2]] and data["curves"]["norm"] == [[], []]
    assert data["curves"]["held_out"] == [[2, 4], [1, 1]] and data["shared"]
    assert data["curves"]["predicted"] == [[1, 2, 3, 4], [7.5 * GIB] * 4]
    assert "▲" not in words and len(text) < 600_000


@pytest.mark.parametrize(
    "routed, said",
    [
        ({"idle_experts": 3.0, "dropped_share": 0.0125}, "3 idle, 1.25% of the rows dropped"),
        ({"idle_experts": 0.0, "dropped_share": 0.0}, "none idle, no row dropped"),
    ],
)
def test_a_mixture_tells_what_its_routers_did(tmp_path, routed, said):
    place = make_run(tmp_path / "run")
    rows = [{**row(step), "load_max": 1.0 + step, **routed} for step in (1, 2)]
    (place / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    words = words_of(run_page.render(run_directory.read(place)))
    assert f"busiest expert 3.00 x the mean at step 2; {said}" in words


def test_a_run_under_way_says_how_far_it_is(tmp_path):
    words = words_of(run_page.render(run_directory.read(make_run(tmp_path / "run", planned=2000))))
    assert "at step 4 of 2,000" in words and "✓" not in words


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("config.json", None, "no config.json"),
        ("config.json", "{", "config.json is damaged"),
        ("config.json", "[]", "config.json is damaged"),
        ("config.json", '{"config": []}', "config.json is damaged"),
        ("metrics.jsonl", None, "no update was recorded"),
        ("memory.json", None, "not compiled yet"),
        ("memory.json", '{"peak_bytes": "many"}', "memory.json is damaged"),
        ("metrics.jsonl", '{"step": 1, "loss": 3}\n{"step": 2, "lo', "1 damaged line is left out"),
        ("metrics.jsonl", '[]\n{"loss": 1}\n{"step": 2, "loss": NaN}\n', "2 damaged lines are left out"),
        ("profile.json", "{}", "profile.json is damaged"),
        ("profile.json", json.dumps({**BREAKDOWN, "total": float("inf")}), "profile.json is damaged"),
        ("profile.json", json.dumps({**BREAKDOWN, "cells": [{"phase": 1}]}), "profile.json is damaged"),
    ],
)
def test_what_is_missing_or_damaged_is_a_word(tmp_path, capsys, name, content, said):
    place = make_run(tmp_path / "run")
    (place / name).unlink()
    if content is not None:
        (place / name).write_text(content)
    assert main(["report", str(place), f"--html={place / 'index.html'}"]) == 0
    out, err = capsys.readouterr()
    assert out.endswith(f"wrote {place / 'index.html'}\n") and err.startswith("warning: ") and err.count("\n") == 1
    assert said in err and said in words_of((place / "index.html").read_text())
    plain_json((place / "index.html").read_text())


@settings(max_examples=60, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.sampled_from(["config.json", "metrics.jsonl", "memory.json", "profile.json"]), data=st.data())
def test_any_damage_gives_a_page(folder, tmp_path, name, data):
    """Every file cut, with bytes changed, or another JSON."""
    place = tmp_path / "run"
    if not place.exists():
        make_run(place)
    whole = (folder / name).read_bytes()
    damage = data.draw(
        st.one_of(
            st.integers(0, len(whole)).map(lambda at: whole[:at]),
            st.tuples(st.integers(0, len(whole) - 1), st.binary(min_size=1, max_size=3)).map(
                lambda cut: whole[: cut[0]] + cut[1] + whole[cut[0] + 1 :]
            ),
            st.recursive(
                st.none() | st.integers() | st.floats() | st.text(max_size=3),
                lambda inner: (
                    st.lists(inner, max_size=2)
                    | st.dictionaries(
                        st.sampled_from(["config", "step", "loss", "memory", "eval_loss"]), inner, max_size=3
                    )
                ),
            ).map(lambda value: json.dumps(value).encode()),
        )
    )
    (place / name).write_bytes(damage)
    text = run_page.render(run_directory.read(place))
    (place / name).write_bytes(whole)
    plain_json(text)
    assert name == "metrics.jsonl" or "train loss 2.0000" in words_of(text)  # what the other files say stays


def test_folders_that_hold_no_run_are_one_line(tmp_path, capsys):
    (tmp_path / "thesis.tex").touch()
    for place in (tmp_path, tmp_path / "nowhere", tmp_path / "thesis.tex"):
        assert main(["report", str(place)]) == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_a_page_elsewhere_leads_to_the_run(folder, tmp_path):
    assert main(["report", str(folder), f"--html={tmp_path / 'out.html'}"]) == 0
    page = (tmp_path / "out.html").read_text()
    (link,) = re.findall(r'href="([^"]*memory.html)"', page)
    assert (tmp_path / link).resolve() == (folder / "memory.html").resolve()
    assert main(["report", str(folder), f"--html={tmp_path / 'nowhere' / 'out.html'}"]) == 2


def test_no_name_can_break_the_page(tmp_path):
    name = HOSTILE.replace("/", "|")
    place = make_run(tmp_path / name, config={HOSTILE: HOSTILE, "train.steps": HOSTILE})
    ReportRecord(
        1,
        1,
        {},
        target={"name": HOSTILE},
        versions={HOSTILE: HOSTILE},
        findings=(Finding(HOSTILE, 1, HOSTILE, HOSTILE, HOSTILE),),
    ).save(place / "memory.json")
    hostile = json.loads(json.dumps(BREAKDOWN).replace('"mlp"', json.dumps(HOSTILE)))
    (place / "profile.json").write_text(json.dumps(hostile))
    (place / "memory.html").touch()
    run = run_directory.read(place)
    page = one_file(run_page.render(run, f"javascript:{name}"), [f"{run_page.quote(f'javascript:{name}')}/memory.html"])
    assert literally(page) >= 8
    assert not any(value.startswith("javascript:") for _, value in page.attributes)


def test_curves_keep_every_summit():
    points = [(step, float(step % 977)) for step in range(1, 20_001)]
    steps, values = run_page.curve(points)
    assert len(steps) <= run_page.MAX_POINTS + 2 and steps == sorted(steps) and (steps[0], steps[-1]) == (1, 20_000)
    assert max(values) == 976 and min(values) == 0 and values.count(976.0) > 15
    assert run_page.curve(points[:5]) == ([1, 2, 3, 4, 5], [1.0, 2.0, 3.0, 4.0, 5.0])


def test_the_browser_draws_the_curves(folder, tmp_path):
    script = """
      document.title = JSON.stringify([["loss", "along", "bytes", "update"].map((id) => charts.of(id).views.length),
        document.documentElement.scrollWidth <= innerWidth]);"""
    seen = body(
        browse(
            tmp_path,
            run_page.render(run_directory.read(folder)),
            script=script,
            options=["--dump-dom", "--window-size=390,900"],
        )
    )
    assert json.loads(re.search("<title>(.*?)</title>", seen)[1]) == [[1, 3, 1, 1], True]
    for expected in ("nats per token", "held out", "norm of the gradient", "predicted"):
        assert expected in seen
    nothing = run_page.render(run_directory.RunDirectory("new", problems=("There is no config.json.",)))
    assert 'data-ready="yes"' in body(browse(tmp_path, nothing, options=["--dump-dom"]))


@pytest.mark.exhaustive
def test_the_page_is_sound_when_it_is_used(folder, browser):
    check_page(browser, run_page.render(run_directory.read(folder)))
