"""The readers of what a compiler, a profiler and `bytescope report` leave: programs, traces, reports."""

import functools
import json
import tempfile
from pathlib import Path

from support.formats import gpu_space
from support.fuzz.command import command, strict


def rarely(data: bytes, one_in: int = 8) -> bool:
    """Whether a case is one of those for which a page is made too; the input alone decides."""
    return sum(data[:64]) % one_in == 0


@functools.cache
def program() -> bytes:
    """The HloProto of a small scan."""
    from bytescope.memory.devices.compiler import compile_lowered
    from support import programs

    return compile_lowered(programs.scan()).proto


def read_hlo(data: bytes, folder: Path) -> None:
    (folder / "step.hlo.pb").write_bytes(data)
    command("report", str(folder / "step.hlo.pb"), "h100", f"--json={folder / 'r.json'}")
    report = json.loads((folder / "r.json").read_text(), parse_constant=_no_constant)["result"]
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
    command("report", str(folder / "card.xplane.pb"), f"--json={folder / 't.json'}", *page)
    json.loads((folder / "t.json").read_text(), parse_constant=_no_constant)


@functools.cache
def report() -> bytes:
    """The JSON of a report on the program, with a step's work, on a target whose rates are known."""
    from bytescope.memory.analysis import report_of
    from bytescope.memory.cost import roofline
    from bytescope.memory.devices import targets
    from bytescope.memory.program.compilation import compiled_for

    found = report_of(compiled_for(program())[0], target=targets.parse("h100:8"), seconds=True).to_json()
    assert found["prediction"] and found["schedule"]
    found["buffers"], found["timeline"] = found["buffers"][:12], found["timeline"][:20]
    found["work"] = {
        phase: {
            "flops": {"bf16": 1e12},
            "product_bytes": 1e9,
            "other_bytes": 1e9,
            "to_host_bytes": 5,
            "collective_bytes": {"in_host": 1e6, "between_hosts": 0},
            "hidden_collective_bytes": {"in_host": 1e6},
        }
        for phase in ("forward", "backward")
    }
    found["roofline"] = roofline.bound_of_answer(found).to_json()
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
        from bytescope.memory.records import report_record
        from bytescope.memory.report import report_page

        found = report_record.load(path)
        strict(report_page.page_data(found))
        report_page.render(found)
    command("report", str(path), f"--trace={good / 'good.xplane.pb'}", f"--json={folder / 't.json'}")
    json.loads((folder / "t.json").read_text(), parse_constant=_no_constant)


@functools.cache
def rates() -> bytes:
    """What `bytescope calibrate` writes, of the device that the good report is for."""
    from bytescope.memory.devices.chips import CHIPS
    from bytescope.memory.seconds import chip_rates

    kind = CHIPS["h100"].kind
    return strict(
        chip_rates.rates_of_kind(kind).to_json() | {"measured": {"device": kind, "date": "2026-11-22"}}
    ).encode()


def read_rates(data: bytes, folder: Path) -> None:
    path, good = folder / "rates.json", beside()
    path.write_bytes(data)
    command(
        "report",
        str(good / "good.json"),
        f"--trace={good / 'good.xplane.pb'}",
        f"--rates={path}",
        f"--json={folder / 't.json'}",
    )
    json.loads((folder / "t.json").read_text(), parse_constant=_no_constant)
