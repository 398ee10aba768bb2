"""Door: the one process a transport starts on a node, and sees.

    python -I -S -B door.py LAUNCH_ID.INDEX stdio SECONDS
    python -I -S -B door.py LAUNCH_ID.INDEX 10.6.1.31:40123,[2001:db8::31]:40123 SECONDS

It opens the channel to the launcher, starts the agent in a session of its own (PBS kills by session) and stays, so that
the scheduler's end of the task is seen at once. When the agent ends, it KILLs what is left below.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Iterator
from typing import NoReturn

if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from torchrun_nccl import authentication, channel
from torchrun_nccl.node import processes
from torchrun_nccl.transports import KEY_VARIABLE

#: Where the key is, unless the transport handed it on: the PBS job's cookie, in every task's environment.
COOKIE_VARIABLE = "PBS_JOBCOOKIE"


#: An agent that lives answers a signal at once, and beats once it has said hello.
ANSWER_SECONDS = 5.0
SILENT_SECONDS = 15.0
LOOK_SECONDS = 1.0


def find_key(environment: dict[str, str], launch_id: str) -> bytes:
    secret = environment.get(KEY_VARIABLE) or environment.get(COOKIE_VARIABLE)
    if not secret:
        sys.exit(f"torchrun_nccl: no key for the launcher: neither {KEY_VARIABLE} nor {COOKIE_VARIABLE} is set")
    return authentication.derive_key(secret.encode(), launch_id)


def split_address(text: str) -> tuple[str, int]:
    """
    >>> split_address("[2001:db8::5]:4001"), split_address("10.0.0.1:4001")
    (('2001:db8::5', 4001), ('10.0.0.1', 4001))
    """
    host, _, port = text.rpartition(":")
    return host.strip("[]"), int(port)


def connect_any(addresses: list[tuple[str, int]], seconds: float) -> Iterator[socket.socket]:
    """Connections to `addresses`, all tried side by side, in the order in which they answer, for at most `seconds`.

    A name is looked up here, on the node; several results are all tried.
    """
    selector = selectors.DefaultSelector()
    deadline = time.monotonic() + seconds
    waiting: dict[int, socket.socket] = {}
    for host, port in addresses:
        with contextlib.suppress(OSError):
            for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
                attempt = socket.socket(family, kind, protocol)
                attempt.setblocking(False)
                attempt.connect_ex(address)
                selector.register(attempt, selectors.EVENT_WRITE)
                waiting[attempt.fileno()] = attempt
    while waiting and time.monotonic() < deadline:
        for key, _ in selector.select(deadline - time.monotonic()):
            attempt = waiting.pop(key.fd)
            selector.unregister(attempt)
            if attempt.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0:
                yield attempt
            attempt.close()
    for attempt in waiting.values():
        attempt.close()
    selector.close()


def open_socket(words: str, launch_id: str, index: int, seconds: float) -> int:
    """Connect to the launcher, prove who we are and see that it is it; the descriptor, ready for frames."""
    key = find_key(dict(os.environ), launch_id)
    os.environ.pop(KEY_VARIABLE, None)  # not for the agent and what it starts
    problem = ""
    for connection in connect_any([split_address(word) for word in words.split(",")], seconds):
        try:
            _shake_hands(connection, key, launch_id, index)
            return os.dup(connection.fileno())
        except (OSError, ValueError) as error:
            # Some other program may listen there: a private address can be this node's own, too.
            problem = f"; what answered did not let us in: {error}"
    sys.exit(f"torchrun_nccl: no answer from the launcher at {words} within {seconds:g} s{problem}")


def _shake_hands(connection: socket.socket, key: bytes, launch_id: str, index: int) -> None:
    connection.settimeout(channel.GREETING_SECONDS)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    mine = os.urandom(16).hex()
    connection.sendall(channel.greeting(launch_id, index) + channel.encode({"nonce": mine}))
    answer = channel.decode(_read_line(connection))
    theirs = str(answer.get("nonce"))
    if not authentication.is_proof(answer.get("proof"), key, "launcher", launch_id, mine, theirs):
        raise ConnectionError("it does not know the key")
    proof = authentication.proof(key, "door", launch_id, str(index), mine, theirs)
    connection.sendall(channel.encode({"proof": proof}))
    connection.settimeout(None)


def _read_line(connection: socket.socket) -> bytes:
    """One line, byte by byte: what follows belongs to the agent."""
    line = bytearray()
    while not line.endswith(b"\n"):
        byte = connection.recv(1)
        if not byte or len(line) > channel.GREETING_LIMIT:
            raise ConnectionError("it closed the connection")
        line += byte
    return bytes(line)


def main(arguments: list[str]) -> NoReturn:
    if len(arguments) != 3 or "." not in arguments[0]:
        sys.exit("torchrun_nccl: the door is started by the launcher, not by hand")
    launch_id, _, place = arguments[0].rpartition(".")
    # srun starts the same words on all nodes and tells each task its number.
    index = int(place if place.isdigit() else os.environ.get(place, "-1"))
    for ignored in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGPIPE):
        signal.signal(ignored, signal.SIG_IGN)
    if arguments[1] == "stdio":
        reader, writer = os.dup(0), os.dup(1)
        os.write(writer, channel.greeting(launch_id, index))
    else:
        reader = writer = open_socket(arguments[1], launch_id, index, float(arguments[2]))
    _give_back_stdio()
    processes.become_subreaper()
    code = _mind_agent(launch_id, index, reader, writer)
    processes.kill_tree(os.getpid())
    processes.remove_launch_folder(launch_id, index)
    os._exit(code)


def _give_back_stdio() -> None:
    """The streams a transport gave are the channel or the job's files; neither is for chatter. Errors keep stderr."""
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    os.close(null)


