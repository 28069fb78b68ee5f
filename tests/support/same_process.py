"""A worker of `compare`, `fit`, `front` and `levers` without a process of its own, which would import jax first.

tests/memory/compare/test_pool.py has the real one.
"""

import json
from collections.abc import Mapping

from bytescope.memory.compare import worker
from bytescope.memory.compare.program_factory import load_factory


class KeptCaches(worker.HeldProgram):
    """Leaves jax's caches alone. The other tests of this process use them, and so do the next jobs of a test."""

    def free_memory(self) -> None:
        pass


class SameProcess:
    """Stands for worker_pool.Worker: `monkeypatch.setattr(worker_pool, "Worker", SameProcess)`."""

    def __init__(self, env: Mapping[str, str], cpu_devices: int = 0):
        self.cpu_devices = cpu_devices
        self._programs = KeptCaches()

    def ask(self, message: str) -> dict:
        try:
            job = json.loads(message)
            return worker.answer_to(job, load_factory(job["factory"]), self._programs) | {"rss_bytes": 0}
        except Exception as error:
            return {"status": worker.describe_error(error)}

    def kill(self) -> None:
        pass

    close = kill
