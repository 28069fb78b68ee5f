"""The link between the processes of one run: from the rendezvous on (train/launch/rendezvous.py) all end if one does.

Process 0 listens where jax's own coordinator will listen afterwards; the others connect and stay connected for as
long as the run lasts. A process that dies closes its connection, whatever it was waiting for, so the others know
within milliseconds: jax alone notices after its heartbeats, with a C++ abort, and a collective may hang for ever.
The link also carries the few small values that every process must agree on: stop now, this checkpoint is damaged.

Once a second each process sends what it is doing, so that the straggler can be named (`Stalls`). A process that is
stopped, swapped out or stuck in the kernel sends no messages; a process that waits for others keeps sending where it
waits. A straggler is not ended, because it may recover.

Messages are JSON lines: `vote value`, `result values`, `error code text`, `end code text`, `at doing`, `bye`.
"""

import contextlib
import json
import math
import os
import queue
import selectors
import socket
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from bytescope.train.launch.rendezvous import LINGER_S, Peer
from bytescope.train.launch.runtime import files_warning
from bytescope.train.user_errors import Lost

BEAT_S = 1.0  # seconds between two messages of a process
SILENT_S = 5.0  # without a message for so long a process counts as silent
# A silent process is named after this share of the timeout: a long step can delay other processes, but does not stop
# messages.
SILENT_SHARE = 0.25
NAMED = 4  # processes that a line names
AGAIN = "start all processes again with the same command, the run resumes from its last checkpoint"


class Stalls:
    """Finds the straggler from this process's own steps and the messages of the others, and prints a line about it.

    Args:
      index: number of this process.
      timeout: seconds without a step after which a line is printed, SILENT_SHARE of it for a silent process; 0: never.
      tell: prints a line. clock: seconds, monotonic.
    """

    def __init__(
        self, index: int, timeout: float, tell: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ):
        self.doing = ""
        self._index, self._timeout, self._tell, self._clock = index, timeout, tell, clock
        self._last_step = self._last_look = clock()
        self._reported: float | None = None  # the stall that was printed, by the time of the last step before it
        self._heard: dict[int, tuple[float, str]] = {}

    def at(self, doing: str) -> None:
        """Records that this process makes progress, and what it does now; "" for nothing that others could wait for."""
        self.doing, self._last_step = doing, self._clock()

    def hear(self, index: int, where: str) -> None:
        """Records a message of another process: what it does, and on which host."""
        self._heard[index] = (self._clock(), where)

    def silent(self, seconds: float = 0.0) -> Mapping[int, str]:
        """Returns process -> its last known activity, for processes that sent no message for max(seconds, SILENT_S)."""
        now, limit = self._clock(), max(seconds, SILENT_S)
        return {index: where for index, (at, where) in sorted(self._heard.items()) if now - at > limit}

    def look(self) -> None:
        """Prints a stall once, and its end. Call it every BEAT_S seconds or so."""
        now, before, self._last_look = self._clock(), self._last_look, self._clock()
        early = SILENT_SHARE * self._timeout
        if now - before > SILENT_S:  # this process itself was stopped: it had no chance to hear the others
            self._heard = {index: (now, where) for index, (_, where) in self._heard.items()}
            if self.doing and 0 < early < now - before:
                self._tell(f"this process was itself stopped for {now - before:.0f} s, {self.doing}")
            return
        if self._reported is not None and self._last_step != self._reported:
            self._tell(f"it goes on, after {self._last_step - self._reported:.0f} s without a step")
            self._reported = None
        timeout = early if self.silent(early) else self._timeout
        if not self.doing or self._reported is not None or not 0 < timeout < now - self._last_step:
            return
        straggler = self._straggler(now)
        if straggler:
            self._reported = self._last_step
            self._tell(f"no step for {now - self._last_step:.0f} s: {straggler}")

    def _straggler(self, now: float) -> str:
        """Returns the processes that the others wait for, in words; "" if another process prints them."""
        silent = [
            f"process {index} has been silent for {now - self._heard[index][0]:.0f} s, last seen {where}"
            for index, where in self.silent().items()
        ]
        if silent:
            return _listed(silent)
        if self._index:
            return ""  # process 0 hears all processes, and prints it
        places = {0: self.doing, **{index: where for index, (_, where) in self._heard.items()}}
        activities = {index: where.partition(" on ")[0] for index, where in places.items()}
        usual, count = Counter(activities.values()).most_common(1)[0]
        if count == len(places):
            return f"all {count} processes are alive, {usual}"
        others = [f"process {index} is {places[index]}" for index in sorted(places) if activities[index] != usual]
        return f"{_listed(others)}; {count} of {len(places)} are {usual}"


def _listed(processes: list[str]) -> str:
    more = f"; and {len(processes) - NAMED} more" if len(processes) > NAMED else ""
    return "; ".join(processes[:NAMED]) + more


