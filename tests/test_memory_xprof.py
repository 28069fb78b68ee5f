"""Our peak against XProf's memory viewer, from the same protos. Needs `pip install xprof`."""

import importlib.util
import json
import subprocess
import sys

import memory_programs as programs
import pytest

from memory import export, targets
from memory.analyze import report_of
from memory.compiler import compile_lowered

pytestmark = pytest.mark.skipif(importlib.util.find_spec("xprof") is None, reason="xprof is not installed")

# In a process of its own: xprof brings protobuf and logging settings along.
ASK = """
import sys
from xprof.convert import raw_to_tool_data
data, _ = raw_to_tool_data.xspace_to_tool_data([sys.argv[1]], "memory_viewer", {"module_name": "m"})
print(data.decode() if isinstance(data, bytes) else data)
"""


def viewer(proto, folder):
    """XProf's (peak, total allocated) in bytes."""
    export.export(folder, hlo_proto=proto)
    done = subprocess.run([sys.executable, "-c", ASK, str(folder / "h.xplane.pb")], capture_output=True, text=True,
                          check=True)
    found = json.loads(done.stdout)
    return found["peakHeapMib"] * 2**20, found["totalBufferAllocationMib"] * 2**20


def compare(lowered, folder):
    compilation = compile_lowered(lowered)
    report = report_of(compilation)
    peak, allocated = viewer(compilation.proto, folder)
    assert report.peak_bytes == pytest.approx(peak, rel=1e-3)
    assert report.allocated_bytes == pytest.approx(allocated, rel=1e-3)


@pytest.mark.parametrize("policy", programs.POLICIES)
@pytest.mark.parametrize("target", ["cpu", "h200", "h200:8"])
def test_training_step(target, policy, devices, tmp_path):
    if target != "cpu":
        pytest.importorskip("jax_plugins.xla_cuda13")
        devices = targets.parse(target).devices()
    compare(programs.trace_step(devices, policy, shard_state=len(devices) > 1).lower(), tmp_path)


@pytest.mark.parametrize("name", ["linen", "convolution", "two_scans", "conditional", "while"])
def test_other_programs(name, tmp_path):
    compare(programs.OTHERS[name](), tmp_path)
