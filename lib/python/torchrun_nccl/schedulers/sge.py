"""Grid Engine and its descendants: PE_HOSTFILE, one line for each queue of each host.

A job without a parallel environment has no such variable, but the same file, with one line, where the job is spooled.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from torchrun_nccl.allocation import Allocation, Env, Host, ReadText, Run
from torchrun_nccl.errors import BadAllocation
from torchrun_nccl.schedulers import reading
from torchrun_nccl.schedulers.reading import ELSEWHERE, can_read, first_set, no_command

NAME = "sge"

_JOB_ID: Final = "JOB_ID"
_TASK_ID: Final = "SGE_TASK_ID"  # "undefined" in a job that is no array's member
_HOSTFILE: Final = "PE_HOSTFILE"
SIGNS: tuple[str, ...] = (_HOSTFILE, _TASK_ID)
_ENVIRONMENT: Final = "PE"
_SPOOL: Final = "SGE_JOB_SPOOL_DIR"
_SLOTS: Final = "NSLOTS"

# `gadi-gpu-v100-0002.gadi.nci.org.au 8 gpu.q@gadi-gpu-v100-0002.gadi.nci.org.au 0,0:0,1`
_LINE: Final = re.compile(r"(?P<host>\S+)\s+(?P<slots>[0-9]{1,6})(?:\s.*)?")


def is_present(env: Env) -> bool:
    return any(env.get(name) for name in SIGNS)


def is_real(env: Env, read_text: ReadText, run: Run = no_command) -> bool:
    """Whether the job's own file is here; it is removed when the job ends."""
    return can_read(read_text, env.get(_HOSTFILE)) or can_read(read_text, _spooled(env))


def read(env: Env, read_text: ReadText, run: Run = no_command) -> Allocation:
    """The job's hosts in the scheduler's order; the first is the one of the job script."""
    job = f"Grid Engine job {env.get(_JOB_ID, '')}".strip()
    if env.get(_HOSTFILE):
        hosts, why = _hosts(read_text, _HOSTFILE, env[_HOSTFILE], job), f"{_HOSTFILE} is set"
    elif env.get(_ENVIRONMENT):
        raise BadAllocation(
            f"{job}: {_HOSTFILE} is not set here, but {_ENVIRONMENT}={env[_ENVIRONMENT]}: only the job script has it, "
            f"tasks of qrsh -inherit do not; run this in the job script, or {ELSEWHERE}"
        )
    else:
        hosts, why = _alone(env, read_text, job), f"{first_set(env, SIGNS)} is set, and no parallel environment"
    return Allocation(
        NAME,
        env.get(_JOB_ID, ""),
        # A slot is a CPU unless a site decided otherwise.
        tuple(replace(host, cpus=host.slots) for host in hosts),
        why=why,
        array_index=reading.index(env.get(_TASK_ID, "")),
    )


def _alone(env: Env, read_text: ReadText, job: str) -> tuple[Host, ...]:
    """The one host of the job; without a name where it has to be this machine's own."""
    if can_read(read_text, _spooled(env)):
        return _hosts(read_text, _SPOOL, _spooled(env), job)
    return (Host("", 0, reading.count(env, _SLOTS) or 1),)


def _spooled(env: Env) -> str:
    return f"{env[_SPOOL]}/pe_hostfile" if env.get(_SPOOL) else ""


def _hosts(read_text: ReadText, name: str, path: str, job: str) -> tuple[Host, ...]:
    where = f"{job}: {name}={path}"
    try:
        text = reading.text_of(read_text, path)
    except OSError as error:
        raise BadAllocation(
            f"{where} cannot be read: {reading.reason(error)}; is the job over, or is this another machine? "
            f"Run this in the job script, or {ELSEWHERE}"
        ) from error
    if not text.strip():
        raise BadAllocation(f"{where} is empty; {ELSEWHERE}")
    return reading.merged(_listed(text, where))


def _listed(text: str, where: str) -> Iterator[tuple[str, int]]:
    for number, line in enumerate(text.rstrip().split("\n"), 1):
        match = _LINE.fullmatch(line.strip())
        if match is None:
            raise BadAllocation(f"{where} line {number} is not HOST SLOTS QUEUE: {json.dumps(line)}; {ELSEWHERE}")
        yield reading.host(match["host"], f"{where} line {number}"), int(match["slots"])
