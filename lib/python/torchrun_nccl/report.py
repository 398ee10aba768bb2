"""What a person reads: the header, and the summary with the first failure last, where the eye is. Pure text."""

from __future__ import annotations

import os.path
from typing import Any

from . import diagnosis
from .agreement import Agreement
from .hostlist import fold
from .outcome import Cause, Outcome, RankEnd, last_words
from .plan import Plan

TAIL_LINES = 20
#: Of a list of numbers in one line.
SHOWN = 16


def header(plan: Plan, agreement: Agreement) -> str:
    """One line at the start.

    2 nodes x 4 = 8 processes (GPU), PBS job 17.pbs0 by pbsdsh, OMP_NUM_THREADS 12 = 48 CPUs / 4 (PBS had 48),
    logs output.train.py.HOST.log
    """
    counts = [node.nproc for node in agreement.nodes]
    each = str(counts[0]) if len(set(counts)) == 1 else f"({_joined('+', counts)})"
    scheduler = plan.scheduler.upper() if plan.scheduler == "pbs" else plan.scheduler
    job = f"{scheduler} job {plan.job_id}" if plan.job_id else scheduler
    by = "" if plan.transport == "local" else f" by {plan.transport}"
    notes = dict.fromkeys(node.omp_note for node in agreement.nodes)
    omp = next(iter(notes)) + (f" on {plan.nodes[0].host}" if len(notes) > 1 else "")
    processes = "process" if agreement.world_size == 1 else "processes"
    return (
        f"{len(counts)} node{_s(counts)} x {each} = {agreement.world_size} {processes} "
        f"({'CPU' if agreement.is_cpu else 'GPU'}), {job}{by}, {omp}, log{_s(counts)} {_logs(plan)}"
    )


def _logs(plan: Plan) -> str:
    directory = "" if plan.log_directory == plan.directory else plan.log_directory
    first = plan.nodes[0]
    before, _, after = first.log.rpartition(f".{first.short}.")
    return os.path.join(directory, first.log if len(plan.nodes) == 1 else f"{before}.HOST.{after}")


def hint_of(cause: Cause) -> str:
    if cause.rank is not None:
        code = cause.rank.code or 0
        return diagnosis.hint(cause.rank.tail, -code if code < 0 else 0)
    return diagnosis.hint(cause.node.tail, 0) if cause.node is not None else ""


def summary(plan: Plan, outcome: Outcome) -> list[str]:
    """Lines for stderr; the last one says cause and exit code in fixed words."""
    cause = outcome.cause
    if cause.rank is not None:
        lines = _rank_report(plan, outcome, cause, cause.rank)
    elif cause.node is not None:
        lines = [
            f"{plan.nodes[cause.node.node].host} (node {cause.node.node}): {cause.message}",
            *_tail(cause.node.tail),
            *_log(outcome, cause.node.node),
        ]
    else:
        lines = cause.message.splitlines()
    hint = hint_of(cause)
    lines += [f"hint: {hint}"] if hint else []
    attempts = f", {len(outcome.attempts)} attempts" if len(outcome.attempts) > 1 else ""
    return [*lines, f"{cause.cause}, exit code {cause.exit_code}, {outcome.seconds:.1f} s{attempts}"]


def _rank_report(plan: Plan, outcome: Outcome, cause: Cause, end: RankEnd) -> list[str]:
    later = sorted(
        (other for other in outcome.attempts[-1].ranks if other.is_failure and other is not end), key=lambda one: one.ms
    )
    gpu = f", GPU {end.gpu}" if end.gpu else ""
    place = f"rank {end.rank} on {plan.nodes[end.node].host} (node {end.node}, local rank {end.local_rank}{gpu})"
    what = "first failure seen, likely the echo of another" if cause.is_echo else "first failure"
    ending = f"{what}: {place} {end.ending} after {end.ms / 1000:.1f} s"
    lines = _folded(plan, later)
    if end.code == 0:  # it left early, and said nothing: the words of the first one that could not go on
        for one in later[:1]:
            lines += [f"rank {one.rank} {one.ending}:", *_tail(one.tail)]
        return [*lines, f"{ending}: {cause.message}", *_log(outcome, end.node)]
    lines += [cause.message] if cause.message else []
    return [*lines, ending, *_tail(end.tail), *_log(outcome, end.node)]


def _folded(plan: Plan, later: list[RankEnd]) -> list[str]:
    """One line for the ranks that failed later by themselves."""
    if not later:
        return []
    ranks = _joined(", ", sorted(end.rank for end in later))
    hosts = fold(plan.nodes[node].host for node in sorted({end.node for end in later}))
    return [f"later: rank{_s(later)} {ranks} on {hosts} failed too"]


def _log(outcome: Outcome, node: int) -> list[str]:
    path = dict(outcome.logs).get(node)
    return [f"log: {path}"] if path else []


def _tail(text: str) -> list[str]:
    """The last lines of a stderr, marked as somebody else's words."""
    return [f"  | {line}" for line in last_words(text, TAIL_LINES)]


def _joined(sign: str, numbers: list[int]) -> str:
    return sign.join(map(str, numbers[:SHOWN])) + (f"{sign}…" if len(numbers) > SHOWN else "")


def _s(several: list[Any]) -> str:
    return "s" if len(several) > 1 else ""
