"""What the benchmarks assert, on hand-made figures; they themselves are run by name."""

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
