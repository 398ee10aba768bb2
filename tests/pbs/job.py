"""What qsub and the server decided about a job, as data, and the environments that follow from it. Pure."""

from __future__ import annotations

import itertools
from dataclasses import asdict, dataclass, fields
from typing import Any

TASK_BITS = 31  #: task numbers are positive 32-bit integers: node number above, count on that node below


@dataclass(frozen=True)
class Job:
    """One job. Times are seconds; pairs stand for mappings; all paths are absolute.

    lines: the nodefile's lines.
    mother: the host that runs the script ("mother superior", MS); it may be absent from the lines (mpiprocs=0).
    ncpus: of the chunk that each line belongs to.
    variables: what the site adds to the script's environment only; qsub_v: what `qsub -v` or `-V` gave.
    host_variables: (host, pairs) that a site's launch hook sets in script and tasks on that host.
    enter: (host, words put before every command there).
    lost: hosts that vanished from the network.
    cut_newlines, index_hosts: a worse TM than the real one, see `standin.PbsJob`.
    """

    root: str
    job_id: str
    cookie: str
    lines: tuple[str, ...]
    mother: str
    ncpus: tuple[int, ...]
    user: str
    home: str
    workdir: str
    path: str
    pbs_exec: str
    name: str = "t1.sh"
    queue: str = "workq"
    walltime: float | None = None
    kill_delay: float = 10.0
    join: bool = False
    variables: tuple[tuple[str, str], ...] = ()
    qsub_v: tuple[tuple[str, str], ...] = ()
    host_variables: tuple[tuple[str, tuple[tuple[str, str], ...]], ...] = ()
    resources: tuple[tuple[str, Any], ...] = ()
    addresses: tuple[tuple[str, str], ...] = ()
    uts: str = "auto"
    short_names: bool = False
    enter: tuple[tuple[str, tuple[str, ...]], ...] = ()
    spawn_delay: float = 0.0
    lost: tuple[str, ...] = ()
    cut_newlines: bool = False
    index_hosts: bool = False
    port: int = 0

    @property
    def nodefile(self) -> str:
        return f"{self.root}/var/spool/pbs/aux/{self.job_id}"

    @property
    def script(self) -> str:
        return f"{self.root}/var/spool/pbs/mom_priv/jobs/{self.job_id}.SC"

    @property
    def output(self) -> str:
        return f"{self.root}/var/spool/pbs/spool/{self.job_id}.OU"

    @property
    def error(self) -> str:
        """PBS 23.06: `-j oe` puts all in the output file."""
        return self.output if self.join else f"{self.root}/var/spool/pbs/spool/{self.job_id}.ER"

    @property
    def hosts(self) -> tuple[str, ...]:
        """PBS 23.06: PBS_NODENUM is the index here: order of first appearance, the MS is 0."""
        return tuple(dict.fromkeys((self.mother, *self.lines)))

    @property
    def targets(self) -> tuple[str, ...]:
        """What `pbsdsh -n` counts: lines, or hosts where TM is told to be wrong."""
        return tuple(dict.fromkeys(self.lines)) if self.index_hosts else self.lines

    def tmpdir(self, host: str) -> str:
        """Real hosts have the same path with different contents; on one machine the paths must differ."""
        return f"{self.root}/hosts/{host}/var/tmp/pbs.{self.job_id}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def from_json(text: dict[str, Any]) -> Job:
    return Job(**{field.name: _tuples(text[field.name]) for field in fields(Job)})


def _tuples(value: Any) -> Any:
    """JSON knows only lists; our data are tuples all the way down."""
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value


def task_number(job: Job, host: str, count: int) -> int:
    """TM's number of the count-th task on a host, counted from 1; the script itself is the MS's first.

    PBS 23.06: on the MS 00000002, ...; the first sister of a job with 2 lines 40000001, with 4 lines 20000001,
    with 8 lines 10000001.
    """
    bits = max(len(job.lines) - 1, 1).bit_length()
    return (job.hosts.index(host) << (TASK_BITS - bits)) + count


def _submitted(job: Job) -> dict[str, str]:
    """PBS 23.06: the eleven variables that qsub records."""
    return {
        "PBS_O_HOME": job.home,
        "PBS_O_HOST": "pbs0.cluster.test",
        "PBS_O_LANG": "C.UTF-8",
        "PBS_O_LOGNAME": job.user,
        "PBS_O_PATH": f"/usr/local/bin:/usr/bin:/bin:{job.pbs_exec}/bin",
        "PBS_O_QUEUE": job.queue,
        "PBS_O_SHELL": "/bin/bash",
        "PBS_O_SYSTEM": "Linux",
        "PBS_O_WORKDIR": job.workdir,
        "PBS_O_INTERACTIVE_AUTH_METHOD": "resvport",
        "PBS_O_INTERACTIVE_ENCRYPT_METHOD": "",
    }


