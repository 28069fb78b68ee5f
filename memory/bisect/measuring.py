"""Compiles the candidates of a bisection, each in a worker process with its own virtual environment or checkout.

A worker process is `python -m bytescope.memory worker`, as in `compare`. If its interpreter belongs to another
environment, bytescope is imported from the running installation. For versions of jax that bytescope does not support,
`standalone_dump.py` compiles and dumps the program, and a worker of the running interpreter reads the dump.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bytescope.memory.analysis import with_seconds
from bytescope.memory.bisect.measurements import Measurement, MeasurementFile
from bytescope.memory.compare import worker_pool
from bytescope.memory.compare.jobs import with_cpu_devices
from bytescope.memory.compare.prepared_program import PreparedProgram, prepare_dump
from bytescope.memory.compare.program_factory import ProgramFactory
from bytescope.memory.devices.targets import Target
from bytescope.memory.errors import ReportError, one_line
from bytescope.memory.records.report_record import ReportRecord

# The sub-packages of bytescope, which another interpreter imports through links.
_PACKAGES = ("configs", "memory", "model", "train")


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a candidate is compiled: the Python interpreter and the folders of its worker process.

    Fields:
        python: path of the interpreter; "" for the running interpreter.
        folder: working directory of the worker; None for the working directory of this process.
        paths: folders that come first on sys.path.
        state: identifies the content of `folder`, such as a commit. If it changes, a new worker process is started.
        is_standalone: True if the interpreter's version of jax is too old for bytescope. The worker then runs
            standalone_dump.py, which does not import bytescope.
        moved: (repository, its checkout in a temporary folder) for a bisection over commits, else None. Folders of the
            repository on sys.path are replaced by the same folders of the checkout, so that the code of the commit is
            imported.
    """

    python: str = ""
    folder: Path | None = None
    paths: tuple[Path, ...] = ()
    state: str = ""
    is_standalone: bool = False
    moved: tuple[Path, Path] | None = None


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A program that a bisection can compile: the user's program with one version, or with some of the changes.

    Fields:
        point: name of the candidate, such as "jax 0.11.0"; unique within a bisection.
        factory: the function that makes the program, as a worker imports it: `module:function` or `file.py:function`.
        overrides: config key -> value, passed to the factory.
        prepare: function that installs packages or checks out a commit, and returns where the program is compiled.
        doing: what `prepare` does, for the progress bar, such as "installing"; "" if it takes no time.
    """

    point: str
    factory: str
    overrides: Mapping[str, Any]
    prepare: Callable[[], Place] = Place
    doing: str = ""


class DumpFactory(ProgramFactory):
    """A program factory whose "program" is an XLA dump that standalone_dump.py has written. A worker process of the
    bisection reads the dump's memory figures with it, as it compiles other programs with other factories."""

    reference = f"{__name__}:DUMPS"

    def __call__(self, overrides: Mapping[str, Any], target: Target) -> PreparedProgram:
        """Returns the compiled program in the dump folder `overrides["dump"]`, for the target's devices."""
        return prepare_dump(overrides["dump"], target)


DUMPS = DumpFactory()


