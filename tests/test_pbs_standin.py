"""The PBS stand-in does what was seen on a real OpenPBS 23.06.06.

Nearly all tests look at a job only as its user can: by what its script and tasks see and write. Another row in `start`
could hold a real PBS to the same expectations.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from pbs import proc
from pbs.job import Job, attributes, script_environment, task_environment, task_number
from pbs.standin import EXEC, PbsJob

N1, N2, N3 = (f"node{number}.cluster.test" for number in (1, 2, 3))
THREE = (N1, N2, N3)
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="namespaces are for root")

#: Prints what a process is, as one JSON line.
PROBE = """\
import json, os, stat, sys
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
kinds = {fd: "socket" if stat.S_ISSOCK(os.fstat(fd).st_mode) else os.readlink(f"/proc/self/fd/{fd}") for fd in range(3)}
mask = os.umask(0)
print(json.dumps({
    "arguments": [os.fsencode(word).decode("latin-1") for word in sys.argv[1:]],
    "environment": dict(os.environ),
    "cwd": os.getcwd(),
    "umask": mask,
    "leads session and group": os.getpid() == os.getsid(0) == os.getpgid(0),
    "ignored": int(status["SigIgn"], 16),
    "blocked": int(status["SigBlk"], 16),
    "files": kinds,
    "host": os.uname().nodename,
}), file=open(os.path.expanduser(f"~/probe.{os.environ['PBS_TASKNUM']}"), "w"))
"""

#: A task that notes in a file that it is ready, then each signal of interest, and goes on.
NOTER = """\
import os, signal, sys, time
file = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
for name in sys.argv[2].split(","):
    number = signal.Signals["SIG" + name]
    signal.signal(number, lambda number, _: os.write(file, signal.Signals(number).name[3:].encode() + b" "))
os.write(file, b"ready ")
while True:
    time.sleep(100)
"""

# glibc keeps these for itself and lets no program set them: a task has them as the tests' own caller had.
OF_GLIBC = {32, 33}
#: For a shell: the tree may stand in a folder with a space in its name.
BIN = shlex.quote(f"{EXEC}/bin")


def make_job(folder, script, files=(), **options):
    """On three hosts with one line each, if nothing else is said; `files` are in its home directory."""
    home = folder / "home"
    home.mkdir(exist_ok=True)
    for name, data in {"probe.py": PROBE, "note.py": NOTER, **dict(files)}.items():
        (home / name).write_bytes(os.fsencode(data))
    return PbsJob(folder, script, **{"nodefile": THREE, **options})


@pytest.fixture(params=["stand-in"])
def start(request, tmp_path):
    return functools.partial(make_job, tmp_path)


def noted(job, name):
    path = job.home / name
    return path.read_text().split() if path.exists() else []


def wait_until(condition, timeout=10.0):
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "this did not come true in time"
        time.sleep(0.01)


def probes(job):
    return {path.suffix[1:]: json.loads(path.read_text()) for path in job.home.glob("probe.*") if path.suffix != ".py"}


# ---- 1. nodefile


def test_nodefile(start):
    """One line per MPI slot, in chunk order, not merged or sorted; mode 644; its name holds the whole job number."""
    script = 'cat "$PBS_NODEFILE"; stat -c %a "$PBS_NODEFILE"; basename "$PBS_NODEFILE"'
    with start(script, nodefile=(N2, N1, N2), job_id="75[0].pbs0") as job:
        assert job.wait() == 0
        assert job.stdout().split() == [N2, N1, N2, "644", "75[0].pbs0"]


# ---- 2. the job script


def test_script_environment(start):
    """Exactly these variables; `_` is the shell's."""
    with start("env -0", ncpus=4, job_name="t1.sh") as job:
        assert job.wait() == 0
        seen = dict(pair.split("=", 1) for pair in job.stdout().split("\0")[:-1])
        home, port = str(job.home), seen["PBS_MOMPORT"]
        assert port.isdigit()
        assert re.fullmatch(r"[0-9A-F]{32}", seen["PBS_JOBCOOKIE"])
        seen.pop("_")
        assert seen == {
            "ENVIRONMENT": "BATCH",
            "HOME": home,
            "LOGNAME": job.job.user,
            "MANPATH": f":{EXEC}/share/man",
            "NCPUS": "4",
            "OMP_NUM_THREADS": "4",
            # PBS has its own folder last; here it must win over another scheduler's qstat and qdel.
            "PATH": f"{EXEC}/bin:/usr/local/bin:/usr/bin:/bin:/usr/local/games:/usr/games",
            "PBS_ENVIRONMENT": "PBS_BATCH",
            "PBS_JOBCOOKIE": job.cookie,
            "PBS_JOBDIR": home,
            "PBS_JOBID": job.job_id,
            "PBS_JOBNAME": "t1.sh",
            "PBS_MOMPORT": port,
            "PBS_NODEFILE": str(job.nodefile),
            "PBS_NODENUM": "0",
            "PBS_O_HOME": home,
            "PBS_O_HOST": "pbs0.cluster.test",
            "PBS_O_LANG": "C.UTF-8",
            "PBS_O_LOGNAME": job.job.user,
            "PBS_O_PATH": f"/usr/local/bin:/usr/bin:/bin:{EXEC}/bin",
            "PBS_O_QUEUE": "workq",
            "PBS_O_SHELL": "/bin/bash",
            "PBS_O_SYSTEM": "Linux",
            "PBS_O_WORKDIR": f"{home}/w",
            "PBS_O_INTERACTIVE_AUTH_METHOD": "resvport",
            "PBS_O_INTERACTIVE_ENCRYPT_METHOD": "",
            "PBS_QUEUE": "workq",
            "PBS_TASKNUM": "1",
            "PWD": home,
            "SHELL": "/bin/bash",
            "SHLVL": "2",
            "USER": job.job.user,
            "TMPDIR": str(job.tmpdir(N1)),
        }


def test_script_process(start):
    """A child of the login shell `-bash`, which leads the session; cwd is $HOME; stdin is a pipe at its end."""
    script = """\
        pwd; umask; echo "$0" $#; tr '\\0' ' ' < /proc/$PPID/cmdline; echo
        test $(ps -o sid= -p $$) -eq $PPID && echo shell leads
        read -r line; echo "read $? [$line]"; readlink /proc/$$/fd/0 | cut -c 1-5
        stat -c %a $TMPDIR; echo to stderr >&2"""
    with start(script) as job:
        assert job.wait() == 0
        pwd, umask, zero, shell, *rest = job.stdout().splitlines()
        assert (pwd, umask) == (str(job.home), "0077")
        assert zero == f"{job.job.script} 0"
        assert shell.split()[0] == "-bash"
        assert rest == ["shell leads", "read 1 []", "pipe:", "700"]
        assert job.stderr() == "to stderr\n"
        assert not job.tmpdir(N1).exists()  # removed at the job's end


