"""The link between the processes of one run: from the rendezvous on (train/launch/rendezvous.py) all end if one does.

Process 0 listens where jax's own coordinator will listen afterwards; the others connect and stay connected for as
long as the run lasts. A process that dies closes its connection, whatever it was waiting for, so the others know
within milliseconds: jax alone notices after its heartbeats, with a C++ abort, and a collective may hang for ever.
The link also carries the few small values that every process must agree on: stop now, this checkpoint is damaged.

It carries too, once a second, what each is doing, so that a slow one can be named (train/launch/stalls.py).

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
from collections import deque
from collections.abc import Callable
from typing import Any, NoReturn

from bytescope.train.launch.rendezvous import LINGER_S, Peer
from bytescope.train.launch.runtime import files_warning
from bytescope.train.launch.stalls import BEAT_S, Stalls
from bytescope.train.user_errors import Lost

AGAIN = "start all processes again with the same command, the run resumes from its last checkpoint"


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
        """This process goes on, with what `doing` says; "": with nothing that others could wait for."""
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
