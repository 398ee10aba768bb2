"""The PBS stand-in on virtual hosts: the job's script and tasks run there as an ordinary user.

    with Cluster(4) as c, HostsJob(c, "pbsdsh -- hostname", slots=2) as job:
        job.wait(), job.stdout()
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pbs.standin import PbsJob

from . import enter, etc
from .virtual import Cluster


class HostsJob(PbsJob):
    """hosts: numbers or names, in the order of the nodefile, default all; slots: lines of each. options: as of PbsJob."""

    def __init__(
        self,
        cluster: Cluster,
        script: str,
        *,
        hosts: Sequence[int | str] = (),
        slots: int = 1,
        user: str = "user1",
        **options: Any,
    ) -> None:
        chosen = [cluster.host(which) for which in hosts] or list(cluster.hosts)
        folder = cluster.shared / "pbs"
        folder.mkdir(exist_ok=True)
        super().__init__(
            folder,
            script,
            nodefile=[host.full_name for host in chosen for _ in range(slots)],
            addresses={host.full_name: host.address for host in chosen},
            enter=lambda name: [*cluster.enter(name), *enter.user_words(user)],
            **{"home": cluster.home(user), "workdir": cluster.home(user), **options},
        )
        self.job = replace(self.job, user=user)

    def _make_files(self) -> None:
        super()._make_files()
        number = etc.USERS[self.job.user]
        for folder, _, files in os.walk(self.job.root):
            for path in (Path(folder), *(Path(folder, name) for name in files)):
                os.chown(path, number, number)
