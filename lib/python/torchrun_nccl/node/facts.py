"""Hello: what this node is, in a few tens of milliseconds and without importing torch.

Everything is read from files and system calls below a `root` that tests replace.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import select
import signal
import socket
import struct
import time
from pathlib import Path
from typing import Any

from torchrun_nccl.channel import Frame
from torchrun_nccl.environment import DEVICE_NAMES
from torchrun_nccl.node import processes

#: linux/if_arp.h
ARPHRD_LOOPBACK, ARPHRD_INFINIBAND = 772, 32
AF_NAMES = {socket.AF_INET: 4, socket.AF_INET6: 6}
PYTHON_SECONDS = 20.0
PORT_CHOICES = 4

#: Run by the user's Python: where is torch, without importing it. `torch/version.py` has lines such as
#: ``__version__ = '2.13.0+cpu'`` and ``cuda: Optional[str] = None``.
_ASK_PYTHON = r"""
import importlib.util, json, os, re, sys
sys.path[:] = [p for p in sys.path if p]
spec = importlib.util.find_spec("torch")
text = ""
if spec and spec.submodule_search_locations:
    for place in spec.submodule_search_locations:
        try:
            text = open(place + "/version.py").read()
        except OSError:
            pass
def value(name):
    found = re.search(r"^%s\b[^=\n]*=\s*['\"]([^'\"]*)" % name, text, re.M)
    return found and found.group(1)
torch = value("__version__") or (spec and "unknown") or None
answer = {"version": "%d.%d.%d" % sys.version_info[:3], "torch": torch, "cuda": value("cuda"), "hip": value("hip")}
os.write(int(sys.argv[1]), json.dumps(answer).encode() + b"\n")
"""


class _Address(ctypes.Structure):
    """struct ifaddrs of getifaddrs(3)."""


_Address._fields_ = [
    ("next", ctypes.POINTER(_Address)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.c_void_p),
    ("netmask", ctypes.c_void_p),
    ("broadcast", ctypes.c_void_p),
    ("data", ctypes.c_void_p),
]
IFF_UP, IFF_LOOPBACK, IFF_RUNNING = 0x1, 0x8, 0x40  # linux/if.h


def _text_address(pointer: int) -> str | None:
    family = struct.unpack("=H", ctypes.string_at(pointer, 2))[0]
    if family == socket.AF_INET:
        return socket.inet_ntop(family, ctypes.string_at(pointer + 4, 4))
    if family == socket.AF_INET6:
        return socket.inet_ntop(family, ctypes.string_at(pointer + 8, 16))
    return None


def interfaces(root: str = "/") -> list[dict[str, Any]]:
    """Interfaces that are up, with their addresses, in the kernel's order; InfiniBand told from the rest by sysfs."""
    libc = ctypes.CDLL(None, use_errno=True)
    head = ctypes.POINTER(_Address)()
    if libc.getifaddrs(ctypes.byref(head)) != 0:
        return []
    found: dict[str, dict[str, Any]] = {}
    node = head
    while node:
        entry = node.contents
        name = entry.name.decode("ascii", "replace")
        if entry.flags & IFF_UP and entry.flags & IFF_RUNNING:
            one = found.setdefault(
                name,
                {
                    "name": name,
                    "addresses": [],
                    "loopback": bool(entry.flags & IFF_LOOPBACK),
                    "infiniband": _is_infiniband(root, name),
                },
            )
            text = _text_address(entry.address) if entry.address else None
            if text and text not in one["addresses"]:
                one["addresses"].append(text)
        node = entry.next
    libc.freeifaddrs(head)
    return [one for one in found.values() if one["addresses"]]


def _is_infiniband(root: str, name: str) -> bool:
    return read(root, f"sys/class/net/{name}/type").strip() == str(ARPHRD_INFINIBAND)


def read(root: str, path: str) -> str:
    """A small file's text, empty where it is not to be had."""
    try:
        return Path(root, path).read_text(errors="replace")
    except OSError:
        return ""


def gpus(root: str = "/") -> tuple[int, str]:
    """How many GPUs the drivers show here, and whose: "cuda", "rocm" or "".

    NVML counts only devices that this process may open (a job's device cgroup), so it goes first.
    /proc/driver/nvidia/gpus/0000:3d:00.0/ is one directory a GPU; /sys/class/kfd/kfd/topology/nodes/N/properties
    has ``simd_count 440`` for a GPU and 0 for a CPU.
    """
    count = _nvml_count() if root == "/" else None
    if count is None:
        count = len(list(Path(root, "proc/driver/nvidia/gpus").glob("*")))
    if count:
        return count, "cuda"
    nodes = Path(root, "sys/class/kfd/kfd/topology/nodes").glob("*/properties")
    amd = sum(1 for path in nodes if re.search(r"^simd_count [1-9]", read("/", str(path)), re.M))
    return amd, "rocm" if amd else ""


def _nvml_count() -> int | None:
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    count = ctypes.c_uint()
    try:
        if nvml.nvmlInit_v2() != 0:
            return None
        failed = nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
        nvml.nvmlShutdown()
    except AttributeError:
        return None
    return None if failed else count.value


