"""Records of an audit: what a program asks jax and XLA to do (its requests), and whether the compiled program does it.

A request is something that the user's code asks for: to recompute, save or offload a value, to donate an argument, or
to keep an array sharded. All sizes are bytes on one device, and all FLOPs are FLOPs of one call of the step on one
device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

# Kind of a request -> what the request is about.
KINDS = {
    "checkpoint": "a function under jax.checkpoint, whose values the backward pass recomputes",
    "name": "a value with a checkpoint_name that a remat policy saves, offloads or recomputes",
    "offload": "a value that is kept in host memory",
    "donation": "a donated argument, whose memory a result reuses",
    "sharding": "an array that stays sharded, so that each device holds only its part",
}
# Values of `asked`, and the value of `done` that honors each of them.
HONORED_BY = {
    "recompute": "recomputed",
    "save": "kept",
    "offload": "offloaded",
    "donate": "reused",
    "divide": "divided",
}
UNKNOWN = "unknown"
# Values of `done` for requests that were not honored: "ignored" (for example, a policy lists a name that no value has),
# "copied" (no result reuses the donated memory), "replicated" (every device holds the whole array).
OTHER_OUTCOMES = ("ignored", "copied", "replicated")
# Values of `undone_by`, in the order in which jax and XLA run these steps. "copies": XLA copies an array that is read
# after its memory is overwritten. "scheduler": XLA orders the instructions so that the request has no effect.
STEPS = (
    "tracing",
    "autodiff",
    "lowering",
    "partitioner",
    "cse",
    "offloader",
    "rematerialization",
    "copies",
    "scheduler",
)
# Steps whose effect is read from the jaxpr. Effects of the other steps are inferred from the compiled program.
_IN_JAXPR = ("tracing", "autodiff")


@dataclasses.dataclass(frozen=True)
class AuditRow:
    """One request of a program (something that the user's code asks jax or XLA to do), and what the compiled program
    does.

    Fields:
        kind: the kind of the request, a key of `KINDS`.
        subject: what the request is about: the checkpointed function, the checkpoint name, or the pytree path of the
            argument.
        source: "file.py:line" of the request in the user's code; "" if unknown.
        asked: what the user's code asks for, a key of `HONORED_BY`; "unknown" for a program without a jaxpr, such as an
            HLO dump.
        done: what the compiled program does, a value of `HONORED_BY` or of `OTHER_OUTCOMES`; "unknown" if this cannot
            be found out.
        bytes: bytes on one device of the values that the request is about.
        flops: FLOPs that recompute these values in one step on one device; 0 if nothing is recomputed, or if unknown.
        undone_by: the step of jax or XLA because of which the request was not honored, an element of `STEPS`; "" if the
            request was honored, or if the step is unknown.
        message: one sentence that says what happened and how to change it; "" if the request was honored.
        count: number of equal requests that this row stands for, such as one in each layer of an unrolled loop.
        compiler_pass: pipeline and pass of XLA's compiler that undid the request, such as "simplification/cse"; "" if
            unknown. The pass is known only if the program was compiled with dumps of all passes (`audit --passes`).
        wire_bytes: bytes that one device sends to others in one step because the request was not honored; 0 if none, or
            if unknown.
    """

    kind: str
    subject: str
    source: str = ""
    asked: str = UNKNOWN
    done: str = UNKNOWN
    bytes: int = 0
    flops: int = 0
    undone_by: str = ""
    message: str = ""
    count: int = 1
    wire_bytes: int = 0
    compiler_pass: str = ""

    @property
    def honored(self) -> bool | None:
        """True if the compiled program does what the user's code asks for, False if not, None if `asked` or `done` is
        unknown."""
        if UNKNOWN in (self.asked, self.done):
            return None
        return HONORED_BY[self.asked] == self.done

    @property
    def inferred(self) -> bool:
        """True if `undone_by` is inferred: the compiled program shows that the request was not honored, but not which
        step undid it. False if the jaxpr shows the step, or if `compiler_pass` names the pass of XLA."""
        steps = ("", *_IN_JAXPR)
        return self.honored is False and self.undone_by not in steps and not self.compiler_pass


@dataclasses.dataclass(frozen=True)
class JudgedRequest(AuditRow):
    """A request of a program with the outcome."""

    COMPUTED_KEYS: ClassVar[tuple[str, ...]] = ("honored", "inferred")


@dataclasses.dataclass(frozen=True)
class AuditResult:
    """The result of an audit.

    Fields:
        program: the name of the program.
        target: the device that the program was compiled for; {} if unknown.
        versions: package -> version for the packages that compiled the program.
        requests: what the program asks jax and XLA to do, and what the compiled program does.
    """

    COMPUTED_KEYS: ClassVar[tuple[str, ...]] = ("honored", "not_honored", "unknown")

    program: str
    target: Mapping[str, Any]
    versions: Mapping[str, str]
    requests: tuple[JudgedRequest, ...]

    @property
    def honored(self) -> int:
        """Number of requests that the compiled program honors."""
        return sum(row.honored is True for row in self.requests)

    @property
    def not_honored(self) -> int:
        """Number of requests that the compiled program does not honor."""
        return sum(row.honored is False for row in self.requests)

    @property
    def unknown(self) -> int:
        """Number of requests of which the outcome is unknown."""
        return sum(row.honored is None for row in self.requests)
