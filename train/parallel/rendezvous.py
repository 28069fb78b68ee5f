"""The connections between the processes of one run, and how those come to be: all come or none starts.

Messages are JSON lines: `hello index count` and `go` here, what follows in train/parallel/liveness.py.
"""

import contextlib
import json
import selectors
import socket
import time
from typing import Any

from bytescope.train.errors import Lost, UserError

# A machine that loses its power closes nothing: probes after 20 s of silence, given up after four, 10 s apart.
KEEPALIVE = (("TCP_KEEPIDLE", 20), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 4))
RETRY_S = 0.05
LINGER_S = 10.0  # how long one that fails waits for the others to be gone


class Peer:
    """One connection: whole messages in and out."""

    def __init__(self, connection: socket.socket):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in KEEPALIVE:
            if hasattr(socket, name):  # not everywhere
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self.connection, self.said_bye, self._rest = connection, False, b""
        self.early: list[list[Any]] = []  # messages that came before there was a `Link` to take them

    def close(self) -> None:
        self.connection.close()

    def fileno(self) -> int:
        return self.connection.fileno()

    def send(self, *message: Any) -> None:
        """One message; one that cannot be sent is lost with its receiver, which the reader will notice."""
        with contextlib.suppress(OSError):
            self.connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[list[Any]] | None:
        """The messages that came, waiting for some; None once the other side is gone."""
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
        except (ValueError, TypeError):  # somebody else's protocol
            return None


def meet(host: str, port: int, index: int, count: int, timeout: float) -> dict[int, Peer]:
    """Waits until all `count` processes are there; returns the peers of this one (process 0: all, others: 0).

    Raises:
      Lost: not everybody came within `timeout` seconds.
      UserError: the port is taken, or the processes do not agree on who they are.
    """
    return _welcome(port, count, timeout) if index == 0 else {0: _join(host, port, index, count, timeout)}


def _welcome(port: int, count: int, timeout: float) -> dict[int, Peer]:
    peers: dict[int, Peer] = {}
    try:
        _collect(port, count, time.monotonic() + timeout, peers)
        if missing := sorted(set(range(1, count)) - set(peers)):
            raise Lost(f"{_name(missing)} of {count} never came within {timeout:g} s: look at their output, "
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
        while len(peers) < count - 1 and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                if key.fileobj is listener:
                    selector.register(Peer(listener.accept()[0]), selectors.EVENT_READ)
                    continue
                peer, messages = key.fileobj, key.fileobj.receive()
                if messages is None:  # gone again, or a stranger
                    selector.unregister(peer)
                    peer.close()
                    for index in [index for index, known in peers.items() if known is peer]:
                        del peers[index]
                for message in messages or ():
                    _greet(message, peer, count, peers)
        for key in selector.get_map().values():
            if key.fileobj not in peers.values():
                key.fileobj.close()


def _greet(message: list[Any], peer: Peer, count: int, peers: dict[int, Peer]) -> None:
    match message:
        case ["hello", int(index), int(theirs)]:
            known, peers[index] = peers.get(index), peer  # so that this one hears of it too
            if known or not 0 < index < count:
                text = f"process {index} of {count} came twice: give each its own --process, from 0 on"
                if known:
                    known.send("end", UserError.exit_code, text)
                    known.close()
                raise UserError(text)
            if theirs != count:
                raise UserError(f"process {index} was told --processes={theirs}, process 0 {count}: "
                                "give all the same")


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
        answer = _answer(peer, timeout + LINGER_S)  # process 0 speaks when its own time is over
        match answer:
            case ["go"]:
                return peer
            case ["end", int(code), str(text)]:
                peer.close()
                raise Lost(text) if code == Lost.exit_code else UserError(text)
        peer.close()  # it went away without a word, and may come again
        time.sleep(RETRY_S)
    raise Lost(f"process 0 never answered at {host}:{port} within {timeout:g} s"
               f"{f' ({reason})' if reason else ''}: is it running, and the address right?")


def _answer(peer: Peer, seconds: float) -> list[Any] | None:
    """The first message, None if there comes none."""
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
    return f"process{'es' * (len(indices) > 1)} {', '.join(map(str, indices))}"
