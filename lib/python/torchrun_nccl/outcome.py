"""What became of a launch: per rank, per node, the first failure, the exit code. Pure."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from .errors import NodeLost
from .options import signal_name

SAVED: Final = 75
INTERNAL: Final = 125
#: What a rank says when another one has gone: the loss of a connection, or a wait that ended, never a cause.
_ECHOES: Final = re.compile(
    # gloo: `[…/pair.cc:537] Connection closed by peer [10.6.1.31]:40123`, `Timed out waiting 9000ms for recv operation`
    r"Connection closed by (?:remote )?peer|Connection reset by peer|Connection refused|Broken pipe"
    r"|Timed out waiting .*(?:send|recv) operation|Application timeout caused pair closure|connectFullMesh failed"
    # store: `recvVector failed`, `failed to recv, got 0 bytes`, `Timed out after 61 seconds waiting for clients`
    r"|recv(?:Vector|Value\w*) failed|[Ff]ailed to recv|Socket Timeout|waiting for clients|wait timeout after \d+"
    r"|client socket has (?:timed out|failed)"
    # NCCL and its watchdog
    r"|[Rr]emote process (?:has )?exited|unhandled system error|ncclRemoteError|ncclSystemError"
    r"|NCCL communicator was aborted|[Ww]atchdog caught collective operation timeout"
    r"|due to a collective timeout from|stuck for \d+ seconds"
    r"|remote worker|monitoredBarrier|terminate called without an active exception"
)
#: Exceptions in which torch reports the loss of another rank; any other is a rank's own, whatever its text.
_TORCH_ERRORS: Final = re.compile(r"RuntimeError|(?:torch\.(?:\w+\.)*)?Dist(?:Backend|Network|Store)?Error")
#: How a process ends that did not choose its end: an exception, an abort, the same below a shell, a closed pipe.
_HELPLESS: Final = (1, -signal.SIGABRT, 128 + signal.SIGABRT, -signal.SIGPIPE, 128 + signal.SIGPIPE)
_TRACEBACK: Final = "Traceback (most recent call last):"
#: Between two tracebacks of which the later one was raised while the earlier one was handled.
_CHAINED: Final = ("During handling of the above exception", "The above exception was the direct cause")
#: The message of an exception may have several lines before the words that chain it to the next one.
_CHAIN_LINES: Final = 20
#: torch marks each line of an uncaught exception: `[rank3]: ValueError: boom`
_MARK: Final = re.compile(r"\[rank\d+\]: ?")
#: The last line of an exception whose traceback has no head (a SyntaxError's), or whose head is cut off.
_EXCEPTION: Final = re.compile(r"(?:\w+\.)*[A-Z]\w*(?:Error|Exception|Interrupt)(?::.*)?")
EXCERPT_BYTES: Final = 8192
#: So much of what follows the exception, such as a C++ trace that ends in an abort.
_AFTER_BYTES: Final = 1024
_AFTER_LINES: Final = 4
_GAP: Final = "[…]"
#: Nodes lost within this time were lost by one event.
_ONE_WINDOW_MS: Final = 5000.0


@dataclass(frozen=True)
class RankEnd:
    """The exit record of one rank.

    code: exit code, negative for a signal; None where its starter was lost with it.
    ms: milliseconds from the common start to its death. asked: the signal we had sent before, 0 if none.
    gpu: the device at its local rank, empty on CPUs.
    """

    node: int
    rank: int
    local_rank: int
    code: int | None
    ms: float
    asked: int
    tail: str = ""
    gpu: str = ""

    @property
    def is_failure(self) -> bool:
        """It failed by itself, before we asked it to end."""
        return self.code != 0 and not self.asked

    @property
    def exit_code(self) -> int:
        return 137 if self.code is None else self.code if self.code >= 0 else 128 - self.code

    @property
    def ending(self) -> str:
        if self.code is None:
            return "lost with its starter, killed from outside"
        if self.code < 0:
            return f"ended by {signal_name(-self.code)}"
        return f"exited with {self.code}"


@dataclass(frozen=True)
class NodeEnd:
    """A node that ended otherwise than asked, or torchrun on it (is_engine).

    ms: from the common start; None before it. is_late: it came after our own stop had begun, and is no cause.
    """

    node: int
    why: str
    ms: float | None = None
    is_engine: bool = False
    tail: str = ""
    is_late: bool = False


@dataclass(frozen=True)
class Attempt:
    """One start of all ranks. others: how many nodes are not on the launcher's host."""

    number: int
    ranks: tuple[RankEnd, ...]
    nodes: tuple[NodeEnd, ...]
    world_size: int
    others: int = 0


@dataclass(frozen=True)
class Cause:
    """Why the launch ended as it did. cause: one word of the JSON's table."""

    cause: str
    exit_code: int
    rank: RankEnd | None = None
    node: NodeEnd | None = None
    is_echo: bool = False
    message: str = ""


@dataclass(frozen=True)
class Outcome:
    cause: Cause
    attempts: tuple[Attempt, ...]
    logs: tuple[tuple[int, str], ...] = ()
    seconds: float = 0.0


