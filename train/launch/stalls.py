"""Finds the straggler from the messages that each process sends every second.

A process that is stopped, swapped out or stuck in the kernel sends no messages; a process that waits for others keeps
sending where it waits. No process is ended, because the straggler may recover.
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping

BEAT_S = 1.0  # seconds between two messages of a process
SILENT_S = 5.0  # without a message for so long a process counts as silent
# A silent process is named after this share of the timeout: a long step can delay other processes, but does not stop
# messages.
SILENT_SHARE = 0.25
NAMED = 4  # processes that a line names


class Stalls:
    """The steps of this process and the messages of the others, and what is to be told of them.

    Args:
      timeout: seconds without a step after which a line is printed, SILENT_SHARE of it for a silent process; 0: never.
      tell: prints a line. clock: seconds, monotonic.
    """

    def __init__(
        self, index: int, timeout: float, tell: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ):
        self.doing = ""
        self._index, self._timeout, self._tell, self._clock = index, timeout, tell, clock
        self._moved = self._looked = clock()
        self._told_of: float | None = None  # the stall that was told, by the moment of the last step before it
        self._heard: dict[int, tuple[float, str]] = {}

    def at(self, doing: str) -> None:
        """This process goes on, with what `doing` says; "" for nothing that others could wait for."""
        self.doing, self._moved = doing, self._clock()

    def hear(self, index: int, where: str) -> None:
        """Another process said where it is and what it does."""
        self._heard[index] = (self._clock(), where)

    def silent(self, seconds: float = 0.0) -> Mapping[int, str]:
        """Returns process -> its last known activity, for processes that sent no message for max(seconds, SILENT_S)."""
        now, limit = self._clock(), max(seconds, SILENT_S)
        return {index: where for index, (at, where) in sorted(self._heard.items()) if now - at > limit}

    def look(self) -> None:
        """Tells of a stall once, and of its end. To be called every BEAT_S or so."""
        now, before, self._looked = self._clock(), self._looked, self._clock()
        if now - before > SILENT_S:  # it was this process that was stopped: the others have had no chance to be heard
            self._heard = {index: (now, where) for index, (_, where) in self._heard.items()}
            if self.doing and 0 < SILENT_SHARE * self._timeout < now - before:
                self._tell(f"this process was itself stopped for {now - before:.0f} s, {self.doing}")
            return
        if self._told_of is not None and self._moved != self._told_of:
            self._tell(f"it goes on, after {self._moved - self._told_of:.0f} s without a step")
            self._told_of = None
        early = SILENT_SHARE * self._timeout
        timeout = early if self.silent(early) else self._timeout
        stalled = self.doing and 0 < timeout < now - self._moved
        if stalled and self._told_of is None and (who := self._who(now)):
            self._told_of = self._moved
            self._tell(f"no step for {now - self._moved:.0f} s: {who}")

    def _who(self, now: float) -> str:
        """The processes that hold the others up, in words; "" for one whose part it is not to say that."""
        if silent := self.silent():
            named = [
                f"process {index} has been silent for {now - self._heard[index][0]:.0f} s, last seen {where}"
                for index, where in silent.items()
            ]
            return _first(named)
        if self._index:
            return ""  # process 0 hears all, and tells it
        places = {0: self.doing, **{index: where for index, (_, where) in self._heard.items()}}
        usual, count = Counter(where.partition(" on ")[0] for where in places.values()).most_common(1)[0]
        if count == len(places):
            return f"all {count} processes are alive, {usual}"
        others = [
            f"process {index} is {where}"
            for index, where in sorted(places.items())
            if where.partition(" on ")[0] != usual
        ]
        return f"{_first(others)}; {count} of {len(places)} are {usual}"


def _first(named: list[str]) -> str:
    more = f"; and {len(named) - NAMED} more" if len(named) > NAMED else ""
    return "; ".join(named[:NAMED]) + more
