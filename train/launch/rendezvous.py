"""The connections between the processes of one run, and how they are made: all processes connect, or none starts.

Messages are JSON lines: `hello index count token`, `stranger` and `go` here; the messages of a run in progress are in
train/launch/liveness.py. Process 0 listens on the address that the others use. It closes connections that send a wrong
token, or nothing. The token is BYTESCOPE_TOKEN if a launcher sets it. Otherwise process 0 makes one for this start and
leaves it in a file that only its user may read, in the run directory that all processes share, while it waits.
"""

import contextlib
import hmac
import ipaddress
import json
import os
import secrets
import selectors
import socket
import time
from pathlib import Path
from typing import Any

from bytescope.train.user_errors import Lost, UserError

# A machine that loses power closes no connection: probes after 20 s of silence, given up after four, 10 s apart.
KEEPALIVE = (("TCP_KEEPIDLE", 20), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 4))
RETRY_S = 0.05
HELLO_S = 10.0  # seconds within which a connection has to say who it is
STRANGERS = 64  # connections that may be about to say it, besides those that are awaited
HELLO_BYTES = 4096  # that a hello may have
TOKEN_VARIABLE = "BYTESCOPE_TOKEN"
TOKEN_FILE = ".rendezvous"
LINGER_S = 10.0  # seconds that a process which fails waits for the others to end


class Peer:
    """One connection to another process: complete messages in and out."""

    def __init__(self, connection: socket.socket):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in KEEPALIVE:
            if hasattr(socket, name):  # not everywhere
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self.connection, self.said_bye, self._rest = connection, False, b""
        self.limit: int | None = None  # bytes of one message
        self.early: list[list[Any]] = []  # messages that arrived before there was a `Link` to handle them

    def close(self) -> None:
        """Closes the connection; without a `bye` before, the other side takes this process for dead."""
        self.connection.close()

    def fileno(self) -> int:
        """The file descriptor, by which a selector waits for messages."""
        return self.connection.fileno()

    def send(self, *message: Any) -> None:
        """Sends one message of JSON values. An error is ignored: the reader will notice that the receiver is gone."""
        with contextlib.suppress(OSError):
            self.connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[list[Any]] | None:
        """The messages that have arrived, after waiting for some bytes; None once the other side is gone.

        Raises:
          TimeoutError: nothing arrived within the connection's timeout.
        """
        try:
            content = self.connection.recv(1 << 16)
        except TimeoutError:  # an OSError too
            raise
        except OSError:
            return None
        if not content:
            return None
        *lines, self._rest = (self._rest + content).split(b"\n")
        if self.limit is not None and max(map(len, (*lines, self._rest))) > self.limit:
            return None
        try:
            return [list(json.loads(line)) for line in lines]
        except (ValueError, TypeError, RecursionError):  # another protocol
            return None


class Token:
    """The secret word by which the processes of one start of a run recognize each other.

    Args:
      workdir: the run directory; None if it is not known yet: then the file is in `runs` in the current folder.
      port: the port of process 0; concurrent runs have different ones.
    """

    def __init__(self, workdir: Path | None, port: int):
        place = workdir or Path("runs") / "new"
        # In the directory where it exists already: it may be all that the machines share.
        self._files = (place / TOKEN_FILE, place.parent / f"{TOKEN_FILE}-{port}")
        self._made: Path | None = None

    def make(self) -> str:
        """Returns the word that process 0 asks for; "" if no file can be written: then every process is admitted."""
        given = os.environ.get(TOKEN_VARIABLE, "")
        if given:
            return given
        word = secrets.token_hex(16)
        path = self._files[0] if self._files[0].parent.is_dir() else self._files[1]
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)  # of a start that was killed
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(word)
        except OSError:
            return ""
        self._made = path
        return word

    def read(self) -> str:
        """Returns the word that another process has to send; "" if there is none yet."""
        given = os.environ.get(TOKEN_VARIABLE, "")
        if given:
            return given
        for path in self._files:
            with contextlib.suppress(OSError, ValueError):
                word = path.read_text().strip()
                if word:
                    return word
        return ""

    def remove(self) -> None:
        """Removes the file."""
        if self._made is not None:
            with contextlib.suppress(OSError):
                self._made.unlink(missing_ok=True)


