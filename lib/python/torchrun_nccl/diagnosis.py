"""Known errors and what to change: a table, searched in the last words of the first failure."""

from __future__ import annotations

import re

#: (pattern, hint), the first that matches counts.
HINTS: tuple[tuple[str, str], ...] = (
    (r"CUDA out of memory|OutOfMemoryError", "the GPU's memory is full: a smaller batch or model, or more GPUs"),
    (
        r"no kernel image is available|not compatible with the current PyTorch installation",
        "this torch was not built for the GPUs of this node: install a build that lists its architecture",
    ),
    (r"EADDRINUSE|[Aa]ddress already in use", "a port is taken by another program on that node"),
    (
        r"Name or service not known|Temporary failure in name resolution|nodename nor servname",
        "a host name does not resolve on that node",
    ),
    (
        r"DataLoader worker .* (?:is killed|exited unexpectedly)",
        "a DataLoader worker was killed: too little memory or /dev/shm",
    ),
    (r"unable to open shared memory object|/dev/shm|Bus error", "/dev/shm is full or too small on that node"),
    (r"No space left on device", "a disk is full on that node"),
    (r"Disk quota exceeded", "your quota is used up"),
    (r"ModuleNotFoundError: No module named", "a package is missing in that node's environment"),
)
#: By signal, where nothing was said.
SIGNAL_HINTS = {
    9: "killed from outside: often the memory limit of the job (look at the scheduler's report)",
    11: "a crash in compiled code",
    7: "/dev/shm is full or too small on that node, or a file on a lost file system was mapped",
}


def hint(tail: str, number: int) -> str:
    """What to change, or nothing. tail: last words on stderr; number: the signal that ended it, 0 if none.

    >>> hint("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate", 0)[:10]
    "the GPU's "
    """
    for pattern, text in HINTS:
        if re.search(pattern, tail):
            return text
    return SIGNAL_HINTS.get(number, "")
