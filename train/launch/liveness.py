"""The link between the processes of one run. After the rendezvous (train/launch/rendezvous.py), all processes end if
one dies.

Process 0 listens at the address where jax's own coordinator will listen later. The other processes connect and stay
connected during the run. When a process dies, the system closes its connection, so the others notice within
milliseconds. jax alone would notice only after missed heartbeats and abort in C++, and a collective could hang
forever. The link also exchanges the small values that all processes must agree on, such as "stop now" or "this
checkpoint is damaged".

Once a second, each process sends what it is doing, so that the straggler can be named (`Stalls`). A process that is
stopped, swapped out or stuck in the kernel sends nothing. A process that waits for others keeps sending what it waits
for. A straggler is not ended, because it may recover.

Messages are JSON lines: `vote value`, `result values`, `error code text`, `end code text`, `at doing`, `bye`.
"""

import contextlib
import json
import math
import os
import queue
import socket
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from bytescope.train.launch.rendezvous import LINGER_S, Peer
from bytescope.train.user_errors import Lost

BEAT_S = 1.0  # seconds between two messages of a process
SILENT_S = 5.0  # seconds without a message after which a process counts as silent
# A silent process is named after this fraction of the timeout. A long step delays other processes too, but it does not
# stop their messages.
SILENT_SHARE = 0.25
AGAIN = "start all processes again with the same command, the run resumes from its last checkpoint"


class Stalls:
    """Detects a stalled run and prints a line that names the straggler, the process that the others wait for.

    Args:
      index: number of this process, from 0.
      timeout: seconds without progress after which a line is printed, or 0 for never. For a process that sends no
        messages, the time is SILENT_SHARE x timeout.
      tell: a function that prints a line.
    """

    def __init__(
        self, index: int, timeout: float, tell: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ):
        self.doing = ""
        self._index, self._timeout, self._tell, self._clock = index, timeout, tell, clock
        self._last_step = self._last_check = clock()
        self._reported: float | None = None  # time of the last step before the stall that was printed
        self._heard: dict[int, tuple[float, str]] = {}

    def at(self, doing: str) -> None:
        """Records that this process makes progress, and its current activity, such as "in step 12".

        `doing`: the activity; "" if no other process can be waiting for this one.
        """
        self.doing, self._last_step = doing, self._clock()

    def hear(self, index: int, where: str) -> None:
        """Records a message of another process. `where`: its activity and its host, such as "in step 12 on node3"."""
        self._heard[index] = (self._clock(), where)

    def silent(self, seconds: float = 0.0) -> Mapping[int, str]:
        """Returns the processes that sent nothing for max(seconds, SILENT_S) seconds: process number -> last known
        activity."""
        now, limit = self._clock(), max(seconds, SILENT_S)
        return {index: where for index, (at, where) in sorted(self._heard.items()) if now - at > limit}

    def check(self) -> None:
        """Prints a line when a stall begins and when it ends. Call it about every BEAT_S seconds."""
        now, before, self._last_check = self._clock(), self._last_check, self._clock()
        early = SILENT_SHARE * self._timeout
        if now - before > SILENT_S:  # this process was stopped, so it could not receive messages
            self._heard = {index: (now, where) for index, (_, where) in self._heard.items()}
            if self.doing and 0 < early < now - before:
                self._tell(f"this process was stopped for {now - before:.0f} s while it was {self.doing}")
            return
        if self._reported is not None and self._last_step != self._reported:
            self._tell(f"the run continues, after {self._last_step - self._reported:.0f} s without a step")
            self._reported = None
        timeout = early if self.silent(early) else self._timeout
        if not self.doing or self._reported is not None or not 0 < timeout < now - self._last_step:
            return
        straggler = self._describe_stragglers(now)
        if straggler:
            self._reported = self._last_step
            self._tell(f"no step for {now - self._last_step:.0f} s: {straggler}")

    def _describe_stragglers(self, now: float) -> str:
        """Returns text that names the processes that the others wait for, or "" if process 0 prints that text instead.

        `now`: the time of the clock in seconds.
        """
        silent = [
            f"process {index} has been silent for {now - self._heard[index][0]:.0f} s, last seen {where}"
            for index, where in self.silent().items()
        ]
        if silent:
            return "; ".join(silent)
        if self._index:
            return ""  # process 0 receives the messages of all processes and prints the line
        places = {0: self.doing, **{index: where for index, (_, where) in self._heard.items()}}
        activities = {index: where.partition(" on ")[0] for index, where in places.items()}
        usual, count = Counter(activities.values()).most_common(1)[0]
        if count == len(places):
            return f"all {count} processes are alive, {usual}"
        others = [f"process {index} is {places[index]}" for index in sorted(places) if activities[index] != usual]
        return f"{'; '.join(others)}; {count} of {len(places)} are {usual}"