def token_matches(given: str, wanted: str) -> bool:
    """Returns whether a word is the right one, in a time that does not depend on how much of it is right."""
    return not wanted or hmac.compare_digest(given.encode(), wanted.encode())


def meet(host: str, port: int, index: int, count: int, timeout: float, token: Token) -> dict[int, Peer]:
    """Waits until all `count` processes are connected; returns the peers of this one (process 0: all, others: 0).

    Raises:
      Lost: not all connected within `timeout` seconds.
      UserError: the port is taken, or two processes disagree on their numbers.
    """
    if index:
        return {0: _join(host, port, index, count, timeout, token)}
    try:
        return _welcome(host, port, count, timeout, token.make())
    finally:
        token.remove()


def own_address(host: str) -> str:
    """The address of this machine to listen at so that others reach it by the name or address `host`; "" for all.

    A name that means the loopback here, as a machine's own name often does, is another address elsewhere; an address
    that is none of this machine's is translated on the way. Both need all.
    """
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return ""
    for family, _, _, _, (name, *_) in found:
        address = str(name)
        if ipaddress.ip_address(address.partition("%")[0]).is_loopback and host != "localhost" and not _literal(host):
            return ""
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))
            return address
    return ""


def _literal(host: str) -> bool:
    try:
        return bool(ipaddress.ip_address(host.partition("%")[0]))
    except ValueError:
        return False


