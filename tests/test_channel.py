"""The channel between launcher and node: frames, greeting, proofs, heartbeat; and the loop below it."""

from __future__ import annotations

import contextlib
import doctest
import os
import signal
import socket
import time
from types import SimpleNamespace

import pytest
from torchrun_nccl import authentication, channel, loop
from torchrun_nccl.authentication import derive_key, is_proof, proof
from torchrun_nccl.channel import Channel, Heart, decode, encode, greeting, split_greeting
from torchrun_nccl.listener import Listener
from torchrun_nccl.loop import Loop
from torchrun_nccl.nodes import Greeting

SECONDS = 5.0


def serve(running: Loop, until=lambda: False, seconds: float = SECONDS) -> bool:
    """Serve until something is so; whether it came to be."""
    found = False

    def look():
        nonlocal found
        found = bool(until())
        if found:
            running.stop()
        else:
            timers[:] = [running.after(0.002, look), timers[-1]]

    timers = [running.after(0.0, look), running.after(seconds, running.stop)]
    running.run()
    for timer in timers:
        timer.cancel()
    return found


class End:
    """One end of a channel in a loop, and what came to it; `far` is the other end, a plain socket."""

    def __init__(self) -> None:
        self.loop = Loop()
        self.frames: list[dict[str, object]] = []
        self.lost: list[str] = []
        self.far, near = socket.socketpair()
        fd = near.detach()
        self.channel = Channel(self.loop, fd, fd, self.frames.append, self.lost.append)

    def close(self) -> None:
        self.channel.close()
        self.far.close()


@pytest.fixture
def end():
    one = End()
    yield one
    one.close()


FRAMES = [
    {"is": "beat"},
    {"is": "output", "text": "two\nlines\r\n", "rank": 3},
    {"is": "exit", "code": -9, "ms": 0.5, "tail": ""},
    {"is": "job", "environment": [["ODD", "\udcff"], ["é", '"\\']], "none": None, "true": True},
]
STREAM = b"".join(map(encode, FRAMES))


@pytest.mark.parametrize("frame", FRAMES)
def test_a_frame_is_one_line_of_ascii(frame):
    line = encode(frame)
    assert (line.count(b"\n"), line.isascii(), decode(line)) == (1, True, frame)


def test_frames_split_at_every_byte(end):
    for cut in range(len(STREAM) + 1):
        end.frames.clear()
        end.channel.feed(STREAM[:cut])
        end.channel.feed(STREAM[cut:])
        assert end.frames == FRAMES, cut


def test_frames_byte_by_byte(end):
    for byte in STREAM:
        end.far.sendall(bytes([byte]))
        serve(end.loop, seconds=0.0)
    assert serve(end.loop, lambda: len(end.frames) == len(FRAMES))
    assert end.frames == FRAMES


def test_large_frames_both_ways():
    """More than any buffer of the kernel holds: neither end ever waits for the other."""
    running = Loop()
    ends = socket.socketpair()
    came: dict[int, list[dict[str, object]]] = {0: [], 1: []}
    fds = [one.detach() for one in ends]
    channels = [Channel(running, fd, fd, came[side].append, pytest.fail) for side, fd in enumerate(fds)]
    frame = {"is": "job", "text": "é" * 700_000}
    for one in channels:
        one.send(frame)
        one.send({"is": "beat"})
        assert one.waiting > 0
    assert serve(running, lambda: len(came[0]) == len(came[1]) == 2)
    assert came == {0: [frame, {"is": "beat"}], 1: [frame, {"is": "beat"}]}
    assert [one.waiting for one in channels] == [0, 0]
    for one in channels:
        one.close()


@pytest.mark.parametrize("line", [
    b"", b"x", b"[]", b'"a"', b"7", b"null", b"\xff", b"{} x", b'{"a":',
    b"[" * 4000,
], ids=lambda line: repr(line[:9]))  # fmt: skip
def test_what_is_no_frame_ends_the_channel(end, line):
    end.channel.feed(encode({"is": "beat"}) + line + b"\n" + encode({"is": "beat"}))
    assert end.frames == [{"is": "beat"}]
    assert [text[:12] for text in end.lost] == ["not a frame:"]
    assert end.far.recv(1) == b""


