"""The command with real processes, on pretended nodes of this machine; workers do not import torch, torchrun is real."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import COMMAND, Running, job_environment

Start = Callable[..., Running]
Script = Callable[..., str]

TWO_BY_TWO = ("--simulate", "2x2", "--device", "cpu")
HOST = socket.gethostname().partition(".")[0]

HOSTILE = [
    "a b", '{"k": "v w"}', "", "*.py", "$HOME", "a$$b", "${local_rank}", "it's", "x;touch pwn", "l1\nl2", "--", "-n",
    "back\\slash", "é", "--nnodes", "3", "`id`", "%h", "\udcff", "a&b|c>d", "!!", "~", "#", "-", "--help", "$(touch pwn)",
]  # fmt: skip

#: Waits until all ranks are there, by files: what follows happens at the same moment on all of them.
TOGETHER = """
import os, sys, time, pathlib
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
def together():
    pathlib.Path(f".here-{rank}").touch()
    while len(list(pathlib.Path().glob(".here-*"))) < world:
        time.sleep(0.01)
def moment():
    # The same time of day on all ranks, a little ahead.
    together()
    if rank == 0:
        pathlib.Path(".moment.new").write_text(str(time.time() + 1))
        os.rename(".moment.new", ".moment")
    while not os.path.exists(".moment"):
        time.sleep(0.01)
    return float(pathlib.Path(".moment").read_text())
