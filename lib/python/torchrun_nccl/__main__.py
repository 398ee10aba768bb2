"""Run by bin/torchrun_nccl.sh as ``python -I -S -B …/__main__.py``: apart from the user's folder and packages."""

import os
import sys

for _fd, _name in ((0, "stdin"), (1, "stdout"), (2, "stderr")):  # one that is closed would become a pipe of ours
    try:
        os.fstat(_fd)
    except OSError:
        os.open(os.devnull, os.O_RDWR)  # the lowest free number, which is this one
        setattr(sys, _name, open(_fd, "r" if _fd == 0 else "w", closefd=False))  # noqa: SIM115

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from torchrun_nccl.cli import main  # noqa: E402

main(sys.argv[1:])
