import errno
import os
import socket
from collections.abc import Iterator
from datetime import timedelta

import pytest

from telemetry.collect.kernel_log.kmsg import Kmsg, OpenDevice, parse_record
from tests.telemetry.collect.builders import NOW, Clock


class Ring:
    """A ring by hand: bytes are records, an exception is raised, and its end is 'no record'."""

    def __init__(self, *records: bytes | OSError) -> None:
        self.records = list(records)

    def read(self) -> bytes:
        if not self.records:
            raise BlockingIOError
        first = self.records.pop(0)
        if isinstance(first, OSError):
            raise first
        return first

    def wait(self, timeout_s: float) -> bool:
        return bool(self.records)

    def close(self) -> None:
        pass


def record(sequence: int, message: str, *, us: int = 0, flags: str = "-", more: str = "") -> bytes:
    return f"4,{sequence},{us},{flags}{more};{message}\n SUBSYSTEM=pci\n".encode()


def kmsg(ring: Ring, position: dict | None = None, *, boot: str = "b1", clock: Clock | None = None) -> Kmsg:
    return Kmsg(position or {}, clock=clock or Clock(), device=ring, boot_id=boot, uptime_s=lambda: 100.0)


def messages(source: Kmsg, wait_s: float = 0.0) -> list[str]:
    return [line.message for line in source.read(wait_s).lines]


def test_a_record_is_taken_apart():
    made = parse_record(b"3,1234,567890123,-,caller=T42;NVRM: Xid caf\\xc3\\xa9 \\x0anext\n DEVICE=+pci:0000:3b:00.0\n")
    assert made is not None
    assert (made.sequence, made.since_us, made.continues, made.caller) == (1234, 567890123, "-", "T42")
    assert made.message == "NVRM: Xid caf\u00c3\u00a9 \nnext"
    assert parse_record(b"nonsense") is None


def test_stamps_count_from_the_boot():
    (line,) = kmsg(Ring(record(0, "a", us=40_000_000))).read(0.0).lines
    assert line.when == NOW - timedelta(seconds=60)
    assert (line.boot_id, line.history) == ("b1", True)


def test_the_moment_of_boot_follows_the_wall_clock_and_is_kept():
    clock, ring = Clock(), Ring(record(0, "a", us=0))
    source = kmsg(ring, clock=clock)
    source.read(0.0)
    clock.move(days=30)
    # The log's own clock is 90 s behind after a month.
    ring.records.append(record(1, "b", us=(30 * 86400 + 100 - 90) * 1_000_000))
    got = source.read(1.0)
    assert [line.when for line in got.lines] == [clock.now]
    assert not got.lines[0].history
    again = kmsg(Ring(record(2, "c", us=(30 * 86400 + 100 - 90) * 1_000_000)), got.position, clock=clock)
    assert [line.when for line in again.read(0.0).lines] == [clock.now]


def test_a_restart_neither_repeats_nor_misses_within_a_boot():
    ring = [record(5, "a"), record(6, "b"), record(7, "c")]
    got = kmsg(Ring(*ring[:2])).read(0.0)
    assert got.position["sequence"] == 6
    assert messages(kmsg(Ring(*ring), got.position)) == ["c"]
    assert messages(kmsg(Ring(record(0, "new")), got.position, boot="b2")) == ["new"]


def test_what_the_ring_overran_is_counted():
    overrun = OSError(errno.EPIPE, "overwritten")
    got = kmsg(Ring(record(5, "a"), overrun, record(9, "b"))).read(0.0)
    assert ([line.message for line in got.lines], got.lost) == (["a", "b"], 3)
    after = kmsg(Ring(record(20, "c")), got.position).read(0.0)
    assert after.lost == 10  # while nobody read
    assert kmsg(Ring(record(20, "c"))).read(0.0).lost == 0


@pytest.mark.parametrize(
    ("records", "expected"),
    [
        ([("NVRM: Xid ", "c"), ("(PCI:0000:10:00): 79", "+"), ("x", "-")], ["NVRM: Xid (PCI:0000:10:00): 79", "x"]),
        ([("NVRM: Xid ", "-"), ("(PCI:0000:10:00): 79", "c"), ("x", "-")], ["NVRM: Xid (PCI:0000:10:00): 79", "x"]),
        ([("first: line", "-"), ("NVRM: second", "c"), (" half", "+")], ["first: line", "NVRM: second half"]),
    ],
)
def test_fragments_become_a_line(records: list[tuple[str, str]], expected: list[str]):
    made = [record(number, text, flags=flag) for number, (text, flag) in enumerate(records)]
    assert messages(kmsg(Ring(*made))) == expected


def test_fragments_of_another_caller_are_not_joined():
    ring = Ring(record(0, "half", more=",caller=T1"), record(1, "other", flags="c", more=",caller=C2"))
    assert messages(kmsg(ring)) == ["half", "other"]


def test_an_open_line_is_read_again_after_a_kill():
    ring = [record(number, f"m{number}") for number in range(2001)]
    got = kmsg(Ring(*ring)).read(0.0)  # stops after 2000 records, the last one still open
    assert not got.drained
    again = kmsg(Ring(*ring), got.position)
    assert [*messages(again), *messages(again)] == ["m1999", "m2000"]


def test_what_cannot_be_read_is_passed_over():
    assert messages(kmsg(Ring(b"nonsense", record(1, "a")))) == ["a"]


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, OpenDevice]]:
    """A socket that gives one record a read, as the device does."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs.setblocking(False)
    device = OpenDevice(os.dup(theirs.fileno()))
    theirs.close()
    yield ours, device
    ours.close()


def test_an_open_descriptor(pair: tuple[socket.socket, OpenDevice]):
    ours, device = pair
    ours.send(record(1, "a"))
    ours.send(record(2, "b"))
    source = Kmsg({}, clock=Clock(), device=device, boot_id="b", uptime_s=lambda: 0.0)
    assert messages(source) == ["a", "b"]
    ours.send(record(3, "c"))
    assert messages(source, 1.0) == ["c"]
    assert messages(source, 0.01) == []
    source.close()
