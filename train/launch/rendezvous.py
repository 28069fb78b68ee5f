"""Connects the processes of one run before it starts: either all processes connect, or none starts.

Messages are JSON lines: `hello index count token`, `stranger` and `go`. The messages of a run in progress are in
train/launch/liveness.py. Process 0 listens for the others. It closes connections that send
a wrong token or nothing. The token is BYTESCOPE_TOKEN if a launcher sets it. Otherwise process 0 creates a token for
this start and, while it waits, stores it in a file that only its user may read, in the run directory that all
processes share.
"""

import contextlib
import hmac
import json
import os
import secrets
import socket
import time
from pathlib import Path
from typing import Any

from bytescope.memory import environment
from bytescope.memory.units import plural
from bytescope.train.user_errors import Lost, UserError

# A machine that loses power does not close its connections. TCP probes them after 20 s of silence, and gives up after
# four probes, 10 s apart.
KEEPALIVE = (("TCP_KEEPIDLE", 20), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 4))
RETRY_S = 0.05
HELLO_S = 1.0  # seconds within which a connection has to send its hello; the others wait meanwhile
HELLO_BYTES = 4096  # maximum bytes of a hello
TOKEN_VARIABLE = "BYTESCOPE_TOKEN"
TOKEN_FILE = ".rendezvous"
# Process 0 listens only on this machine if the processes are all on it, else on all addresses: the name by which other
# machines know this one may be another address here, and a router may translate addresses.
LOOPBACK = {"localhost": "127.0.0.1", "127.0.0.1": "127.0.0.1", "::1": "::1"}
LINGER_S = 10.0  # seconds that a process which fails waits for the others to end


class Peer:
    """A connection to another process of the run, which sends and receives messages, one line each."""

    def __init__(self, connection: socket.socket):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in KEEPALIVE:
            if hasattr(socket, name):  # some systems lack these options
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self.connection, self.said_bye = connection, False
        self._lines = connection.makefile("rb")

    def close(self) -> None:
        """Closes the connection, also while a thread reads from it. If the message `bye` was not sent before, the other
        process assumes that this one has died."""
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)  # ends a read that waits
        self._lines.close()
        self.connection.close()

    def send(self, *message: Any) -> None:
        """Sends one message, a list of JSON values. Errors are ignored, because the reading thread notices a closed
        connection."""
        with contextlib.suppress(OSError):
            self.connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, max_bytes: int = -1) -> list[Any] | None:
        """Waits for the next message and returns it. Returns None if the connection was closed, if nothing arrived
        within its timeout, or if the bytes are not a message of at most `max_bytes`."""
        try:
            return list(json.loads(self._lines.readline(max_bytes)))
        except (OSError, ValueError, TypeError, RecursionError):
            return None


class Token:
    """The file with the secret by which the processes of a run recognize each other.

    Args:
      workdir: the run directory, in which the file is written. If it is None (not known yet), the file is in `runs` in
        the current folder.
      port: the port of process 0, a part of the file name. It differs between concurrent runs.
    """

    def __init__(self, workdir: Path | None, port: int):
        place = workdir or Path("runs") / "new"
        self._given = environment.text(TOKEN_VARIABLE)
        # Inside the run directory if it exists, since it may be the only directory that the machines share.
        self._files = (place / TOKEN_FILE, place.parent / f"{TOKEN_FILE}-{port}")

    def make(self) -> str:
        """Creates the secret and the file. Returns the secret that process 0 requires of other processes. Returns ""
        if the file cannot be written; every process is then admitted."""
        if self._given:
            return self._given
        word = secrets.token_hex(16)
        path = self._files[0] if self._files[0].parent.is_dir() else self._files[1]
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)  # left by a start that was killed
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(word)
        except OSError:
            return ""
        return word

    def read(self) -> str:
        """Returns the secret that this process must send to process 0; "" if the file does not exist yet."""
        if self._given:
            return self._given
        for path in self._files:
            with contextlib.suppress(OSError, ValueError):
                word = path.read_text().strip()
                if word:
                    return word
        return ""

    def remove(self) -> None:
        """Removes the file with the secret that `make` created."""
        if not self._given:
            for path in self._files:
                with contextlib.suppress(OSError):
                    path.unlink(missing_ok=True)


