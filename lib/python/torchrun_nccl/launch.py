"""The launcher's effects: start the doors, hear the nodes, agree, supervise, stop. `launch(plan)` is the way in."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import secrets
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import IO, Optional

from . import agreement, authentication, channel, outcome, report
from .agreement import Agreement, NodeFacts
from .channel import Channel, Frame, Heart
from .environment import Pairs
from .errors import DeadlinePassed, LaunchError, NodeLost, Refused
from .hostlist import fold
from .loop import Loop, Timer
from .outcome import Attempt, Cause, NodeEnd, Outcome, RankEnd
from .plan import NodePlan, Plan
from .transports import LISTENER

SPAWNS_IN_FLIGHT = 16
#: After a first failure the others get this long, at most half the grace, to fail by themselves.
SETTLE_SECONDS = 3.0
PORT_TRIES = 3
#: What a node may need beyond its grace to sweep and report, before it counts as lost.
STOP_SLACK = 8.0
BYE_SECONDS = 3.0
NODE_BYE_SLACK = 3.0
PR_SET_PDEATHSIG = 1  # linux/prctl.h
WANTED_FILES = 65536

Talk = Callable[[str], None]


class Printer:
    """Copies the ranks' lines to our stdout from a thread: a reader that stalls must not stall the launch."""

    LIMIT = 16 << 20

    def __init__(self, out: IO[bytes]) -> None:
        self._out = out
        self._lines: deque[bytes] = deque()
        self._ready = threading.Condition()
        self._pending = 0
        self._dropped = 0
        self._is_broken = False
        self._thread: Optional[threading.Thread] = None

    def put(self, rank: int, text: str) -> None:
        prefix = b"[%d] " % rank
        lines = os.fsencode(text).splitlines(keepends=True)
        block = b"".join(prefix + line.rstrip(b"\r\n") + b"\n" for line in lines)
        with self._ready:
            if self._pending > self.LIMIT or self._is_broken:
                self._dropped += len(lines)
                return
            self._lines.append(block)
            self._pending += len(block)
            self._ready.notify()
        if self._thread is None:
            self._thread = threading.Thread(target=self._print, daemon=True)
            self._thread.start()

    def _print(self) -> None:
        while True:
            with self._ready:
                while not self._lines:
                    self._ready.wait()
                block = self._lines.popleft()
            try:
                self._out.write(block)
                self._out.flush()
            except (OSError, ValueError):
                self._is_broken = True
            with self._ready:
                self._pending -= len(block)

    def finish(self, seconds: float) -> int:
        """Wait for what is pending; the number of lines that were left out."""
        deadline = time.monotonic() + seconds
        while self._pending and not self._is_broken and time.monotonic() < deadline:
            time.sleep(0.005)
        return self._dropped


class Node:
    """What the launcher knows of one node while it runs."""

    def __init__(self, plan: NodePlan) -> None:
        self.plan = plan
        self.process: Optional[subprocess.Popen[bytes]] = None
        self.words: Optional[IO[bytes]] = None
        self.channel: Optional[Channel] = None
        self.heart: Optional[Heart] = None
        self.deadline: Optional[Timer] = None
        self.facts: Optional[NodeFacts] = None
        self.reached: Optional[dict[str, str]] = None
        self.is_started = False
        self.is_stopped = False
        self.is_over = False

    @property
    def index(self) -> int:
        return self.plan.index

    def said(self) -> str:
        """The last line the transport printed, for a message."""
        if self.words is None:
            return ""
        self.words.seek(0, os.SEEK_END)
        self.words.seek(max(0, self.words.tell() - 2000))
        lines = self.words.read().decode(errors="replace").strip().splitlines()
        return f": {lines[-1]}" if lines else ""