def test_a_frame_has_a_limit(end, monkeypatch):
    monkeypatch.setattr(channel, "FRAME_LIMIT", 100)
    end.channel.feed(b"x" * 100)
    assert end.lost == []
    end.channel.feed(b"x")
    assert end.lost == ["a frame without end"]


def test_the_end_of_one_direction_is_not_the_others(end):
    end.far.sendall(encode({"is": "bye"}))
    end.far.shutdown(socket.SHUT_WR)
    assert serve(end.loop, lambda: end.lost)
    assert (end.frames, end.lost) == ([{"is": "bye"}], ["closed by the other side"])
    end.channel.send({"is": "last"})
    assert end.far.recv(100) == encode({"is": "last"})


def test_a_reader_that_is_gone_is_said_once(end):
    end.far.close()
    for _ in range(3):
        end.channel.send({"is": "beat"})
    serve(end.loop, seconds=0.02)
    assert end.lost == ["cannot send: Broken pipe"]


def test_closing_is_quiet_and_stops_what_follows(end):
    def receive(frame):
        end.frames.append(frame)
        end.channel.close()

    end.channel._receive = receive
    end.channel.feed(STREAM)
    end.channel.close()
    end.channel.send({"is": "beat"})
    assert (end.frames, end.lost, end.far.recv(1)) == (FRAMES[:1], [], b"")


def test_silence_is_counted_from_the_last_byte(end):
    end.channel.heard = 0.0
    end.far.sendall(b"{")  # half a frame is a sign of life too
    assert serve(end.loop, lambda: end.channel.heard > 0)


def test_finish_pushes_out_what_waits(end):
    end.far.setblocking(False)
    end.channel.send({"is": "bye", "why": "w" * 3_000_000})
    assert end.channel.waiting
    began = time.monotonic()
    end.channel.finish(0.05)  # nobody reads
    assert time.monotonic() - began < 1.0
    assert end.lost == []


# --- the greeting ---


@pytest.mark.parametrize("chatter", [
    b"", b"Welcome!\n", b"no newline at the end", b"a\r\n\n\n", b"\x1b[0m\xff\xfe\n", b"torchrun_nccl-door\n", b"x" * 70000,
], ids=lambda text: repr(text[:20]))  # fmt: skip
def test_greeting_after_what_a_login_shell_prints(chatter):
    assert split_greeting(chatter + greeting("17.pbs0-ab12", 31) + b'{"is":"hello"}\n') == (
        "17.pbs0-ab12", 31, b'{"is":"hello"}\n',
    )  # fmt: skip


def test_greeting_is_not_taken_before_it_is_whole():
    whole = b"Welcome" + greeting("17-ab", 3)
    assert [split_greeting(whole[:end]) for end in range(len(whole))] == [None] * len(whole)
    assert split_greeting(whole) == ("17-ab", 3, b"")


@pytest.mark.parametrize("line", [b"17-ab", b"17-ab x", b"17-ab -1", b"17-ab 1 2", b"", b"17-ab \xff"])
def test_bad_greetings(line):
    with pytest.raises(ValueError, match="not a greeting"):
        split_greeting(b"\n" + channel.MAGIC + b" " + line + b"\n")


@pytest.fixture
def pipe():
    reader, writer = os.pipe()
    yield reader, writer
    for fd in (reader, writer):
        with contextlib.suppress(OSError):
            os.close(fd)


@pytest.mark.parametrize(
    "said, expected",
    [
        ([greeting("17-ab", 1)], b""),
        ([greeting("17-ab", 1)[1:]], b""),  # the very first bytes of the pipe
        ([b"motd\n", b"prompt> ", greeting("17-ab", 1) + b"{}"], b"{}"),
        # Another launch's, another node's, a malformed one: chatter too.
        ([greeting("18-ab", 1), greeting("17-ab", 2), b"\ntorchrun_nccl-door 17-ab\n", greeting("17-ab", 1)], b""),
        ([b"/bin/sh: no python3\n", None], "ended before the node answered"),
        ([None], "ended before the node answered"),
        ([b"x" * 65536] * 17, "printed 1 MB instead of an answer"),
    ],
)
def test_greeting_over_a_pipe(pipe, said, expected):
    running, (reader, writer) = Loop(), pipe
    got: list[object] = []
    Greeting(running, reader, greeting("17-ab", 1), got.append, got.append)
    for data in said:
        if data is None:
            os.close(writer)
        else:
            os.write(writer, data)
        serve(running, lambda: got, 0.01)
    assert serve(running, lambda: got)
    assert got == [expected]


