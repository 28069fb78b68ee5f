"""The link between processes: who came, in what order values come, how all end as one, and which straggler is named."""

import contextlib
import socket
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bytescope.train.launch.liveness import Link, Stalls
from bytescope.train.launch.rendezvous import Token, meet
from bytescope.train.user_errors import Lost, UserError
from support.ports import free_port

pytestmark = pytest.mark.quick


def meet_all(count, timeout=10.0, told=None, present=None):
    """`meet` of several processes in threads; what each got or raised."""
    port, folder = free_port(), Path(tempfile.mkdtemp())

    def one(index):
        try:
            return meet("127.0.0.1", port, *(told or {}).get(index, (index, count)), timeout, Token(folder, port))
        except UserError as error:
            return error

    with ThreadPoolExecutor(count) as pool:
        found = list(pool.map(one, range(count) if present is None else present))
    folder.rmdir()  # nothing is left in it
    return found


def linked(count):
    """Links of all processes, and the exit codes they leave with."""
    codes: list[list[int]] = [[] for _ in range(count)]
    return [Link(index, count, peers, codes[index].append) for index, peers in enumerate(meet_all(count))], codes


def test_those_who_came_hear_who_is_missing():
    for error in meet_all(4, timeout=1.0, present=[0, 2]):
        assert isinstance(error, Lost) and "processes 1, 3 of 4 did not connect within 1 s" in str(error)


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ({2: (1, 3)}, "process 1 of 3 connected twice"),
        ({2: (2, 4)}, "with --processes=4, but process 0 with --processes=3"),
    ],
)
def test_processes_that_disagree_are_refused(told, message):
    found = meet_all(3, told=told, timeout=2.0)
    assert isinstance(found[0], UserError) and message in str(found[0]) and not isinstance(found[0], Lost)
    assert message in str(found[2])


def knock(port, content=b""):
    """A stranger's connection, once somebody listens."""
    while True:
        try:
            stranger = socket.create_connection(("127.0.0.1", port), timeout=5)
        except ConnectionRefusedError:
            time.sleep(0.01)
            continue
        stranger.sendall(content)
        return stranger


STRANGERS = (
    b"GET / HTTP/1.1\r\n\r\n",
    b"\n",
    b'["hello", "x"]\n',
    b"[" * 3000 + b"\n",
    b"\0" * 100_000,
    b'["hello", 1, 2, "guess"]\n',
    b'["hello", 1, 3, ""]\n',
    b'["hello", 1, 2]\n',
    b'["end", 2, "over"]\n',
    b'["hello", 1, 2, 3]\n',
    b'["hello", -1, 2, "guess"]\n',
    b'["hello", 1, 2, "\\ud800"]\n',
)


def test_strangers_at_the_port_change_nothing(tmp_path, monkeypatch):
    """Those who say something else, take a place with another token, say half a word, or nothing at all."""
    port = free_port()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(meet, "127.0.0.1", port, 0, 2, 10.0, Token(tmp_path, port))
        for content in STRANGERS:
            with contextlib.suppress(ConnectionError), knock(port, content) as stranger:
                assert stranger.recv(100) in (b'["stranger"]\n', b"")
        monkeypatch.setattr("bytescope.train.launch.rendezvous.HELLO_S", 0.1)
        silent, half = knock(port), knock(port, b'["hello", 1, ')
        assert (tmp_path / ".rendezvous").stat().st_mode & 0o777 == 0o600
        second = pool.submit(meet, "127.0.0.1", port, 1, 2, 10.0, Token(tmp_path, port)).result()
        assert list(second) == [0] and list(first.result()) == [1]
    assert silent.recv(20) == half.recv(20) == b'["stranger"]\n' and not list(tmp_path.iterdir())
    for each in (silent, half, *(peer for peers in (second, first.result()) for peer in peers.values())):
        each.close()


def test_one_with_another_token_is_told_why(tmp_path, monkeypatch):
    port = free_port()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(meet, "127.0.0.1", port, 0, 2, 1.5, Token(tmp_path / "a" / "run", port))
        with pytest.raises(
            Lost,
            match="it rejected the token of this process: give all processes a shared --workdir, or the same "
            "BYTESCOPE_TOKEN",
        ):
            meet("127.0.0.1", port, 1, 2, 1.0, Token(tmp_path / "b" / "run", port))
        with pytest.raises(Lost, match=r"process 1 of 2 did not connect within 1.5 s \(\d+ connections without the"):
            first.result()
    monkeypatch.setenv("BYTESCOPE_TOKEN", "secret")
    assert Token(None, port).make() == Token(tmp_path, port).read() == "secret" and not (tmp_path / "runs").exists()


def test_a_place_that_cannot_be_written_asks_for_no_token(tmp_path):
    (tmp_path / "file").write_text("")
    assert Token(tmp_path / "file" / "run", 1).make() == ""
    assert Token(tmp_path / "file" / "run", 1).read() == ""


def test_a_port_in_use_is_one_line(tmp_path):
    with socket.create_server(("", 0)) as taken, pytest.raises(UserError, match="choose another port"):
        meet("127.0.0.1", taken.getsockname()[1], 0, 2, 5.0, Token(tmp_path, 1))


