"""What samples of a calibration say, its table, rates of another device refused; and one run of it on this machine."""

import dataclasses
import itertools
import json

import pytest

from bytescope.memory import cli
from bytescope.memory.commands.calibration_document import document
from bytescope.memory.cost.collectives import WIRE
from bytescope.memory.devices import targets
from bytescope.memory.errors import ReportError
from bytescope.memory.host import host_terms
from bytescope.memory.records.result import plain
from bytescope.memory.records.schedule_records import MOVING, PRODUCT, ScheduledKernel
from bytescope.memory.seconds import rates
from bytescope.memory.seconds.calibration import cases as calibration_cases
from bytescope.memory.seconds.calibration import host_measure, measure
from bytescope.memory.seconds.calibration.cases import (
    ATTENTION,
    COLLECTIVES,
    FLOOR,
    HOST_LINK,
    MAX_LINKS,
    MEMORY,
    MIB,
    MIN_LINKS,
    PRODUCTS,
    SHORT,
    UNROLLED,
    CalibrationCase,
    CalibrationSizes,
    choose_sizes,
    count_links,
    list_cases,
)
from bytescope.memory.seconds.calibration.measure import Calibration, Sample, fit_rates
from bytescope.memory.seconds.operation_seconds import kernel_seconds
from bytescope.memory.seconds.rate_records import WAYS, from_json
from bytescope.memory.view import draw_terminal
from bytescope.memory.view.console import plain_text
from support.described import described

US, T = 1e-6, 1e12
ABOUT = {"device": "NVIDIA H200", "platform": "cuda", "devices": "8", "date": "2026-11-22", "jax": "0.10.2"}
# Of a made-up device: a floor of 2 us, 400 TFLOP/s of products, 2 TB/s of memory, 300 GB/s on the wire.
FLOOR_SECONDS = 2 * US


def sample(part, key, size, work, rate, floor=FLOOR_SECONDS):
    return Sample(part, key, size, work, floor + work / rate, 0.01)


SAMPLES = (
    Sample(FLOOR, (), 0, 0.0, FLOOR_SECONDS),
    *(sample(PRODUCTS, ("bf16",), side, 2.0 * side**3, 400 * T) for side in (8192, 1024)),
    *(sample(ATTENTION, (way, 128), 2048, 1e12, 200 * T) for way in WAYS),
    *(
        sample(MEMORY, (kind,), size, arrays * size, 2 * T)
        for kind, arrays in (("copy", 2), ("add", 3))
        for size in (MIB, 64 * MIB)
    ),
    *(
        Sample(HOST_LINK, (way,), size, size, took)
        for way, size, took in (
            ("to host", 256 * MIB, 256 * MIB / 50e9),
            ("to device", 256 * MIB, 256 * MIB / 40e9),
            ("to host", SHORT, 9 * US),
            ("to device", SHORT, 11 * US),
        )
    ),
    *(
        sample(COLLECTIVES, (kind, 8), 64 * MIB, 64 * MIB, 300e9 / WIRE[kind](8), 0)
        for kind in ("all-reduce", "all-gather")
    ),
    Sample(COLLECTIVES, ("collective-permute", 8), SHORT, SHORT, 3 * US),
)


@pytest.fixture
def h200():
    return targets.parse("h200:8")


@pytest.fixture
def used():
    """`rates.use`, undone at the end."""
    yield rates.use
    rates.use(None)


@pytest.mark.quick
def test_samples_say_the_rates_that_made_them(h200):
    found = fit_rates(SAMPLES, h200, ABOUT)
    assert found.floor_seconds == FLOOR_SECONDS and found.cores == 132 and found.hop_seconds == 3 * US
    assert [size for size, _ in found.products["bf16"]] == [1024, 8192]
    assert [rate / T for _, rate in found.products["bf16"]] == pytest.approx([400, 400])
    assert [size / MIB for size, _ in found.memory] == [2.5, 160]
    assert [rate / T for _, rate in found.memory] == pytest.approx([2, 2])
    assert {way: list(table) for way, table in found.attention.items()} == {way: [128] for way in WAYS}
    assert found.host_link_bytes_per_s == pytest.approx(40e9) and found.host_link_seconds == 11 * US
    assert [(row.kind, row.group, row.hosts) for row in found.collectives] == [
        ("all-reduce", 8, 1),
        ("all-gather", 8, 1),
    ]
    assert [row.bus[0] for row in found.collectives] == [(64 * MIB, pytest.approx(300e9))] * 2
    assert found.source == "measured on 8 x NVIDIA H200 on 2026-11-22, jax 0.10.2"
    # What was measured is predicted again.
    cube = ScheduledKernel(PRODUCT, "forward", 1, 2 * 8192**3, "bfloat16", (1, 8192, 8192, 8192))
    assert kernel_seconds(ScheduledKernel(MOVING, "forward", 160 * MIB), found) == pytest.approx(
        2 * US + 160 * MIB / (2 * T), rel=0.2
    )
    assert kernel_seconds(cube, found) == pytest.approx(SAMPLES[1].seconds, rel=0.2)