"""


def test_arguments_arrive_unchanged_on_every_rank(start: Start, script: Script, work: Path) -> None:
    name = script("import json, os, sys; open(f'args.{os.environ[\"RANK\"]}', 'w').write(json.dumps(sys.argv))")
    assert start(*TWO_BY_TWO, name, *HOSTILE).wait() == 0
    for rank in range(4):
        assert json.loads((work / f"args.{rank}").read_text()) == [name, *HOSTILE]
    assert not (work / "pwn").exists()


def test_environment_directory_limits_and_umask_are_the_callers(start: Start, script: Script, work: Path) -> None:
    name = script(
        "import json, os, resource, sys\n"
        "pairs = [e.split(b'=', 1) for e in open('/proc/self/environ', 'rb').read().split(b'\\0') if e]\n"
        "seen = {k.decode('latin-1'): v.decode('latin-1') for k, v in pairs}\n"
        "os.umask(umask := os.umask(0))\n"
        "json.dump({'env': seen, 'cwd': os.getcwd(), 'umask': umask,\n"
        "  'files': resource.getrlimit(resource.RLIMIT_NOFILE)[0],\n"
        "  'stdin': os.readlink('/proc/self/fd/0'), 'python': sys.executable}, open(f'env.{seen[\"RANK\"]}', 'w'))"
    )
    odd = {
        "A.B": "dots",
        "BASH_FUNC_f%%": "() {  echo hi\n}",
        "LATIN": "\udce9",
        "EMPTY": "",
        "MULTI": "l1\nl2=x",
        "NCCL_DEBUG": "WARN",
    }
    stale = {"RANK": "5", "WORLD_SIZE": "99", "LOCAL_RANK": "9", "MASTER_ADDR": "x", "PET_NNODES": "2",
             "PET_NPROC_PER_NODE": "8",
             "OMPI_COMM_WORLD_SIZE": "8", "PMI_RANK": "3", "PALS_RANKID": "1", "PYTHON_EXEC": "/bin/false"}  # fmt: skip
    kept = {"PYTHONPATH": "/nowhere:", "PYTHON_EXEC": "/bin/false", "LD_LIBRARY_PATH": "/nowhere"}
    run = subprocess.Popen(
        ["sh", "-c", 'umask 027; ulimit -S -n 777; exec "$@"', "sh", str(COMMAND), *TWO_BY_TWO, name],
        cwd=work, env=(sent := job_environment(**odd, **{**stale, **kept})), stderr=subprocess.PIPE,
    )  # fmt: skip
    assert run.wait(60) == 0, run.stderr.read() if run.stderr else ""
    for rank in range(4):
        seen = json.loads((work / f"env.{rank}").read_text())
        assert (seen["cwd"], seen["umask"], seen["files"]) == (str(work), 0o027, 777)
        assert (seen["stdin"], seen["python"]) == ("/dev/null", str(Path(sys.executable).with_name("python3")))
        env = seen["env"]
        for key, value in {**sent, **kept}.items():
            # dash drops names that are no identifiers; left out is fine, mangled is not.
            if key not in stale or key in kept:
                expected = value.encode("utf-8", "surrogateescape").decode("latin-1")
                assert env.get(key, expected if key in ("A.B", "BASH_FUNC_f%%") else None) == expected, key
        assert [key for key in env if key.startswith(("PET_", "OMPI_", "PMI_", "PALS_", "TORCHRUN_NCCL"))] == []
        assert (env["RANK"], env["LOCAL_RANK"], env["WORLD_SIZE"]) == (str(rank), str(rank % 2), "4")
        assert (env["GROUP_RANK"], env["LOCAL_WORLD_SIZE"]) == (str(rank // 2), "2")
        added = set(env) - set(sent) - {"PWD", "_", "SHLVL", "OLDPWD"}
        assert not {name for name in added if not name.startswith(("TORCHELASTIC_", "ROLE_", "GROUP_"))} - {
            "LOCAL_WORLD_SIZE", "MASTER_PORT", "TORCH_NCCL_ASYNC_ERROR_HANDLING", "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME",
            "TP_SOCKET_IFNAME", "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES",
        }  # fmt: skip


def test_each_node_has_its_log_and_nothing_goes_to_stdout(start: Start, script: Script) -> None:
    run = start(
        *TWO_BY_TWO,
        script("import os, sys\nprint('OUT', os.environ['RANK'])\nprint('ERR', file=sys.stderr)\nos.abort()", "t.py"),
    )
    assert run.wait() == 134
    logs = run.logs()
    assert sorted(logs) == [f"output.t.py.{HOST}-sim0.log", f"output.t.py.{HOST}-sim1.log"]
    for node, text in enumerate(logs.values()):
        assert sorted(text.split("\n")) == sorted(["", f"OUT {2 * node}", f"OUT {2 * node + 1}", "ERR", "ERR"])
    assert run.stdout == ""
    assert "ended by SIGABRT" in run.stderr


@pytest.mark.parametrize("words, stdin_code, expected", [
    (("-m", "pkg.mod", "--nnodes", "3"), 0, "output.pkg.mod.{}.log"),
    (("--no-python", "sh", "-c", 'echo "$0 $@ $RANK"', "--nnodes", "3"), 0, "output.sh.{}.log"),
    (("--wrap", "env WRAPPED=yes", "plain.py", "--nnodes", "3"), 0, "output.plain.py.{}.log"),
])  # fmt: skip
def test_modules_programs_and_wrappers(
    start: Start, script: Script, work: Path, words: tuple[str, ...], stdin_code: int, expected: str
) -> None:
    (work / "pkg").mkdir()
    (work / "pkg" / "mod.py").write_text("import sys; print(sys.argv[1:])")
    script("import os, sys; print(sys.argv[1:], os.environ['WRAPPED'])", "plain.py")
    run = start("--scheduler", "none", "--nproc-per-node", "1", *words)
    assert run.wait() == stdin_code, run.stderr
    assert "--nnodes" in run.logs()[expected.format(HOST)]


def test_exit_code_host_rank_and_last_words_of_the_first_failure(start: Start, script: Script) -> None:
    name = script(
        TOGETHER
        + "together()\nif rank == 3:\n  sys.stderr.write('a reason\\nthe last line\\n'); sys.exit(7)\ntime.sleep(300)"
    )
    began = time.monotonic()
    run = start(*TWO_BY_TWO, "--json", "out.json", name)
    assert run.wait(30) == 7
    assert time.monotonic() - began < 15
    assert run.left(0.5) == []
    for word in (f"{HOST}-sim1", "rank 3", "the last line", "exited with 7"):
        assert word in run.stderr
    assert run.stderr.splitlines()[-1].startswith("torchrun_nccl: rank_exit, exit code 7")
    result = json.loads((run.cwd / "out.json").read_text())
    assert (result["exit_code"], result["cause"]) == (7, "rank_exit")
    first = result["first_failure"]
    assert (first["host"], first["node_rank"], first["rank"], first["local_rank"], first["exit_code"]) == (
        f"{HOST}-sim1",
        1,
        3,
        1,
        7,
    )
    assert "the last line" in first["stderr_tail"]
    assert [one["ended_by"] for one in result["ranks"]] == ["us", "us", "us", "itself"]


@pytest.mark.parametrize("attempt", range(10))
def test_the_earlier_failure_is_the_first_one(start: Start, script: Script, attempt: int) -> None:
    name = script(
        TOGETHER + "then = moment()\nif rank in (0, 3):\n  time.sleep(then - time.time() + (0.02 if rank == 0 else 0))\n"
        "  os._exit(7 if rank == 3 else 9)\ntime.sleep(60)"
    )
    run = start("--simulate", "1x4", "--device", "cpu", "--grace", "1", name)
    assert run.wait(30) == 7, run.stderr
    assert "first failure: rank 3" in run.stderr


STUBBORN = (
    TOGETHER
    + """