# --- what a rank said ---


@dataclass(frozen=True)
class _Said:
    """An exception in a stderr, with those it was raised from: lines `start` to `end`; `text` is the first one's."""

    start: int
    end: int
    text: str

    @property
    def is_own(self) -> bool:
        is_torchs = _TORCH_ERRORS.fullmatch(self.text.partition(":")[0])
        return not (is_torchs and _ECHOES.search(self.text))


def _exceptions(lines: Sequence[str]) -> list[_Said]:
    """The exceptions in a stderr, in their order."""
    found: list[_Said] = []
    is_inside = is_chained = False
    start, previous = 0, " "
    for number, line in enumerate(_MARK.sub("", line, count=1) for line in lines):
        is_last = _is_indented(previous) and _EXCEPTION.fullmatch(line)
        if line == _TRACEBACK:
            is_inside = True
            start = number
        elif line.startswith(_CHAINED):
            is_chained = bool(found) and number - found[-1].end <= _CHAIN_LINES
        elif line and not _is_indented(line) if is_inside else is_last:
            first = found.pop() if is_chained else _Said(start if is_inside else number, number, line)
            found.append(_Said(first.start, number, first.text))
            is_inside = is_chained = False
        previous = line
    return found


def _is_indented(line: str) -> bool:
    return line.startswith((" ", "\t"))


def _chosen(lines: Sequence[str]) -> _Said | None:
    """The exception that tells most: the last one of the rank's own, else the last one."""
    said = _exceptions(lines)
    return next((one for one in reversed(said) if one.is_own), said[-1] if said else None)


def excerpt(tail: str) -> str:
    """What of a long stderr is worth keeping: an exception and a little of what follows it, else its end.

    >>> excerpt("noise\\nTraceback (most recent call last):\\n  f()\\nValueError: x\\nbye\\n")
    'Traceback (most recent call last):\\n  f()\\nValueError: x\\nbye\\n'
    """
    lines = tail.splitlines(keepends=True)
    said = _chosen([line.rstrip("\r\n") for line in lines])
    if said is None:
        return tail[-EXCERPT_BYTES:]
    exception, after = "".join(lines[said.start : said.end + 1]), "".join(lines[said.end + 1 :])
    return _without_middle(exception, EXCERPT_BYTES - _AFTER_BYTES) + _without_middle(after, _AFTER_BYTES)


def _without_middle(text: str, limit: int) -> str:
    half = (limit - len(_GAP) - 2) // 2
    return text if len(text) <= limit else f"{text[:half]}\n{_GAP}\n{text[-half:]}"


def last_words(tail: str, count: int) -> list[str]:
    """At most `count` lines of a stderr: up to its exception, and the last few of what follows."""
    lines = [line.rstrip() for line in tail.splitlines() if line.strip()]
    said = _chosen(lines)
    if said is None:
        return lines[-count:]
    after = lines[said.end + 1 :]
    if len(after) > _AFTER_LINES:
        after = [_GAP, *after[1 - _AFTER_LINES :]]
    return [*lines[: said.end + 1][len(after) - count :], *after]


def is_echo(end: RankEnd) -> bool:
    """Whether this rank failed because another one had.

    A Python exception of its own is never an echo, one that only reports a lost connection is; nor is an end that the
    program chose, or a signal from outside.
    """
    said = _exceptions(end.tail.splitlines())
    if said:
        return not any(one.is_own for one in said)
    return end.code in _HELPLESS and (bool(_ECHOES.search(end.tail)) or end.code == -signal.SIGPIPE)


# --- what it means ---


def first_failure(attempt: Attempt) -> Cause | None:
    """The first failure; None where nothing failed by itself.

    In this order, each by time: a failure that is no echo, of a rank, its starter or torchrun; a rank that left early
    with 0 or a node lost, before the first echo; an echo; a node lost.
    """
    failed = [(end, is_echo(end)) for end in sorted(attempt.ranks, key=lambda end: end.ms) if end.is_failure]
    echoes = [end for end, is_an_echo in failed if is_an_echo]
    nodes = sorted((end for end in attempt.nodes if not end.is_late), key=_node_ms)
    lost = [end for end in nodes if not end.is_engine]
    first_echo_ms = echoes[0].ms if echoes else float("inf")
    own = [(end.ms, _of_rank(end)) for end, is_an_echo in failed if not is_an_echo]
    own += [(_node_ms(end), _of_engine(end)) for end in nodes if end.is_engine]
    before = [(end.ms, _of_early(end, echoes)) for end in attempt.ranks if end.code == 0 and not end.asked and echoes]
    before += [(_node_ms(end), _of_lost(attempt, lost)) for end in lost[:1]]
    before = [(ms, cause) for ms, cause in before if ms <= first_echo_ms]
    after = [(end.ms, _of_rank(end, is_echo=True)) for end in echoes[:1]]
    for causes in (own, before, after):
        if causes:
            return min(causes, key=lambda one: one[0])[1]
    return _of_lost(attempt, lost) if lost else None


