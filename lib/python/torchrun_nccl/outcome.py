"""What became of a launch: per rank, per node, the first failure, the exit code. Pure."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Optional

from .errors import NodeLost
from .options import signal_name

SAVED = 75
INTERNAL = 125
#: What a rank says when another one has gone: the loss of a connection, never a cause.
_ECHOES = re.compile(
    r"Connection closed by peer|Connection reset by peer|Connection refused|Broken pipe|Socket Timeout"
    r"|recvVector failed|[Rr]emote process exited|remote worker|connectFullMesh|failed to recv|Failed to recv"
    r"|NCCL communicator was aborted|[Ww]atchdog caught collective operation timeout|Timed out waiting .*(?:send|recv) operation"
    r"|DistBackendError|DistNetworkError|DistStoreError|ncclRemoteError|ncclSystemError|collective monitored barrier"
    r"|terminate called without an active exception",
)
#: The last line of a traceback: ``ValueError: boom``, ``torch.OutOfMemoryError: CUDA out of memory``, ``KeyboardInterrupt``.
_EXCEPTION = re.compile(
    r"^(?:\[rank\d+\]:\s*)?([A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit|Warning|Failure|Timeout))(?::|$)(.*)", re.M
)
_TRACEBACK = "Traceback (most recent call last)"
EXCERPT_BYTES = 8192


@dataclass(frozen=True)
class RankEnd:
    """The exit record of one rank.

    code: exit code, negative for a signal; None where its starter was lost with it.
    ms: milliseconds from the common start to its death. asked: the signal we had sent before, 0 if none.
    """

    node: int
    rank: int
    local_rank: int
    code: Optional[int]
    ms: float
    asked: int
    tail: str = ""

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
    """A node that ended otherwise than asked. ms: from the common start; None before it."""

    node: int
    why: str
    ms: Optional[float] = None
    is_engine: bool = False
    tail: str = ""


@dataclass(frozen=True)
class Attempt:
    """One start of all ranks."""

    number: int
    ranks: tuple[RankEnd, ...]
    nodes: tuple[NodeEnd, ...]
    world_size: int


@dataclass(frozen=True)
class Cause:
    """Why the launch ended as it did. cause: one word of the JSON's table."""

    cause: str
    exit_code: int
    rank: Optional[RankEnd] = None
    node: Optional[NodeEnd] = None
    is_echo: bool = False
    message: str = ""


@dataclass(frozen=True)
class Outcome:
    cause: Cause
    attempts: tuple[Attempt, ...]
    logs: tuple[tuple[int, str], ...] = ()
    seconds: float = 0.0


