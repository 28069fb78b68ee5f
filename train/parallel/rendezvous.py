"""The connections between the processes of one run, and how they are made: all processes connect, or none starts.

Messages are JSON lines: `hello index count` and `go` here; those of a running run are in train/parallel/liveness.py.
"""

import contextlib
import json
import selectors
import socket
import time
from typing import Any

from bytescope.train.errors import Lost, UserError

# A machine that loses power closes no connection: probes after 20 s of silence, given up after four, 10 s apart.
KEEPALIVE = (("TCP_KEEPIDLE", 20), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 4))
RETRY_S = 0.05
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
        try:
            return [list(json.loads(line)) for line in lines]
        except (ValueError, TypeError):  # another protocol
            return None


def meet(host: str, port: int, index: int, count: int, timeout: float) -> dict[int, Peer]:
    """Waits until all `count` processes are connected; returns the peers of this one (process 0: all, others: 0).

    Raises:
      Lost: not all connected within `timeout` seconds.
      UserError: the port is taken, or two processes disagree on their numbers.
    """
    return _welcome(port, count, timeout) if index == 0 else {0: _join(host, port, index, count, timeout)}


def _welcome(port: int, count: int, timeout: float) -> dict[int, Peer]:
    peers: dict[int, Peer] = {}
    try:
        _collect(port, count, time.monotonic() + timeout, peers)
        if missing := sorted(set(range(1, count)) - set(peers)):
            raise Lost(f"{_name(missing)} of {count} did not connect within {timeout:g} s: look at their output, "
                       "or give a longer --timeout")
    except UserError as error:
        for peer in peers.values():
            peer.send("end", error.exit_code, str(error))
            peer.close()
        raise
    for peer in peers.values():
        peer.send("go")
    return peers


def _collect(port: int, count: int, deadline: float, peers: dict[int, Peer]) -> None:
    """Fills `peers` until all are there or the deadline is over."""
    with _listen(port) as listener, selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        try:
            while len(peers) < count - 1 and (left := deadline - time.monotonic()) > 0:
                for key, _ in selector.select(left):
                    if key.fileobj is listener:
                        selector.register(Peer(listener.accept()[0]), selectors.EVENT_READ)
                    else:
                        _hear(key.fileobj, selector, count, peers)
        finally:  # who connected and was not greeted is not kept waiting, whatever ended this
            for key in list(selector.get_map().values()):
                if key.fileobj not in peers.values():
                    key.fileobj.close()


def _hear(peer: Peer, selector: selectors.BaseSelector, count: int, peers: dict[int, Peer]) -> None:
    """Reads what has arrived from one connection; forgets it when it is gone again, or not one of ours."""
    messages = peer.receive()
    if messages is None:
        selector.unregister(peer)
        peer.close()
        for index in [index for index, known in peers.items() if known is peer]:
            del peers[index]
    for message in messages or ():
        _greet(message, peer, count, peers)


def _greet(message: list[Any], peer: Peer, count: int, peers: dict[int, Peer]) -> None:
    match message:
        case ["hello", int(index), int(theirs)]:
            known, peers[index] = peers.get(index), peer  # in `peers`, so that this one is told too
            if known or not 0 < index < count:
                text = f"process {index} of {count} connected twice: give each its own --process, from 0 on"
                if known:
                    known.send("end", UserError.exit_code, text)
                    known.close()
                raise UserError(text)
            if theirs != count:
                raise UserError(f"process {index} has --processes={theirs}, process 0 has {count}: "
                                "give all processes the same")


def _listen(port: int) -> socket.socket:
    try:
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
        return socket.create_server(("", port), backlog=1024)
    except OSError as error:
        raise UserError(f"process 0 cannot listen on port {port} ({error.strerror}): "
                        "choose another port for --coordinator") from error


def _join(host: str, port: int, index: int, count: int, timeout: float) -> Peer:
    deadline, reason = time.monotonic() + timeout, None
    while (left := deadline - time.monotonic()) > 0:
        try:
            peer = Peer(socket.create_connection((host, port), timeout=left))
        except OSError as error:  # process 0 is not there yet, or its name is not known yet
            reason = error.strerror or str(error)
            time.sleep(RETRY_S)
            continue
        peer.send("hello", index, count)
        answer = _answer(peer, timeout + LINGER_S)  # process 0 answers when its own timeout is over
        match answer:
            case ["go"]:
                return peer
            case ["end", int(code), str(text)]:
                peer.close()
                raise Lost(text) if code == Lost.exit_code else UserError(text)
        peer.close()  # it closed the connection without an answer, and may start again
        time.sleep(RETRY_S)
    shown = f" ({reason})" if reason else ""
    raise Lost(f"process 0 did not answer at {host}:{port} within {timeout:g} s{shown}: check that it runs and that "
               "the address is right")


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