@pytest.mark.parametrize(
    "script, status",
    [
        ("exit 3", 3),
        ("#!/usr/bin/python3\nimport sys; sys.exit(4)", 4),  # the shebang is honoured
        ("kill -9 $$", 137),  # the login shell tells it: 128+N
        ("kill -TERM $PPID; sleep 9", 271),  # the login shell itself died: 256+N
        ("test -e nosuch.file", 1),
    ],
)
def test_exit_status(start, script, status):
    with start(script) as job:
        assert job.wait() == status


def test_array_job(start):
    names = ("PBS_ARRAY_ID", "PBS_ARRAY_INDEX", "PBS_JOBID", "PBS_JOBNAME")
    script = "; ".join(f"printenv {name}" for name in names)
    with start(f"{script}\npbsdsh -n 1 -- sh -c '{script}'", job_id="75[0].pbs0", job_name="myarr") as job:
        assert job.wait() == 0
        assert job.stdout().split() == ["75[].pbs0", "0", "75[0].pbs0", "myarr"] * 2
        assert job.tmpdir(N2).name == "pbs.75[0].pbs0"


def test_join(start):
    """`-j oe`: all in the output file."""
    with start("echo one; echo two >&2; pbsdsh -n 1 -- sh -c 'echo three >&2'", join=True) as job:
        assert job.wait() == 0
        assert job.stdout() == "one\ntwo\nthree\n"


# ---- 3. tasks


def test_task_environment(start):
    """Nothing of the script's; PBS_NODEFILE only on sisters; per-chunk NCPUS; pbsdsh and pbs_tmrsh alike."""
    script = f"""\
        export EXPORTED=1; ulimit -n 100; umask 0; cd /tmp
        pbsdsh -- /usr/bin/python3 -I probe.py
        pbs_tmrsh {N2} /usr/bin/python3 -I probe.py"""
    options = {
        "ncpus": (4, 8, 2),
        "qsub_v": {"CARRIED": "a b"},
        "variables": {"PBS_NGPUS": "8"},
        "host_variables": {N2: {"CUDA_VISIBLE_DEVICES": "GPU-node2-aaaa"}},
    }
    with start(script, **options) as job:
        assert job.wait() == 0
        found = probes(job)
        # 3 lines: a sister's numbers begin at its index times 0x20000000.
        assert sorted(found) == ["00000002", "20000001", "20000002", "40000001"]
        mother, sister = found["00000002"]["environment"], found["20000001"]["environment"]
        for environment in (mother, sister):
            environment.pop("LC_CTYPE", None)  # Python's own, in the C locale
        home = str(job.home)
        common = {
            "PATH": "/bin:/usr/bin",
            **{name: value for name, value in script_environment(job.job).items() if name.startswith("PBS_O_")},
            "CARRIED": "a b",
            "HOME": home,
            "PBS_JOBNAME": "t1.sh",
            "PBS_JOBID": job.job_id,
            "PBS_QUEUE": "workq",
            "PBS_JOBCOOKIE": job.cookie,
            "PBS_MOMPORT": mother["PBS_MOMPORT"],
            "PBS_ENVIRONMENT": "PBS_BATCH",
            "ENVIRONMENT": "BATCH",
            "PBS_JOBDIR": home,
        }
        assert mother == {
            **common,
            "PBS_NODENUM": "0",
            "PBS_TASKNUM": "00000002",
            "OMP_NUM_THREADS": "4",
            "NCPUS": "4",
            "TMPDIR": str(job.tmpdir(N1)),
        }
        assert sister == {
            **common,
            "PBS_NODEFILE": str(job.nodefile),
            "PBS_NODENUM": "1",
            "PBS_TASKNUM": "20000001",
            "OMP_NUM_THREADS": "8",
            "NCPUS": "8",
            "TMPDIR": str(job.tmpdir(N2)),
            "CUDA_VISIBLE_DEVICES": "GPU-node2-aaaa",
        }
        order = list(found["20000001"]["environment"])
        assert order[0] == "PATH"
        assert order[12:] == [
            *("CARRIED", "PBS_NODEFILE", "HOME", "PBS_JOBNAME", "PBS_JOBID", "PBS_QUEUE", "PBS_JOBCOOKIE"),
            *("PBS_NODENUM", "PBS_TASKNUM", "PBS_MOMPORT", "OMP_NUM_THREADS", "NCPUS", "PBS_ENVIRONMENT"),
            *("ENVIRONMENT", "TMPDIR", "PBS_JOBDIR", "CUDA_VISIBLE_DEVICES"),
        ]
        by_tmrsh = found["20000002"]["environment"]
        by_tmrsh.pop("LC_CTYPE", None)
        assert by_tmrsh == {**sister, "PBS_TASKNUM": "20000002"}


def test_task_process(start):
    """A session of its own, HUP ignored, all else default, stdin /dev/null, two sockets, umask 077, cwd $HOME."""
    with start("umask 0; cd /; trap '' USR1; pbsdsh -n 1 -- /usr/bin/python3 -I probe.py") as job:
        assert job.wait() == 0
        (found,) = probes(job).values()
        python = {signal.SIGPIPE, signal.SIGXFSZ}  # ignored by Python itself
        ignored = {number for number in range(1, 65) if found["ignored"] >> (number - 1) & 1} - python - OF_GLIBC
        assert ignored == {signal.SIGHUP}
        assert found["blocked"] == 0
        assert found["files"] == {"0": "/dev/null", "1": "socket", "2": "socket"}
        assert (found["umask"], found["cwd"]) == (0o077, str(job.home))
        assert found["leads session and group"]


def test_task_signals_are_default(start):
    """Seen by a program that touches none itself."""
    with start("trap '' PIPE USR2; pbsdsh -n 1 -- grep SigIgn /proc/self/status") as job:
        assert job.wait() == 0
        mask = int(job.stdout().split()[1], 16) & ~sum(1 << number - 1 for number in OF_GLIBC)
        assert mask == 1 << signal.SIGHUP - 1


