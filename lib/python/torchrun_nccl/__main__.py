"""Run by bin/torchrun_nccl.sh as ``python -I -S -B …/__main__.py``: apart from the user's folder and packages."""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from torchrun_nccl.cli import main

main(sys.argv[1:])