def _welcome(host: str, port: int, count: int, timeout: float, token: str) -> dict[int, Peer]:
    peers: dict[int, Peer] = {}
    try:
        with _listen(host, port) as listener:
            strangers = _Door(listener, count, token, peers).watch(time.monotonic() + timeout)
        if missing := sorted(set(range(1, count)) - set(peers)):
            turned = f" ({strangers} connections of others were turned away)" if strangers else ""
            raise Lost(
                f"{_name(missing)} of {count} did not connect within {timeout:g} s{turned}: look at their "
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


class _Door:
    """Process 0 while it waits: fills `peers` with those who know the token, and turns away all others."""

    def __init__(self, listener: socket.socket, count: int, token: str, peers: dict[int, Peer]):
        self._listener, self._count, self._token, self._peers = listener, count, token, peers
        self._unknown: dict[Peer, float] = {}  # connections that have not said who they are, and when they must have
        self._turned_away = 0

    def watch(self, deadline: float) -> int:
        """Waits until all are there or the deadline is over; returns how many connections were turned away."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            try:
                while len(self._peers) < self._count - 1 and (left := deadline - time.monotonic()) > 0:
                    for key, _ in selector.select(min(left, 1.0)):
                        if key.fileobj is self._listener:
                            self._open(selector)
                        elif isinstance(key.fileobj, Peer) and key.fileobj.fileno() >= 0:  # not closed in this turn
                            self._hear(key.fileobj, selector)
                    self._close_late(selector)
            finally:  # who connected and was not greeted is not kept waiting, whatever ended this
                for peer in self._unknown:
                    peer.close()
        return self._turned_away

    def _open(self, selector: selectors.BaseSelector) -> None:
        with contextlib.suppress(OSError):  # gone again already
            peer = Peer(self._listener.accept()[0])
            peer.limit = HELLO_BYTES
            self._unknown[peer] = time.monotonic() + HELLO_S
            selector.register(peer, selectors.EVENT_READ)

    def _close_late(self, selector: selectors.BaseSelector) -> None:
        """Turns away who has said nothing for too long, or is one of too many: the oldest first."""
        many = len(self._unknown) - STRANGERS - self._count
        for place, (peer, until) in enumerate(list(self._unknown.items())):
            if place < many or time.monotonic() > until:
                self._turn_away(peer, selector)

    def _turn_away(self, peer: Peer, selector: selectors.BaseSelector) -> None:
        self._turned_away += 1
        del self._unknown[peer]
        selector.unregister(peer)
        peer.send("stranger")
        peer.close()

    def _hear(self, peer: Peer, selector: selectors.BaseSelector) -> None:
        """Reads what has arrived from one connection; forgets it when it is gone again."""
        messages = peer.receive()
        if peer in self._unknown:
            if messages is None:
                self._turn_away(peer, selector)
            elif messages:
                self._greet(messages[0], peer, selector)
        elif messages is None:
            selector.unregister(peer)
            peer.close()
            for index in [index for index, known in self._peers.items() if known is peer]:
                del self._peers[index]

    def _greet(self, message: list[Any], peer: Peer, selector: selectors.BaseSelector) -> None:
        match message:
            case ["hello", int(index), int(theirs), str(token)] if token_matches(token, self._token):
                del self._unknown[peer]
                peer.limit = None
                self._admit(index, theirs, peer)
            case _:
                self._turn_away(peer, selector)

    def _admit(self, index: int, theirs: int, peer: Peer) -> None:
        count, known = self._count, self._peers.get(index)
        self._peers[index] = peer  # in any case, so that this one is told too
        if known or not 0 < index < count:
            text = f"process {index} of {count} connected twice: give each its own --process, from 0 on"
            if known:
                known.send("end", UserError.exit_code, text)
                known.close()
            raise UserError(text)
        if theirs != count:
            raise UserError(
                f"process {index} has --processes={theirs}, process 0 has {count}: give all processes the same"
            )


def _listen(host: str, port: int) -> socket.socket:
    address = own_address(host)
    try:
        if address:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            return socket.create_server((address, port), family=family, backlog=1024)
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
        return socket.create_server(("", port), backlog=1024)
    except OSError as error:
        raise UserError(
            f"process 0 cannot listen on port {port} ({error.strerror}): choose another port for --coordinator"
        ) from error


def _join(host: str, port: int, index: int, count: int, timeout: float, token: Token) -> Peer:
    deadline, reason = time.monotonic() + timeout, None
    while (left := deadline - time.monotonic()) > 0:
        try:
            peer = Peer(socket.create_connection((host, port), timeout=left))
        except OSError as error:  # process 0 is not there yet, or its name is not known yet
            reason = error.strerror or str(error)
            time.sleep(RETRY_S)
            continue
        peer.send("hello", index, count, token.read())  # read now: process 0 leaves it before it listens
        answer = _answer(peer, timeout + LINGER_S)  # process 0 answers when its own timeout is over
        match answer:
            case ["go"]:
                return peer
            case ["end", int(code), str(text)]:
                peer.close()
                raise Lost(text) if code == Lost.exit_code else UserError(text)
        if answer == ["stranger"]:
            reason = f"it does not know this one: give all a --workdir that they share, or the same {TOKEN_VARIABLE}"
        peer.close()  # it closed the connection without an answer, and may start again
        time.sleep(RETRY_S)
    shown = f" ({reason})" if reason else ""
    raise Lost(
        f"process 0 did not answer at {host}:{port} within {timeout:g} s{shown}: check that it runs and that "
        "the address is right"
    )


def _answer(peer: Peer, seconds: float) -> list[Any] | None:
    """The first message, None if none arrives within so many seconds."""
    peer.connection.settimeout(seconds)
    try:
        messages = peer.receive()
        while messages == []:
            messages = peer.receive()
    except TimeoutError:
        return None
    peer.connection.settimeout(None)
    if messages is None:
        return None
    peer.early = messages[1:]
    return messages[0]


def _name(indices: list[int]) -> str:
    return f"{'process' if len(indices) == 1 else 'processes'} {', '.join(map(str, indices))}"
