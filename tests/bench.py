"""What a launch costs beside torchrun itself: `make bench`.

Alternating pairs on one machine, so that its speed of the moment falls on both; ratios and differences of medians.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from conftest import COMMAND, job_environment

SCRIPTS = {
    "empty": "pass\n",
    "first all-reduce": (
        "import torch, torch.distributed as d\nd.init_process_group('gloo')\nt = torch.ones(1)\nd.all_reduce(t)\n"
        "d.barrier()\nd.destroy_process_group()\n"
    ),
}


def commands(script: str, nproc: int) -> dict[str, list[str]]:
    count = f"--nproc-per-node={nproc}"
    return {
        "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone", count, script],
        "torchrun static": [sys.executable, "-m", "torch.distributed.run", "--master-port=29876", count, script],
        "torchrun_nccl.sh": [str(COMMAND), "--scheduler", "none", "--device", "cpu", count, script],
    }


def wall_seconds(words: list[str], cwd: str) -> float:
    began = time.monotonic()
    subprocess.run(words, cwd=cwd, env=job_environment(), check=True, capture_output=True)
    return time.monotonic() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--nproc", type=int, default=2)
    options = parser.parse_args()
    for title, text in SCRIPTS.items():
        with tempfile.TemporaryDirectory() as folder:
            script = Path(folder, "script.py")
            script.write_text(text)
            names = commands(str(script), options.nproc)
            times: dict[str, list[float]] = {name: [] for name in names}
            for number in range(options.pairs + 1):  # the first warms the page cache
                for name, words in names.items():
                    seconds = wall_seconds(words, folder)
                    if number:
                        times[name].append(seconds)
        ours = statistics.median(times["torchrun_nccl.sh"])
        print(f"{title}, 1 node x {options.nproc}, {options.pairs} alternating runs")
        for name, found in times.items():
            median = statistics.median(found)
            against = "" if name == "torchrun_nccl.sh" else f"   ours {ours - median:+.2f} s, {ours / median:.2f}x"
            print(f"  {name:<18} {min(found):6.2f} {median:6.2f} {max(found):6.2f} s (min median max){against}")


if __name__ == "__main__":
    main()