class Measuring:
    """Compiles the programs of a bisection for one target in a worker process, and writes each measurement to a file.
    The worker process is kept for the next program if its interpreter and folders are the same. Use this class as a
    context manager, which stops the worker at exit.

    Args:
        target: name of the devices to compile for, such as "h100:8".
        records: the file that keeps the measurements.
        gpu_config: XLA's GpuTargetConfigProto of the target's GPU as text, for standalone_dump.py; "" for a CPU.
        progress: function that is called with a text for the progress bar, such as "installing jax 0.11.0".
    """

    def __init__(
        self,
        target: str,
        records: MeasurementFile,
        gpu_config: str = "",
        progress: Callable[[str], None] = lambda doing: None,
    ) -> None:
        self._target, self._records, self._gpu_config, self._progress = target, records, gpu_config, progress
        self._worker: worker_pool.Worker | None = None
        self._worker_of: tuple[Place, int] | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="bisect-", ignore_cleanup_errors=True)

    def __enter__(self) -> Measuring:
        return self

    def __exit__(self, *about: object) -> None:
        self._stop_worker()
        self._folder.cleanup()

    def measure(self, candidate: Candidate) -> Measurement:
        """Returns the measurement of one program of the bisection. If the file of measurements has it, returns it from
        there; else compiles the program and adds the measurement to the file. If the program cannot be compiled, the
        measurement's `status` says why and its `report` is None."""
        if found := self._records.find(candidate.point):
            return found
        began = time.perf_counter()
        self._progress(f"{candidate.doing or 'compiling'} {candidate.point}")
        place = candidate.prepare()
        self._progress(f"compiling {candidate.point}")
        answer = self._dump(place, candidate) if place.is_standalone else self._ask(place, candidate)
        if answer.get("dead"):  # the worker was killed or crashed: measure again next time
            self._stop_worker()
        report = None
        if answer.get("status") == "ok":
            report = with_seconds(ReportRecord.from_json(answer["report"]))
            if "versions" in answer:
                report = dataclasses.replace(report, versions=answer["versions"])
        measurement = Measurement(
            candidate.point, str(answer.get("status")), report, seconds=time.perf_counter() - began
        )
        if not answer.get("dead"):
            self._records.add(measurement)
        return measurement

    def _ask(self, place: Place, candidate: Candidate) -> dict[str, Any]:
        job = worker_pool.Job(
            candidate.factory, candidate.overrides, self._target, "", candidate.point, method="report_json"
        )
        if "bytescope." not in candidate.factory:  # a user's function, which builds its mesh
            job = with_cpu_devices(job)
        if self._worker is None or self._worker_of != (place, job.cpu_devices):
            self._stop_worker()
            python = place.python or sys.executable
            self._worker = worker_pool.Worker(self._variables(place), job.cpu_devices, python, place.folder)
            self._worker_of = (place, job.cpu_devices)
        return self._worker.ask(job.message(False))

    def _stop_worker(self) -> None:
        if self._worker is not None:
            self._worker.close()
            self._worker = None

    def _variables(self, place: Place) -> dict[str, str]:
        variables = worker_pool.environment([self._target])
        paths = [*map(str, place.paths), *filter(None, [variables.get("PYTHONPATH")])]
        if place.python or place.folder:
            paths.insert(0, str(self._links(place.moved)))
        variables["PYTHONPATH"] = os.pathsep.join(paths)
        return variables

    def _links(self, moved: tuple[Path, Path] | None) -> Path:
        """Returns a folder with symbolic links to the sub-packages of bytescope. With this folder on sys.path, another
        interpreter can import bytescope. `moved`: (repository, checkout of one of its commits), or None; a sub-package
        inside the repository is linked to the same folder of the checkout."""
        top = Path(self._folder.name) / "links"
        if not top.exists():
            (top / "bytescope").mkdir(parents=True)
            for name in _PACKAGES:
                with contextlib.suppress(ModuleNotFoundError):
                    spec = importlib.util.find_spec(f"bytescope.{name}")
                    for text in (spec.submodule_search_locations or ()) if spec else ():
                        source = Path(text).resolve()
                        if moved and source.is_relative_to(moved[0]):
                            source = moved[1] / source.relative_to(moved[0])
                        (top / "bytescope" / name).symlink_to(source, target_is_directory=True)
        return top

    def _dump(self, place: Place, candidate: Candidate) -> dict[str, Any]:
        out = Path(tempfile.mkdtemp(prefix="dump-", dir=self._folder.name))
        command = [place.python, str(Path(__file__).with_name("standalone_dump.py")), candidate.factory, str(out)]
        command += ["--keys", json.dumps(dict(candidate.overrides))]
        if self._gpu_config:
            (out / "gpu.txt").write_text(self._gpu_config)
            command += ["--gpu", str(out / "gpu.txt")]
        variables = self._variables(dataclasses.replace(place, python=""))
        done = subprocess.run(
            command, env=variables, cwd=place.folder, capture_output=True, text=True, errors="replace"
        )
        if done.returncode < 0:
            return {"status": f"signal {-done.returncode} ended the compiler's process", "dead": True}
        if done.returncode:
            return {"status": one_line((done.stderr.strip().splitlines() or ["no message"])[-1], 300)}
        dump = Candidate(candidate.point, DumpFactory.reference, {"dump": str(out / "dump")})
        answer = self._ask(Place(), dump)
        return {**answer, "versions": json.loads((out / "versions.json").read_text())}


def check_measured(measurement: Measurement, quantity: str, which: str) -> float:
    """Returns the measured bytes, FLOPs or seconds of the first or last program of a bisection.

    Args:
        measurement: the measurement of the program.
        quantity: a key of QUANTITIES.
        which: words for the program in error messages, such as "the first candidate".

    Raises ReportError if the program could not be compiled, or if its report lacks the quantity.
    """
    if measurement.status != "ok":
        raise ReportError(f"{which}, {measurement.point}, cannot be compiled: {measurement.status}")
    value = measurement.value(quantity)
    if value is None:
        raise ReportError(
            f"the report of {which}, {measurement.point}, has no {quantity}: set a bound with --bytes, or choose a "
            "target whose FLOP/s and bandwidth bytescope knows, such as h100"
        )
    return value