def test_nobody_can_knock_from_another_machine_if_all_processes_are_on_one():
    """What listens on all addresses is found on each of them."""
    port, found = free_port(), []
    with ThreadPoolExecutor(1) as pool, tempfile.TemporaryDirectory() as folder:
        first = pool.submit(meet, "127.0.0.1", port, 0, 2, 1.0, Token(Path(folder), port))
        knock(port).close()
        try:
            socket.create_connection(("127.0.0.2", port), timeout=5).close()
        except ConnectionRefusedError as error:
            found.append(error)
        with pytest.raises(Lost):
            first.result()
    assert found


def test_values_come_in_the_order_of_the_processes():
    links, codes = linked(3)
    with ThreadPoolExecutor(3) as pool:
        for turn in range(20):
            found = list(pool.map(lambda link, turn=turn: link.gather([link.index, turn]), links))
            assert found == [[[0, turn], [1, turn], [2, turn]]] * 3
        list(pool.map(Link.close, links))
    assert codes == [[], [], []]


def test_a_value_counts_as_it_was_given():
    """A signal that comes to process 0 while it waits for the others must not be seen by it alone."""
    links, _ = linked(2)
    asked = []
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(links[0].gather, asked)
        deadline = time.monotonic() + 10
        while not links[0]._votes[0] and time.monotonic() < deadline:
            time.sleep(0.001)
        asked.append("SIGTERM")
        assert links[1].gather([]) == first.result() == [[], []]
        list(pool.map(Link.close, links))


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


def test_a_process_that_says_nothing_is_named(capsys, monkeypatch):
    """Process 1 is there, and reads and says nothing after its first word, as one that is stopped."""
    monkeypatch.setattr("bytescope.train.launch.liveness.SILENT_S", 0.5)
    monkeypatch.setattr("bytescope.train.launch.liveness.BEAT_S", 0.05)
    peers = meet_all(3)
    peers[1][0].send("at", "waiting for the data of step 7 on node1")
    codes = []
    links = {index: Link(index, 3, peers[index], codes.append, stall_timeout=0.9) for index in (0, 2)}
    for link in links.values():
        link.stalls.at("in step 7")
    said, deadline = "", time.monotonic() + 20
    while "no step for" not in said and time.monotonic() < deadline:
        time.sleep(0.05)
        said += capsys.readouterr().err
    assert "warning: no step for" in said and said.count("\n") == 1
    assert "process 1 has been silent for" in said and "last seen waiting for the data of step 7 on node1" in said
    peers[1][0].send("bye")
    peers[1][0].close()
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(Link.close, links.values()))
    assert codes == []


# ---- the straggler ---------------------------------------------------------------------------------------------------


class Clock:
    """Seconds that pass when a test says so."""

    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def told():
    return []


def seconds(clock, stalls, count, beating=()):
    """So many seconds, in each of which the beating processes say where they are and `stalls` looks."""
    for _ in range(count):
        clock.now += 1
        for index, where in dict(beating).items():
            stalls.hear(index, where)
        stalls.check()


def test_a_silent_process_is_named_once_with_its_host_and_what_it_did(clock, told):
    """After a quarter of the timeout, since silence has no other reason."""
    stalls = Stalls(0, 120.0, told.append, clock)
    stalls.at("in step 7")
    stalls.hear(1, "waiting for the data of step 7 on node1")
    seconds(clock, stalls, 90, {2: "in step 7 on node2"})
    assert told == [
        "no step for 31 s: process 1 has been silent for 31 s, last seen waiting for the data of step 7 on node1"
    ]
    stalls.at("in step 8")
    seconds(clock, stalls, 1)
    assert told[1:] == ["the run continues, after 90 s without a step"]
    seconds(clock, stalls, 20, {1: "in step 8 on node1"})
    assert len(told) == 2


ELSEWHERE = {1: "in step 7 on a", 2: "waiting for the data of step 7 on b", 3: "in step 7 on c"}


@pytest.mark.parametrize(
    ("index", "timeout", "doing", "beating", "lines"),
    [
        (
            0,
            30.0,
            "in step 7",
            ELSEWHERE,
            ["no step for 31 s: process 2 is waiting for the data of step 7 on b; 3 of 4 are in step 7"],
        ),
        (0, 30.0, "in step 7", {1: "in step 7 on a"}, ["no step for 31 s: all 2 processes are alive, in step 7"]),
        (3, 30.0, "in step 7", {0: "in step 7 on z"}, []),  # process 0 names it
        (0, 0.0, "in step 7", ELSEWHERE, []),
        (0, 30.0, "", ELSEWHERE, []),
    ],
)
def test_of_those_that_are_alive_the_one_elsewhere_is_named(clock, told, index, timeout, doing, beating, lines):
    stalls = Stalls(index, timeout, told.append, clock)
    stalls.at(doing)
    seconds(clock, stalls, 40, beating)
    assert told == lines


def test_who_was_stopped_itself_says_so_and_accuses_nobody(clock, told):
    stalls = Stalls(0, 30.0, told.append, clock)
    stalls.at("in step 7")
    seconds(clock, stalls, 3, {1: "in step 7 on a"})
    clock.now += 60
    stalls.check()
    assert told == ["this process was stopped for 60 s while it was in step 7"]
    assert not stalls.silent()