class Link:
    """The connections in use. A thread reads them, so that the end of another process is noticed at any moment.

    That thread alone ends this process, by `leave(exit code)`: at once, without waiting for collectives that hang.
    """

    def __init__(
        self,
        index: int,
        count: int,
        peers: dict[int, Peer],
        leave: Callable[[int], Any] = os._exit,
        stall_timeout: float = 0.0,
    ):
        self.index, self.count, self._peers, self._leave = index, count, peers, leave
        self._lock = threading.RLock()  # of the connections, the votes and the verdict
        self._results: queue.SimpleQueue[list[Any]] = queue.SimpleQueue()
        self._votes: list[deque[Any]] = [deque() for _ in range(count)]
        self._stalls = Stalls(index, stall_timeout, self._tell)
        self._host, self._beat, self._warned_of_files = socket.gethostname(), 0.0, False
        self._code: int | None = None  # the exit code, once all have to end
        self._deadline = math.inf
        self._reader = threading.Thread(target=self._read, name="link", daemon=True)
        self._reader.start()

    def at(self, doing: str) -> None:
        """Records that this process makes progress, and what it does now; "" for nothing that others could wait for."""
        self._stalls.at(doing)

    def gather(self, value: Any) -> list[Any]:
        """The JSON values of all processes, in the order of their numbers; waits until each has given its own."""
        if self.index:
            self._send("vote", value)
        else:
            self._vote(0, json.loads(json.dumps(value)))  # as it is now: the caller may append to it meanwhile
        return self._results.get()

    def fail(self, code: int, text: str) -> NoReturn:
        """Prints the error and ends all processes with exit code `code`. Of several errors the first one counts."""
        self._announce(code, text)
        self._reader.join()
        raise SystemExit(code)

    def settle(self, seconds: float) -> None:
        """Waits so many seconds for the error of another process; does not return if there is one."""
        self._reader.join(seconds)
        if self._code is not None:
            self._reader.join()

    def close(self) -> None:
        """Ends the link once all others end theirs; no error."""
        self._send("bye")
        for peer in self._peers.values():
            with contextlib.suppress(OSError):
                peer.connection.shutdown(socket.SHUT_WR)
        self._reader.join(LINGER_S)
        self._close_connections()  # not earlier: who closes without a `bye` counts as dead

    @property
    def label(self) -> str:
        """The prefix of the errors of this process; empty for process 0."""
        return f"[process {self.index}] " if self.index else ""

    def _send(self, *message: Any) -> None:
        """To all that this process is connected to."""
        with self._lock:
            for peer in self._peers.values():
                peer.send(*message)

    def _tell(self, line: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            print(f"{self.label}warning: {line}", file=sys.stderr, flush=True)

    def _tick(self) -> None:
        """Every BEAT_S seconds, sends the other processes what this process does, and checks whether any process is
        stuck. Warns once of many open files: Gloo keeps every connection to its port, also from other programs."""
        if (now := time.monotonic()) < self._beat + BEAT_S:
            return
        self._beat, silent = now, self._stalls.silent()
        with self._lock:
            for index, peer in self._peers.items():
                if index not in silent:  # who reads nothing would block the sender at last
                    peer.send("at", f"{self._stalls.doing} on {self._host}")
        self._stalls.look()
        if not self._warned_of_files and (line := files_warning()):
            self._warned_of_files = True
            self._tell(line)

    def _vote(self, index: int, value: Any) -> None:
        """On process 0: takes the value of one process; with the last value the result is sent to all."""
        with self._lock:
            self._votes[index].append(value)
            if all(self._votes):
                values = [votes.popleft() for votes in self._votes]
                self._send("result", values)
                self._results.put(values)

    def _announce(self, code: int, text: str) -> None:
        with self._lock:
            if self._code is not None:
                return
            self._code, self._deadline = code, time.monotonic() + LINGER_S
            with contextlib.suppress(OSError, ValueError):
                if sys.stdout.isatty():
                    sys.stdout.write("\x1b[?25h")  # the progress display may have hidden the cursor
                sys.stdout.flush()
                print(f"{self.label}error: {text}", file=sys.stderr, flush=True)
            self._send("end" if self.index == 0 else "error", code, text)

    def _read(self) -> None:
        for index, peer in self._peers.items():
            for message in peer.early:
                self._take(index, peer, message)
        with selectors.DefaultSelector() as selector:
            for index, peer in self._peers.items():
                selector.register(peer, selectors.EVENT_READ, (index, peer))
            # jax's coordinator runs in process 0, which is therefore the last to end.
            while selector.get_map() and time.monotonic() < self._deadline:
                self._tick()
                for key, _ in selector.select(BEAT_S):
                    index, peer = key.data
                    messages = peer.receive()
                    for message in messages or ():
                        self._take(index, peer, message)
                    if messages is None:
                        selector.unregister(peer)
                        if not peer.said_bye:
                            self._announce(Lost.exit_code, f"process {index} died: {AGAIN}")
        if self._code is not None:
            self._close_connections()
            self._leave(self._code)

    def _close_connections(self) -> None:
        for peer in self._peers.values():
            peer.close()

    def _take(self, index: int, peer: Peer, message: list[Any]) -> None:
        match message:
            case ["vote", value]:
                self._vote(index, value)
            case ["result", list(values)]:
                self._results.put(values)
            case ["error", int(code), str(text)]:
                self._announce(code, f"process {index}: {text}")
            case ["end", int(code), str(text)]:
                self._announce(code, text)
                self._deadline = 0.0
            case ["at", str(doing)]:
                self._stalls.hear(index, doing)
            case ["bye"]:
                peer.said_bye = True
