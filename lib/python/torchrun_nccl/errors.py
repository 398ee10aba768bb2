"""What can go wrong before, beside and after the user's program, and the exit code of each.

The codes below 120 belong to the user's program and pass through unchanged.
"""

from __future__ import annotations

from typing import Final

#: Exit codes of our own, as ``--help`` and the README print them.
EXIT_CODES: Final[tuple[tuple[str, str], ...]] = (
    ("0", "every rank ended with 0"),
    ("1-119", "the code of the first rank that failed, unchanged"),
    ("2", "usage: an option or value that cannot be (a rank's own 2 passes too)"),
    ("75", "every rank saved its state on request and left with 75"),
    ("120", "refused before the start: the message says what and where"),
    ("121", "a node was lost"),
    ("124", "a deadline passed"),
    ("125", "our own fault, or torchrun's"),
    ("126", "the target cannot be run"),
    ("127", "the target was not found"),
    ("128+n", "ended by signal n: 130 INT, 143 TERM, 137 KILL"),
)


class LaunchError(Exception):
    """Base of everything we report as one message, without a traceback."""

    exit_code = 125
    cause = "internal"


class UsageError(LaunchError):
    """The command line cannot be right wherever it is run."""

    exit_code = 2
    cause = "usage"


class Refused(LaunchError):
    """The launch cannot work here; nothing of the user's was started."""

    exit_code = 120
    cause = "refused"


class TargetNotRunnable(Refused):
    exit_code = 126


class TargetNotFound(Refused):
    exit_code = 127


class NodeLost(LaunchError):
    """A node ended, or went silent, without its goodbye."""

    exit_code = 121
    cause = "node_lost"


class DeadlinePassed(LaunchError):
    """Something did not answer within its time."""

    exit_code = 124
    cause = "deadline"


class BadHostList(UsageError):
    """A host list or host file that cannot be read as one."""


class BadAllocation(Refused):
    """The scheduler's variables or files do not add up to a list of hosts."""
