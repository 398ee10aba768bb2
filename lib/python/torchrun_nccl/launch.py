"""The launcher: start the doors, hear the nodes, agree, supervise, stop. `launch(plan)` is the way in.

A launch goes through phases, and each ends when every node still there has answered::

    hello → reach → running → stopping → goodbye
              ↑________________|   another attempt
"""

from __future__ import annotations

import contextlib
import os
import resource
import secrets
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import IO

from . import agreement, authentication, channel, commands, outcome, report
from .agreement import Agreement, NodeFacts
from .channel import Channel, Frame, Heart
from .environment import Pairs
from .errors import DeadlinePassed, LaunchError, NodeLost, Refused
from .hostlist import fold
from .listener import Listener
from .loop import Loop, Timer
from .node.engine import bracketed
from .nodes import RETRY_SECONDS, Greeting, Node, Start, end_transports
from .options import signal_name
from .outcome import Attempt, Cause, NodeEnd, Outcome, RankEnd
from .plan import Plan
from .printer import Printer
from .schedulers import slurm
from .transports import KEY_VARIABLE, TRANSPORTS, passed

SPAWNS_IN_FLIGHT = 16
#: After a first failure the others get this long, at most half the grace, to fail by themselves.
SETTLE_SECONDS = 3.0
PORT_TRIES = 3
#: What a node may need beyond its grace to sweep and report, before it counts as lost.
STOP_SLACK = 8.0
BYE_SECONDS = 3.0
PRINT_SECONDS = 5.0
WANTED_FILES = 65536

Talk = Callable[[str], None]


def launch(plan: Plan, caller_environment: Pairs, talk: Talk, out: IO[bytes]) -> Outcome:
    """Carry out a plan; what goes wrong is part of the outcome, not an exception.

    caller_environment: for the transports' own processes, with what workers do not get. talk: takes one line for the
    user. out: takes the ranks' lines with --tee.
    """
    return _Launch(plan, caller_environment, talk, out).run()