# --- proofs ---

KEY = derive_key(b"5C969418768AF281161BE8C97AD05B7B", "17-ab")


def test_keys_differ():
    """By the job's secret, and by the launch: two launches in one job do not meet."""
    keys = {KEY, derive_key(b"5C969418768AF281161BE8C97AD05B7B", "17-ac"), derive_key(b"other", "17-ab")}
    assert ([len(key) for key in keys], len(keys)) == ([32] * 3, 3)


@pytest.mark.parametrize(
    "given, expected",
    [
        (proof(KEY, "door", "17-ab", "1", "n1", "n2"), True),
        (proof(derive_key(b"guess", "17-ab"), "door", "17-ab", "1", "n1", "n2"), False),
        (proof(KEY, "launcher", "17-ab", "1", "n1", "n2"), False),  # the other side's, sent back
        (proof(KEY, "door", "17-ab", "1", "n1", "n3"), False),  # of another time
        (proof(KEY, "door", "17-ab", "2", "n1", "n2"), False),  # as another node
        (proof(KEY, "door", "17-ac", "1", "n1", "n2"), False),  # of another launch
        (proof(KEY, "door", "17-ab", "1", "n2", "n1"), False),
        (proof(KEY, "door", "17-ab", "1n1", "", "n2"), False),  # the same letters, cut elsewhere
        (proof(KEY, "door", "17-ab", "1", "n1", "n2").upper(), False),
        ("", False),
        ("é", False),
        (None, False),
        (7, False),
        ([], False),
    ],
)
def test_is_proof(given, expected):
    assert is_proof(given, KEY, "door", "17-ab", "1", "n1", "n2") is expected


class Stranger:
    """Somebody who connects to the launcher's port."""

    def __init__(self, running: Loop, port: int) -> None:
        self.loop = running
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.settimeout(SECONDS)
        self.seen = b""

    def say(self, data: bytes) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.socket.sendall(data)

    def hears(self) -> bytes:
        """What the launcher answers; nothing where it hangs up."""
        self.socket.setblocking(False)

        def has_heard():
            try:
                data = self.socket.recv(65536)
            except BlockingIOError:
                return False
            except ConnectionResetError:
                data = b""
            self.seen += data
            return not data or data.endswith(b"\n")

        assert serve(self.loop, has_heard)
        answer, self.seen = self.seen, b""
        return answer


@pytest.fixture
def launcher():
    """A port that waits for the doors of 17-ab: its loop, what it took, a way to connect."""
    running, taken = Loop(), []
    listener = Listener(running, "17-ab", KEY, lambda index, fd: taken.append((index, fd)))
    port = int(listener.addresses().rpartition(":")[2])
    strangers: list[Stranger] = []

    def connect() -> Stranger:
        strangers.append(Stranger(running, port))
        return strangers[-1]

    yield SimpleNamespace(loop=running, taken=taken, connect=connect)
    for _, fd in taken:
        os.close(fd)
    for one in strangers:
        one.socket.close()
    listener._socket.close()


def hello(launch_id: str = "17-ab", index: int = 3, nonce: str = "n1") -> bytes:
    return greeting(launch_id, index) + encode({"nonce": nonce})


def test_a_door_is_let_in(launcher):
    door = launcher.connect()
    door.say(hello())
    answer = decode(door.hears())
    assert is_proof(answer["proof"], KEY, "launcher", "17-ab", "n1", answer["nonce"])
    door.say(encode({"proof": proof(KEY, "door", "17-ab", "3", "n1", answer["nonce"])}))
    assert serve(launcher.loop, lambda: launcher.taken)
    index, fd = launcher.taken[0]
    os.write(fd, b"welcome")
    door.socket.setblocking(True)
    assert (index, door.socket.recv(7)) == (3, b"welcome")


def test_a_door_that_speaks_slowly_is_let_in(launcher):
    door = launcher.connect()
    for byte in hello():
        door.say(bytes([byte]))
        serve(launcher.loop, seconds=0.0)
    nonce = decode(door.hears())["nonce"]
    for byte in encode({"proof": proof(KEY, "door", "17-ab", "3", "n1", nonce)}):
        door.say(bytes([byte]))
        serve(launcher.loop, seconds=0.0)
    assert serve(launcher.loop, lambda: launcher.taken)


