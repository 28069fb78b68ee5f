"""A worker of `compare`, `fit`, `front` and `levers` without a process of its own, which would import jax first.

tests/memory/compare/test_pool.py has the real one.
"""

import json
from collections.abc import Mapping

from bytescope.memory.compare import worker
from bytescope.memory.compare.program_factory import load_factory


class SameProcess:
    """Stands for worker_pool.Worker: `monkeypatch.setattr(worker_pool, "Worker", SameProcess)`."""

    def __init__(self, env: Mapping[str, str], cpu_devices: int = 0):
        self.cpu_devices = cpu_devices

    def ask(self, message: str) -> dict:
        try:
            job = json.loads(message)
            return worker.answer_to(job, load_factory(job["factory"])) | {"rss_bytes": 0}
        except Exception as error:
            return {"status": worker.describe_error(error)}

    def kill(self) -> None:
        pass

    close = kill
