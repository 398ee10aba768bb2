"""The wires between virtual hosts: a bridge in a network namespace of its own, one port per host. Lines for `ip -batch`."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from typing import NamedTuple

NETWORK = "10.77.0"
PRIVATE_NETWORK = "192.168.77"
PRIVATE_INTERFACE = "priv0"


class Wire(NamedTuple):
    """number: of the host, from 1. pid: of a process in its network namespace. private: has a second network that leads
    nowhere, in the same subnet as those of the others."""

    number: int
    pid: int
    interface: str
    private: bool

    @property
    def port(self) -> str:
        """The bridge's end."""
        return f"port{self.number}"

    @property
    def slow(self) -> str:
        """The bridge's end behind a slow wire."""
        return f"slow{self.number}"


def address(number: int) -> str:
    return f"{NETWORK}.{number}"


def bridge_lines(wires: Iterable[Wire]) -> list[str]:
    lines = ["link add bridge0 type bridge", "link set bridge0 up"]
    for wire in wires:
        if wire.private:
            # First, so that it also comes first where somebody lists the host's interfaces.
            lines += [f"link add dead{wire.number} type veth peer name {PRIVATE_INTERFACE} netns {wire.pid}"]
            lines += [f"link set dead{wire.number} up"]
        lines += [
            f"link add {wire.port} type veth peer name {wire.interface} netns {wire.pid}",
            f"link set {wire.port} master bridge0",
            f"link set {wire.port} up",
        ]
    return lines


def host_lines(wire: Wire) -> list[str]:
    """What the host itself does, once its ends are there."""
    own = [(wire.interface, NETWORK)] + [(PRIVATE_INTERFACE, PRIVATE_NETWORK)] * wire.private
    lines = ["link set lo up"]
    for interface, network in own:
        lines += [f"addr add {network}.{wire.number}/24 dev {interface}", f"link set {interface} up"]
    return lines


def slow_lines(wire: Wire) -> list[str]:
    """Take the host's port off the bridge and put another one there: whoever joins the two decides what passes."""
    return [
        f"link set {wire.port} nomaster",
        f"link add {wire.slow} type veth peer name {wire.slow}b",
        f"link set {wire.slow}b master bridge0",
        f"link set {wire.slow} up",
        f"link set {wire.slow}b up",
    ]


def enter_words(pid: int) -> list[str]:
    return ["/usr/bin/nsenter", f"--target={pid}", "--net"]


def ip(pid: int, lines: Iterable[str]) -> None:
    """Run them in the network namespace of that process."""
    words = [*enter_words(pid), "ip", "-batch", "-"]
    subprocess.run(words, input="\n".join(lines), text=True, check=True, capture_output=True)