class _Launch:
    def __init__(self, plan: Plan, caller_environment: Pairs, talk: Talk, out: IO[bytes]) -> None:
        self._plan = plan
        self._caller_environment = caller_environment
        self._talk = talk
        self._printer = Printer(out)
        self._loop = Loop()
        self._nodes = [Node(node) for node in plan.nodes]
        self._by_pid: dict[int, Start] = {}
        self._to_spawn = deque(self._nodes)
        self._addresses = ""
        self._secret = _secret(caller_environment)
        self._key = authentication.derive_key(self._secret.encode(), plan.launch_id)
        self._job = channel.encode(_job_frame(plan))
        self._phase = "hello"
        #: Nodes whose answer ends the phase, and those whose ranks do not all run yet.
        self._awaited = {node.index for node in self._nodes}
        self._starting: set[int] = set()
        self._attempts: list[Attempt] = []
        self._agreement: Agreement | None = None
        self._ranks: list[RankEnd] = []
        self._ends: list[NodeEnd] = []
        self._go_at = 0.0
        self._port_choice = 0
        self._is_port_stolen = False
        self._error: LaunchError | None = None
        self._stopped_by = 0
        self._signals_waiting: list[int] = []
        self._has_forwarded = False
        self._settle: Timer | None = None
        self._stop_deadline: Timer | None = None
        self._logs: dict[int, str] = {}
        self._troubles: set[str] = set()
        self._calls: dict[str, Callable[[Node, Frame], None]] = {
            "hello": self._take_hello,
            "reached": self._take_reached,
            "log": self._take_log,
            "started": self._take_started,
            "exit": self._take_exit,
            "engine": self._take_engine,
            "output": self._take_output,
            "trouble": self._take_trouble,
            "stopping": self._take_stopping,
            "stopped": self._take_stopped,
            "bye": self._take_bye,
        }
        self._grace = plan.grace
        self._began = time.monotonic()

    def run(self) -> Outcome:
        _raise_file_limit()
        self._loop.on_signals((signal.SIGINT, signal.SIGTERM), self._told_to_stop)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup
            self._loop.on_signals((signal.SIGHUP,), self._told_to_stop)
        self._loop.on_signals((signal.SIGUSR1, signal.SIGUSR2), self._told_to_forward)
        self._loop.on_signals((signal.SIGCHLD,), lambda _: self._look_at_transports())
        if any(node.is_tcp for node in self._nodes):
            self._addresses = Listener(self._loop, self._plan.launch_id, self._key, self._take_visitor).addresses()
        self._spawn_more()
        self._loop.run()
        end_transports(self._nodes)
        self._printer.finish(PRINT_SECONDS)
        if self._printer.dropped:
            self._talk(f"{self._printer.dropped} lines were not copied here, the reader is gone or slow; the logs hold them")
        return self._outcome()

    # --- hello ---

    def _spawn_more(self) -> None:
        """Keep up to SPAWNS_IN_FLIGHT transports between their start and their node's hello."""
        while self._to_spawn and self._phase == "hello":
            if len(self._awaited) - len(self._to_spawn) >= SPAWNS_IN_FLIGHT:
                return
            self._spawn(self._to_spawn.popleft())

    def _spawn(self, node: Node) -> None:
        """Start the transport of a node, and of all others that the same words start."""
        together = [other for other in self._nodes if other.plan.words == node.plan.words] if node.is_step else [node]
        try:
            start = Start(node.plan.words, self._addresses, self._transport_environment(node), node.is_step, together)
        except OSError as error:
            self._fail(NodeLost(f"{node.host}: cannot start {node.plan.words[0]}: {error.strerror}"))
            return
        self._by_pid[start.process.pid] = start
        for one in together:
            one.start = start
            if one.deadline:
                one.deadline.cancel()
            one.deadline = self._loop.after(self._plan.options.hello_timeout, self._hello_overdue)
            if one is not node:
                self._to_spawn.remove(one)
        if not node.is_tcp:
            reader, writer = start.take_pipes()
            Greeting(
                self._loop,
                reader,
                channel.greeting(self._plan.launch_id, node.index),
                lambda rest: self._take_channel(node, reader, writer, rest),
                lambda why: self._not_greeted(node, reader, writer, why),
            )

    def _not_greeted(self, node: Node, reader: int, writer: int, why: str) -> None:
        """A transport that ended before the door spoke is tried again: some sites let nobody in for a job's first moment."""
        os.close(reader)
        os.close(writer)
        tries = len(RETRY_SECONDS) - len(node.retries)
        if node.retries and node.may_retry():
            if self._plan.options.verbose:
                self._talk(f"{node.host}: {node.starter()} {why}{node.said()}; trying again")
            self._loop.after(node.retries.pop(0), lambda: self._spawn(node) if self._phase == "hello" else None)
        else:
            again = f" (tried {tries + 1} times)" if tries else ""
            self._lose(node, f"{node.starter()} {why}{again}")

    def _transport_environment(self, node: Node) -> Pairs:
        transport = TRANSPORTS[node.plan.transport]
        environment = passed(transport, self._caller_environment, self._plan.job_id)
        # Inherited channels need no key, and PBS's task manager hands nothing on: its tasks have the job's cookie.
        return (*environment, (KEY_VARIABLE, self._secret)) if transport.is_tcp else environment

    def _hello_overdue(self) -> None:
        silent = [one for one in self._nodes if one.start and one.facts is None]
        hosts = fold([one.host for one in silent])
        starters = ", ".join(dict.fromkeys(one.starter() for one in silent))
        seconds = self._plan.options.hello_timeout
        self._fail(DeadlinePassed(f"{hosts}: no report within {seconds:g} s of the start by {starters}{silent[0].said()}"))

    def _look_at_transports(self) -> None:
        """A transport that ends before its node has spoken is that node's failure; later it means nothing by itself."""
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            start = self._by_pid.get(ended.si_pid) if ended else None
            if start is None:
                return
            code = start.process.poll()
            for node in start.nodes:
                if node.is_tcp and node.channel is None and not node.is_over:
                    self._lose(node, f"{node.starter()} ended ({code}) before the node answered")

    def _take_visitor(self, index: int, fd: int) -> None:
        node = self._nodes[index] if index < len(self._nodes) else None
        if node is None or node.channel is not None or node.is_over:
            os.close(fd)
        else:
            self._take_channel(node, fd, fd, b"")

    def _take_channel(self, node: Node, reader: int, writer: int, rest: bytes) -> None:
        node.channel = Channel(
            self._loop,
            reader,
            writer,
            lambda frame: self._hear(node, frame),
            lambda why: self._lose(node, f"lost: {why}"),
        )
        name = (self._plan.master_name if node.index == 0 else "") or node.host
        node.channel.send({"is": "node", "name": name, "log": node.plan.log})
        node.channel.send_encoded(self._job)
        node.channel.feed(rest)

    def _hear(self, node: Node, frame: Frame) -> None:
        if frame["is"] == "beat" or node.is_over:
            return
        self._calls[frame["is"]](node, frame)

    def _take_hello(self, node: Node, frame: Frame) -> None:
        assert node.channel
        node.facts = NodeFacts.of(frame["facts"])
        if node.deadline:
            node.deadline.cancel()
        options = self._plan.options
        node.heart = Heart(
            self._loop,
            node.channel,
            options.heartbeat,
            options.lost_after,
            lambda seconds: self._lose(node, f"lost: silent for {seconds:.0f} s", seconds),
        )
        self._answered(node)
        self._spawn_more()

    def _answered(self, node: Node) -> None:
        """A node has done its part of this phase; with the last one the phase is over."""
        if node.index not in self._awaited:
            return
        self._awaited.discard(node.index)
        if not self._awaited:
            ends = {"hello": self._reach, "reach": self._agree, "stopping": self._end_attempt, "goodbye": self._loop.stop}
            ends[self._phase]()

    # --- reach and agree ---

    def _facts(self) -> list[NodeFacts]:
        return [node.facts for node in self._nodes if node.facts]

    def _reach(self) -> None:
        """Every node has said hello: see that all can start, and by which address of node 0 they meet."""
        facts = self._facts()
        try:
            agreement.check(self._plan, facts)
            is_alone = not agreement.needs_reach(self._plan)
            candidates = () if is_alone else agreement.master_candidates(self._plan, facts[0])
        except LaunchError as error:
            self._fail(error)
            return
        if is_alone:
            self._agree()
            return
        self._phase = "reach"
        self._awaited = {node.index for node in self._nodes[1:]}
        self._send(self._nodes[1:], {"is": "reach", "addresses": candidates, "port": facts[0].ports[0]})

    def _take_reached(self, node: Node, frame: Frame) -> None:
        node.reached = frame["addresses"]
        self._answered(node)

    def _agree(self) -> None:
        """Settle one attempt and start it everywhere."""
        reached = {node.index: node.reached for node in self._nodes}
        number = len(self._attempts)
        try:
            agreed = agreement.agree(self._plan, self._facts(), reached, number, self._port_choice)
        except LaunchError as error:
            self._fail(error)
            return
        if self._agreement is None:
            for warning in (*self._plan.warnings, *agreed.warnings):
                self._talk(f"warning: {warning}")
            self._talk(report.header(self._plan, agreed))
        if self._plan.options.verbose:
            self._talk(f"the nodes meet at {bracketed(agreed.address)}:{agreed.port}")
        self._agreement = agreed
        self._phase = "running"
        self._starting = {node.index for node in self._nodes}
        self._ranks, self._ends, self._is_port_stolen = [], [], False
        self._go_at = time.monotonic()
        if number == 0 and self._plan.scheduler == "slurm" and self._plan.options.grace is None:
            threading.Thread(target=self._ask_for_grace, daemon=True).start()
        for node, part in zip(self._nodes, agreed.nodes):
            go = {
                "is": "go",
                "nnodes": len(self._nodes),
                "node_rank": part.node_rank,
                "nproc": part.nproc,
                "settings": part.settings,
                "master": [agreed.address, agreed.port],
                "overrides": {
                    "TORCHELASTIC_RESTART_COUNT": str(number),
                    "TORCHELASTIC_MAX_RESTARTS": str(self._plan.options.max_restarts),
                },
                "terminal": self._plan.terminal if agreed.world_size == 1 else "",
            }
            self._send([node], go)

    def _ask_for_grace(self) -> None:
        """Slurm KILLs all, agents included, KillWait after its TERM: our own stop must be over by then."""
        with contextlib.suppress(OSError):
            self._grace = slurm.grace(commands.answer(("scontrol", "show", "config")), self._plan.grace)

    # --- running ---

    def _take_log(self, node: Node, frame: Frame) -> None:
        self._logs[node.index] = frame["path"]

    def _take_output(self, node: Node, frame: Frame) -> None:
        self._printer.print(frame["rank"], frame["text"])

    def _take_trouble(self, node: Node, frame: Frame) -> None:
        text = f"{node.host}: {frame['text']}"
        if text not in self._troubles:
            self._troubles.add(text)
            self._talk(text)

    def _take_started(self, node: Node, frame: Frame) -> None:
        self._starting.discard(node.index)
        if not self._starting:
            if self._plan.options.verbose:
                self._talk(f"all ranks run after {time.monotonic() - self._began:.1f} s")
            for number in self._signals_waiting:
                self._forward(number)
            self._signals_waiting.clear()

    def _take_exit(self, node: Node, frame: Frame) -> None:
        end = RankEnd(
            node.index,
            frame["rank"],
            frame["local_rank"],
            frame["code"],
            frame["ms"],
            frame["asked"],
            outcome.excerpt(frame["tail"]),
            gpu=self._gpu(node.index, frame["local_rank"]),
        )
        self._ranks.append(end)
        if self._phase == "running" and len(self._ranks) == self._world_size():
            self._stop(0.0)
        elif end.is_failure and end.code != outcome.SAVED:
            self._start_settling()
        elif end.is_failure and not self._has_forwarded:
            # It was told to save by somebody else; the others may need the time that a save needs.
            self._start_settling(self._grace)

    def _take_engine(self, node: Node, frame: Frame) -> None:
        """torchrun has ended on a node although ranks of it are still to come or to end."""
        tail, code, ranks = frame["tail"], frame["code"], frame["ranks"]
        if not ranks and node.index == 0 and ("EADDRINUSE" in tail or "address already in use" in tail.lower()):
            self._is_port_stolen = True
            self._stop(0.0)
            return
        ending = f"exited with {code}" if code >= 0 else f"was ended by {signal_name(-code)}"
        when = "while its ranks ran" if ranks else "before it started a rank"
        self._ends.append(
            NodeEnd(node.index, f"torchrun {ending} {when}", self._milliseconds(), True, outcome.excerpt(tail))
        )
        self._start_settling()

    def _gpu(self, index: int, local_rank: int) -> str:
        """The device a rank has by its local rank, as its node names it; empty on CPUs."""
        devices = self._agreement.nodes[index].devices if self._agreement else ()
        return devices[local_rank] if local_rank < len(devices) else ""

    def _world_size(self) -> int:
        return self._agreement.world_size if self._agreement else 0

    def _milliseconds(self, ago: float = 0.0) -> float:
        return round((time.monotonic() - ago - self._go_at) * 1000, 1)

    # --- failure and stop ---

    def _start_settling(self, seconds: float | None = None) -> None:
        """A first failure: the others get a moment to fail by themselves, then all are stopped."""
        if self._settle is None and self._phase == "running":
            if seconds is None:
                seconds = min(SETTLE_SECONDS, self._plan.failure_grace / 2)
            self._settle = self._loop.after(seconds, lambda: self._stop(self._plan.failure_grace))

    def _stop(self, grace: float) -> None:
        """Have every node stop its ranks; whatever ends from now on is our doing."""
        if self._settle:
            self._settle.cancel()
            self._settle = None
        self._phase = "stopping"
        self._awaited = {node.index for node in self._nodes if not node.is_over}
        self._send(self._nodes, {"is": "stop", "grace": grace, "number": signal.SIGTERM})
        if self._stop_deadline:
            self._stop_deadline.cancel()
        self._stop_deadline = self._loop.after(grace + STOP_SLACK, self._stop_overdue)
        if not self._awaited:
            self._end_attempt()

    def _stop_overdue(self) -> None:
        for index in sorted(self._awaited):
            self._lose(self._nodes[index], "did not report that it had stopped")

    def _take_stopped(self, node: Node, frame: Frame) -> None:
        if frame["left"]:
            self._talk(f"{node.host}: {frame['left']} processes could not be killed")
        self._answered(node)

    def _end_attempt(self) -> None:
        if self._stop_deadline:
            self._stop_deadline.cancel()
        if self._is_port_stolen and not self._stopped_by and not self._ends:
            self._port_choice += 1
            if self._port_choice < PORT_TRIES and self._plan.master_port is None:
                self._talk(
                    f"port {self._agreement.port if self._agreement else 0} was taken just before its use; trying another"
                )
                self._agree()
                return
            self._error = Refused(
                f"{self._nodes[0].host}: the rendezvous port was taken by another program just before its use"
            )
        else:
            others = sum(not node.plan.is_here for node in self._nodes)
            self._attempts.append(
                Attempt(len(self._attempts), tuple(self._ranks), tuple(self._ends), self._world_size(), others)
            )
            if self._may_restart():
                return
        self._say_goodbye()

    def _may_restart(self) -> bool:
        """Start the whole gang again, if a restart is left and every node is still there."""
        if self._error or self._stopped_by or any(node.is_over for node in self._nodes):
            return False
        cause = outcome.decide(self._attempts[-1], 0)
        if cause.cause in ("done", "saved") or len(self._attempts) > self._plan.options.max_restarts:
            return False
        self._talk(
            f"attempt {len(self._attempts)} failed ({cause.cause}, exit code {cause.exit_code}); starting all ranks again"
        )
        # A port of its own for each attempt: what is left of the last one must not be met.
        self._port_choice = (self._port_choice + 1) % len(self._facts()[0].ports)
        self._agree()
        return True

    def _fail(self, error: LaunchError) -> None:
        """Something makes the launch impossible before a rank has run."""
        self._error = self._error or error
        self._say_goodbye()

    def _lose(self, node: Node, why: str, ago: float = 0.0) -> None:
        """A node that ended, or fell silent, unasked; its last sign of life was `ago` seconds before."""
        if node.is_over:
            return
        words = why + (node.said() if node.facts is None else "")
        node.close()
        node.kill_transport()
        if self._phase in ("hello", "reach"):
            self._fail(NodeLost(f"{node.host}: {words}"))
        elif self._phase == "running":
            self._talk(f"{node.host}: {words}")
            self._ends.append(NodeEnd(node.index, words, self._milliseconds(ago)))
            self._start_settling()
        else:
            if self._phase == "stopping" and not self._stopped_by:
                self._ends.append(NodeEnd(node.index, words, self._milliseconds(ago), is_late=True))
            self._answered(node)

    def _take_stopping(self, node: Node, frame: Frame) -> None:
        if self._phase == "running":
            self._talk(f"{node.host}: stopping: {frame['why']}")

    def _take_bye(self, node: Node, frame: Frame) -> None:
        if self._phase == "goodbye":
            node.close()
            self._answered(node)
        else:
            self._lose(node, f"left: {frame['why']}")

    def _say_goodbye(self) -> None:
        self._phase = "goodbye"
        for node in self._nodes:
            if node.channel is None and not node.is_over:
                node.close()
                node.kill_transport()
        self._awaited = {node.index for node in self._nodes if not node.is_over}
        self._send(self._nodes, {"is": "leave"})
        self._loop.after(BYE_SECONDS, self._loop.stop)
        if not self._awaited:
            self._loop.stop()

    def _send(self, nodes: Iterable[Node], frame: Frame) -> None:
        data = channel.encode(frame)
        for node in nodes:
            if node.channel and not node.is_over:
                node.channel.send_encoded(data)

    # --- signals ---

    def _told_to_stop(self, number: int) -> None:
        if self._stopped_by:
            if number == signal.SIGINT and self._phase == "stopping":
                self._talk("second INT: killing all ranks now")
                self._send(self._nodes, {"is": "stop", "grace": 0.0, "number": signal.SIGTERM})
            return
        self._stopped_by = number
        if self._phase in ("hello", "reach"):
            self._talk(f"{signal_name(number)}: leaving before the start")
            self._say_goodbye()
        elif self._phase in ("running", "stopping"):
            self._talk(f"{signal_name(number)}: stopping all ranks, KILL after {self._grace:g} s")
            self._stop(self._grace)

    def _told_to_forward(self, number: int) -> None:
        if self._phase == "running" and not self._starting:
            self._forward(number)
        elif self._phase in ("hello", "reach", "running") and number not in self._signals_waiting:
            self._signals_waiting.append(number)

    def _forward(self, number: int) -> None:
        self._talk(f"{signal_name(number)} goes to all ranks")
        self._has_forwarded = True
        self._send(self._nodes, {"is": "signal", "number": number})

    # --- the end ---

    def _outcome(self) -> Outcome:
        if self._attempts and not self._error:
            cause = outcome.decide(self._attempts[-1], self._stopped_by)
        elif self._stopped_by:
            cause = Cause("stopped", 128 + self._stopped_by, message=f"stopped by {signal_name(self._stopped_by)}")
        elif self._error:
            cause = Cause(self._error.cause, self._error.exit_code, message=str(self._error))
        else:
            cause = Cause("internal", outcome.INTERNAL, message="the launch ended before it started")
        return Outcome(cause, tuple(self._attempts), tuple(sorted(self._logs.items())), time.monotonic() - self._began)


def _job_frame(plan: Plan) -> Frame:
    """The same for every node, so that it is encoded once; what differs goes in a small frame before it."""
    options = plan.options
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


def _secret(caller_environment: Pairs) -> str:
    """What only this job's processes know: the cookie PBS puts into every task's environment, else a new one."""
    return dict(caller_environment).get("PBS_JOBCOOKIE") or secrets.token_hex(16)


def _raise_file_limit() -> None:
    """Two descriptors a node; the workers get the caller's own limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED_FILES if hard == resource.RLIM_INFINITY else min(hard, WANTED_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