def usable_cpus(root: str = "/") -> tuple[int, int]:
    """CPUs this process may use (affinity and cgroup quota), and CPUs of the machine.

    cgroup v2 cpu.max is ``200000 100000`` (two CPUs) or ``max 100000``.
    """
    here = len(os.sched_getaffinity(0))
    group = read(root, "proc/self/cgroup").rpartition("0::")[2].strip()
    quota, _, period = read(root, f"sys/fs/cgroup{group}/cpu.max").strip().partition(" ")
    if quota.isdigit() and period.isdigit():
        here = min(here, max(1, int(quota) // int(period)))
    return here, os.cpu_count() or 1


def ask_python(python: str, environment: dict[str, str]) -> dict[str, Any]:
    """Version of the user's Python and of its torch (null where it has none); {"error": words} where it does not run."""
    # A pipe of its own: what a sitecustomize, PYTHONVERBOSE and the like print is for the message only.
    reader, writer = os.pipe()
    answer_reader, answer_writer = os.pipe()
    os.set_inheritable(answer_writer, True)

    def prepare() -> None:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(writer, 1)
        os.dup2(writer, 2)
        # The user's folder may hold a dis.py or a torch/; neither is what torchrun will import.
        os.chdir("/")

    pid = processes.spawn((python, "-c", _ASK_PYTHON, str(answer_writer)), environment, prepare)
    os.close(writer)
    os.close(answer_writer)
    said = {reader: b"", answer_reader: b""}
    open_ends = [reader, answer_reader]
    deadline = time.monotonic() + PYTHON_SECONDS
    # Children of a sitecustomize may hold the pipes: a whole answer is enough.
    while open_ends and b"\n" not in said[answer_reader]:
        ready, _, _ = select.select(open_ends, [], [], max(0.0, deadline - time.monotonic()))
        for end in ready:
            data = os.read(end, 65536)
            said[end] = (said[end] + data)[-65536:]
            if not data:
                open_ends.remove(end)
        if not ready:
            break
    is_late = bool(open_ends) and b"\n" not in said[answer_reader]
    os.close(reader)
    os.close(answer_reader)
    with contextlib.suppress(ValueError):
        answer = json.loads(said[answer_reader])
        if isinstance(answer, dict):
            return answer  # what it still does at its end is not waited for; the agent reaps it
    if is_late:
        processes.send_signal(pid, signal.SIGKILL)
    status = os.waitpid(pid, 0)[1]
    text = said[reader].decode(errors="replace").strip()
    return {
        "error": f"no answer in {PYTHON_SECONDS:.0f} s"
        if is_late
        else text[-400:] or f"it ended with {os.waitstatus_to_exitcode(status)}"
    }


def listen_on(port: int) -> socket.socket:
    """A listening socket on every address of this host, or OSError. Both families where there are two."""
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
        except OSError as error:
            if isinstance(error, PermissionError) or "in use" in str(error):
                raise
    return socket.create_server(("", port), backlog=1024)


def choose_ports(seed: int, root: str = "/", wanted: int = PORT_CHOICES) -> list[int]:
    """Ports free now, below the ephemeral range, where no client's port can steal them; `seed` spreads launches.

    /proc/sys/net/ipv4/ip_local_port_range is ``32768\\t60999``.
    """
    low = (read(root, "proc/sys/net/ipv4/ip_local_port_range") or "32768 60999").split()
    first, last = 10000, int(low[0]) - 1
    if last - first < 1000:  # a site that lets clients use nearly everything
        first, last = int(low[1]) + 1, 65535
    if last - first < 100:
        first, last = 10000, 65535
    free: list[int] = []
    for step in range(400):
        port = first + (seed + step * 7919) % (last - first + 1)
        try:
            listen_on(port).close()
        except OSError:
            continue
        free.append(port)
        if len(free) == wanted:
            break
    return free


def collect(job: Frame, root: str = "/") -> dict[str, Any]:
    """The facts of this node for a launch; `errors` are what forbids the start here, each in words."""
    own = dict(os.environ)
    environment = dict(job["environment"])
    count, kind = gpus(root)
    usable, total = usable_cpus(root)
    python = ask_python(job["python"], environment)
    return {
        "hostname": socket.gethostname(),
        "boot": read(root, "proc/sys/kernel/random/boot_id").strip(),
        "interfaces": interfaces(root),
        "addresses": _own_addresses(job["name"].rpartition("@")[2]),
        "gpus": count,
        "gpu_kind": kind,
        "devices": [[name, own[name]] for name in DEVICE_NAMES if name in own],
        "cpus": usable,
        "machine_cpus": total,
        "scheduler_cpus": int(own["NCPUS"]) if own.get("NCPUS", "").isdigit() else None,
        "python": python,
        "errors": _errors(job, python),
        "clock": time.time(),
    }


def _own_addresses(host: str) -> list[str]:
    """What the scheduler's name for this node means here; may be a loopback address, or nothing."""
    try:
        return list(dict.fromkeys(str(found[4][0]) for found in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)))
    except OSError:
        return []


def _errors(job: Frame, python: dict[str, Any]) -> list[str]:
    found = []
    if "error" in python:
        found.append(f"Python {job['python']} does not run: {python['error']}")
    elif not python["torch"]:
        found.append(
            f"no torch in {job['python']} (Python {python['version']}): "
            f"activate the environment that has it, or give --python"
        )
    directory, log_directory, script = job["directory"], job["log_directory"], job["script"]
    try:
        os.chdir(directory)
    except OSError as error:
        return [*found, f"working directory {directory}: {error.strerror}"]
    if not os.path.isdir(log_directory):
        found.append(f"log directory {log_directory}: no such directory; make it on every node, or give another --log-dir")
    elif not os.access(log_directory, os.W_OK | os.X_OK):
        found.append(f"log directory {log_directory}: not writable; give a writable one with --log-dir")
    if script:
        try:
            os.close(os.open(script, os.O_RDONLY | os.O_NONBLOCK))
            if not os.path.isfile(script) and not os.path.isdir(script):
                found.append(f"script {script}: no regular file; each rank must read all of it")
        except OSError as error:
            found.append(f"script {script}: {error.strerror}")
    return found