@pytest.mark.parametrize(
    "answer",
    [
        lambda theirs: {"proof": proof(derive_key(b"guess", "17-ab"), "door", "17-ab", "3", "n1", theirs["nonce"])},
        lambda theirs: {"proof": theirs["proof"]},  # the launcher's own, sent back
        lambda theirs: {"proof": proof(KEY, "door", "17-ab", "3", "n1", "0" * 32)},  # recorded at another time
        lambda theirs: {"proof": proof(KEY, "door", "17-ab", "2", "n1", theirs["nonce"])},  # meant for another node
        lambda theirs: {"proof": None},
        lambda theirs: {"proof": "\udcff"},
        lambda theirs: {},
    ],
    ids=["wrong key", "reflected", "replayed", "other node", "null", "odd text", "none"],
)
def test_without_the_key_nobody_is_let_in(launcher, answer):
    stranger = launcher.connect()
    stranger.say(hello())
    stranger.say(encode(answer(decode(stranger.hears()))))
    assert stranger.hears() == b""
    assert launcher.taken == []


def test_nonces_are_fresh(launcher):
    nonces = []
    for _ in range(2):
        stranger = launcher.connect()
        stranger.say(hello())
        nonces.append(decode(stranger.hears())["nonce"])
    assert nonces[0] != nonces[1]
    assert len(nonces[0]) == 32


@pytest.mark.parametrize(
    "data",
    [
        hello(launch_id="17-ac"),  # of another launch: it learns nothing
        b"GET / HTTP/1.1\r\n\r\n" + b"x" * channel.GREETING_LIMIT,
        greeting("17-ab", 3) + b"x\n",
        greeting("17-ab", 3) + b"[]\n",
        greeting("17-ab", 3) + b'{"nonce":"\\u00e9"}\n',
        b"\n" + channel.MAGIC + b" 17-ab one\n{}\n",
        hello()[:-1] + b"x" * channel.GREETING_LIMIT,
    ],
    ids=["other launch", "too much", "no JSON", "no object", "odd nonce", "no number", "too long"],
)
def test_strangers_are_sent_away(launcher, data):
    stranger = launcher.connect()
    stranger.say(data)
    assert stranger.hears() == b""
    assert launcher.taken == []


@pytest.mark.parametrize("data", [b"", b"\n", hello()])
def test_strangers_have_little_time(launcher, monkeypatch, data):
    monkeypatch.setattr(channel, "GREETING_SECONDS", 0.05)
    stranger = launcher.connect()
    stranger.say(data)
    if data == hello():
        assert decode(stranger.hears())["nonce"]
    assert stranger.hears() == b""


# --- heartbeat ---


class Clock:
    """A clock and a loop with one timer that only move when told."""

    def __init__(self, monkeypatch) -> None:
        self.now = 100.0
        self.due, self.call = 0.0, None
        monkeypatch.setattr(channel, "time", SimpleNamespace(monotonic=lambda: self.now))

    def after(self, seconds, call):
        self.due, self.call = self.now + seconds, call
        return SimpleNamespace(cancel=lambda: setattr(self, "call", None))

    def wake(self, late: float = 0.0) -> None:
        self.now = self.due + late
        call, self.call = self.call, None
        call()


class Peer:
    """The other side as the heart sees it."""

    def __init__(self, now: float) -> None:
        self.heard = now
        self.sent: list[dict[str, object]] = []
        self.send = self.sent.append


@pytest.fixture
def heart(monkeypatch):
    clock = Clock(monkeypatch)
    peer, silences = Peer(clock.now), []
    beating = Heart(clock, peer, 2.0, 15.0, silences.append)
    return SimpleNamespace(clock=clock, peer=peer, silences=silences, heart=beating)


def test_heart_beats_at_its_interval(heart):
    for count in range(1, 4):
        heart.clock.wake()
        assert (heart.clock.now, heart.peer.sent) == (100.0 + 2 * count, [{"is": "beat"}] * count)
        heart.peer.heard = heart.clock.now


def test_silence_is_noticed_once(heart):
    while heart.clock.call:
        heart.clock.wake()
    assert (heart.silences, heart.clock.now, len(heart.peer.sent)) == ([16.0], 116.0, 7)


