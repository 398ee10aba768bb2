"""Flux: the hosts are not in variables, `flux` says them.

The script of `flux batch` and the shell of `flux alloc` have FLUX_URI, and in newer releases FLUX_ENCLOSING_ID; the tasks
of `flux run` have FLUX_URI, FLUX_JOB_ID, FLUX_JOB_NNODES and FLUX_JOB_SIZE.
"""

from __future__ import annotations

import json
from typing import Final

from torchrun_nccl import hostlist
from torchrun_nccl.allocation import Allocation, Env, Host, ReadText, Run
from torchrun_nccl.errors import BadAllocation, BadHostList
from torchrun_nccl.schedulers.reading import ELSEWHERE, count, first_set, no_command, reason

NAME = "flux"

_JOB_ID: Final = "FLUX_JOB_ID"  # ƒ2Xyz, or f2Xyz in plain ASCII
_ENCLOSING_ID: Final = "FLUX_ENCLOSING_ID"
_URI: Final = "FLUX_URI"
SIGNS: tuple[str, ...] = (_JOB_ID, _ENCLOSING_ID, _URI)
_NODES: Final = "FLUX_JOB_NNODES"
#: The instance of the whole cluster: a shell that talks to it is in no job.
_SYSTEM: Final = "local:///run/flux/local"


def is_present(env: Env) -> bool:
    return bool(env.get(_JOB_ID) or env.get(_ENCLOSING_ID) or env.get(_URI, _SYSTEM) not in ("", _SYSTEM))


def is_real(env: Env, read_text: ReadText, run: Run = no_command) -> bool:
    """Whether the instance answers."""
    try:
        return bool(run(("flux", "getattr", "size")))
    except OSError:
        return False


def read(env: Env, read_text: ReadText, run: Run = no_command) -> Allocation:
    """The job's hosts in the order of Flux's ranks."""
    sign = first_set(env, SIGNS)
    job_id = env.get(_JOB_ID) or env.get(_ENCLOSING_ID, "")
    job = f"Flux job {job_id}".strip()
    names = _names(env, f"{job} ({sign} is set)", run)
    nodes = count(env, _NODES)
    if nodes is not None and len(names) > nodes:
        raise BadAllocation(
            f"{job}: flux names {len(names)} hosts, but {_NODES}={nodes}: "
            f"one of them is of another job; run this in the job script, or {ELSEWHERE}"
        )
    return Allocation(NAME, job_id, tuple(Host(name, line) for line, name in enumerate(names)), why=f"{sign} is set")


def _names(env: Env, job: str, run: Run) -> tuple[str, ...]:
    problems: list[str] = []
    for words in _commands(env):
        command = " ".join(words)
        try:
            answer = run(words).strip()
        except OSError as error:
            problems.append(f"`{command}`: {reason(error)}")
            continue
        try:
            return hostlist.expand(answer, f"{job}: `{command}`")
        except BadHostList:
            problems.append(f"`{command}` answered {json.dumps(answer[:60])}")
    raise BadAllocation(f"{job}: no list of its hosts: {', '.join(problems)}; have the job's flux on PATH, or {ELSEWHERE}")


def _commands(env: Env) -> tuple[tuple[str, ...], ...]:
    """Compressed lists, t[1-2]; the second is for old releases."""
    if env.get(_JOB_ID):
        return ("flux", "hostlist", "local"), ("flux", "jobs", "-n", "-o", "{nodelist}", env[_JOB_ID])
    return ("flux", "hostlist", "local"), ("flux", "getattr", "hostlist")