def test_task_streams(start):
    """stdout and stderr go to the job's files, never through pbsdsh, and cannot be opened again."""
    script = """\
        captured=$(pbsdsh -n 1 -- sh -c 'echo out; echo err >&2; printf partial')
        echo " captured [$captured]"
        pbsdsh -n 1 -- sh -c 'echo x > /dev/stderr'"""
    with start(script) as job:
        assert job.wait() == 0
        assert job.stdout() == "out\npartial captured []\npbsdsh: task 0x00000000 exit status 2\n"
        first, second = job.stderr().splitlines()
        assert first == "err"
        assert "No such device or address" in second


def test_output_in_order(start):
    with start("for i in $(seq 8); do echo script $i; pbsdsh -n $i -- echo task $i; done") as job:
        assert job.wait() == 0
        assert job.stdout().splitlines() == [f"{who} {i}" for i in range(1, 9) for who in ("script", "task")]


HOSTILE = ["a  b", '{"k": "v w"}', "", "*.py", "$HOME", "it's", "x;touch /tmp/pwn", "l1\nl2\n", "--", "-n"]
HOSTILE += ["back\\slash", "`id`", "tab\there", "ü€", os.fsdecode(b"\xff\xfe"), "x" * 100_000]


@pytest.mark.parametrize("command", ["pbsdsh -n 1 --", f"pbs_tmrsh {N2}"])
@pytest.mark.parametrize("words", [HOSTILE, ["w"] * 5000], ids=["hostile", "5000"])
def test_arguments(start, command, words):
    """Direct exec, no shell: byte-exact."""
    script = f'. ./words; {command} /usr/bin/python3 -I probe.py "${{words[@]}}"'
    with start(script, files={"words": f"words=({shlex.join(words)})\n"}) as job:
        assert job.wait() == 0
        (found,) = probes(job).values()
        assert found["arguments"] == [os.fsencode(word).decode("latin-1") for word in words]


@pytest.mark.parametrize(
    "program, output, error, status",
    [
        ("./plain", "plain sh 1 a  b\n", "", 0),  # no shebang: sh; relative to $HOME
        ("nosuch", "", "No such file or directory", 254),
        ("./note.py", "", "Permission denied", 254),
        ("./w", "", "Permission denied", 254),
    ],
)
def test_task_program(start, program, output, error, status):
    """The program's name is mangled to a few garbage bytes."""
    plain = 'echo plain $(tr "\\0" " " < /proc/$$/cmdline | cut -d" " -f1) $# "$1"\n'
    with start(f"chmod +x plain; cd /; pbsdsh -n 1 -- {program} 'a  b'", files={"plain": plain}) as job:
        assert job.wait() == 0
        assert job.stdout() == output + (ended((0, status)) if status else "")
        assert re.fullmatch(f".{{3,4}}: {error}\n" if error else "", job.stderr())


@pytest.mark.parametrize(
    "lines, host, count, number",
    [
        ((N1, N2), N1, 2, 0x00000002),
        ((N1, N2), N2, 1, 0x40000001),
        ((N1, N2), N2, 2, 0x40000002),
        ((N1, N1, N2, N2), N2, 1, 0x20000001),
        ((N1,) * 4 + (N2,) * 4, N2, 1, 0x10000001),
    ],
)
def test_task_number(lines, host, count, number):
    assert task_number(plain_job(lines=lines), host, count) == number


def plain_job(**changes):
    lines = changes.pop("lines", THREE)
    fixed = {"root": "/r", "job_id": "76.pbs0", "cookie": "C", "mother": lines[0], "ncpus": (4,) * len(lines)}
    fixed |= {"user": "u", "home": "/h", "workdir": "/h/w", "path": "/bin", "pbs_exec": "/opt/pbs"}
    return Job(lines=lines, **{**fixed, **changes})


@pytest.mark.parametrize(
    "lines, mother, numbers",
    [
        ((N2, N1, N2), N2, ["0", "1", "0"]),  # of the host, not of the line
        ((N2, N2), N1, ["1", "1"]),  # mpiprocs=0 on the MS: it counts
    ],
)
def test_node_number(lines, mother, numbers):
    job = plain_job(lines=lines, mother=mother)
    assert [task_environment(job, line, 1)["PBS_NODENUM"] for line in range(len(lines))] == numbers


def test_mother_not_in_nodefile(start):
    with start("hostname; cat $PBS_NODEFILE; pbsdsh -- printenv PBS_NODENUM", nodefile=(N2, N2), mother=N1) as job:
        assert job.wait() == 0
        host, *rest = job.stdout().split()
        assert rest == [N2, N2, "1", "1"]
        assert host == N1 or not job.uts


# ---- 4, 5, 7. the commands

USAGE = "Usage: pbsdsh [-c copies | -n index | -h hostname] [-s] [-v] [-o] -- program [args]\n"
TMRSH_USAGE = "usage: pbs_tmrsh host [-n][-l username] command\n       pbs_tmrsh [-n][-l username] host command\n"
BAD = "pbsdsh: tm_init failed, rc = bad environment (17005) (17005)\n"


def ended(*statuses):
    return "".join(f"pbsdsh: task 0x{index:08x} exit status {status}\n" for index, status in statuses)


def spawned(*lines):
    """What -v says of tasks that are started at once."""
    pairs = enumerate(lines)
    return "".join(f"pbsdsh: spawned task 0x{i:08x} on logical node {line} event {i + 2}\n" for i, line in pairs)


def no_node(name):
    return f'pbs_tmrsh: host "{name}" is not a node in job <1.pbs0>\n'


