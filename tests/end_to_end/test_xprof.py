"""Peak and allocated bytes equal XProf's memory viewer to the byte, for the same protos. Needs `pip install xprof`."""

import pytest

from bytescope.memory.analysis import report_of
from bytescope.memory.devices import targets
from bytescope.memory.devices.compiler import compile_lowered
from bytescope.train.program.config_files import load, override
from bytescope.train.program.program import build
from support import programs
from support.exhaustive import exhaustive
from support.oracles import memory_viewer, require

pytestmark = pytest.mark.oracle("xprof")


def check_viewer(compilation, folder):
    report = report_of(compilation)
    [(peak, allocated)] = memory_viewer([compilation.proto], folder)
    assert report.peak_bytes == peak
    assert report.allocated_bytes == allocated
    assert sum(report.breakdown.values()) == report.allocated_bytes
    return report


# Policies on one GPU are those of the shipped configs below.
STEPS = [
    ("cpu", "named"),
    ("h200", "named"),
    *exhaustive(("cpu", "full"), ("h200:8", "none")),
]


@pytest.mark.parametrize(("target", "policy"), STEPS)
def test_training_step(target, policy, devices, tmp_path):
    if target != "cpu":
        require("cuda")
        devices = targets.parse(target).devices()
    check_viewer(compile_lowered(programs.trace_step(devices, policy, shard_state=len(devices) > 1).lower()), tmp_path)


@pytest.mark.parametrize("name", ["linen", "convolution", "two_scans", "conditional", "while"])
def test_other_programs(name, tmp_path):
    check_viewer(compile_lowered(programs.OTHERS[name]()), tmp_path)


@pytest.mark.parametrize(
    ("name", "target", "changes"),
    [
        ("tiny", "cpu:1", {}),
        *exhaustive(
            ("tiny", "cpu:8", {"batch.accumulation": "2", "remat.policy": "full"}),
            ("gpt2_xl", "h100:8", {"batch.mode": "scan", "model.attention": "chunked"}),
            ("llama_8b", "rtx4090:8", {"precision.preset": "fp32", "remat.policy": "dots", "loss.kind": "full"}),
        ),
    ],
    ids=str,
)
def test_shipped_configs(name, target, changes, tmp_path):
    if not target.startswith("cpu"):
        require("cuda")
    config = load(name)
    for key, text in changes.items():
        override(config, key, text)
    report = check_viewer(build(config, targets.parse(target).devices()).compile_for_report(exact=True), tmp_path)
    assert report.breakdown["unattributed"] < 0.02 * report.peak_bytes
