"""Who holds the others up is named, with what it was last seen doing; who was stopped itself accuses nobody."""

import socket

import pytest

from bytescope.train.launch.stalls import SILENT_S, Stalls

pytestmark = pytest.mark.quick


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
        stalls.look()


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
    assert told[1:] == ["it goes on, after 90 s without a step"]
    seconds(clock, stalls, 20, {1: "in step 8 on node1"})
    assert len(told) == 2


def test_of_those_that_are_alive_the_one_elsewhere_is_named_by_process_0(clock, told):
    beating = {1: "in step 7 on a", 2: "waiting for the data of step 7 on b", 3: "in step 7 on c"}
    stalls = Stalls(0, 30.0, told.append, clock)
    stalls.at("in step 7")
    seconds(clock, stalls, 40, beating)
    assert told == ["no step for 31 s: process 2 is waiting for the data of step 7 on b; 3 of 4 are in step 7"]
    told.clear()
    other = Stalls(3, 30.0, told.append, clock)
    other.at("in step 7")
    seconds(clock, other, 40, {0: "in step 7 on z"})
    assert told == []


def test_all_in_the_same_place(clock, told):
    stalls = Stalls(0, 30.0, told.append, clock)
    stalls.at("in step 7")
    seconds(clock, stalls, 40, {1: "in step 7 on a"})
    assert told == ["no step for 31 s: all 2 processes are alive, in step 7"]


def test_who_was_stopped_itself_says_so_and_accuses_nobody(clock, told):
    stalls = Stalls(0, 30.0, told.append, clock)
    stalls.at("in step 7")
    seconds(clock, stalls, 3, {1: "in step 7 on a"})
    clock.now += 60
    stalls.look()
    assert told == ["this process was itself stopped for 60 s, in step 7"]
    assert not stalls.silent()


@pytest.mark.parametrize(("timeout", "doing"), [(0.0, "in step 7"), (30.0, "")])
def test_nothing_is_told_where_nothing_is_asked_or_waited_for(clock, told, timeout, doing):
    stalls = Stalls(0, timeout, told.append, clock)
    stalls.at(doing)
    stalls.hear(1, f"in step 7 on {socket.gethostname()}")
    seconds(clock, stalls, int(40 + SILENT_S))
    assert told == []