def meet(host: str, port: int, index: int, count: int, timeout: float, token: Token) -> dict[int, Peer]:
    """Connects the `count` processes of a run. Returns the connections of this process: process number -> connection.

    Process 0 has a connection to every other process. Other processes have one connection, to process 0.

    Raises:
      Lost: not all processes connected within `timeout` seconds.
      UserError: the port is already in use, or the processes were given contradicting numbers.
    """
    if index:
        return {0: _join(host, port, index, count, timeout, token)}
    try:
        return _welcome(host, port, count, timeout, token.make())
    finally:
        token.remove()


def _welcome(host: str, port: int, count: int, timeout: float, token: str) -> dict[int, Peer]:
    peers: dict[int, Peer] = {}
    rejected, deadline = 0, time.monotonic() + timeout
    try:
        with _listen(host, port) as listener:
            while len(peers) < count - 1 and time.monotonic() < deadline:
                try:
                    connection = listener.accept()[0]
                    connection.settimeout(HELLO_S)
                    peer = Peer(connection)
                except OSError:  # nobody has connected, or the connection is already closed
                    continue
                match peer.receive(HELLO_BYTES):
                    case ["hello", int(index), int(theirs), str(given)] if _token_matches(given, token):
                        connection.settimeout(None)
                        _admit(peer, index, theirs, count, peers)
                    case _:
                        rejected += 1
                        peer.send("stranger")
                        peer.close()
        if missing := sorted(set(range(1, count)) - set(peers)):
            others = f" ({plural(rejected, 'connection')} without the right token rejected)" if rejected else ""
            names = f"{'process' if len(missing) == 1 else 'processes'} {', '.join(map(str, missing))}"
            raise Lost(
                f"{names} of {count} did not connect within {timeout:g} s{others}: look at their "
                "output, or give a longer --timeout"
            )
    except UserError as error:
        for peer in peers.values():
            peer.send("end", error.exit_code, str(error))
            peer.close()
        raise
    for peer in peers.values():
        peer.send("go")
    return peers


def _token_matches(given: str, wanted: str) -> bool:
    # The comparison takes the same time for every wrong token.
    return not wanted or hmac.compare_digest(given.encode("utf-8", "surrogatepass"), wanted.encode())


def _admit(peer: Peer, index: int, theirs: int, count: int, peers: dict[int, Peer]) -> None:
    known = peers.get(index)
    peers[index] = peer  # before the checks, so that this process also gets the error
    if known or not 0 < index < count:
        text = f"process {index} of {count} connected twice: give each process its own --process, counted from 0"
        if known:
            known.send("end", UserError.exit_code, text)
            known.close()
        raise UserError(text)
    if theirs != count:
        raise UserError(
            f"process {index} was started with --processes={theirs}, but process 0 with --processes={count}: give "
            "all processes the same number"
        )


def _listen(host: str, port: int) -> socket.socket:
    address = LOOPBACK.get(host, "")
    dual = not address and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if ":" in address or dual else socket.AF_INET
    try:
        listener = socket.create_server((address, port), family=family, dualstack_ipv6=dual, backlog=1024)
    except OSError as error:
        raise UserError(
            f"process 0 cannot listen on port {port} ({error.strerror}): choose another port for --coordinator"
        ) from error
    listener.settimeout(RETRY_S)
    return listener


def _join(host: str, port: int, index: int, count: int, timeout: float, token: Token) -> Peer:
    deadline, reason = time.monotonic() + timeout, None
    while (left := deadline - time.monotonic()) > 0:
        try:
            peer = Peer(socket.create_connection((host, port), timeout=left))
        except OSError as error:  # process 0 does not listen yet, or its name does not resolve yet
            reason = error.strerror or str(error)
            time.sleep(RETRY_S)
            continue
        peer.send("hello", index, count, token.read())  # read late: process 0 writes the token before it listens
        peer.connection.settimeout(timeout + LINGER_S)  # process 0 answers when its own timeout is over
        answer = peer.receive()
        match answer:
            case ["go"]:
                peer.connection.settimeout(None)
                return peer
            case ["end", int(code), str(text)]:
                peer.close()
                raise Lost(text) if code == Lost.exit_code else UserError(text)
        if answer == ["stranger"]:
            reason = (
                f"it rejected the token of this process: give all processes a shared --workdir, or the same "
                f"{TOKEN_VARIABLE}"
            )
        peer.close()  # without an answer: process 0 may start again
        time.sleep(RETRY_S)
    detail = f" ({reason})" if reason else ""
    raise Lost(
        f"process 0 did not answer at {host}:{port} within {timeout:g} s{detail}: check that it runs and that "
        "the address is right"
    )