def _node_ms(end: NodeEnd) -> float:
    return -1.0 if end.ms is None else end.ms


def _of_rank(end: RankEnd, is_echo: bool = False) -> Cause:
    cause = "rank_signal" if end.code is None or end.code < 0 else "rank_exit"
    return Cause(cause, end.exit_code, rank=end, is_echo=is_echo)


def _of_engine(end: NodeEnd) -> Cause:
    return Cause("internal", INTERNAL, node=end, message=end.why)


def _of_early(end: RankEnd, echoes: Sequence[RankEnd]) -> Cause:
    """The exit code is that of the first rank that could not go on."""
    return Cause("rank_exit", echoes[0].exit_code, rank=end, message="it left early, while others still needed it")


def _of_lost(attempt: Attempt, lost: Sequence[NodeEnd]) -> Cause:
    """All other nodes at once: the fault is more likely here than there."""
    first = lost[0]
    together = {end.node for end in lost if _node_ms(end) - _node_ms(first) <= _ONE_WINDOW_MS}
    if len(together) == 1:
        return Cause("node_lost", NodeLost.exit_code, node=first, message=first.why)
    if len(together) == attempt.others:
        words = f"this host lost all {len(together)} other nodes at once ({first.why}): look at this host and its network"
        return Cause("node_lost", NodeLost.exit_code, message=words)
    more = len(together) - 1
    words = f"{first.why}, and {more} other node{'s' if more > 1 else ''} at the same time"
    return Cause("node_lost", NodeLost.exit_code, node=first, message=words)


def decide(attempt: Attempt, stopped_by: int) -> Cause:
    """The cause and exit code of an attempt that is over.

    stopped_by: the signal that made the launcher stop, 0 if none.
    """
    # The one code of all ranks, where there is one.
    codes = {end.code for end in attempt.ranks}
    code = next(iter(codes)) if len(codes) == 1 and len(attempt.ranks) == attempt.world_size else None
    if code == SAVED:
        return Cause("saved", SAVED, message="every rank saved its state and left")
    if code == 0 and not (stopped_by and any(end.asked for end in attempt.ranks)):
        return Cause("done", 0)
    if stopped_by:
        # Ranks that all end with one code of their own have said how it ended; a code after TERM is not the signal's.
        exit_code = code if code is not None and code >= 0 else 128 + stopped_by
        return Cause("stopped", exit_code, rank=_before_stop(attempt), message=f"stopped by {signal_name(stopped_by)}")
    failure = first_failure(attempt)
    return failure or Cause("internal", INTERNAL, message="the launch ended without a rank that failed")


def _before_stop(attempt: Attempt) -> RankEnd | None:
    """A failure that was there before the signal came, worth a word beside it."""
    failure = first_failure(attempt)
    is_own = failure is not None and failure.cause == "rank_exit" and not failure.is_echo and failure.exit_code
    return failure.rank if failure and is_own else None


# --- as JSON ---


def to_json(outcome: Outcome, hosts: Sequence[str], hint: str) -> dict[str, Any]:
    """What `--json FILE` writes."""
    cause = outcome.cause
    last = outcome.attempts[-1] if outcome.attempts else Attempt(0, (), (), 0)
    logs = dict(outcome.logs)
    errors = {node.node: node.why for node in reversed(last.nodes)}
    return {
        "exit_code": cause.exit_code,
        "cause": cause.cause,
        "message": cause.message,
        "attempts": len(outcome.attempts),
        "seconds": round(outcome.seconds, 3),
        "first_failure": _failure(cause, hosts, hint),
        "nodes": [
            {"host": host, "node_rank": index, "log": logs.get(index), "error": errors.get(index)}
            for index, host in enumerate(hosts)
        ],
        "ranks": [
            {
                **_place(end, hosts),
                **_ending(end),
                "milliseconds": end.ms,
                "ended_by": "us" if end.asked else "itself",
            }
            for end in sorted(last.ranks, key=lambda end: end.rank)
        ],
    }


def _failure(cause: Cause, hosts: Sequence[str], hint: str) -> dict[str, Any] | None:
    end, node = cause.rank, cause.node
    if end is not None:
        return {**_place(end, hosts), **_ending(end), "stderr_tail": end.tail, "hint": hint}
    if node is not None:
        place = {"host": hosts[node.node], "node_rank": node.node, "rank": None, "local_rank": None, "gpu": None}
        return {**place, "exit_code": None, "signal": None, "stderr_tail": node.tail, "hint": hint}
    return None


def _place(end: RankEnd, hosts: Sequence[str]) -> dict[str, Any]:
    return {
        "host": hosts[end.node],
        "node_rank": end.node,
        "rank": end.rank,
        "local_rank": end.local_rank,
        "gpu": end.gpu or None,
    }


def _ending(end: RankEnd) -> dict[str, Any]:
    """A rank lost without a record has neither code nor signal."""
    code = end.code
    return {
        "exit_code": code if code is not None and code >= 0 else None,
        "signal": signal_name(-code) if code is not None and code < 0 else None,
    }
