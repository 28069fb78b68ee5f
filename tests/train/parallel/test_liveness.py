"""The line between processes: who came, in what order values come, and how all end as one."""

import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from bytescope.train.errors import Lost, UserError
from bytescope.train.parallel.liveness import Link
from bytescope.train.parallel.rendezvous import meet
from support.ports import free_port

pytestmark = pytest.mark.quick


def meet_all(count, timeout=10.0, told=None, present=None):
    """`meet` of several processes in threads; what each got or raised."""
    port = free_port()

    def one(index):
        try:
            return meet("127.0.0.1", port, *(told or {}).get(index, (index, count)), timeout)
        except UserError as error:
            return error

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(one, range(count) if present is None else present))


def linked(count):
    """Links of all processes, and the exit codes they leave with."""
    codes: list[list[int]] = [[] for _ in range(count)]
    return [Link(index, count, peers, codes[index].append) for index, peers in enumerate(meet_all(count))], codes


def test_those_who_came_hear_who_is_missing():
    for error in meet_all(4, timeout=1.0, present=[0, 2]):
        assert isinstance(error, Lost) and "processes 1, 3 of 4 did not connect within 1 s" in str(error)


@pytest.mark.parametrize(("told", "message"), [({2: (1, 3)}, "process 1 of 3 connected twice"),
                                               ({2: (2, 4)}, "has --processes=4, process 0 has 3")])
def test_processes_that_disagree_are_refused(told, message):
    found = meet_all(3, told=told, timeout=2.0)
    assert isinstance(found[0], UserError) and message in str(found[0]) and not isinstance(found[0], Lost)
    assert message in str(found[2])


def test_strangers_at_the_port_change_nothing():
    port = free_port()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(meet, "127.0.0.1", port, 0, 2, 10.0)
        for content in (b"GET / HTTP/1.1\r\n\r\n", b"", b'["hello", "x"]\n'):
            while True:
                try:
                    with socket.create_connection(("127.0.0.1", port), timeout=5) as stranger:
                        stranger.sendall(content)
                    break
                except ConnectionRefusedError:
                    time.sleep(0.01)
        second = pool.submit(meet, "127.0.0.1", port, 1, 2, 10.0).result()
        assert list(second) == [0] and list(first.result()) == [1]
    for peers in (second, first.result()):
        for peer in peers.values():
            peer.close()


def test_a_port_in_use_is_one_line():
    with socket.create_server(("", 0)) as taken, pytest.raises(UserError, match="choose another port"):
        meet("127.0.0.1", taken.getsockname()[1], 0, 2, 5.0)


def test_values_come_in_the_order_of_the_processes():
    links, codes = linked(3)
    with ThreadPoolExecutor(3) as pool:
        for turn in range(20):
            found = list(pool.map(lambda link, turn=turn: link.gather([link.index, turn]), links))
            assert found == [[[0, turn], [1, turn], [2, turn]]] * 3
        list(pool.map(Link.close, links))
    assert codes == [[], [], []]


@pytest.mark.parametrize("failing", [0, 2])
def test_the_exit_code_of_one_is_that_of_all(failing, capsys):
    links, codes = linked(3)
    with pytest.raises(SystemExit):
        links[failing].fail(4, "loss nan")
    deadline = time.monotonic() + 20
    while codes != [[4], [4], [4]] and time.monotonic() < deadline:
        time.sleep(0.01)
    assert codes == [[4], [4], [4]]
    said = sorted(capsys.readouterr().err.splitlines())
    assert len(said) == 3 and sum(line.startswith("[process ") for line in said) == 2
    assert all("loss nan" in line for line in said)


def test_a_connection_that_breaks_is_a_death():
    links, codes = linked(3)
    for peer in links[1]._peers.values():  # what the kernel does for a process that is killed
        peer.connection.shutdown(socket.SHUT_RDWR)
    deadline = time.monotonic() + 20
    while not (codes[0] and codes[2]) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert codes[0] == codes[2] == [5]