@pytest.mark.quick
def test_a_part_that_predictions_need_is_missed(h200):
    for part, told in (
        (PRODUCTS, "products is empty"),
        (ATTENTION, "attention"),
        (MEMORY, "the rate of the device memory"),
        (HOST_LINK, "of the host link was not measured"),
    ):
        with pytest.raises(ReportError, match=told):
            fit_rates([each for each in SAMPLES if each.part != part], h200, ABOUT)
    alone = fit_rates([each for each in SAMPLES if each.part != COLLECTIVES], h200, ABOUT)
    assert not alone.collectives and from_json(plain(alone.to_json())) == alone


@pytest.mark.quick
def test_a_floor_that_was_measured_too_high_takes_no_time_away(h200):
    slow = [dataclasses.replace(each, seconds=1.0) if each.part == FLOOR else each for each in SAMPLES]
    found = fit_rates(slow, h200, ABOUT)
    assert 0 < found.products["bf16"][1][1] < 4100 * T


@pytest.mark.quick
def test_links_fill_a_call_in_whole_turns():
    assert count_links(1e15, 1e12) == MIN_LINKS and count_links(1.0, 1e12) == MAX_LINKS
    assert count_links(1e9, 4e12) == 16 and all(count_links(work, 1e12) % UNROLLED == 0 for work in (1e7, 1e8, 3e8))


@pytest.mark.quick
def test_rates_of_another_device_are_refused(h200, tmp_path, used):
    file = tmp_path / "rates.json"
    file.write_text(json.dumps(fit_rates(SAMPLES, h200, ABOUT).to_json()))
    used(file)
    assert rates.select(h200).floor_seconds == FLOOR_SECONDS and rates.select(h200) == rates.load(file)
    over = rates.select(targets.parse("h200:2x8"))
    assert {row.hosts > 1 for row in over.collectives} == {False, True} and over.source.endswith("network as published")
    assert [row for row in over.collectives if row.hosts == 1] == list(rates.load(file).collectives)
    with pytest.raises(ReportError, match=r"measured on NVIDIA H200, but a100-80g .*leave --rates out.*calibrate"):
        rates.select(targets.parse("a100-80g"))
    used(None)
    assert rates.select(h200).floor_seconds != FLOOR_SECONDS


@pytest.mark.quick
def test_devices_that_a_cpu_simulates_share_its_rates(tmp_path, used):
    cpu = {"name": "cpu:4", "platform": "cpu", "kind": "cpu", "n_devices": 4}
    whole = dataclasses.replace(fit_rates(SAMPLES, targets.parse("h200"), {**ABOUT, "device": "cpu"}), cores=0)
    file = tmp_path / "rates.json"
    file.write_text(json.dumps(whole.to_json()))
    used(file)
    found = rates.select(cpu)
    assert found.products["bf16"] == tuple((size, rate / 4) for size, rate in whole.products["bf16"])
    assert found.memory[0][1] == whole.memory[0][1] / 4 and found.collectives == whole.collectives


@pytest.mark.quick
@pytest.mark.parametrize("width", [80, 100])
def test_the_table_stands_beside_the_data_sheet(h200, width):
    left = {f"products fp8 {side}": "no time: give more --seconds" for side in range(5)}
    shown = plain_text(
        draw_terminal.draw(document(Calibration(fit_rates(SAMPLES, h200, ABOUT), SAMPLES, left), h200)), width
    )
    lines = shown.splitlines()
    assert max(map(len, lines)) <= width
    for told in (
        "measured on 8 x NVIDIA H200",
        "attention bwd 2048x128 causal 5.002 ms",
        "and 2 more: no time",
        "chained kernel",
    ):
        assert told in " ".join(shown.split()), shown
    assert any("product, bf16" in line and "2.751 ms" in line for line in lines), shown
    assert next(line for line in lines if "8192 cubed" in line).split()[-4:] == ["399.7", "TFLOP/s", "989.4", "40%"]
    assert next(line for line in lines if "memory, copy" in line and "64" in line).split()[-2:] == ["4.8", "40%"]