class Launch:
    def __init__(self, plan: Plan, caller_environment: Pairs, talk: Talk, out: IO[bytes]) -> None:
        self.plan = plan
        self._caller_environment = caller_environment
        self._talk = talk
        self._printer = Printer(out)
        self._loop = Loop()
        self._nodes = [Node(node) for node in plan.nodes]
        self._to_spawn = deque(self._nodes)
        self._in_flight = 0
        self._listener: Optional[socket.socket] = None
        self._key = authentication.derive_key(_secret(caller_environment), plan.launch_id)
        self._job = channel.encode(self._job_frame())
        self._phase = "hello"
        self._attempts: list[Attempt] = []
        self._agreement: Optional[Agreement] = None
        self._port_choice = 0
        self._is_port_stolen = False
        self._error: Optional[LaunchError] = None
        self._stopped_by = 0
        self._signals_waiting: list[int] = []
        self._settle: Optional[Timer] = None
        self._stop_deadline: Optional[Timer] = None
        self._logs: dict[int, str] = {}
        self._troubles: set[str] = set()
        self._began = time.monotonic()
        self._forget_attempt()

    def _forget_attempt(self) -> None:
        self._ranks: list[RankEnd] = []
        self._ends: list[NodeEnd] = []
        self._go_at = 0.0

    def run(self) -> Outcome:
        """Everything, to the end. Raises no LaunchError: an error is an outcome too."""
        _raise_file_limit()
        self._loop.on_signals((signal.SIGINT, signal.SIGTERM), self._told)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup
            self._loop.on_signals((signal.SIGHUP,), self._told)
        self._loop.on_signals((signal.SIGUSR1, signal.SIGUSR2), self._told_to_forward)
        self._loop.on_signals((signal.SIGCHLD,), lambda _: self._look_at_transports())
        if any(LISTENER in node.plan.words for node in self._nodes):
            self._listen()
        self._spawn_more()
        self._loop.run()
        self._kill_transports()
        left_out = self._printer.finish(5.0)
        if left_out:
            self._talk(f"{left_out} lines were not copied here, the reader was too slow; the logs hold them")
        return self._outcome()

    # --- start ---

    def _job_frame(self) -> Frame:
        """The same for every node, so that it is made once; what differs goes in a small frame before it."""
        plan, options = self.plan, self.plan.options
        return {
            "is": "job",
            "environment": plan.environment,
            "argv": plan.argv,
            "script": plan.script,
            "directory": plan.directory,
            "log_directory": plan.log_directory,
            "umask": plan.umask,
            "limits": plan.limits,
            "python": plan.python,
            "torchrun": plan.torchrun,
            "signal_group": plan.signal_group,
            "master_port": plan.master_port,
            "master_port_source": plan.master_port_source,
            "tee": options.tee,
            "tee_ranks": options.tee_ranks,
            "redirects": options.redirects,
            "verbose": options.verbose,
            "heartbeat": options.heartbeat,
            "lost_after": options.lost_after,
            "lost_grace": plan.failure_grace,
        }

    def _listen(self) -> None:
        if socket.has_dualstack_ipv6():
            try:
                self._listener = socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
            except OSError:
                self._listener = None
        if self._listener is None:
            self._listener = socket.create_server(("", 0), backlog=1024)
        self._listener.setblocking(False)
        self._loop.watch(self._listener.fileno(), self._accept)

    def _addresses(self) -> str:
        """Where nodes find us: our own name first, then every address that is not loopback."""
        assert self._listener
        port = self._listener.getsockname()[1]
        from .node import facts

        found = [a for one in facts.interfaces() if not one["loopback"] for a in one["addresses"] if not a.startswith("fe80")]
        # Last, for tasks that a site runs on this very machine under another name, with the network down.
        found.append("127.0.0.1")
        names = [f"[{one}]" if ":" in one else one for one in found]
        return ",".join(f"{name}:{port}" for name in names[:12])

    def _spawn_more(self) -> None:
        while self._to_spawn and self._in_flight < SPAWNS_IN_FLIGHT and self._phase == "hello":
            node = self._to_spawn.popleft()
            self._in_flight += 1
            self._spawn(node)

    def _spawn(self, node: Node) -> None:
        is_tcp = LISTENER in node.plan.words
        words = [self._addresses() if word == LISTENER else word for word in node.plan.words]
        node.words = tempfile.TemporaryFile()
        pipe = subprocess.DEVNULL if is_tcp else subprocess.PIPE
        # ssh and local get no key: their channel is inherited. TM tasks have the job's cookie.
        try:
            node.process = subprocess.Popen(
                words,
                stdin=pipe,
                stdout=node.words if is_tcp else subprocess.PIPE,
                stderr=node.words,
                cwd="/",
                env=dict(self._caller_environment),
                preexec_fn=_transport_preparer(os.getpid()),
            )
        except OSError as error:
            self._fail(NodeLost(f"{node.plan.host}: cannot start {words[0]}: {error.strerror}"))
            return
        timeout = self.plan.options.hello_timeout
        node.deadline = self._loop.after(timeout, lambda: self._too_late(node))
        if not is_tcp:
            self._greet_pipe(node)

    def _too_late(self, node: Node) -> None:
        self._fail(DeadlinePassed(f"{self._silent_hosts()}: no report within {self.plan.options.hello_timeout:g} s{node.said()}"))

    def _silent_hosts(self) -> str:
        return fold([node.plan.host for node in self._nodes if node.facts is None])

    # --- greeting ---

    def _greet_pipe(self, node: Node) -> None:
        process = node.process
        assert process and process.stdin and process.stdout
        reader, writer = os.dup(process.stdout.fileno()), os.dup(process.stdin.fileno())
        process.stdout.close()
        process.stdin.close()
        os.set_blocking(reader, False)
        seen = bytearray()

        def read() -> None:
            data = b""
            with contextlib.suppress(OSError):
                data = os.read(reader, 65536)
            seen.extend(data)
            try:
                found = channel.split_greeting(bytes(b"\n" + seen))
            except ValueError:
                found = None
            if found is None:
                if not data or len(seen) > channel.CHATTER_LIMIT:
                    self._loop.forget(reader)
                    os.close(reader)
                    os.close(writer)
                    self._lose(node, "ended before it answered" if not data else "printed 1 MB instead of an answer")
                return
            self._loop.forget(reader)
            launch_id, index, rest = found
            if (launch_id, index) != (self.plan.launch_id, node.index):
                self._fail(Refused(f"{node.plan.host}: answered as node {index} of {launch_id}"))
                return
            self._take_channel(node, reader, writer, rest)

        self._loop.watch(reader, read)

    def _accept(self) -> None:
        assert self._listener
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        Visitor(self._loop, connection, self.plan.launch_id, self._key, self._find_node)

    def _find_node(self, index: int, fd: int) -> None:
        node = self._nodes[index] if index < len(self._nodes) else None
        if node is None or node.channel is not None or node.is_over:
            os.close(fd)
            return
        self._take_channel(node, fd, fd, b"")

    def _take_channel(self, node: Node, reader: int, writer: int, rest: bytes) -> None:
        node.channel = Channel(self._loop, reader, writer, lambda frame: self._hear(node, frame), lambda why: self._channel_lost(node, why))
        node.channel.send({"is": "node", "host": node.plan.host, "log": node.plan.log})
        node.channel.send_encoded(self._job)
        node.channel.feed(rest)

    # --- what nodes say ---

    def _hear(self, node: Node, frame: Frame) -> None:
        kind = frame["is"]
        if kind == "beat" or node.is_over:
            return
        calls: dict[str, Callable[[Node, Frame], None]] = {
            "hello": self._take_hello,
            "reached": self._take_reached,
            "log": self._take_log,
            "started": self._take_started,
            "exit": self._take_exit,
            "engine": self._take_engine,
            "output": lambda _, frame: self._printer.put(frame["rank"], frame["text"]),
            "trouble": self._take_trouble,
            "stopped": self._take_stopped,
            "stopping": self._take_stopping,
            "bye": self._take_bye,
        }
        calls[kind](node, frame)

    def _take_hello(self, node: Node, frame: Frame) -> None:
        assert node.channel
        node.facts = NodeFacts.of(frame["facts"])
        if node.deadline:
            node.deadline.cancel()
        options = self.plan.options
        node.heart = Heart(self._loop, node.channel, options.heartbeat, options.lost_after, lambda s: self._silent(node, s))
        self._in_flight -= 1
        self._spawn_more()
        if self._phase == "hello" and all(one.facts for one in self._nodes):
            self._all_said_hello()

    def _facts(self) -> list[NodeFacts]:
        return [node.facts for node in self._nodes if node.facts]

    def _all_said_hello(self) -> None:
        facts = self._facts()
        try:
            agreement.check(self.plan, facts)
        except LaunchError as error:
            self._fail(error)
            return
        if not agreement.needs_reach(self.plan):
            self._agree()
            return
        self._phase = "reach"
        candidates = agreement.master_candidates(facts[0])
        self._send(self._nodes[1:], {"is": "reach", "addresses": candidates, "port": facts[0].ports[0]})

    def _take_reached(self, node: Node, frame: Frame) -> None:
        node.reached = frame["addresses"]
        if self._phase == "reach" and all(one.reached is not None for one in self._nodes[1:]):
            self._agree()

    def _agree(self) -> None:
        """All nodes have spoken: settle the attempt and start it everywhere."""
        reached = {node.index: node.reached or {} for node in self._nodes}
        number = len(self._attempts)
        try:
            agreed = agreement.agree(self.plan, self._facts(), reached, number, self._port_choice)
        except LaunchError as error:
            self._fail(error)
            return
        if self._agreement is None:
            for warning in (*self.plan.warnings, *agreed.warnings):
                self._talk(f"warning: {warning}")
            self._talk(report.header(self.plan, agreed))
        self._agreement = agreed
        self._phase = "running"
        self._forget_attempt()
        self._is_port_stolen = False
        self._go_at = time.monotonic()
        is_single = agreed.world_size == 1
        for node, part in zip(self._nodes, agreed.nodes):
            node.is_started = node.is_stopped = False
            self._send(
                [node],
                {
                    "is": "go",
                    "nnodes": len(self._nodes),
                    "node_rank": part.node_rank,
                    "nproc": part.nproc,
                    "settings": part.settings,
                    "master": [agreed.address, agreed.port],
                    "overrides": {
                        "TORCHELASTIC_RESTART_COUNT": str(number),
                        "TORCHELASTIC_MAX_RESTARTS": str(self.plan.options.max_restarts),
                    },
                    "terminal": self.plan.terminal if is_single else "",
                },
            )

    def _take_log(self, node: Node, frame: Frame) -> None:
        self._logs[node.index] = frame["path"]

    def _take_trouble(self, node: Node, frame: Frame) -> None:
        text = f"{node.plan.host}: {frame['text']}"
        if text not in self._troubles:
            self._troubles.add(text)
            self._talk(text)

    def _take_started(self, node: Node, frame: Frame) -> None:
        node.is_started = True
        if all(one.is_started for one in self._nodes):
            if self.plan.options.verbose:
                self._talk(f"all ranks run after {time.monotonic() - self._began:.1f} s")
            for number in self._signals_waiting:
                self._send(self._nodes, {"is": "signal", "number": number})
            self._signals_waiting.clear()

    def _take_exit(self, node: Node, frame: Frame) -> None:
        end = RankEnd(
            node.index, frame["rank"], frame["local_rank"], frame["code"], frame["ms"], frame["asked"], outcome.excerpt(frame["tail"])
        )
        self._ranks.append(end)
        if self._phase == "running" and len(self._ranks) == self._world_size():
            self._stop(0.0)
        elif end.is_failure and self._phase == "running":
            self._start_settling()

    def _world_size(self) -> int:
        return self._agreement.world_size if self._agreement else 0

    def _take_engine(self, node: Node, frame: Frame) -> None:
        tail = frame["tail"]
        if not frame["ranks"] and node.index == 0 and ("EADDRINUSE" in tail or "address already in use" in tail.lower()):
            self._is_port_stolen = True
            self._stop(0.0)
            return
        ending = f"exited with {frame['code']}" if frame["code"] >= 0 else f"was ended by {outcome.signal_name(-frame['code'])}"
        when = "while its ranks ran" if frame["ranks"] else "before it started a rank"
        self._ends.append(NodeEnd(node.index, f"torchrun {ending} {when}", self._ms(), True, outcome.excerpt(tail)))
        self._start_settling()

    def _ms(self) -> float:
        return round((time.monotonic() - self._go_at) * 1000, 1)

    # --- failure and stop ---

    def _start_settling(self) -> None:
        if self._settle is None and self._phase == "running":
            seconds = min(SETTLE_SECONDS, self.plan.failure_grace / 2)
            self._settle = self._loop.after(seconds, lambda: self._stop(self.plan.failure_grace))

    def _stop(self, grace: float, number: int = signal.SIGTERM) -> None:
        """Have every node stop its ranks; whatever comes later is our doing."""
        if self._settle:
            self._settle.cancel()
            self._settle = None
        self._phase = "stopping"
        self._to_spawn.clear()
        self._send(self._nodes, {"is": "stop", "grace": grace, "number": number})
        if self._stop_deadline:
            self._stop_deadline.cancel()
        self._stop_deadline = self._loop.after(grace + STOP_SLACK, self._stop_overdue)
        self._end_attempt_if_stopped()

    def _stop_overdue(self) -> None:
        for node in self._nodes:
            if not node.is_stopped and not node.is_over:
                self._lose(node, "did not report that it had stopped")

    def _take_stopped(self, node: Node, frame: Frame) -> None:
        node.is_stopped = True
        if frame["left"]:
            self._talk(f"{node.plan.host}: {frame['left']} processes could not be killed")
        self._end_attempt_if_stopped()

    def _end_attempt_if_stopped(self) -> None:
        if self._phase != "stopping" or not all(node.is_stopped or node.is_over for node in self._nodes):
            return
        if self._stop_deadline:
            self._stop_deadline.cancel()
        if self._is_port_stolen and not self._stopped_by:
            self._port_choice += 1
            if self._port_choice < PORT_TRIES:
                self._talk(f"port {self._agreement.port if self._agreement else ''} was taken just before its use; trying another")
                self._phase = "hello"
                self._agree()
                return
            self._error = Refused(f"the rendezvous port was taken by others {PORT_TRIES} times; give one with --master-port")
        if self._agreement and self._go_at:
            self._attempts.append(Attempt(len(self._attempts), tuple(self._ranks), tuple(self._ends), self._world_size()))
            if self._may_restart():
                return
        self._say_goodbye()

    def _may_restart(self) -> bool:
        """Start the whole gang again, if a failure is left to spend and every node is still there."""
        if self._error or self._stopped_by or any(node.is_over for node in self._nodes):
            return False
        cause = outcome.decide(self._attempts[-1], 0)
        if cause.cause in ("done", "saved") or len(self._attempts) > self.plan.options.max_restarts:
            return False
        number = len(self._attempts)
        self._talk(f"attempt {number} failed ({cause.cause}, exit code {cause.exit_code}); starting all ranks again")
        # Each attempt has a port of its own: what is left of the last one must not be met.
        self._port_choice = (self._port_choice + 1) % max(1, len(self._facts()[0].ports))
        self._agree()
        return True

    def _fail(self, error: LaunchError) -> None:
        """Something before or beside the ranks makes the launch impossible."""
        if self._error is None:
            self._error = error
        if self._phase in ("hello", "reach"):
            self._say_goodbye()
        elif self._phase == "running":
            self._stop(self.plan.failure_grace)

    def _lose(self, node: Node, why: str) -> None:
        """A node that ended, or fell silent, unasked. Its transport does not end by itself."""
        if node.is_over:
            return
        self._close_node(node)
        if self._phase == "goodbye":
            self._leave_if_all_said_bye()
            return
        words = why + (node.said() if node.facts is None else "")
        if node.facts is None:
            self._fail(NodeLost(f"{node.plan.host}: {words}"))
            return
        self._ends.append(NodeEnd(node.index, words, self._ms() if self._go_at else None))
        if self._phase == "running":
            self._talk(f"{node.plan.host}: {words}")
            self._start_settling()
        elif self._phase == "stopping":
            self._end_attempt_if_stopped()
        else:
            self._fail(NodeLost(f"{node.plan.host}: {words}"))

    def _close_node(self, node: Node) -> None:
        node.is_over = True
        for timer in (node.deadline,):
            if timer:
                timer.cancel()
        if node.heart:
            node.heart.stop()
        if node.channel:
            node.channel.close()
        if node.process:
            _kill_group(node.process)

    def _channel_lost(self, node: Node, why: str) -> None:
        self._lose(node, f"lost: {why}")

    def _silent(self, node: Node, seconds: float) -> None:
        self._lose(node, f"lost: silent for {seconds:.0f} s")

    def _take_stopping(self, node: Node, frame: Frame) -> None:
        if self._phase == "running":
            self._talk(f"{node.plan.host}: stopping: {frame['why']}")

    def _take_bye(self, node: Node, frame: Frame) -> None:
        if self._phase == "goodbye" and not frame["why"]:
            node.is_over = True
            if node.heart:
                node.heart.stop()
            if node.channel:
                node.channel.close()
            self._leave_if_all_said_bye()
        else:
            self._lose(node, f"left: {frame['why']}")

    def _say_goodbye(self) -> None:
        self._phase = "goodbye"
        self._to_spawn.clear()
        for node in self._nodes:
            if node.channel is None and not node.is_over:
                self._close_node(node)
        self._send(self._nodes, {"is": "leave"})
        self._loop.after(BYE_SECONDS, self._loop.stop)
        self._leave_if_all_said_bye()

    def _leave_if_all_said_bye(self) -> None:
        if all(node.is_over for node in self._nodes):
            self._loop.stop()

    def _send(self, nodes: Iterable[Node], frame: Frame) -> None:
        for node in nodes:
            if node.channel and not node.is_over:
                node.channel.send(frame)

    # --- transports ---

    def _look_at_transports(self) -> None:
        """A transport that ends before its node has spoken is that node's failure; later it means nothing."""
        for node in self._nodes:
            if node.process and node.process.poll() is not None and node.facts is None and node.channel is None and not node.is_over:
                if LISTENER in node.plan.words:
                    program = os.path.basename(node.plan.words[0])
                    self._lose(node, f"{program} ended ({node.process.returncode}) before the node answered")

    def _kill_transports(self) -> None:
        for node in self._nodes:
            if node.process and node.process.poll() is None:
                # After the goodbye a transport ends by itself in milliseconds.
                with contextlib.suppress(subprocess.TimeoutExpired):
                    node.process.wait(1.0)
                _kill_group(node.process)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    node.process.wait(1.0)

    # --- signals ---

    def _told(self, number: int) -> None:
        if self._stopped_by:
            if number == signal.SIGINT and self._phase == "stopping":
                self._talk("second INT: killing all ranks now")
                self._send(self._nodes, {"is": "stop", "grace": 0.0, "number": signal.SIGTERM})
            return
        self._stopped_by = number
        name = signal.Signals(number).name
        if self._phase in ("hello", "reach"):
            self._talk(f"{name}: leaving before the start")
            self._say_goodbye()
        elif self._phase in ("running", "stopping"):
            self._talk(f"{name}: stopping all ranks, KILL after {self.plan.grace:g} s")
            self._stop(self.plan.grace)

    def _told_to_forward(self, number: int) -> None:
        if self._phase == "running" and all(node.is_started for node in self._nodes):
            self._talk(f"{signal.Signals(number).name} goes to all ranks")
            self._send(self._nodes, {"is": "signal", "number": number})
        elif number not in self._signals_waiting:
            self._signals_waiting.append(number)

    # --- the end ---

    def _outcome(self) -> Outcome:
        if self._attempts and not self._error:
            cause = outcome.decide(self._attempts[-1], self._stopped_by)
        elif self._stopped_by:
            cause = Cause("stopped", 128 + self._stopped_by, message=f"stopped by {signal.Signals(self._stopped_by).name}")
        elif self._error:
            cause = Cause(self._error.cause, self._error.exit_code, message=str(self._error))
        else:
            cause = Cause("internal", outcome.INTERNAL, message="the launch ended before it started")
        return Outcome(cause, tuple(self._attempts), tuple(sorted(self._logs.items())), time.monotonic() - self._began)