#: call, exit code, lines of its stdout in any order (None: not looked at), its stderr
CALLS = [
    # exit 0 whatever the tasks' codes; only non-zero ones are told
    ("pbsdsh -- true", 0, "", ""),
    ("pbsdsh -- sh -c 'exit 3'", 0, ended((0, 3), (1, 3), (2, 3)), ""),
    ("pbsdsh -- sh -c 'exit $PBS_NODENUM'", 0, ended((1, 1), (2, 2)), ""),
    ("pbsdsh -n 2 -- sh -c 'exit 255'", 0, ended((0, 255)), ""),  # the task's index is pbsdsh's own
    ("pbsdsh -n 1 -- sh -c 'kill -9 $$'", 0, ended((0, 265)), ""),
    ("pbsdsh -n 1 -- sh -c 'kill -TERM $$'", 0, ended((0, 271)), ""),
    ("pbsdsh -n 1 -- sh -c 'kill -SEGV $$'", 0, ended((0, 267)), ""),
    ("pbsdsh -n 1 -- nosuch", 0, ended((0, 254)), ""),
    ("pbsdsh -n 1 -- /tmp", 0, ended((0, 254)), ""),
    ("pbsdsh -n 1 -- 'true && true'", 0, ended((0, 254)), ""),  # no shell
    # -n: a line, modulo; read as atoi reads
    ("pbsdsh -v -n 1 -- true", 0, None, ""),
    ("pbsdsh -n 99 -- sh -c 'exit 4$PBS_NODENUM'", 0, ended((0, 40)), ""),
    ("pbsdsh -n 4 -- sh -c 'exit 4$PBS_NODENUM'", 0, ended((0, 41)), ""),
    ("pbsdsh -n node2 -- sh -c 'exit 4$PBS_NODENUM'", 0, ended((0, 40)), ""),
    ("pbsdsh -n1 -- sh -c 'exit 4$PBS_NODENUM'", 0, ended((0, 41)), ""),
    ("pbsdsh -n -1 -- true", 1, "", USAGE),
    ("pbsdsh -n 1 -c 2 -- true", 1, "", USAGE),
    # -c: on lines 0.. and around
    ("pbsdsh -c 4 -- sh -c 'exit 4$PBS_NODENUM'", 0, ended((0, 40), (1, 41), (2, 42), (3, 40)), ""),
    ("pbsdsh -c 0 -- false", 0, "", ""),
    # -h: the exact string or the IP
    (f"pbsdsh -h {N2} -- sh -c 'exit 4$PBS_NODENUM'", 0, ended((0, 41)), ""),
    ("pbsdsh -h 10.77.0.13 -- sh -c 'exit 4$PBS_NODENUM'", 0, ended((0, 42)), ""),
    ("pbsdsh -h node2 -- true", 1, "", USAGE),
    ("pbsdsh -h Node2.cluster.test -- true", 1, "", USAGE),
    ("pbsdsh -h other -- true", 1, "", USAGE),
    # -s: one after another, a failure stops nothing; -o: no waiting, no statuses
    ("pbsdsh -s -- sh -c 'exit 4$PBS_NODENUM'", 0, ended((0, 40), (1, 41), (2, 42)), ""),
    ("pbsdsh -o -- sh -c 'exit 3'", 0, "", ""),
    # GNU getopt: options count after the program too, until `--`
    ("pbsdsh sh -n 1 -- -c 'exit 5'", 0, ended((0, 5)), ""),
    ("pbsdsh ls -l", 1, "", USAGE),
    ("pbsdsh -x -- true", 1, "", USAGE),
    ("pbsdsh", 1, "", USAGE),
    ("pbsdsh -n 1 --", 1, "", USAGE),
    # what it needs
    ("env -u PBS_ENVIRONMENT pbsdsh -- true", 1, "", "pbsdsh: not executing under PBS\n"),
    ("env -u PBS_JOBID pbsdsh -- true", 1, "", BAD),
    ("env -u PBS_JOBCOOKIE pbsdsh -- true", 1, "", BAD),
    ("env -u PBS_NODENUM pbsdsh -- true", 1, "", BAD),
    ("env -u PBS_TASKNUM pbsdsh -- true", 1, "", BAD),
    ("env -u PBS_MOMPORT pbsdsh -- true", 1, "", BAD),
    ("env -u PBS_NODEFILE -u HOME pbsdsh -n 1 -- true", 0, "", ""),
    ("env PYTHONPATH=/nosuch PYTHONHOME=/nosuch pbsdsh -n 1 -- true", 0, "", ""),
    # pbs_tmrsh: the task's code & 255
    (f"pbs_tmrsh {N2} true", 0, "", ""),
    (f"pbs_tmrsh {N2} sh -c 'exit 3'", 3, "", ""),
    (f"pbs_tmrsh {N2} sh -c 'exit 255'", 255, "", ""),
    (f"pbs_tmrsh {N2} sh -c 'kill -9 $$'", 9, "", ""),
    (f"pbs_tmrsh {N2} sh -c 'kill -TERM $$'", 15, "", ""),
    (f"pbs_tmrsh {N1} sh -c 'exit 4$PBS_NODENUM'", 40, "", ""),
    ("pbs_tmrsh 10.77.0.12 sh -c 'exit 4$PBS_NODENUM'", 41, "", ""),
    # ... 254 where it cannot be executed: there is no shell
    (f"pbs_tmrsh {N2} nosuch", 254, "", ""),
    (f"pbs_tmrsh {N2} 'cd / && true'", 254, "", ""),
    (f"pbs_tmrsh {N2} VAR=x true", 254, "", ""),
    (f"pbs_tmrsh {N2} env VAR=x true", 0, "", ""),
    (f"pbs_tmrsh {N2} exit 3", 254, "", ""),
    # ... options before or after the host
    (f"pbs_tmrsh -n -l $LOGNAME {N2} sh -c 'exit 6'", 6, "", ""),
    (f"pbs_tmrsh {N2} -n -l $LOGNAME sh -c 'exit 6'", 6, "", ""),
    (f"pbs_tmrsh -l other {N2} true", 255, "", f'pbs_tmrsh: bad user "other"\n{TMRSH_USAGE}'),
    (f"pbs_tmrsh {N2} -- true", 255, "", TMRSH_USAGE),
    (f"pbs_tmrsh {N2}", 255, "", TMRSH_USAGE),
    # ... the host byte for byte
    ("pbs_tmrsh node2 true", 255, "", no_node("node2")),
    ("pbs_tmrsh Node2.cluster.test true", 255, "", no_node("Node2.cluster.test")),
    ("pbs_tmrsh localhost true", 255, "", no_node("localhost")),
    ("pbs_tmrsh 127.0.0.1 true", 255, "", no_node("127.0.0.1")),
    # ... what it needs
    (f"env -u PBS_ENVIRONMENT pbs_tmrsh {N2} true", 255, "", "pbs_tmrsh: not executing under PBS\n"),
    (f"env -u PBS_JOBID pbs_tmrsh {N2} true", 255, "", "pbs_tmrsh: PBS jobid not in environment\n"),
    (f"env -u PBS_MOMPORT pbs_tmrsh {N2} true", 255, "", "pbs_tmrsh: tm_init: bad environment (17005)\n"),
    (f"env -u PBS_NODEFILE pbs_tmrsh {N2} true", 255, "", "pbs_tmrsh: cannot find PBS_NODEFILE\n"),
    # what nobody has seen is refused, and pbs_attach is not there
    ("pbsdsh -c x -- true", 99, "", "pbsdsh: not known to the PBS stand-in: -c x\n"),
    (f"pbs_tmrsh -- {N2} true", 99, "", "pbs_tmrsh: not known to the PBS stand-in: -- before the host\n"),
    ("env PBS_JOBCOOKIE=0 pbsdsh -- true", 99, "", None),
    ("env PBS_MOMPORT=1 pbsdsh -- true", 99, "", None),
    ("qdel", 99, "", "qdel: not known to the PBS stand-in: qdel \n"),
    ("qdel 2.pbs0", 99, "", "qdel: not known to the PBS stand-in: qdel 2.pbs0\n"),
    ("qdel -W force 1.pbs0", 99, "", None),
    ("qstat", 99, "", "qstat: not known to the PBS stand-in: qstat \n"),
    ("qstat -Qf", 99, "", None),
    ("qstat -f -F xml", 99, "", None),
    ("command -v pbs_attach", 1, "", ""),
]


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """All calls in one job: their exit codes and streams, in order."""
    folder = tmp_path_factory.mktemp("calls")
    run = "{ %s\n} > out.%d 2> err.%d; echo $? > code.%d"
    lines = [run % (call, number, number, number) for number, (call, *_) in enumerate(CALLS)]
    # Two lanes; in each, one after another.
    script = "({}) &\n({}) &\nwait".format("\n".join(lines[::2]), "\n".join(lines[1::2]))
    with make_job(folder, script, job_id="1.pbs0") as job:
        assert job.wait(60) == 0
        parts = [[job.home / f"{part}.{number}" for part in ("code", "out", "err")] for number in range(len(CALLS))]
        return [[path.read_text() for path in paths] for paths in parts]