def test_a_sign_of_life_is_enough(heart):
    for step in range(20):
        heart.clock.wake()
        if step % 7 == 6:
            heart.peer.heard = heart.clock.now
    assert heart.silences == []


@pytest.mark.parametrize(
    "late, silences",
    [
        # Suspended for a while: what the other side sent waits unread, so it gets a whole fresh window.
        (3600.0, []),
        (4.5, []),
        # A little late is no excuse: 15 s were over anyway.
        (3.5, [17.5]),
    ],
)
def test_a_side_that_slept_gives_the_other_a_fresh_window(heart, late, silences):
    for _ in range(6):
        heart.clock.wake()  # 12 s of silence
    heart.clock.wake(late)
    assert heart.silences == silences
    if not silences:
        since = heart.clock.now
        while heart.clock.call:
            heart.clock.wake()
        assert (heart.clock.now - since, heart.silences) == (16.0, [16.0])


def test_a_stopped_heart_is_still(heart):
    heart.heart.stop()
    assert heart.clock.call is None


# --- the loop ---


@pytest.fixture
def signals():
    """Gives the process its handlers back."""
    numbers = (signal.SIGUSR1, signal.SIGUSR2)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
    fd = signal.set_wakeup_fd(-1)
    assert fd >= 0


def test_timers_run_in_their_order():
    running, ran = Loop(), []
    running.after(0.03, lambda: ran.append("later"))
    running.after(0.01, lambda: ran.append("first"))
    running.after(0.01, lambda: ran.append("second"))  # of two at the same time the older one
    running.after(-1.0, lambda: ran.append("now"))
    running.after(0.02, lambda: ran.append("never")).cancel()
    running.after(0.04, running.stop)
    running.run()
    assert ran == ["now", "first", "second", "later"]


def test_a_timer_may_cancel_another_that_is_due():
    running, ran = Loop(), []
    running.after(0.0, lambda: second.cancel())
    second = running.after(0.0, lambda: ran.append("second"))
    running.after(0.01, running.stop)
    running.run()
    assert ran == []


def test_nothing_runs_after_stop():
    running, ran = Loop(), []
    running.after(0.0, running.stop)
    running.after(0.0, lambda: ran.append("late"))
    running.run()
    assert ran == []
    running.after(0.01, running.stop)
    running.run()  # it can be run again, and nothing is lost
    assert ran == ["late"]


def test_a_descriptor_forgotten_in_the_same_round_is_not_called():
    running, called = Loop(), []
    pairs = [socket.socketpair() for _ in range(2)]
    for number, (near, far) in enumerate(pairs):

        def read(number=number):
            called.append(number)
            for one, _ in pairs:
                running.forget(one.fileno())

        running.watch(near.fileno(), read)
        far.send(b"x")
    serve(running, seconds=0.02)
    assert len(called) == 1
    for pair in pairs:
        for one in pair:
            one.close()


def test_watching_again_replaces():
    running, called = Loop(), []
    near, far = socket.socketpair()
    running.watch(near.fileno(), lambda: called.append("old"))
    running.watch(near.fileno(), None, lambda: (called.append("writable"), running.stop()))
    far.send(b"x")
    running.run()
    assert called == ["writable"]
    running.forget(near.fileno())
    running.forget(near.fileno())  # not known any more: no error
    near.close()
    far.close()


def test_signals_come_through_the_loop(signals):
    running, came = Loop(), []
    running.on_signals((signal.SIGUSR1,), lambda number: came.append(("one", number)))
    running.on_signals((signal.SIGUSR2,), lambda number: came.append(("two", number)))
    os.kill(os.getpid(), signal.SIGUSR1)
    os.kill(os.getpid(), signal.SIGUSR2)
    assert came == []  # not before the loop runs
    assert serve(running, lambda: len(came) == 2)
    assert sorted(came) == [("one", signal.SIGUSR1), ("two", signal.SIGUSR2)]


def test_a_signal_that_comes_many_times_at_once_is_one(signals):
    running, came = Loop(), []
    running.on_signals((signal.SIGUSR1,), came.append)
    for _ in range(5):
        os.kill(os.getpid(), signal.SIGUSR1)
    serve(running, lambda: came, 0.05)
    serve(running, seconds=0.02)
    assert came == [signal.SIGUSR1]


@pytest.mark.parametrize("module", [channel, loop, authentication])
def test_doctests(module):
    assert doctest.testmod(module).failed == 0