def _mind_agent(launch_id: str, index: int, reader: int, writer: int) -> int:
    """Start the agent, pass TERM, INT and HUP on to it as TERM, wait for its end; its exit code."""
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD))
    # Our end's closing tells the agent that we are gone; through its own it answers our signals, and beats.
    pair = socket.socketpair()
    held, watched = (one.detach() for one in pair)
    agent = os.fork()
    if agent == 0:
        os.close(held)
        os.setsid()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        from torchrun_nccl.node import agent as agent_module

        agent_module.main(launch_id, index, reader, writer, watched)
    os.close(watched)
    os.close(reader)
    if writer != reader:
        os.close(writer)
    # A handler must exist, or the default of SIGCHLD would keep sigwait from seeing it.
    signal.signal(signal.SIGCHLD, lambda *_: None)
    os.set_blocking(held, False)
    waited = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD)
    ended = dict(processes.reap())
    deadline = float("inf")
    while agent not in ended:
        before = time.monotonic()
        told = signal.sigtimedwait(waited, LOOK_SECONDS)
        now = time.monotonic()
        if now - before > 2 * LOOK_SECONDS:  # we were suspended ourselves
            deadline += now - before
        if told is not None and told.si_signo != signal.SIGCHLD:
            processes.send_signal(agent, signal.SIGTERM)
            deadline = min(deadline, now + ANSWER_SECONDS)
        if _has_beaten(held):
            deadline = now + SILENT_SECONDS
        elif now > deadline:  # it hangs, on a file system perhaps, or is stopped
            processes.send_signal(agent, signal.SIGKILL)
        ended = dict(processes.reap())
    code = ended[agent]
    if code < 0:
        # It died without a goodbye. Its children became ours; the mark finds what hides from every subreaper.
        processes.kill_tree(os.getpid())
        processes.kill_marked(processes.launch_mark(launch_id, index))
    return code if code >= 0 else 128 - code


def _has_beaten(held: int) -> bool:
    with contextlib.suppress(BlockingIOError):
        return bool(os.read(held, 64))
    return False


if __name__ == "__main__":
    main(sys.argv[1:])
