"""Schedulers whose jobs are recognised but not read yet: inside one, a run on this machine alone would be wrong."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from torchrun_nccl.allocation import Env
from torchrun_nccl.errors import BadAllocation


@dataclass(frozen=True)
class Foreign:
    """A scheduler, the variables of which any one means "inside a job", and the one that holds the job's id."""

    name: str
    title: str
    signs: tuple[str, ...]
    job_id: str

    def sign(self, env: Env) -> str | None:
        return next((name for name in self.signs if env.get(name)), None)


FOREIGN: Final = (
    Foreign("oar", "OAR", ("OAR_JOB_ID", "OAR_NODEFILE"), "OAR_JOB_ID"),
)


def refusal(foreign: Foreign, env: Env, problems: Iterable[Exception] = ()) -> BadAllocation:
    """Why this job is not started, and what can be done; problems are those of the schedulers tried before."""
    sign = foreign.sign(env)
    job = f"{foreign.title} job {env.get(foreign.job_id, '')}".strip()
    why = f"{sign} is set" if sign else f"--scheduler {foreign.name}"
    # The cause stands before the first semicolon; the advice after it is ours to give.
    before = "".join(f" ({str(problem).partition(';')[0]})" for problem in problems)
    return BadAllocation(
        f"{job} ({why}): this version cannot read such a job; "
        f"give --hosts HOST,HOST, or --scheduler none to use this machine alone{before}"
    )
