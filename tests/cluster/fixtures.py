"""Clusters for tests: `pytest_plugins = ["cluster.fixtures"]` in a test file, and each is brought up once for that file.

What this machine lacks is the reason of the skip.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from . import ssh
from .grid_engine import GridEngine
from .need import GRID_ENGINE, SLURM, SSH
from .skip import skip_where_missing
from .slurm import Slurm
from .virtual import Cluster


def gadi(count: int) -> Cluster:
    return Cluster(count, names="gadi-gpu-v100-%04d", domain="gadi.nci.org.au")


@pytest.fixture(scope="module")
def ssh_cluster() -> Iterator[Cluster]:
    """node1 to node4; `ssh` works from each to each."""
    skip_where_missing(SSH)
    with Cluster(4) as cluster:
        ssh.start(cluster)
        yield cluster


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    """Four nodes named as on Gadi, with two GPUs each; `slurm.cluster` is their cluster."""
    skip_where_missing(SLURM)
    with gadi(4) as cluster:
        yield Slurm(cluster, gpus=2)


@pytest.fixture(scope="module")
def grid_engine() -> Iterator[GridEngine]:
    """Three hosts named as on Gadi, with two slots each."""
    skip_where_missing(GRID_ENGINE)
    with gadi(3) as cluster:
        yield GridEngine(cluster, slots=2)


@pytest.fixture(scope="module")
def pbs_cluster() -> Iterator[Cluster]:
    """Four hosts named as on Gadi, for `pbs_hosts.HostsJob`."""
    skip_where_missing()
    with gadi(4) as cluster:
        yield cluster