@pytest.mark.parametrize("number", range(len(CALLS)), ids=[call for call, *_ in CALLS])
def test_call(answers, number):
    _, code, output, error = CALLS[number]
    seen_code, seen_output, seen_error = answers[number]
    assert (int(seen_code), seen_error) == (code, seen_error if error is None else error)
    if output is not None:
        assert sorted(seen_output.splitlines()) == output.splitlines()


def test_verbose(start):
    with start("pbsdsh -v -n 1 -- true") as job:
        assert job.wait() == 0
        assert job.stdout() == (
            spawned(1)
            + "pbsdsh: waiting on 1 spawned and 0 obits\npbsdsh: waiting on 0 spawned and 1 obits\n"
            + ended((0, 0))
        )


def test_plain_pbsdsh_runs_on_every_line(start):
    """Not on every host."""
    with start("pbsdsh -- true", nodefile=(N1,) * 3 + (N2,) * 3) as job:
        assert job.wait() == 0
        hosts = [(spawn.host, spawn.line, spawn.words) for spawn in job.spawns()]
        assert hosts == [(N1 if line < 3 else N2, line, ("true",)) for line in range(6)]


def test_first_process_ends_the_task(start):
    """The rest of its session is KILLed without TERM; a setsid'ed child lives on, even after the job."""
    script = """\
        pbsdsh -n 1 -- sh -c '
            python3 -I note.py beside TERM & setsid python3 -I note.py apart TERM &
            while ! test -e beside -a -e apart; do sleep 0.02; done'
        sleep 0.1; pgrep -f 'note.py [b]eside'; pgrep -c -f 'note.py [a]part'"""
    with start(script) as job:
        assert job.wait() == 0
        assert job.stdout().split() == ["1"]
        assert noted(job, "beside") == noted(job, "apart") == ["ready"]
        (survivor,) = job.survivors()
        assert survivor.words[-2] == "apart"


def test_nested(start):
    """From a task on a sister and on the MS; the full path is needed."""
    script = f"""\
        pbsdsh -n 1 -- {BIN}/pbsdsh -n 2 -- sh -c 'echo nested $PBS_NODENUM'
        pbsdsh -n 0 -- {BIN}/pbsdsh -n 1 -- sh -c 'echo nested $PBS_NODENUM'
        pbsdsh -n 1 -- {BIN}/pbs_tmrsh {N3} sh -c 'echo nested $PBS_NODENUM'
        pbsdsh -n 0 -- {BIN}/pbs_tmrsh {N3} sh -c 'echo never'
        pbsdsh -n 1 -- pbsdsh -n 2 -- sh -c 'echo never'"""
    with start(script) as job:
        assert job.wait() == 0
        lines = [line for line in job.stdout().splitlines() if "nested" in line or "never" in line]
        assert lines == ["nested 2", "nested 1", "nested 2"]
        # PBS_NODEFILE is unset in a task on the MS.
        assert "pbs_tmrsh: cannot find PBS_NODEFILE" in job.stderr()


@pytest.mark.parametrize("wrapper, early", [("", 0), ("script -qfec '{}' /dev/null", 2)])
def test_status_lines_are_buffered(start, wrapper, early):
    """Through a pipe they come when pbsdsh ends, on a terminal at once."""
    call = wrapper.replace("{}", "pbsdsh -- sh task") or "pbsdsh -- sh task"
    script = f"""\
        ({call}) | cat > out &
        while ! test -e ended0 -a -e ended1; do sleep 0.02; done
        for i in $(seq 25); do test $(grep -c exit out) = 2 && break; sleep 0.02; done
        grep -c exit out; touch go; wait; grep -c exit out"""
    task = "test $PBS_NODENUM = 2 && while ! test -e go; do sleep 0.02; done; touch ended$PBS_NODENUM; exit 1"
    with start(script, files={"task": task}) as job:
        assert job.wait() == 0
        assert job.stdout().split() == [str(early), "3"]


#: command, signal to it, its exit code, what its task gets
SIGNALS = [
    ("pbsdsh -n 1 --", "TERM", 1, ["TERM"]),
    ("pbsdsh -n 1 --", "INT", 1, ["INT"]),
    ("pbsdsh -n 1 --", "HUP", 1, ["HUP"]),
    ("pbsdsh -n 1 --", "KILL", 137, []),
    ("pbsdsh -n 1 --", "USR1", 138, []),
    (f"pbs_tmrsh {N2}", "TERM", 143, []),
    (f"pbs_tmrsh {N2}", "INT", 130, []),
    (f"pbs_tmrsh {N2}", "HUP", 129, []),
    (f"pbs_tmrsh {N2}", "KILL", 137, []),
]
#: A task with a process beside it and one in a session of its own; it outlives the signals itself.
FAMILY = """\
    cd $1; trap : TERM INT HUP
    python3 -I ../note.py ../beside.$1 TERM,INT,HUP & setsid python3 -I ../note.py ../apart.$1 TERM,INT,HUP &
    while :; do wait; done
    """


