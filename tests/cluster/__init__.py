"""Virtual hosts on this machine, and what runs batch jobs on them. See `virtual.Cluster`; root only."""

from .need import Missing
from .virtual import Cluster, Host

__all__ = ["Cluster", "Host", "Missing"]