class Visitor:
    """Somebody who connected to our port: it has a few seconds and a few bytes to prove it is one of our doors."""

    def __init__(
        self, loop: Loop, connection: socket.socket, launch_id: str, key: bytes, accept: Callable[[int, int], None]
    ) -> None:
        self._loop, self._launch_id, self._key, self._accept = loop, launch_id, key, accept
        self._connection = connection
        self._seen = bytearray()
        self._index = -1
        self._nonces = ("", "")
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._timer = loop.after(channel.GREETING_SECONDS, self._refuse)
        loop.watch(connection.fileno(), self._read)

    def _refuse(self) -> None:
        self._timer.cancel()
        if self._connection.fileno() >= 0:
            self._loop.forget(self._connection.fileno())
            self._connection.close()

    def _read(self) -> None:
        try:
            data = self._connection.recv(channel.GREETING_LIMIT)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self._seen += data
        try:
            if not data or len(self._seen) > channel.GREETING_LIMIT or not self._step():
                self._refuse()
        except (ValueError, OSError):
            self._refuse()

    def _step(self) -> bool:
        """Go on with what has come; False for somebody else."""
        if self._index < 0:
            found = channel.split_greeting(bytes(self._seen))
            if found is None or b"\n" not in found[2]:
                return True
            launch_id, index, rest = found
            if launch_id != self._launch_id:
                return False
            line, _, remaining = rest.partition(b"\n")
            theirs, mine = str(channel.decode(line).get("nonce")), secrets.token_hex(16)
            self._index, self._nonces = index, (theirs, mine)
            self._seen = bytearray(remaining)
            proof = authentication.proof(self._key, "launcher", launch_id, theirs, mine)
            self._connection.sendall(channel.encode({"nonce": mine, "proof": proof}))
        if b"\n" not in self._seen:
            return True
        given = channel.decode(bytes(self._seen.partition(b"\n")[0])).get("proof")
        if not authentication.is_proof(given, self._key, "door", self._launch_id, str(self._index), *self._nonces):
            return False
        self._timer.cancel()
        self._loop.forget(self._connection.fileno())
        self._accept(self._index, self._connection.detach())
        return True


def _secret(caller_environment: Pairs) -> bytes:
    """What only this job's processes know: the cookie PBS puts into every task's environment."""
    return (dict(caller_environment).get("PBS_JOBCOOKIE") or secrets.token_hex(16)).encode()


def _transport_preparer(parent: int) -> Callable[[], None]:
    """Runs in the forked transport: a process group of its own, so that ^C and our stop do not race; TERM with our death."""
    libc = ctypes.CDLL(None)

    def prepare() -> None:
        os.setpgid(0, 0)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, signal.SIG_DFL)
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    return prepare


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _raise_file_limit() -> None:
    """Two descriptors a node; the workers get the caller's own limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED_FILES if hard == resource.RLIM_INFINITY else min(hard, WANTED_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def launch(plan: Plan, caller_environment: Pairs, talk: Talk, out: IO[bytes]) -> Outcome:
    """Carry out a plan. caller_environment: for the transports' own processes, with what workers do not get."""
    return Launch(plan, caller_environment, talk, out).run()
