"""CPU seconds of each test, child processes that ended included: `pytest --times=FILE` writes them as JSON.

Wall time depends on what else the machine does; CPU time does not, so two runs of the suite can be compared by it.
"""

import json
import resource
from collections import defaultdict
from pathlib import Path

import pytest


def cpu_seconds() -> float:
    """CPU seconds of this process, all its threads, and the children that it has waited for."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


class Times:
    """Measures each phase of a test in the process that runs it; writes the file in the process that was started."""

    def __init__(self, config: pytest.Config, path: Path):
        self._config, self._path = config, path
        self._tests: dict[str, float] = defaultdict(float)
        self._workers: list[float] = []
        self._phase_cpu_s = 0.0

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item):
        return (yield from self._measure())

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item):
        return (yield from self._measure())

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item):
        return (yield from self._measure())

    def _measure(self):
        before = cpu_seconds()
        try:
            return (yield)
        finally:
            self._phase_cpu_s = cpu_seconds() - before

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item, call):
        report = yield
        report.cpu_s = self._phase_cpu_s  # pytest-xdist sends a report's attributes to the process that was started
        return report

    def pytest_runtest_logreport(self, report):
        self._tests[report.nodeid] += report.cpu_s

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node, error):
        self._workers.append(getattr(node, "workeroutput", {}).get("cpu_s", 0.0))

    def pytest_sessionfinish(self, session):
        """Collection, which imports every test file, is in the totals alone."""
        if hasattr(self._config, "workeroutput"):
            self._config.workeroutput["cpu_s"] = cpu_seconds()

    def pytest_unconfigure(self, config):
        if hasattr(config, "workeroutput"):
            return
        tests = dict(sorted(self._tests.items(), key=lambda item: -item[1]))
        found = {
            "total_cpu_s": round(sum(self._workers) or cpu_seconds(), 1),
            "tests_cpu_s": round(sum(tests.values()), 1),
            "tests": {name: round(seconds, 3) for name, seconds in tests.items()},
        }
        self._path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
