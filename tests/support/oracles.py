"""What tests compare with, or compile with, that may not be installed: then they skip, or fail where CI requires it.

A test names what it needs as `@pytest.mark.oracle("cuda")`; `pytest --require-oracles=cuda,xprof` makes a missing one a
failure.
"""

import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import pytest

# The first of these on the path is the browser that pages are looked at with.
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def _plugin(module: str) -> Callable[[], bool]:
    def found() -> bool:
        try:
            return importlib.util.find_spec(module) is not None
        except ModuleNotFoundError:  # the package around it is missing too
            return False

    return found


# oracle -> (whether it is here, how to get it)
ORACLES = {
    "cuda": (_plugin("jax_plugins.xla_cuda13"), "no compiler for GPUs: pip install 'bytescope[cuda]'"),
    "tpu": (_plugin("libtpu"), "no compiler for TPUs: pip install 'bytescope[tpu]'"),
    "xprof": (_plugin("xprof"), "xprof is not installed: pip install 'bytescope[test]'"),
    "notebook": (lambda: all(_plugin(name)() for name in ("nbclient", "ipykernel")),
                 "nbclient or ipykernel is not installed: pip install 'bytescope[test]'"),
    "datasets": (_plugin("datasets"), "datasets is not installed: pip install 'bytescope[test]'"),
    "transformers": (lambda: all(_plugin(name)() for name in ("torch", "transformers")),
                     "torch or transformers is not installed: pip install 'bytescope[test,hf]'"),
    "peft": (_plugin("peft"), "peft is not installed: pip install 'bytescope[test,hf]'"),
    "chromium": (lambda: CHROMIUM is not None, "chromium is not installed (apt install chromium)"),
}
required: set[str] = set()  # from --require-oracles, by conftest.py

# In a process of its own: xprof brings protobuf and logging settings along.
_ASK = """
import sys
from xprof.convert import raw_to_tool_data
for path in sys.argv[1:]:
    data, _ = raw_to_tool_data.xspace_to_tool_data([path], "memory_viewer", {"module_name": "m"})
    print(data.decode() if isinstance(data, bytes) else data)
"""


def memory_viewer(protos: Sequence[bytes], folder: Path) -> list[tuple[float, float]]:
    """What XProf's memory viewer shows of each serialized HloProto: (peak, total allocated) in bytes.

    `folder`: where the files that it reads are put.
    """
    from bytescope.memory.commands import xprof_export

    traces = []
    for number, proto in enumerate(protos):
        xprof_export.export(folder / str(number), hlo_proto=proto)
        traces.append(str(folder / str(number) / "h.xplane.pb"))
    if not traces:
        return []
    done = subprocess.run([sys.executable, "-c", _ASK, *traces], capture_output=True, text=True, check=True)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    return [(one["peakHeapMib"] * 2**20, one["totalBufferAllocationMib"] * 2**20) for one in found]


def require(*names: str) -> None:
    """Ends the test if one of these oracles is missing."""
    for name in names:
        found, remedy = ORACLES[name]
        if not found():
            _missing(name, remedy)


def _missing(name: str, remedy: str) -> NoReturn:
    if name in required:
        pytest.fail(f"{remedy} (--require-oracles={name})", pytrace=False)
    pytest.skip(remedy)