class Link:
    """The connections to the other processes of the run. A thread reads each of them, so that this process notices
    immediately if another one ends.

    Only the thread `link` ends the process, by calling `leave(exit code)`, which does not wait for collectives that
    hang.

    Args:
      index: number of this process, from 0.
      count: number of processes.
      peers: process number -> connection.
      leave: function that ends the process.
      stall_timeout: seconds without progress after which a line names the straggler; 0 for never.

    Attributes:
      stalls: names the straggler. Call `stalls.at` when this process makes progress.
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
        self._lock = threading.RLock()  # guards the connections, the votes and the exit code
        self._results: queue.SimpleQueue[list[Any]] = queue.SimpleQueue()
        self._votes: list[deque[Any]] = [deque() for _ in range(count)]
        self.stalls = Stalls(index, stall_timeout, self._tell)
        self._label = f"[process {index}] " if index else ""  # the prefix of messages
        self._host, self._beat = socket.gethostname(), 0.0
        self._code: int | None = None  # the exit code, as soon as all processes must end
        self._deadline = math.inf
        self._changed = threading.Event()  # a connection has ended, or all processes must end
        self._reader = threading.Thread(target=self._watch, name="link", daemon=True)
        self._reader.start()

    def gather(self, value: Any) -> list[Any]:
        """Sends a JSON value to all processes and waits for theirs. Returns the values in order of process number."""
        if self.index:
            self._send("vote", value)
        else:
            self._collect_vote(0, json.loads(json.dumps(value)))  # a copy, since the caller may change the value later
        return self._results.get()

    def fail(self, code: int, text: str) -> NoReturn:
        """Prints the error and ends all processes with this exit code. If several processes fail, the error and exit
        code of the first are used."""
        self._announce(code, text)
        self._reader.join()
        raise SystemExit(code)

    def settle(self, seconds: float) -> None:
        """Waits up to this many seconds for an error of another process, which may have caused an error of this one.

        If one arrives, this process ends with the other's exit code.
        """
        self._reader.join(seconds)
        if self._code is not None:
            self._reader.join()

    def close(self) -> None:
        """Closes the connections at the normal end of a run, after the other processes have announced their end too."""
        self._send("bye")
        for peer in self._peers.values():
            with contextlib.suppress(OSError):
                peer.connection.shutdown(socket.SHUT_WR)
        self._reader.join(LINGER_S)
        self._close_connections()  # not earlier: a connection that is closed without a `bye` counts as a dead process

    def _send(self, *message: Any) -> None:
        with self._lock:
            for peer in self._peers.values():
                peer.send(*message)

    def _tell(self, line: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            print(f"{self._label}warning: {line}", file=sys.stderr, flush=True)

    def _tick(self) -> None:
        """Every BEAT_S seconds, sends what this process is doing and checks for stalls."""
        if (now := time.monotonic()) < self._beat + BEAT_S:
            return
        self._beat, silent = now, self.stalls.silent()
        with self._lock:
            for index, peer in self._peers.items():
                if index not in silent:  # sending to a process that does not read would block in the end
                    peer.send("at", f"{self.stalls.doing} on {self._host}")
        self.stalls.check()

    def _collect_vote(self, index: int, value: Any) -> None:
        # Process 0 collects one value from each process.
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
                sys.stdout.flush()
                print(f"{self._label}error: {text}", file=sys.stderr, flush=True)
            self._send("end" if self.index == 0 else "error", code, text)

    def _watch(self) -> None:
        readers = [threading.Thread(target=self._read, args=pair, daemon=True) for pair in self._peers.items()]
        for reader in readers:
            reader.start()
        # jax's coordinator runs in process 0, which is therefore the last to end.
        while any(reader.is_alive() for reader in readers) and time.monotonic() < self._deadline:
            self._tick()
            self._changed.wait(BEAT_S)
            self._changed.clear()
        if self._code is not None:
            self._close_connections()
            self._leave(self._code)

    def _read(self, index: int, peer: Peer) -> None:
        while (message := peer.receive()) is not None:
            match message:
                case ["vote", value]:
                    self._collect_vote(index, value)
                case ["result", list(values)]:
                    self._results.put(values)
                case ["error", int(code), str(text)]:
                    self._announce(code, f"process {index}: {text}")
                case ["end", int(code), str(text)]:
                    self._announce(code, text)
                    self._deadline = 0.0
                    self._changed.set()
                case ["at", str(doing)]:
                    self.stalls.hear(index, doing)
                case ["bye"]:
                    peer.said_bye = True
        if not peer.said_bye:
            self._announce(Lost.exit_code, f"process {index} died: {AGAIN}")
        self._changed.set()

    def _close_connections(self) -> None:
        for peer in self._peers.values():
            peer.close()
