"""The switch that a cluster's hosts are plugged into: a process that holds a network of its own, and its slow wires."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from . import network
from .network import Wire

PYTHON = ("/usr/bin/python3", "-I", "-S", "-B")
DELAY = str(Path(__file__).with_name("delay.py"))
WORDS = ("unshare", "--net", "sh", "-c", "echo ready; exec cat")


class Switch:
    """log: what its processes write when something is wrong."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._process = start_held(WORDS, log)
        self._relays: list[subprocess.Popen[str]] = []

    def plug_in(self, wires: Iterable[Wire]) -> None:
        read_answer(self._process, "the switch", self._log)
        network.ip(self._process.pid, network.bridge_lines(wires))

    def set_link(self, number: int, state: str) -> None:
        network.ip(self._process.pid, [f"link set port{number} {state}"])

    def delay(self, wire: Wire, seconds: float) -> None:
        network.ip(self._process.pid, network.slow_lines(wire))
        words = [*network.enter_words(self._process.pid), *PYTHON, DELAY, wire.port, wire.slow, str(seconds)]
        self._relays.append(start_held(words, self._log))
        read_answer(self._relays[-1], "the slow wire", self._log)

    def end(self) -> None:
        end_held([*self._relays, self._process])


def start_held(words: Sequence[str], log: Path) -> subprocess.Popen[str]:
    """A process that ends when its stdin does, which is at our own end at the latest."""
    with log.open("a") as errors:
        # A session of its own: ^C in the tests' terminal is not for the hosts.
        options: dict[str, Any] = {"text": True, "cwd": "/", "start_new_session": True, "stderr": errors}
        return subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, **options)


def read_answer(process: subprocess.Popen[str], name: str, log: Path) -> str:
    assert process.stdout
    line = process.stdout.readline().strip()
    if not line:
        raise RuntimeError(f"{name} does not come up: {log.read_text()}")
    return line


def end_held(processes: Sequence[subprocess.Popen[str]]) -> None:
    for process in processes:
        assert process.stdin
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
    for process in processes:
        process.wait(30)
        assert process.stdout
        process.stdout.close()
