"""Free TCP ports."""

import random
import socket


def free_port(first=1024, last=65535):
    """A port that nobody listens on."""
    for _ in range(100):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", random.randint(first, last) if first > 1024 else 0))
            except OSError:
                continue
            return probe.getsockname()[1]
    raise AssertionError("no free port")