@pytest.fixture(scope="module")
def signalled(tmp_path_factory):
    """All of these at once in one job."""
    script = """\
        one() {
            set -m  # as a foreground command would have it: INT not ignored
            mkdir $1; $3 sh family $1 > out.$1 &
            while ! test -s beside.$1 -a -s apart.$1; do sleep 0.05; done
            kill -$2 $!; wait $!; echo $? > code.$1
            for i in $(seq $4); do grep -q $2 beside.$1 && break; sleep 0.02; done
        }
        """
    # What is relayed may take its time; what is not is waited for a moment only.
    tries = {True: 1000, False: 40}
    calls = [
        f"one {number} {name} '{command}' {tries[bool(relayed)]} &"
        for number, (command, name, _, relayed) in enumerate(SIGNALS)
    ]
    with make_job(tmp_path_factory.mktemp("signals"), "\n".join([script, *calls, "wait"]), {"family": FAMILY}) as job:
        assert job.wait() == 0
        assert len([process for process in job.survivors() if "note.py" in process.words[2]]) == len(SIGNALS)
        return job


@pytest.mark.parametrize("number", range(len(SIGNALS)), ids=[f"{command} {name}" for command, name, *_ in SIGNALS])
def test_command_is_signalled(signalled, number):
    """pbsdsh relays some and ends at once, without waiting; else the task is not told, and runs on."""
    _, name, code, relayed = SIGNALS[number]
    assert noted(signalled, f"code.{number}") == [str(code)]
    assert noted(signalled, f"beside.{number}") == ["ready", *relayed]
    assert noted(signalled, f"apart.{number}") == ["ready"]
    told = f"pbsdsh: killing task 0x2000000[0-9A-F] signal {signal.Signals['SIG' + name].value}\n" if relayed else ""
    assert re.fullmatch(told, (signalled.home / f"out.{number}").read_text())


def test_qstat(start):
    calls = "qstat -f -F json $PBS_JOBID > json; qstat -f > text; qstat -fF dsv > dsv"
    options = {"nodefile": (N1,) * 4 + (N2,) * 4, "resources": {"ngpus": 8}, "walltime": 3600, "job_id": "76.pbs0"}
    with start(f"{calls}; pbsdsh -n 4 -- {BIN}/qstat -f -F json", **options) as job:
        assert job.wait() == 0
        seen = json.loads((job.home / "json").read_text())
        assert seen == json.loads(job.stdout())
        found = seen["Jobs"]["76.pbs0"]
        assert found["exec_host"] == "node1/0*4+node2/0*4"
        assert found["run_count"] == 1
        assert found["Resource_List"] == {
            "mpiprocs": 8,
            "ncpus": 8,
            "ngpus": 8,
            "nodect": 2,
            "place": "scatter",
            "select": "1:ncpus=4:mpiprocs=4+1:ncpus=4:mpiprocs=4",
            "walltime": "01:00:00",
        }
        assert all(len(line) < 80 for line in (job.home / "text").read_text().splitlines())
        assert (job.home / "dsv").read_text().count("\n") == 1


@pytest.mark.parametrize(
    "lines, ncpus, exec_host",
    [
        ((N1, N2), (4, 4), "node1/0*4+node2/0*4"),
        ((N2, N1, N2), (1, 1, 1), "node2/0+node1/0+node2/1"),
        ((N1, N2, N2, N3, N3), (2, 4, 4, 4, 4), "node1/0*2+node2/0*4+node3/0*4"),
    ],
)
def test_exec_host(lines, ncpus, exec_host):
    assert attributes(plain_job(lines=lines, ncpus=ncpus))["exec_host"] == exec_host


# ---- 6. ends


def test_normal_end(start):
    """The login shell's end KILLs all tasks and background processes on all hosts at once, without TERM."""
    script = """\
        python3 -I note.py background TERM &
        pbsdsh -- sh -c 'exec python3 -I note.py task$PBS_NODENUM TERM' &
        setsid pbsdsh -n 1 -- python3 -I note.py task3 TERM &
        setsid python3 -I note.py apart TERM &
        for name in background task0 task1 task2 task3 apart; do while ! test -s $name; do sleep 0.02; done; done
        exit 7"""
    with start(script) as job:
        assert job.wait() == 7
        # A KILL takes a moment to be done.
        deadline = time.monotonic() + 5
        while len(survivors := job.survivors()) > 2 and time.monotonic() < deadline:
            time.sleep(0.02)
        assert {noted(job, name)[-1] for name in ("background", "task0", "task1", "task2", "task3")} == {"ready"}
        assert [process.words[-2] for process in survivors if "note.py" in process.words] == ["apart"]
        # One in a session of its own is no process of the job; the ends it waited for have come.
        assert len(survivors) <= 2


#: A script that notes TERM and stays; %s is run before and after.
STAYS = """\
    trap 'echo TERM >> script' TERM
    %s
    echo ready; while :; do sleep 0.05; done"""


def test_qdel(start):
    """TERM to every process on the MS, to sisters only by a running pbsdsh; KILL after the delay."""
    starts = """\
        (trap : TERM; pbsdsh -- sh -c 'exec python3 -I note.py task$PBS_NODENUM TERM' > out; echo $? > code) &
        for name in task0 task1 task2; do while ! test -s $name; do sleep 0.02; done; done
        set -m; python3 -I note.py group TERM & set +m
        pbsdsh -o -n 1 -- python3 -I note.py no_wait TERM
        pbs_tmrsh node3.cluster.test python3 -I note.py tmrsh TERM &
        setsid python3 -I note.py apart TERM &
        for name in no_wait tmrsh apart group; do while ! test -s $name; do sleep 0.02; done; done"""
    with start(STAYS % starts, kill_delay=1) as job:
        job.wait_for("ready")
        began = time.monotonic()
        job.qdel()
        assert job.wait() == 271  # the login shell dies of TERM at once, whatever the script does
        assert 1 <= time.monotonic() - began < 8
        assert noted(job, "script") == ["TERM"]
        assert set(noted(job, "group")) == {"ready", "TERM"}
        assert set(noted(job, "task0")) == {"ready", "TERM"}  # most often twice: from MoM and from pbsdsh
        assert noted(job, "task1") == noted(job, "task2") == ["ready", "TERM"]
        assert noted(job, "no_wait") == noted(job, "tmrsh") == noted(job, "apart") == ["ready"]
        assert noted(job, "code") == ["1"]
        assert sorted((job.home / "out").read_text().splitlines()) == [
            f"pbsdsh: killing task 0x{number:08x} signal 15" for number in (0x00000002, 0x20000001, 0x40000001)
        ]
        (survivor,) = job.survivors()
        assert "apart" in survivor.words


