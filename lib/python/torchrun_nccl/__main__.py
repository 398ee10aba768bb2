"""Run by bin/torchrun_nccl.sh as ``python -I -S -B …/torchrun_nccl/__main__.py``: isolated from the user's folder and packages."""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from torchrun_nccl.cli import main  # noqa: E402 (the path must be there first)

main(sys.argv[1:])