def excerpt(tail: str) -> str:
    """What of a long stderr is worth sending: from the last traceback on, at most EXCERPT_BYTES.

    >>> excerpt("noise\\n" * 3 + "Traceback (most recent call last):\\nValueError: x\\n")[:9]
    'Traceback'
    """
    start = tail.rfind(_TRACEBACK)
    text = tail[start:] if start >= 0 else tail
    if len(text) <= EXCERPT_BYTES:
        return text if start >= 0 else text[-EXCERPT_BYTES:]
    # A long C++ trace after the exception: its head holds the exception, its end the abort.
    return text[: EXCERPT_BYTES // 2] + "\n[…]\n" + text[-EXCERPT_BYTES // 2 :]


def is_echo(end: RankEnd) -> bool:
    """Whether this rank failed because another one had.

    A Python exception of its own is never an echo; an exception that only reports a lost connection is one.
    """
    own = [name + text for name, text in _EXCEPTION.findall(end.tail) if not _ECHOES.search(name + text)]
    if own:
        return False
    return bool(_ECHOES.search(end.tail)) or end.code == -signal.SIGPIPE


def first_failure(attempt: Attempt) -> Optional[Cause]:
    """The first failure that is no echo of another; None where nothing failed by itself."""
    failed = sorted((end for end in attempt.ranks if end.is_failure), key=lambda end: end.ms)
    echoes = [end for end in failed if is_echo(end)]
    lost = [node for node in attempt.nodes if not node.is_engine]
    engines = [node for node in attempt.nodes if node.is_engine]
    own = next((end for end in failed if end not in echoes and end.code is not None), None)
    first_echo_ms = echoes[0].ms if echoes else float("inf")
    if own is not None:
        return _of_rank(own)
    if engines:
        return Cause("internal", INTERNAL, node=engines[0], message=engines[0].why)
    early = min(
        (end for end in attempt.ranks if end.code == 0 and not end.asked and end.ms < first_echo_ms),
        key=lambda end: end.ms,
        default=None,
    )
    for node in lost:
        if node.ms is None or node.ms <= first_echo_ms or not echoes:
            return _of_node(attempt, node, lost)
    dead = next((end for end in failed if end.code is None), None)
    if dead is not None:
        return _of_rank(dead)
    if echoes:
        if early is not None:
            words = f"rank {early.rank} left early with 0 while others still needed it"
            return Cause("rank_exit", echoes[0].exit_code, rank=echoes[0], is_echo=True, message=words)
        return _of_rank(echoes[0], is_echo=True)
    return _of_node(attempt, lost[0], lost) if lost else None


def _of_rank(end: RankEnd, is_echo: bool = False) -> Cause:
    cause = "rank_signal" if end.code is None or end.code < 0 else "rank_exit"
    return Cause(cause, end.exit_code, rank=end, is_echo=is_echo)


def _of_node(attempt: Attempt, node: NodeEnd, lost: Sequence[NodeEnd]) -> Cause:
    others = len({end.node for end in lost})
    words = node.why if others == 1 else f"{node.why} (the launcher lost {others} nodes at the same time)"
    return Cause("node_lost", NodeLost.exit_code, node=node, message=words)


def decide(attempt: Attempt, stopped_by: int) -> Cause:
    """The cause and exit code of an attempt that is over.

    stopped_by: the signal that made the launcher stop, 0 if none.
    """
    codes = {end.code for end in attempt.ranks}
    is_whole = len(attempt.ranks) == attempt.world_size
    if is_whole and codes == {SAVED}:
        return Cause("saved", SAVED, message="every rank saved its state and left")
    if is_whole and codes == {0} and not attempt.nodes:
        return Cause("done", 0)
    if stopped_by:
        # Ranks that all end with one code of their own have said how it ended; a code after TERM is not the signal's.
        if is_whole and len(codes) == 1 and None not in codes and min(code or 0 for code in codes) >= 0:
            return Cause("stopped", next(iter(codes)) or 0, message=f"stopped by {signal_name(stopped_by)}")
        return Cause("stopped", 128 + stopped_by, message=f"stopped by {signal_name(stopped_by)}")
    failure = first_failure(attempt)
    if failure is not None:
        return failure
    return Cause("internal", INTERNAL, message="the launch ended without a rank that failed")


def to_json(outcome: Outcome, hosts: Sequence[str], hint: str) -> dict[str, Any]:
    cause = outcome.cause
    end = cause.rank
    last = outcome.attempts[-1] if outcome.attempts else None
    failure: Optional[dict[str, Any]] = None
    if end is not None and cause.cause not in ("done", "saved"):
        failure = _failure_json(end, hosts, hint)
    elif cause.node is not None:
        failure = {
            "host": hosts[cause.node.node], "node_rank": cause.node.node, "rank": None, "local_rank": None,
            "exit_code": None, "signal": None, "stderr_tail": cause.node.tail, "hint": hint,
        }  # fmt: skip
    logs = dict(outcome.logs)
    lost = {node.node: node.why for node in last.nodes} if last else {}
    return {
        "exit_code": cause.exit_code,
        "cause": cause.cause,
        "message": cause.message,
        "attempts": len(outcome.attempts),
        "seconds": round(outcome.seconds, 3),
        "first_failure": failure,
        "nodes": [
            {"host": host, "node_rank": index, "log": logs.get(index), "error": lost.get(index)} for index, host in enumerate(hosts)
        ],
        "ranks": [
            {
                "rank": one.rank, "local_rank": one.local_rank, "node_rank": one.node, "host": hosts[one.node],
                "exit_code": one.code if one.code is None or one.code >= 0 else None,
                "signal": signal_name(-one.code) if one.code is not None and one.code < 0 else None,
                "milliseconds": one.ms, "ended_by": "us" if one.asked else "itself",
            }
            for one in sorted(last.ranks if last else (), key=lambda one: one.rank)
        ],
    }  # fmt: skip


def _failure_json(end: RankEnd, hosts: Sequence[str], hint: str) -> dict[str, Any]:
    return {
        "host": hosts[end.node],
        "node_rank": end.node,
        "rank": end.rank,
        "local_rank": end.local_rank,
        "exit_code": end.code if end.code is not None and end.code >= 0 else None,
        "signal": signal_name(-end.code) if end.code is not None and end.code < 0 else None,
        "stderr_tail": end.tail,
        "hint": hint,
    }
