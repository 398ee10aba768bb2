"""LSF: a file with one line for each slot, or the same in a variable.

LSB_HOSTS is absent in big jobs; LSB_MCPU_HOSTS always fits. On Spectrum CSM systems the first host is the launch node:
it runs the job script and is not for work.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Final

from torchrun_nccl.allocation import Allocation, Env, Host, ReadText, Run
from torchrun_nccl.errors import BadAllocation
from torchrun_nccl.hostlist import fold
from torchrun_nccl.schedulers import reading
from torchrun_nccl.schedulers.reading import ELSEWHERE, can_read, first_set, no_command

NAME = "lsf"

_JOB_ID: Final = "LSB_JOBID"
_FILES: Final = ("LSB_DJOB_HOSTFILE", "LSB_DJOB_RANKFILE")
_PAIRS: Final = "LSB_MCPU_HOSTS"  # h2 4 h1 4
_NAMES: Final = "LSB_HOSTS"  # h2 h2 h1
SIGNS: tuple[str, ...] = (_JOB_ID, *_FILES, _PAIRS, _NAMES)
_ARRAY_INDEX: Final = "LSB_JOBINDEX"  # 0 in a job that is no array's member
_CSM: Final = "CSM_ALLOCATION_ID"

_SLOTS: Final = re.compile(r"[1-9][0-9]{0,5}")
# Summit has batch1, batch2, ...
_LAUNCH_NODE: Final = re.compile(r"(?:batch|login|launch)[0-9]*(?:\..*)?")


def is_present(env: Env) -> bool:
    return any(env.get(name) for name in SIGNS)


def is_real(env: Env, read_text: ReadText, run: Run = no_command) -> bool:
    """Whether one of the job's files is here; they are removed when it ends."""
    return any(can_read(read_text, env.get(name)) for name in _FILES)


def read(env: Env, read_text: ReadText, run: Run = no_command) -> Allocation:
    """The job's hosts in LSF's order. A machine with several names may be listed by more than one of them."""
    job = f"LSF job {env.get(_JOB_ID, '')}".strip()
    source, listed = _listed(env, read_text, job)
    hosts = reading.merged(listed)
    named = f"{_JOB_ID} and {source} are set" if env.get(_JOB_ID) else f"{source} is set"
    launch_node, warnings = _launch_node(env, hosts, source)
    if launch_node:
        hosts, named = hosts[1:], f"{named}; {launch_node}, the launch node, is left out"
    member = reading.index(env.get(_ARRAY_INDEX, ""))
    return Allocation(
        NAME, env.get(_JOB_ID, ""), hosts, why=named, array_index=member if member != "0" else "", warnings=warnings
    )


def _listed(env: Env, read_text: ReadText, job: str) -> tuple[str, list[tuple[str, int]]]:
    """Names and slots in the scheduler's order, and the variable they come from."""
    problems: list[str] = []
    for name in filter(env.get, _FILES):
        where = f"{name}={env[name]}"
        try:
            text = reading.text_of(read_text, env[name]).rstrip()
        except OSError as error:
            problems.append(f"{where} cannot be read: {reading.reason(error)}")
            continue
        if text:
            lines = enumerate(text.split("\n"), 1)
            return name, [(reading.host(line.strip(), f"{job}: {where} line {number}"), 1) for number, line in lines]
        problems.append(f"{where} is empty")
    name = first_set(env, (_PAIRS, _NAMES)) or ""
    words = env.get(name, "").split()
    if words:
        return name, list(_pairs(words, job) if name == _PAIRS else ((reading.host(w, f"{job}: {name}"), 1) for w in words))
    found = "; ".join(problems) or f"none of {', '.join((*_FILES, _PAIRS, _NAMES))} names a host here"
    raise BadAllocation(f"{job}: {found}; run this in the job script, or {ELSEWHERE}")


def _pairs(words: list[str], job: str) -> Iterator[tuple[str, int]]:
    for name, slots in zip(words[::2], [*words[1::2], ""]):
        if not _SLOTS.fullmatch(slots):
            raise BadAllocation(f"{job}: {_PAIRS}: {json.dumps(slots)} after {name} is not a number of slots; {ELSEWHERE}")
        yield reading.host(name, f"{job}: {_PAIRS}"), int(slots)


def _launch_node(env: Env, hosts: tuple[Host, ...], source: str) -> tuple[str, tuple[str, ...]]:
    """The first host if it is there only to run the job script: `batch5 1 h1 42 h2 42`; else what looks like it."""
    first, others = hosts[0], hosts[1:]
    slots = {host.slots for host in others}
    if first.slots != 1 or not others or min(slots) == 1:
        return "", ()
    if env.get(_CSM) or _LAUNCH_NODE.fullmatch(first.name):
        return first.name, ()
    if len(slots) > 1:
        return "", ()
    return "", (
        f"{source} gives {first.name} 1 slot and {'the other host' if len(others) == 1 else 'each other host'} "
        f"{others[0].slots}: if it is a launch node, leave it out with --hosts '{fold(host.name for host in others)}'",
    )
