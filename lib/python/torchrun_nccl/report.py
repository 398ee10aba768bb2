"""What a person reads: the header, and the summary with the first failure last, where the eye is. Pure text."""

from __future__ import annotations

import os.path
from collections.abc import Sequence

from . import diagnosis
from .agreement import Agreement
from .hostlist import fold
from .outcome import Cause, Outcome
from .plan import Plan

TAIL_LINES = 20


def header(plan: Plan, agreement: Agreement) -> str:
    """
    2 nodes × 4 = 8 processes (CPU), PBS job 17.pbs0 by pbsdsh, OMP_NUM_THREADS 12 = 48 CPUs / 4 (PBS had 48),
    logs output.train.py.HOST.log
    """
    counts = [node.nproc for node in agreement.nodes]
    nodes = "1 node" if len(counts) == 1 else f"{len(counts)} nodes"
    each = (
        f"{counts[0]}"
        if len(set(counts)) == 1
        else "(" + "+".join(map(str, counts[:16])) + ("+…" if len(counts) > 16 else "") + ")"
    )
    job = f"{plan.scheduler.upper() if plan.scheduler == 'pbs' else plan.scheduler} {'job ' + plan.job_id if plan.job_id else ''}".strip()
    by = "" if plan.transport == "local" else f" by {plan.transport}"
    return (
        f"{nodes} × {each} = {agreement.world_size} processes ({'CPU' if agreement.is_cpu else 'GPU'}), {job}{by}, "
        f"{agreement.nodes[0].omp_note}, log{'s' if len(counts) > 1 else ''} {_logs(plan)}"
    )


def _logs(plan: Plan) -> str:
    directory = "" if plan.log_directory == plan.directory else plan.log_directory
    first = plan.nodes[0].log
    if len(plan.nodes) == 1:
        return os.path.join(directory, first)
    return os.path.join(directory, first.replace(f".{plan.nodes[0].short}.", ".HOST."))


def hint_of(cause: Cause) -> str:
    if cause.rank is not None:
        return diagnosis.hint(cause.rank.tail, -(cause.rank.code or 0) if (cause.rank.code or 0) < 0 else 0)
    return diagnosis.hint(cause.node.tail, 0) if cause.node is not None else ""


def summary(plan: Plan, outcome: Outcome) -> list[str]:
    """Lines for stderr; the last one says cause and exit code in fixed words."""
    cause = outcome.cause
    lines: list[str] = []
    if cause.rank is not None and cause.cause != "done":
        lines += _rank_report(plan, outcome, cause)
    elif cause.node is not None:
        lines.append(f"{plan.nodes[cause.node.node].host} (node {cause.node.node}): {cause.message}")
        lines += _tail(cause.node.tail)
    elif cause.message:
        lines.append(cause.message)
    hint = hint_of(cause)
    if hint:
        lines.append(f"hint: {hint}")
    attempts = f", {len(outcome.attempts)} attempts" if len(outcome.attempts) > 1 else ""
    lines.append(f"{cause.cause}, exit code {cause.exit_code}, {outcome.seconds:.1f} s{attempts}")
    return lines


def _rank_report(plan: Plan, outcome: Outcome, cause: Cause) -> list[str]:
    end = cause.rank
    assert end is not None
    what = "first failure" if not cause.is_echo else "first failure seen (likely the echo of another)"
    host = plan.nodes[end.node].host
    lines = [*_others(plan, outcome, cause)]
    if cause.message:
        lines.append(cause.message)
    lines.append(
        f"{what}: rank {end.rank} on {host} (node {end.node}, local rank {end.local_rank}) {end.ending} after {end.ms / 1000:.1f} s"
    )
    lines += _tail(end.tail)
    log = dict(outcome.logs).get(end.node)
    if log:
        lines.append(f"log: {log}")
    return lines


def _others(plan: Plan, outcome: Outcome, cause: Cause) -> list[str]:
    """One folded line for the ranks that failed later by themselves."""
    later = [end for end in outcome.attempts[-1].ranks if end.is_failure and end is not cause.rank]
    if not later:
        return []
    ranks = ", ".join(str(end.rank) for end in sorted(later, key=lambda e: e.rank)[:16])
    more = ", …" if len(later) > 16 else ""
    hosts = fold(sorted({plan.nodes[end.node].host for end in later}))
    return [f"later: rank{'s' if len(later) > 1 else ''} {ranks}{more} on {hosts} failed too"]


def _tail(text: str) -> Sequence[str]:
    """The last lines of a stderr, marked as somebody else's words."""
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    return [f"  | {line}" for line in lines[-TAIL_LINES:]]