import signal, subprocess
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP): signal.signal(number, signal.SIG_IGN)
subprocess.Popen(["sleep", "301"], start_new_session=True)
subprocess.Popen(["setsid", "sh", "-c", "trap '' TERM; sleep 302 & wait"])
together()
"""
)


@pytest.mark.parametrize("fault, code, seconds", [("exit 7", 7, 15), ("kill launcher", -9, 15), ("term launcher", 143, 15)])
def test_nothing_is_left_of_workers_that_ignore_term(
    start: Start, script: Script, fault: str, code: int, seconds: float
) -> None:
    name = script(STUBBORN + "\nif rank == 3 and sys.argv[1] == 'exit 7': sys.exit(7)\ntime.sleep(300)")
    grace = () if fault != "term launcher" else ("--grace", "3")
    run = start(*TWO_BY_TWO, *grace, name, fault)
    run.wait_for(lambda: len(list(run.cwd.glob(".here-*"))) == 4)
    time.sleep(0.3)
    began = time.monotonic()
    if "launcher" in fault:
        run.process.send_signal(signal.SIGKILL if fault == "kill launcher" else signal.SIGTERM)
    assert run.wait(30) == code
    assert run.left(seconds - (time.monotonic() - began)) == []


@pytest.mark.parametrize("victim, code", [("door", 121), ("agent", 121), ("torchrun", 125), ("starter", 137)])
def test_nothing_is_left_when_one_of_ours_is_killed(start: Start, script: Script, victim: str, code: int) -> None:
    name = script(STUBBORN + "\ntime.sleep(300)")
    run = start(*TWO_BY_TWO, name)
    run.wait_for(lambda: len(list(run.cwd.glob(".here-*"))) == 4)
    os.kill(run.parts()[victim], signal.SIGKILL)
    assert run.wait(30) == code, run.stderr
    assert run.left(1.0) == []


def test_a_port_stolen_between_choice_and_use_costs_only_time(start: Start, script: Script, work: Path) -> None:
    """The thief sits in torchrun's own Python: sitecustomize of rank 0's node binds the port before torchrun does."""
    (work / "sitecustomize.py").write_text(
        "import os, socket, sys, pathlib\n"
        "port = [w.rpartition(':')[2] for w in sys.orig_argv if w.startswith('--rdzv-endpoint=')]\n"
        "if port and '--node-rank=0' in sys.orig_argv and not pathlib.Path(os.environ['STOLEN']).exists():\n"
        "    pathlib.Path(os.environ['STOLEN']).touch()\n"
        "    thief = socket.create_server(('', int(port[0])))\n"
    )
    run = start(*TWO_BY_TWO, script("print('ran')"), env={"PYTHONPATH": str(work), "STOLEN": str(work / "stolen")})
    assert run.wait() == 0, run.stderr
    assert (work / "stolen").exists()
    assert "trying another" in run.stderr
    assert "".join(run.logs().values()).split() == ["ran"] * 4


def test_200_000_lines_are_whole_there_and_in_order(start: Start, script: Script) -> None:
    name = script(
        "import os, sys\nr = os.environ['RANK']\n"
        "for i in range(50000): print(f'rank {r} line {i} ' + 'x' * (i % 90), file=sys.stderr if i % 2 else sys.stdout)"
    )
    run = start("--scheduler", "none", "--device", "cpu", "--nproc-per-node", "4", name)
    assert run.wait(120) == 0, run.stderr
    (text,) = run.logs().values()
    lines = text.splitlines()
    assert len(lines) == 200_000
    for rank in range(4):
        for parity in (0, 1):  # the order of one stream; the two are two pipes
            mine = [line for line in lines if line.startswith(f"rank {rank} ") and int(line.split()[3]) % 2 == parity]
            assert mine == [f"rank {rank} line {i} " + "x" * (i % 90) for i in range(parity, 50000, 2)]


def test_a_progress_bar_and_a_prompt_reach_the_log_in_time(start: Start, script: Script) -> None:
    name = script(
        "import sys, time\nsys.stdout.write('50%\\r'); sys.stdout.write('no end'); sys.stdout.flush(); time.sleep(60)"
    )
    run = start("--scheduler", "none", "--nproc-per-node", "1", name)
    run.wait_for(lambda: "50%\rno end" in "".join(path.read_bytes().decode() for path in run.cwd.glob("output.*")))
    run.process.terminate()
    assert run.wait() == 143


def test_an_older_log_is_kept_under_another_name(start: Start, script: Script) -> None:
    for word in ("ONE", "TWO"):
        name = script(f"print({word!r})", "t.py")
        assert start("--scheduler", "none", "--nproc-per-node", "1", name).wait() == 0
    run = start("--scheduler", "none", "--nproc-per-node", "1", script("print('THREE')", "t.py"))
    assert run.wait() == 0
    logs = run.logs()
    assert len(logs) == 3
    assert logs[f"output.t.py.{HOST}.log"] == "THREE\n"
    assert sorted("".join(logs.values()).split()) == ["ONE", "THREE", "TWO"]


def test_two_launches_at_once_meet_in_nothing(start: Start, script: Script) -> None:
    name = script(
        TOGETHER
        + "print(os.environ['MASTER_PORT'], os.environ['TORCHELASTIC_RUN_ID'], sys.argv[1])\ntime.sleep(int(sys.argv[2]))"
    )
    runs = [start(*TWO_BY_TWO, name, which, seconds) for which, seconds in (("first", "2"), ("second", "5"))]
    assert [run.wait() for run in runs] == [0, 0]
    logs = runs[0].logs()
    assert len(logs) == 4
    words = {which: {line.rpartition(" ")[0] for text in logs.values() for line in text.splitlines() if line.endswith(which)}
             for which in ("first", "second")}  # fmt: skip
    assert all(len(found) == 1 for found in words.values())
    (first,), (second,) = words.values()
    assert not set(first.split()) & set(second.split())


def test_nodes_may_finish_far_apart(start: Start, script: Script) -> None:
    run = start(*TWO_BY_TWO, script("import os, time; time.sleep(0 if os.environ['GROUP_RANK'] == '0' else 4)"))
    assert run.wait() == 0
    assert "failure" not in run.stderr


@pytest.mark.parametrize("number, expected", [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)])
def test_a_stop_is_passed_on_with_time_to_save(start: Start, script: Script, number: int, expected: int) -> None:
    name = script(
        TOGETHER + "import signal\ndef save(*_): time.sleep(1); print('saved'); os._exit(5 + rank)\n"
        "signal.signal(signal.SIGTERM, save)\ntogether()\ntime.sleep(60)"
    )
    run = start(*TWO_BY_TWO, name)
    run.wait_for(lambda: len(list(run.cwd.glob(".here-*"))) == 4)
    time.sleep(0.3)
    run.process.send_signal(number)
    time.sleep(0.1)
    if number == signal.SIGTERM:
        run.process.send_signal(number)  # PBS sends it twice
    assert run.wait(20) == expected, run.stderr
    assert "".join(run.logs().values()).split() == ["saved"] * 4
    assert run.left() == []


def test_ranks_that_all_saved_on_request_say_so_by_75(start: Start, script: Script) -> None:
    name = script(
        TOGETHER + "import signal\nsignal.signal(signal.SIGUSR1, lambda *_: os._exit(75))\ntogether()\ntime.sleep(60)"
    )
    run = start(*TWO_BY_TWO, name)
    run.wait_for(lambda: len(list(run.cwd.glob(".here-*"))) == 4)
    time.sleep(0.3)
    run.process.send_signal(signal.SIGUSR1)
    assert run.wait(20) == 75, run.stderr
    assert run.stderr.splitlines()[-1].startswith("torchrun_nccl: saved, exit code 75")


def test_a_rank_that_saves_longer_than_the_others_is_not_stopped(start: Start, script: Script) -> None:
    name = script(
        TOGETHER + "import signal\n"
        "def save(*_): time.sleep(4 if rank == 0 else 0); print('saved', flush=True); os._exit(75)\n"
        "signal.signal(signal.SIGUSR1, save)\ntogether()\ntime.sleep(60)"
    )
    run = start(*TWO_BY_TWO, "--grace", "1", name)
    run.wait_for(lambda: len(list(run.cwd.glob(".here-*"))) == 4)
    time.sleep(0.3)
    run.process.send_signal(signal.SIGUSR1)
    assert run.wait(20) == 75, run.stderr
    assert "".join(run.logs().values()).split() == ["saved"] * 4


def test_usr_signals_come_once_and_stop_nothing(start: Start, script: Script) -> None:
    name = script(
        TOGETHER + "import signal\nfor n in (10, 12): signal.signal(n, lambda n, _: print('got', n, flush=True))\n"
        "together()\nfor _ in range(40): time.sleep(0.1)"
    )
    run = start(*TWO_BY_TWO, name)
    run.wait_for(lambda: "2 nodes" in run.stderr)
    run.process.send_signal(signal.SIGUSR2)  # before the ranks run: kept for them
    run.wait_for(lambda: len(list(run.cwd.glob(".here-*"))) == 4)
    time.sleep(0.5)
    run.process.send_signal(signal.SIGUSR1)
    assert run.wait() == 0, run.stderr
    for text in run.logs().values():
        assert sorted(text.splitlines()) == ["got 10"] * 2 + ["got 12"] * 2


def test_a_second_int_kills_at_once(start: Start, script: Script) -> None:
    run = start(*TWO_BY_TWO, script(STUBBORN + "time.sleep(300)"))
    run.wait_for(lambda: len(list(run.cwd.glob(".here-*"))) == 4)
    time.sleep(0.3)
    run.process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    began = time.monotonic()
    run.process.send_signal(signal.SIGINT)
    assert run.wait() == 130
    assert time.monotonic() - began < 6
    assert run.left() == []


def test_1000_orphans_hide_no_exit_code(start: Start, script: Script) -> None:
    name = script(
        "import os, sys, time\nif os.environ['RANK'] == '1':\n  for _ in range(1000):\n"
        "    if os.fork() == 0:\n      if os.fork() == 0: time.sleep(0.2)\n      os._exit(0)\n  sys.exit(7)\ntime.sleep(60)"
    )
    run = start("--scheduler", "none", "--nproc-per-node", "2", "--grace", "1", name)
    assert run.wait() == 7, run.stderr
    assert run.left() == []


def test_restarts_start_the_whole_gang_on_another_port(start: Start, script: Script) -> None:
    name = script(
        "import os, sys, time\n"
        "print('attempt', os.environ['TORCHELASTIC_RESTART_COUNT'], os.environ['MASTER_PORT'], flush=True)\n"
        "if os.environ['RANK'] == '3': sys.exit(3)\ntime.sleep(60)"
    )
    run = start(*TWO_BY_TWO, "--grace", "1", "--max-restarts", "2", name)
    assert run.wait() == 3, run.stderr
    seen = [line.split() for text in run.logs().values() for line in text.splitlines()]
    assert sorted(attempt for _, attempt, _ in seen) == sorted("012" * 4)
    assert len({port for *_, port in seen}) == 3


def test_files_in_the_users_folder_do_not_break_us(start: Start, script: Script, work: Path) -> None:
    for name in ("dis.py", "json.py", "socket.py", "torch.py", "selectors.py"):
        (work / name).write_text("raise SystemExit('imported from the user folder')")
    run = start(*TWO_BY_TWO, "--no-python", "sh", "-c", "echo fine")
    assert run.wait() == 0, run.stderr
    assert "".join(run.logs().values()).split() == ["fine"] * 4


def test_output_is_copied_with_ranks_and_each_rank_has_a_log(start: Start, script: Script) -> None:
    name = script("import os, sys; print('out'); print('err', file=sys.stderr)", "t.py")
    run = start(*TWO_BY_TWO, "--tee", "3", "-r", "1", "--local-ranks-filter", "1", name)
    assert run.wait() == 0
    assert sorted(run.stdout.splitlines()) == ["[1] err", "[1] out", "[3] err", "[3] out"]
    logs = run.logs()
    assert {logs[f"output.t.py.{HOST}-sim{rank // 2}.rank{rank}.log"] for rank in range(4)} == {"out\n"}


def test_a_log_that_cannot_be_written_is_said_once_and_stops_nothing(start: Start, script: Script, work: Path) -> None:
    (work / "logs").mkdir()
    (work / "logs" / f"output.t.py.{HOST}.log").symlink_to("/dev/full")
    run = start(
        "--scheduler",
        "none",
        "--nproc-per-node",
        "2",
        "--log-dir",
        "logs",
        script("for i in range(3000): print(i)", "t.py"),
    )
    assert run.wait() == 0
    assert run.stderr.count("No space left on device") == 1


def test_without_any_network_or_names(script: Script, work: Path) -> None:
    """One machine needs no address but loopback and no resolver: the trainer's own all-reduce works in such a place."""
    if os.geteuid() != 0:
        pytest.skip("a network namespace of its own needs root")
    name = script(
        "import torch.distributed as d, torch\nd.init_process_group('gloo'); t = torch.ones(1); d.all_reduce(t)\n"
        "print(int(t)); "
        "d.barrier(); d.destroy_process_group()", "t.py",
    )  # fmt: skip
    words = [
        "unshare",
        "--net",
        "--uts",
        "sh",
        "-c",
        'ip link set lo up; hostname nowhere; exec "$@"',
        "sh",
        str(COMMAND),
        *TWO_BY_TWO,
        name,
    ]
    run = subprocess.run(words, cwd=work, env=job_environment(), capture_output=True, text=True, timeout=100, check=False)
    assert run.returncode == 0, run.stderr
    # torch warns that it cannot look up names there.
    lines = (work / "output.t.py.nowhere-sim1.log").read_text().splitlines()
    assert [line for line in lines if "socket.cpp" not in line] == ["4", "4"]


