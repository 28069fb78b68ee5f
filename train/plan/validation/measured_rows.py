"""A measured run, and how a config of ours says it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class Row:
    """One run that somebody measured.

    Fields:
        set, id: which it is. model, chip, gpus: of what and on what; scores are by model and GPUs.
        config, overrides (dotted key -> text), target: what compiles our nearest program; empty where there is none.
        measured_seconds: of an update. measured_bytes: of one device. None where the source does not say.
        quality: A read from a table, log or script with the setup known; B a fact or two derived; C prose.
        source: where the figures were read. reason: why this row is not compiled or not scored; "" for one that is.
        setup: what tells it from others of its model, in words.
        tensor: devices that share a layer's products, by which a person would sort. stages: of its pipeline.
        launch_seconds: what the host of the measured framework needs at least to launch the update; 0 where launches
            were no bound, or are not known. Our programs have no such floor.
        host_bound: whether launches set its pace, so that its level says nothing of the device; None where not known.
        network: of `seconds.achieved.NETWORKS`, that joins its hosts; "" for that of its chip's table.
        differs: what is known to set the measured run apart from what is predicted, in words.
        bytes_are: what `measured_bytes` is: "reserved" (an upper bound of what was needed), "allocated" or "".
        bytes_reason: why ours are not compared with `measured_bytes`; "" where they are.
        cohort: the rows over all models that are scored together, such as those of a quality and a vintage; "" where
            models and numbers of GPUs are not pooled.
    """

    set: str
    id: str
    model: str
    chip: str
    gpus: int
    overrides: Mapping[str, str]
    config: str
    target: str
    measured_seconds: float | None
    measured_bytes: int | None
    quality: str
    source: str
    reason: str = ""
    setup: str = ""
    tensor: int = 1
    stages: int = 1
    launch_seconds: float = 0.0
    host_bound: bool | None = None
    network: str = ""
    differs: str = ""
    bytes_are: str = ""
    bytes_reason: str = ""
    cohort: str = ""

    @property
    def source_id(self) -> str:
        """The source's short name."""
        return self.source.partition(":")[0]
