"""What tests compare with, or compile with, that may not be installed: then they skip, or fail where CI requires it.

A test names what it needs as `@pytest.mark.oracle("cuda")`; `pytest --require-oracles=cuda,xprof` makes a missing one a
failure.
"""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NoReturn

import pytest

# The first of these on the path is the browser that pages are looked at with.
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


# MaxText needs a newer Python and jax than the tests: an environment of its own, with bytescope in it (.ci/run).
MAXTEXT_PYTHON = os.environ.get("MAXTEXT_PYTHON", sys.executable)


def _plugin(module: str) -> Callable[[], bool]:
    def found() -> bool:
        try:
            return importlib.util.find_spec(module) is not None
        except ModuleNotFoundError:  # the package around it is missing too
            return False

    return found


def _on_the_path(program: str) -> bool:
    return shutil.which(program) is not None


def shellcheck() -> str | None:
    """The path of shellcheck: beside this Python, where pip puts it, or on the path."""
    return shutil.which("shellcheck", path=str(Path(sys.executable).parent)) or shutil.which("shellcheck")


def _has_maxtext() -> bool:
    asked = [MAXTEXT_PYTHON, "-c", "import importlib.util as i; raise SystemExit(i.find_spec('maxtext') is None)"]
    return shutil.which(MAXTEXT_PYTHON) is not None and subprocess.run(asked).returncode == 0


# oracle -> (whether it is here, how to get it)
ORACLES = {
    "cuda": (_plugin("jax_plugins.xla_cuda13"), "no compiler for GPUs: pip install -e '.[cuda]'"),
    "tpu": (_plugin("libtpu"), "no compiler for TPUs: pip install -e '.[tpu]'"),
    "xprof": (_plugin("xprof"), "xprof is not installed: pip install -e '.[test]'"),
    "notebook": (
        lambda: all(_plugin(name)() for name in ("nbclient", "ipykernel")),
        "nbclient or ipykernel is not installed: pip install -e '.[test]'",
    ),
    "equinox": (_plugin("equinox"), "equinox is not installed: pip install -e '.[test]'"),
    "keras": (_plugin("keras"), "keras is not installed: pip install -e '.[test]'"),
    "datasets": (_plugin("datasets"), "datasets is not installed: pip install -e '.[test]'"),
    "transformers": (
        lambda: all(_plugin(name)() for name in ("torch", "transformers")),
        "torch or transformers is not installed: pip install -e '.[test,hf]'",
    ),
    "peft": (_plugin("peft"), "peft is not installed: pip install -e '.[test,hf]'"),
    "shellcheck": (lambda: shellcheck() is not None, "shellcheck is not installed: pip install -e '.[test]'"),
    "kubernetes": (
        _plugin("kubernetes_validate"),
        "kubernetes-validate is not installed: pip install -e '.[test]'",
    ),
    "jsonschema": (_plugin("check_jsonschema"), "check-jsonschema is not installed: pip install -e '.[test]'"),
    "precommit": (_plugin("pre_commit"), "pre-commit is not installed: pip install -e '.[test]'"),
    "maxtext": (_has_maxtext, "MaxText is not installed: set MAXTEXT_PYTHON to a Python with MaxText and bytescope"),
    "chromium": (lambda: CHROMIUM is not None, "chromium is not installed (apt install chromium)"),
    "zsh": (partial(_on_the_path, "zsh"), "zsh is not installed"),
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


def check_schema(schema: str, files: Sequence[Path]) -> None:
    """Fails unless YAML files match a schema that check-jsonschema brings along, such as "vendor.github-actions"."""
    command = [sys.executable, "-m", "check_jsonschema", f"--builtin-schema={schema}", *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert not done.returncode, done.stdout + done.stderr


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


# ---- GPU programs without machine code: nothing that a report reads lies behind the buffer assignment. XLA starts
# NVIDIA's assembler once a kernel, a hundred times and more for a training step: half of the time of a compile
# for a GPU that is not here, whose code nobody runs. In tests a script stands in its place, which answers with an empty
# file; tests of our own kernels, and of compiling itself, ask for the fixture `assembler` and get NVIDIA's.

# Set while the script hands on to NVIDIA's assembler.
ASSEMBLE = "BYTESCOPE_TESTS_ASSEMBLE"
_SCRIPT = """#!/bin/sh
case "${%s-}$*" in 1*|*--version*) exec '%s' "$@";; esac
[ "$2" = -o ] || exec '%s' "$@"
echo none > "$3"
"""


def without_assembler(folder: Path) -> dict[str, str]:
    """Makes a CUDA in `folder` whose assembler is the script. Returns the variable by which jax finds it when it is
    imported; nothing where there is none to stand in for, or where somebody chose one."""
    cuda = next(filter(None, map(_root, ("nvidia.cu13", "nvidia.cuda_nvcc"))), None)
    if cuda is None or "CUDA_ROOT" in os.environ or not (cuda / "bin" / "ptxas").exists():
        return {}
    (folder / "bin").mkdir(parents=True)
    for found in [*cuda.glob("*"), *cuda.glob("bin/*")]:
        if found.name not in ("bin", "ptxas"):
            (folder / found.relative_to(cuda)).symlink_to(found)
    script = folder / "bin" / "ptxas"
    script.write_text(_SCRIPT % (ASSEMBLE, cuda / "bin" / "ptxas", cuda / "bin" / "ptxas"))
    script.chmod(0o755)
    return {"CUDA_ROOT": str(folder)}


def _root(module: str) -> Path | None:
    try:
        found = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        return None
    return Path(next(iter(found.submodule_search_locations))) if found else None