def test_qdel_command_in_a_task(start):
    with start(f"pbsdsh -n 1 -- {BIN}/qdel 5.pbs0; sleep 99", job_id="5.pbs0", kill_delay=9) as job:
        assert job.wait(5) == 271


def test_no_spawn_after_qdel(start):
    """pbsdsh and pbs_tmrsh hang, on the MS too, until the job is killed."""
    script = """\
        late() {
            for call in "pbsdsh -n 0 --" "pbsdsh -n 1 --" "pbs_tmrsh node2.cluster.test"; do
                timeout -k 1 0.4 $call touch late & pids="$pids $!"
            done
            for pid in $pids; do wait $pid; echo $? >> codes; done; trap - TERM; echo done
        }
        trap late TERM; echo ready; while :; do sleep 0.05; done"""
    with start(script) as job:
        job.wait_for("ready")
        job.qdel()
        job.wait_for("done")
        assert noted(job, "codes") == ["124"] * 3
        assert not (job.home / "late").exists()
        assert job.spawns() == []


def test_mother_empty(start):
    """When the MS has no process left, sisters are killed long before the kill delay is over."""
    script = """\
        pbsdsh -o -n 1 -- python3 -I note.py a TERM; while ! test -s a; do sleep 0.02; done
        sleep 99 & echo ready; wait  # a process that is forked during the TERM may miss it, there as here
        """
    with start(script) as job:
        job.wait_for("ready")
        job.qdel()
        assert job.wait(8) == 271
        assert noted(job, "a") == ["ready"]
        assert job.survivors() == []


def test_pbsdsh_in_a_session_of_its_own(start):
    """qdel does not reach it; it still receives the tasks' ends and relays a signal."""
    script = """\
        setsid pbsdsh -n 1 -- python3 -I note.py a TERM > out & dsh=$!
        setsid -w pbs_tmrsh node2.cluster.test sh -c 'touch b; sleep 0.5; exit 5' & tmrsh=$!
        while ! test -s a -a -e b; do sleep 0.02; done
        relay() {
            sleep 0.1; cp a before
            kill -TERM $dsh; wait $dsh; echo dsh $?; wait $tmrsh; echo tmrsh $?; trap - TERM
        }
        trap relay TERM; echo ready; while :; do sleep 0.05; done"""
    with start(script) as job:
        job.wait_for("ready")
        job.qdel()
        job.wait_for("dsh 1\ntmrsh 5")
        wait_until(lambda: noted(job, "a") == ["ready", "TERM"])
        assert noted(job, "before") == ["ready"]


def test_walltime(start):
    """TERM as with qdel and no warning before it; KILL everywhere after the delay; -29."""
    script = STAYS % "pbsdsh -o -n 1 -- python3 -I note.py sister TERM"
    with start(script, walltime=1, kill_delay=0.5) as job:
        began = time.monotonic()
        assert job.wait(10) == -29
        assert 1.4 < time.monotonic() - began < 10
        assert re.search(r"^=>> PBS: job killed: walltime \d+ exceeded limit 1\n", job.stderr(), re.MULTILINE)
        assert noted(job, "script") == ["TERM"]
        assert noted(job, "sister") == ["ready"]
        assert job.survivors() == []


@pytest.mark.parametrize("name, status", [("USR1", 266), ("USR2", 268), ("HUP", 257), ("TERM", 271)])
def test_qsig_ends_the_login_shell(start, name, status):
    """The job is over at once, and all is KILLed."""
    script = (
        f"pbsdsh -- python3 -I note.py task {name} & while ! test -s task; do sleep 0.02; done; echo ready; sleep 99"
    )
    with start(script) as job:
        job.wait_for("ready")
        job.qsig(name)
        assert job.wait(5) == status
        assert job.survivors() == []


def test_qsig_reaches_the_script(start):
    """INT comes to the script's trap; pbsdsh relays it, and no other of these."""
    script = """\
        trap 'echo trapped' INT
        set -m; pbsdsh -n 1 -- python3 -I note.py sister INT & set +m
        while ! test -s sister; do sleep 0.02; done
        echo ready; while ! grep -q INT sister; do sleep 0.02; done; exit 4"""
    with start(script) as job:
        job.wait_for("ready")
        job.qsig("INT")
        assert job.wait(5) == 4
        assert "trapped" in job.stdout()


# ---- faults


def test_spawn_delay(start):
    with start("pbsdsh -- true", spawn_delay=0.5) as job:
        began = time.monotonic()
        assert job.wait() == 0
        assert time.monotonic() - began > 0.5
        assert len(job.spawns()) == 3


def test_lost_host(start):
    """pbsdsh hangs, on the others the tasks have run; pbs_tmrsh says so."""
    script = f"""\
        pbsdsh -n 1 -- true & one=$!
        pbsdsh -- sh -c 'touch on$PBS_NODENUM' & all=$!
        while ! test -e on0 -a -e on2; do sleep 0.02; done
        pbsdsh -n 0 -- true; echo $?
        pbs_tmrsh {N2} true; echo $?
        kill $one $all; wait $one; echo $?; wait $all; echo $?"""
    with start(script, lost_hosts={N2}) as job:
        assert job.wait() == 0
        assert job.stdout().split() == ["0", "255", "1", "1"]
        assert f'pbs_tmrsh: tm_poll(obit): host "{N2}" err not connected (17002) 15010' in job.stderr()


def test_argument_newline_cut(start):
    with start("pbsdsh -n 1 -- printf '[%s]' $'a\\nb' c $'\\n'", argument_newline_cut=True) as job:
        assert job.wait() == 0
        assert job.stdout() == "[a][c][]"


def test_index_counts_hosts(start):
    with start("pbsdsh -n 1 -- true; pbsdsh -- true", nodefile=(N1, N1, N2, N2), index_counts_hosts=True) as job:
        assert job.wait() == 0
        assert [spawn.host for spawn in job.spawns()] == [N2, N1, N2]


# ---- the stand-in itself


