"""Unlucky surroundings: processes of ours that die or hang in pairs, streams that nobody reads, odd shells and places."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import COMMAND, Running, for_plain_paths, job_environment
from test_launch import HOST, STUBBORN, TWO_BY_TWO

Start = Callable[..., Running]
Script = Callable[..., str]
ALONE = ("--scheduler", "none", "--device", "cpu", "--nproc-per-node", "1")


def begin_stubborn(start: Start, script: Script, *options: str, env: dict[str, str] | None = None) -> Running:
    run = start(*TWO_BY_TWO, *options, script(STUBBORN + "time.sleep(300)"), env=env)
    run.wait_for(lambda: len(list(run.cwd.glob(".here-*"))) == 4)
    return run


@pytest.mark.parametrize("first, second", [("agent", "starter"), ("door", "agent"), ("torchrun", "agent")])
def test_two_of_ours_killed_at_once_leave_nothing(
    start: Start, script: Script, tmp_path: Path, first: str, second: str
) -> None:
    folder = tmp_path / "scratch"
    folder.mkdir()
    run = begin_stubborn(start, script, "--grace", "1", env={"TMPDIR": str(folder)})
    found = run.parts()
    for name in (first, second):
        os.kill(found[name], signal.SIGKILL)
    assert run.wait(30) == 121, run.stderr
    assert run.left(2.0) == []
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("then", ["wait", "term launcher", "kill launcher"])
def test_an_agent_that_hangs_leaves_nothing(start: Start, script: Script, then: str) -> None:
    run = begin_stubborn(start, script, "--grace", "1", "--lost-after", "6")
    os.kill(run.parts()["agent"], signal.SIGSTOP)
    if then != "wait":
        run.process.send_signal(signal.SIGTERM if "term" in then else signal.SIGKILL)
    assert run.wait(40) == {"wait": 121, "term launcher": 143, "kill launcher": -9}[then], run.stderr
    assert run.left(20.0) == []


def test_a_child_that_floods_the_pipe_hides_no_exit_code(start: Start, script: Script) -> None:
    name = script(
        "import os, subprocess\n"
        "for _ in range(3): subprocess.Popen(['dd', 'if=/dev/zero', 'bs=1M', 'count=200', 'status=none'])\n"
        "os._exit(5)"
    )
    run = start(*ALONE, "--grace", "1", "--log-dir", "/dev/shm", name)
    try:
        assert run.wait(40) == 5, run.stderr
        assert run.left(1.0) == []
    finally:
        for path in Path("/dev/shm").glob("output.job script.py.*"):
            path.unlink()


def test_one_lost_line_is_said_too(start: Start, script: Script, work: Path) -> None:
    (work / f"output.t.py.{HOST}.log").symlink_to("/dev/full")
    run = start(*ALONE, script("print('one line')", "t.py"))
    assert run.wait() == 0
    assert "No space left on device" in run.stderr


def test_a_reader_that_stalls_stops_nothing(script: Script, work: Path) -> None:
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETFL, os.O_NONBLOCK)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writer, b"x" * 4096)
    fcntl.fcntl(writer, fcntl.F_SETFL, 0)
    name = script("open('RAN', 'w')", "t.py")
    run = subprocess.Popen([str(COMMAND), *ALONE, name], cwd=work, env=job_environment(), stderr=writer, stdout=writer)
    assert run.wait(30) == 0
    assert (work / "RAN").exists()
    os.close(reader)
    os.close(writer)


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams_change_nothing(script: Script, work: Path, closed: str) -> None:
    name = script("print('fine')", "t.py")
    words = ["sh", "-c", f'"$@" {closed}', "sh", str(COMMAND), *ALONE, name]
    run = subprocess.run(words, cwd=work, env=job_environment(), timeout=40, check=False)
    assert run.returncode == 0
    assert (work / f"output.t.py.{HOST}.log").read_text() == "fine\n"


@pytest.mark.parametrize("env", [
    {"PYTHONVERBOSE": "1"},
    {"PYTHONIOENCODING": "utf-16"},
    {"LC_ALL": "C"},
    {"TMPDIR": "/no/such/folder"},
    {"PYTHONHASHSEED": "7", "PYTHONWARNINGS": "error"},
])  # fmt: skip
def test_odd_variables_are_the_scripts_business(start: Start, script: Script, env: dict[str, str]) -> None:
    run = start(*ALONE, script("open('RAN', 'w')", "t.py"), env=env)
    assert run.wait() == 0, run.stderr
    assert (run.cwd / "RAN").exists()


@pytest.mark.parametrize("prepare, code, message", [
    ("mkfifo f.py", 126, "f.py: no regular file"),
    ("mkdir gone && cd gone && rmdir ../gone", 120, "the working directory is gone"),
    ("touch f.py; umask 777", 120, "umask 777"),
])  # fmt: skip
def test_places_that_cannot_be_are_said_at_once(work: Path, prepare: str, code: int, message: str) -> None:
    words = ["sh", "-c", f'{prepare}; exec "$@"', "sh", str(COMMAND), *ALONE, "f.py"]
    began = time.monotonic()
    run = subprocess.run(words, cwd=work, env=job_environment(), capture_output=True, text=True, timeout=20, check=False)
    assert (run.returncode, message in run.stderr) == (code, True), run.stderr
    assert time.monotonic() - began < 5
    assert "Traceback" not in run.stderr


@for_plain_paths
def test_what_a_login_shell_prints_is_no_greeting(start: Start, script: Script, tmp_path: Path) -> None:
    """A stand-in for ssh whose start-up files print another launch's greeting, then text without a newline."""
    fake = tmp_path / "bin"
    fake.mkdir()
    (fake / "ssh").write_text(
        "#!/bin/sh\nprintf 'Welcome\\n\\ntorchrun_nccl-door fake-id 7\\nno newline'\n"
        'while [ "$1" != exec ]; do shift; done\nshift\n'
        'cd /; exec env -i HOME="$HOME" PATH=/usr/bin:/bin "$@"\n'
    )
    (fake / "ssh").chmod(0o755)
    env = job_environment()
    run = start("--hosts", "elsewhere", "--device", "cpu", "--nproc-per-node", "1", script("print('ran')", "t.py"),
                env={"PATH": f"{fake}:{env['PATH']}"})  # fmt: skip
    assert run.wait() == 0, run.stderr
    assert run.logs() == {"output.t.py.elsewhere.log": "ran\n"}


def test_a_worker_that_asks_to_be_traced_has_not_ended(start: Start, script: Script) -> None:
    name = script("import ctypes, os, signal\nctypes.CDLL(None).ptrace(0, 0, 0, 0)\nos.kill(os.getpid(), signal.SIGUSR1)")
    run = start(*ALONE, name)
    run.wait_for(lambda: "1 node" in run.stderr)
    time.sleep(4)
    run.process.send_signal(signal.SIGTERM)
    assert run.wait(30) == 143, run.stderr
    assert run.left(1.0) == []