def test_one_process_on_a_terminal_keeps_it(script: Script, work: Path) -> None:
    """A person debugs with input() and pdb; the log is still written."""
    import pty

    name = script("import sys; print('tty', sys.stdin.isatty()); print('hello', input('name? '))", "t.py")
    master, slave = pty.openpty()
    run = subprocess.Popen(
        [str(COMMAND), "--scheduler", "none", "--device", "cpu", name],
        cwd=work,
        env=job_environment(),
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
    )
    os.close(slave)
    seen = b""
    while b"hello" not in seen:
        seen += os.read(master, 1024)
        if b"name? " in seen and b"Ada" not in seen:
            os.write(master, b"Ada\n")
    assert run.wait(20) == 0
    os.close(master)
    assert b"tty True" in seen
    assert (work / f"output.t.py.{HOST}.log").read_text() == "tty True\nname? hello Ada\n"


def test_a_container_that_empties_the_environment(start: Start, script: Script, work: Path) -> None:
    """The words before the worker's command run on the node, after its devices are known; the scheduler is not inside."""
    box = '#!/bin/sh\necho "outside $CUDA_VISIBLE_DEVICES"\nexec env -i RANK="$RANK" PATH=/nowhere "$@"\n'
    (work / "box.sh").write_text(box)
    (work / "box.sh").chmod(0o755)
    name = script("import os; print('inside', sorted(os.environ))", "t.py")
    env = {"CUDA_VISIBLE_DEVICES": "4,6"}
    run = start("--scheduler", "none", "--wrap", shlex.quote(f"{work}/box.sh"), name, env=env)
    assert run.wait() == 0, run.stderr
    (text,) = run.logs().values()
    assert text.count("outside 4,6\n") == 2
    assert text.count("inside ['LC_CTYPE', 'PATH', 'RANK']") + text.count("inside ['PATH', 'RANK']") == 2
