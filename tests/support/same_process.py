"""A worker of `compare`, `fit`, `front` and `levers` without a process of its own, which would import jax first.

tests/memory/compare/test_pool.py has the real one.
"""

import json
from collections.abc import Mapping

from bytescope.memory.compare import worker
from bytescope.train.plan.adapter import Adapter


class SameProcess:
    """Stands for worker_pool.Worker: `monkeypatch.setattr(worker_pool, "Worker", SameProcess)`."""

    def __init__(self, env: Mapping[str, str]):
        pass

    def ask(self, message: str) -> dict:
        try:
            return worker.answer_to(json.loads(message), Adapter()) | {"rss_bytes": 0}
        except Exception as error:
            return {"status": worker.one_line(error)}

    def kill(self) -> None:
        pass

    close = kill