def _array(job: Job) -> dict[str, str]:
    """PBS 23.06: subjob 75[0].pbs0 has PBS_ARRAY_ID=75[].pbs0 and PBS_ARRAY_INDEX=0."""
    number, bracket, rest = job.job_id.partition("[")
    if not bracket:
        return {}
    index, _, server = rest.partition("]")
    return {"PBS_ARRAY_ID": f"{number}[]{server}", "PBS_ARRAY_INDEX": index}


def _common(job: Job, host: str, ncpus: int, number: str) -> dict[str, str]:
    """What PBS sets alike in script and tasks, in the order seen with `env` on a sister."""
    return {
        "HOME": job.home,
        "PBS_JOBNAME": job.name,
        "PBS_JOBID": job.job_id,
        **_array(job),
        "PBS_QUEUE": job.queue,
        "PBS_JOBCOOKIE": job.cookie,
        "PBS_NODENUM": str(job.hosts.index(host)),
        "PBS_TASKNUM": number,
        "PBS_MOMPORT": str(job.port),
        # PBS 23.06: both are the chunk's ncpus, so OMP_NUM_THREADS is always set in a job.
        "OMP_NUM_THREADS": str(ncpus),
        "NCPUS": str(ncpus),
        "PBS_ENVIRONMENT": "PBS_BATCH",
        "ENVIRONMENT": "BATCH",
        "TMPDIR": job.tmpdir(host),
        "PBS_JOBDIR": job.home,
        **dict(dict(job.host_variables).get(host, ())),
    }


def script_environment(job: Job) -> dict[str, str]:
    """What the login shell starts with; bash adds PWD and SHLVL (2 in the script)."""
    # A launch hook, a site's profile and the login shell come after what qsub carried.
    first = job.lines.index(job.mother) if job.mother in job.lines else 0
    return {
        **_submitted(job),
        **dict(job.qsub_v),
        "PATH": job.path,
        "MANPATH": f":{job.pbs_exec}/share/man",
        "LOGNAME": job.user,
        "USER": job.user,
        "SHELL": "/bin/bash",
        "PBS_NODEFILE": job.nodefile,
        **_common(job, job.mother, job.ncpus[first], "1"),
        **dict(job.variables),
    }


def task_environment(job: Job, line: int, number: int) -> dict[str, str]:
    """PBS 23.06: nothing of the script's, no USER, LOGNAME, SHELL, PWD; PATH=/bin:/usr/bin."""
    host = job.targets[line]
    # PBS 23.06: absent in tasks on the MS, present on sisters.
    nodefile = {} if host == job.mother else {"PBS_NODEFILE": job.nodefile}
    ncpus = job.ncpus[job.lines.index(host) if job.index_hosts else line]
    return {
        "PATH": "/bin:/usr/bin",
        **_submitted(job),
        **dict(job.qsub_v),
        **nodefile,
        **_common(job, host, ncpus, f"{number:08X}"),
    }


def attributes(job: Job) -> dict[str, Any]:
    """What `qstat -f` says. PBS 23.06: exec_host has short names, and `*ncpus` only where that is more than 1."""
    chunks = [(host, len(list(lines))) for host, lines in itertools.groupby(job.lines)]
    firsts = list(itertools.accumulate((count for _, count in chunks), initial=0))
    cpus = [job.ncpus[first] for first in firsts[:-1]]
    slots: dict[str, int] = {}
    terms, vnodes = [], []
    for (host, _), ncpus in zip(chunks, cpus):
        name = host.partition(".")[0]
        slot = slots[name] = slots.get(name, -1) + 1
        terms.append(f"{name}/{slot}" + (f"*{ncpus}" if ncpus > 1 else ""))
        vnodes.append(f"({name}:ncpus={ncpus})")
    return {
        "Job_Name": job.name,
        "job_state": "R",
        "queue": job.queue,
        "exec_host": "+".join(terms),
        "exec_vnode": "+".join(vnodes),
        "run_count": 1,
        "Resource_List": {
            "mpiprocs": len(job.lines),
            "ncpus": sum(cpus),
            "nodect": len(chunks),
            "place": "scatter",
            "select": "+".join(f"1:ncpus={ncpus}:mpiprocs={count}" for (_, count), ncpus in zip(chunks, cpus)),
            **({} if job.walltime is None else {"walltime": clock(job.walltime)}),
            **dict(job.resources),
        },
    }


def clock(seconds: float) -> str:
    """
    >>> clock(3725.0)
    '01:02:05'
    """
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60:02}:{minutes % 60:02}:{rest:02}"
