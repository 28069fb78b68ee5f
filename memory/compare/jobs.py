"""Creates the compile jobs of a comparison. A job has config overrides, a target, and the name of its cached result."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from bytescope.memory.compare import row_cache
from bytescope.memory.compare.program_factory import ProgramFactory
from bytescope.memory.compare.worker_pool import Job
from bytescope.memory.seconds import rates


class Jobs:
    """Creates the compile jobs of one comparison. A worker process compiles the program of a job.

    A job's name is the cache key of its row, so two jobs with the same name compile the same program. Package versions
    and the digest of the source files are determined once, when this object is created.

    Args:
        factory: makes the programs.
        versions: package -> version used for compiling (default: the installed versions).
        more_sources: a digest of further files that decide what the program computes, or "".
    """

    def __init__(
        self, factory: ProgramFactory, versions: Mapping[str, str] | None = None, more_sources: str = ""
    ) -> None:
        from bytescope.memory.devices import compiler

        self.factory = factory
        self._versions = compiler.versions() if versions is None else versions
        self._sources = more_sources + row_cache.digest_files(
            [*row_cache.source_files(row_cache.MAKING_ROWS), *factory.sources()]
        )
        self._choosing: dict[tuple[str, ...], str] = {}

    def job(
        self,
        overrides: Mapping[str, Any],
        target: str,
        label: str = "",
        *,
        method: str = "",
        measure: bool = False,
    ) -> Job:
        """Returns the job that makes a worker process compile one program for a target.

        Args:
            overrides: config keys and values that define the program.
            target: the name of the target.
            label: the text shown while the worker compiles.
            method: name of a method of the program factory that the worker calls instead of compiling. Its result is
                the worker's answer.
            measure: whether the worker also runs the step. The answer is then cached for this machine only.

        Raises the factory's errors for an unknown key or a wrong value.
        """
        factory = self.factory
        resolved = factory.resolve(overrides)
        name = self.name(resolved, target, measure)
        if method:
            name += f"-{method}"
        chosen = rates.chosen()
        return Job(
            factory.reference,
            overrides,
            target,
            name,
            label,
            resolved,
            method=method,
            rates=str(chosen) if chosen else None,
        )

    def name(self, resolved: Mapping[str, Any], target: str, measure: bool = False) -> str:
        """Returns the name of the cached row of a program. `resolved`: every config key with its value."""
        return row_cache.key(
            resolved,
            target,
            self._versions,
            self._sources,
            measure,
            factory=self.factory.reference,
            choice=self._digest_open_choices(resolved),
        )

    def _digest_open_choices(self, resolved: Mapping[str, Any]) -> str:
        """Returns a digest of the source files and device rates that choose settings which the config leaves open, such
        as the tensors saved by `remat.policy=auto`. It is part of the cache key, so a change makes cached results
        invalid. Returns "" if the config sets everything.

        resolved: every config key with its value.
        """
        files = self.factory.choosing_sources(resolved)
        if not files:
            return ""
        names = tuple(map(str, files))
        if names not in self._choosing:
            self._choosing[names] = row_cache.digest_files(files)
        return self._choosing[names] + rates.digest()


def with_cpu_devices(job: Job) -> Job:
    """Returns the job with as many simulated CPU devices as its target has devices. A user's function needs them
    because it builds its mesh from the devices of the worker process.

    Raises ReportError for an unknown target.
    """
    from bytescope.memory.devices import targets
    from bytescope.memory.devices.chips import base_name

    if base_name(job.target) in ("local", "cpu"):
        return job
    return dataclasses.replace(job, cpu_devices=targets.parse(job.target).n_devices)
