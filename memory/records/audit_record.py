"""Records of an audit: the requests of a program to jax and XLA, each with what the compiled program does instead or as
asked. All sizes are bytes on one device, all FLOPs those of one call of the step on one device."""

from __future__ import annotations

import dataclasses

# Kind of a request -> the request in words.
KINDS = {
    "checkpoint": "a call of jax.checkpoint, whose values are computed again in the backward pass",
    "name": "a value with a checkpoint_name that a remat policy saves, offloads or recomputes",
    "offload": "a value that moves to host memory and back",
    "donation": "a donated argument, whose memory a result reuses",
    "random": "random bits that the backward pass draws again",
    "sharding": "an array that stays divided over the devices",
}
# Values of `asked`, and the value of `done` that honors each of them.
HONORED_BY = {
    "recompute": "recomputed",
    "save": "kept",
    "offload": "offloaded",
    "donate": "reused",
    "repeat": "repeated",
    "divide": "divided",
}
UNKNOWN = "unknown"
# Values of `done` that honor no request: "ignored" (for example, no value has the name of a policy), "copied" (no
# result reuses the donated memory), "redrawn" (other random bits), "replicated" (every device holds the whole array).
OTHER_OUTCOMES = ("ignored", "copied", "redrawn", "replicated")
# Values of `undone_by`, in the order in which jax and XLA run these steps. "copies": XLA copies an array that is read
# after its memory is overwritten.
STEPS = (
    "tracing",
    "autodiff",
    "lowering",
    "partitioner",
    "cse",
    "offloader",
    "rematerialization",
    "fusion",
    "copies",
    "runtime",
)


@dataclasses.dataclass(frozen=True)
class AuditRow:
    """A request of the program, and what the compiled program does.

    Fields:
        kind: the kind of the request, a key of `KINDS`.
        subject: the function under jax.checkpoint, the checkpoint name, or the pytree path of the argument.
        source: "file.py:line" of the request in the user's code; "" if unknown.
        asked: the request, a key of `HONORED_BY`; "unknown" for a program without a jaxpr, such as an HLO dump.
        done: the outcome, a value of `HONORED_BY` or of `OTHER_OUTCOMES`; "unknown" if it cannot be told.
        bytes: bytes of the values of the request.
        flops: FLOPs of the values of the request that are computed again; 0 if there are none or if it is unknown.
        undone_by: the step of jax or XLA that undid the request, of `STEPS`; "" if the request was honored, or if the
            step is unknown.
        message: what happened and how to change it, in one sentence; "" if the request was honored.
        count: number of values of the request, such as the layers of a loop that is unrolled.
        wire_bytes: bytes that one device sends to others in a step because the request was not honored; 0 if there are
            none or if it is unknown.
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

    @property
    def honored(self) -> bool | None:
        """Whether the compiled program does what was asked; None if the request or the outcome is unknown."""
        if UNKNOWN in (self.asked, self.done):
            return None
        return HONORED_BY[self.asked] == self.done