TINY = CalibrationSizes(
    units=("fp32", "bf16"),
    sides=(64, 32),
    lengths=(16,),
    widths=(8,),
    tokens=32,
    heads=16,
    arrays=(MIB // 8,),
    payloads=(MIB // 16,),
    copied=MIB,
)


def test_this_machine_and_its_host_memory_are_measured_and_used_with_the_file(tmp_path, monkeypatch, capsys, used):
    """The whole command, at the least that predictions need: its file is read again by the commands that predict. Host
    memory is measured in processes of their own."""
    monkeypatch.setattr(calibration_cases, "HOST", TINY)
    few = {"libraries": host_measure.MEASUREMENTS["libraries"], "Orbax": lambda: host_measure.run_case("none")}
    monkeypatch.setattr(host_measure, "MEASUREMENTS", few)
    file = tmp_path / "rates.json"
    assert cli.main(["calibrate", "--seconds=0.01", "--host", f"--out={file}"]) == 0
    shown = capsys.readouterr().out
    found, measured = rates.load(file), rates.load(file).host
    assert found.measured["device"] == "cpu" and found.measured["devices"] == "8" and "jax" in found.measured
    assert set(found.products) == {"fp32"} and [row.kind for row in found.collectives] == ["all-reduce"]
    assert 0 < found.floor_seconds < 1
    for told in ("product, fp32", "64 cubed", "attention bwd", "all-reduce x8", "not measured", "products bf16"):
        assert told in shown, shown
    assert "Python and jax" in shown and "not measured: Orbax: KeyError: 'none'" in shown, shown
    assert set(measured) == {"python", "trainer", "flax"}
    assert 50 * MIB < measured["python"] < 2000 * MIB and MIB < measured["trainer"] < 2000 * MIB
    assert host_terms.host_rates() == host_terms.RATES
    (before,) = host_terms.start_terms("cpu")
    used(file)
    assert rates.select({"platform": "cpu", "kind": "cpu", "n_devices": 1, "name": "cpu"}) == found
    (now,) = host_terms.start_terms("cpu")
    loaded = ("python", "trainer")
    assert now.bytes - before.bytes == sum(measured[name] - getattr(host_terms.RATES, name) for name in loaded)
    assert host_terms.host_rates().cpu_compile == host_terms.RATES.cpu_compile
    used(None)
    assert host_terms.host_rates() == host_terms.RATES


def fake_clock(monkeypatch, per_look):
    """Time goes on by so many seconds whenever somebody looks at it."""
    gone = itertools.count()
    monkeypatch.setattr(measure.time, "monotonic", lambda: per_look * next(gone))


class Steady:
    """A program whose calls end at once."""

    def start(self):
        return lambda: self

    def block_until_ready(self):
        return self


def cases_of_samples():
    return [
        CalibrationCase(each.part, each.key, each.size, each.work, 1, Steady, needed=each.size != MIB)
        for each in SAMPLES
    ]


@pytest.mark.quick
def test_a_slow_machine_is_measured_for_little_longer_than_asked_for(h200, monkeypatch):
    """Cases that nobody needs come in the first 70 % of the time, the first turn is finished, and 30 s are the least
    that what is needed has; then it is given up with the remedy."""
    told, cases = [], cases_of_samples()
    cases.sort(key=lambda case: not case.needed)
    fake_clock(monkeypatch, 0.5)
    found = measure.measure(cases, h200, 8, 20.0, lambda labels, gone: told.append((labels, gone)))
    assert cases[-1].label in found.left_out and set(found.left_out.values()) == {measure.NO_TIME}
    assert {sample.spread for sample in found.samples} == {None}, "one turn at most"
    assert max(gone for _, gone in told) == 20 and any(labels[0] == "turn 1" for labels, _ in told)
    fake_clock(monkeypatch, 0.01)
    found = measure.measure(cases, h200, 8, 20.0)
    assert not found.left_out and all(sample.spread is not None for sample in found.samples)
    fake_clock(monkeypatch, 5.0)
    with pytest.raises(ReportError, match=r"could not be measured.*no time: give more --seconds"):
        measure.measure(cases, h200, 8, 20.0)


@pytest.mark.quick
def test_a_case_that_fails_when_it_runs_again_is_left_out(h200, monkeypatch):
    class Filled(Steady):
        def start(self):
            ran = itertools.count()
            return lambda: self if next(ran) < 2 else 1 / 0

    fake_clock(monkeypatch, 0.01)
    extra = CalibrationCase(PRODUCTS, ("fp8",), 1, 1.0, 1, Filled)
    found = measure.measure([*cases_of_samples(), extra], h200, 8, 10.0)
    assert found.left_out == {extra.label: "division by zero"}


def test_what_runs_on_a_card_compiles_for_it():
    """Each library kernel and collective that is measured on GPUs, in the program that is run there."""
    devices = described("h100:8")
    target = targets.parse("h100:8")
    small = dataclasses.replace(
        choose_sizes(target),
        units=("bf16", "fp8"),
        sides=(1024,),
        lengths=(512,),
        widths=(128,),
        payloads=(MIB,),
        arrays=(),
    )
    programs = {case.label: case for case in list_cases(devices, target, small)}
    for label, wanted in (
        ("products fp8 1024", ("f8e4m3fn",)),
        ("attention forward 128 512", ("__cudnn$fmhaSoftmax",)),
        ("attention backward_causal 128 512", ("__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward")),
        *((f"collectives {kind} 8 1.00 MiB", (kind,)) for kind in ("all-gather", "all-to-all")),
    ):
        text = programs[label].make().lower().compile().as_text()
        assert not [one for one in wanted if one not in text], label


def test_a_gpu_without_bfloat16_is_measured_in_float16_and_without_cudnn():
    devices, target = described("t4"), targets.parse("t4")
    cases = list_cases(devices, target, choose_sizes(target))
    assert {case.key[0] for case in cases if case.part == PRODUCTS} == set(target.peak_flops) and cases[0].needed
    forward = next(case for case in cases if case.part == ATTENTION)
    lowered = forward.make().lower().as_text()
    assert "xf16>" in lowered and "bf16" not in lowered and "cudnn" not in lowered


def test_what_a_device_refuses_is_left_out_with_its_reason(h200):
    def fails():
        raise RuntimeError("no such\nunit")

    case = CalibrationCase(PRODUCTS, ("fp8",), 64, 1.0, 1, fails)
    with pytest.raises(ReportError, match="products fp8 64 failed: no such unit"):
        measure.measure([case], h200, 8, 0.01)


# ---- host memory ------------------------------------------------------------------------------------------------


@pytest.mark.quick
def test_constants_change_by_the_ratio_of_sizes_here_and_there(monkeypatch):
    def run_case(name, layers, target):  # a compiler that takes twice the bytes per layer, and the same for any program
        return {"peak": 101_700_000 + 2 * 1_510_000 * layers, "traced": 0}

    monkeypatch.setattr(host_measure, "run_case", run_case)
    few = {"XLA's compiler for GPUs": host_measure.MEASUREMENTS["XLA's compiler for GPUs"]}
    monkeypatch.setattr(host_measure, "MEASUREMENTS", few)
    calls = []
    samples, left_out = host_measure.measure_host(lambda *call: calls.append(call))
    assert not left_out and calls == [(["XLA's compiler for GPUs"], 0)]
    found = host_measure.constants_of(samples)
    assert found == {
        "gpu_compile": host_terms.RATES.gpu_compile,
        "gpu_compile_equation": 2 * host_terms.RATES.gpu_compile_equation,
        "gpu_compile_repeated": 2 * host_terms.RATES.gpu_compile_repeated,
        "described_compile": host_terms.RATES.described_compile,
        "described_compile_equation": 2 * host_terms.RATES.described_compile_equation,
        "described_compile_repeated": 2 * host_terms.RATES.described_compile_repeated,
    }
    assert host_terms.RATES.replaced(found).gpu_compile_equation == found["gpu_compile_equation"]
    assert host_measure.line_through([(1, 7), (1, 9)]) == (8, 0)
    assert host_measure.line_through([(1, 9), (2, 5)])[1] == 0  # memory does not shrink with the program


@pytest.mark.exhaustive
def test_all_sizes_of_host_memory_are_measured():
    samples, left_out = host_measure.measure_host(lambda names, done: None)
    assert not left_out and {sample.words for sample in samples} == set(host_measure._REFERENCES)
    for sample in samples:
        assert 0.3 < sample.bytes / sample.reference < 3, sample
    assert set(host_measure.constants_of(samples)) <= set(vars(host_terms.RATES))