@as_root
@pytest.mark.parametrize("short, name", [(False, N2), (True, "node2")])
def test_host_names(start, short, name):
    here = os.uname().nodename
    script = f"hostname; pbsdsh -n 1 -- hostname; pbs_tmrsh {N1} hostname"
    with start(script, uts=True, short_names=short) as job:
        assert job.wait() == 0
        first = N1.partition(".")[0] if short else N1
        assert job.stdout().split() == [first, name, first]
    assert os.uname().nodename == here


def test_no_host_names(start):
    with start("pbsdsh -n 1 -- hostname", uts=False) as job:
        assert job.wait() == 0
        assert job.stdout().split() == [os.uname().nodename]


@pytest.fixture
def virtual_host():
    """A host with network, processes and name of its own; its number out here."""
    if os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("nsenter")):
        pytest.skip("namespaces are for root, and need ip and nsenter")
    words = ["unshare", "--net", "--uts", "--pid", "--fork", "--kill-child"]
    words += ["sh", "-c", f"hostname {N2}; ip link set lo up; echo up; exec sleep 100"]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline() == b"up\n"
        (inside,) = proc.descendants(holder.pid)
        yield inside
        holder.kill()


def test_enter(start, virtual_host):
    """Words before each command on a host: the task leads a session there, and reaches MoM from that network."""

    def enter(host):
        return ["/usr/bin/nsenter", f"--target={virtual_host}", "--net", "--uts", "--pid"] if host == N2 else []

    script = f"""\
        pbsdsh -n 1 -- sh -c 'hostname; {EXEC}/bin/pbsdsh -n 2 -- hostname; exit 3'
        pbsdsh -n 1 -- env
        pbsdsh -n 1 -- /usr/bin/python3 -I probe.py 'a  b'
        pbsdsh -n 1 -- nosuch
        pbsdsh -n 1 -- sh -c 'kill -9 $$'
        pbsdsh -n 1 -- sh -c 'setsid sleep 99 & sleep 98 & sleep 0.3; exit 0'
        pbsdsh -n 1 -- python3 -I note.py a TERM & while ! test -s a; do sleep 0.02; done
        echo ready; trap '' TERM; while :; do sleep 0.05; done"""
    with start(script, enter=enter, uts=True, kill_delay=1) as job:
        job.wait_for("ready")
        job.qdel()
        assert job.wait() == 271
        told = job.stdout().partition("ready\n")[0].splitlines()
        assert told[:3] + told[-2:] == [N2, N3, *ended((0, 3), (0, 254), (0, 265)).splitlines()]
        assert told[3] == "PATH=/bin:/usr/bin"
        assert {line.split("=")[0] for line in told[3:-2]} == set(task_environment(job.job, 1, 1))
        assert noted(job, "a") == ["ready", "TERM"]
        (found,) = probes(job).values()
        assert (found["arguments"], found["host"]) == (["a  b"], N2)
        assert [process.words for process in job.survivors()] == [("sleep", "99")]


def test_two_jobs_at_once(start):
    """Each has its own MoM, port and cookie; one's cookie is no good for the other."""
    script = "printenv PBS_MOMPORT; env PBS_JOBCOOKIE=$OTHER pbsdsh -- true; echo $?"
    with start("sleep 99") as first, start(script, qsub_v={"OTHER": first.cookie}) as second:
        assert second.wait() == 0
        port, code = second.stdout().split()
        assert (port.isdigit(), code) == (True, "99")
        first.qdel()
        assert first.wait() == 271


def test_much_output(start):
    """100,000 lines of each of two tasks, not a byte lost."""
    line = "x" * 90
    with start(f"pbsdsh -- sh -c 'yes {line} | head -n 100000'", nodefile=(N1, N2)) as job:
        assert job.wait(30) == 0
        assert sum(map(len, job.stdout().split())) == 2 * 100_000 * len(line)


FORKS = """\
import os, time
for number in range(1000):
    if not os.fork():
        if number % 2: os.setsid()
        time.sleep(0.5)
        os._exit(0)
"""


def test_thousand_orphans(start):
    """Half are KILLed with the task's session, half come to MoM as orphans and are reaped."""
    with start("pbsdsh -n 1 -- python3 -I forks.py; pbsdsh -- true; echo $?", files={"forks.py": FORKS}) as job:
        assert job.wait(30) == 0
        assert job.stdout() == "0\n"
        assert job.survivors(within=10) == []


HIDERS = """\
    setsid env -i /bin/sleep 91 & env -i /bin/sleep 92 &
    pbsdsh -n 1 -- setsid env -i /bin/sh -c 'trap "" TERM; /bin/sleep 93 & /bin/sleep 94; :' &
    pbsdsh -n 1 -- sh -c 'setsid setsid sh -c "env -i /bin/sleep 95 & exit" & setsid sleep 96 & sleep 0.5'
    echo ready; %s"""


@pytest.mark.parametrize("rest", ["exit 0", "sleep 99"], ids=["job over", "job runs"])
def test_nothing_is_left(start, rest):
    """Whatever hid: own session, empty environment, orphaned; also when the test failed."""
    with contextlib.suppress(LookupError), start(HIDERS % rest) as job:
        job.wait_for("ready")
        if rest == "exit 0":
            job.wait()
        wait_until(lambda: {"91", "95", "96"} <= {process.words[-1] for process in job.survivors()})
        left = [job._daemon.pid, *(process.pid for process in job.survivors())]
        raise LookupError("a test that fails")
    assert len(left) > 3
    assert not [pid for pid in left if Path(f"/proc/{pid}").exists()]


def test_job_not_over(start):
    with start("echo so far; sleep 99") as job:
        job.wait_for("so far")
        with pytest.raises(TimeoutError, match="so far"):
            job.wait(0.05)


def test_command_line(tmp_path):
    (tmp_path / "job.sh").write_text("cat $PBS_NODEFILE; pbsdsh -n 2 -- sh -c 'echo $A >&2'; exit 3\n")
    words = [sys.executable, EXEC / "standin.py", "--hosts", "n1:2,n2", "-v", "A=b c", "--", tmp_path / "job.sh"]
    run = subprocess.run(words, capture_output=True, text=True, timeout=20, check=False)
    assert (run.returncode, run.stdout, run.stderr) == (3, "n1\nn1\nn2\n", "b c\nExit_status 3\n")


def test_command_line_help():
    words = [sys.executable, EXEC / "standin.py", "--help"]
    assert "--nodefile" in subprocess.run(words, capture_output=True, text=True, timeout=20, check=True).stdout
