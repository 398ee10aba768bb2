"""A slow wire: passes every frame from one interface to the other, both ways, some time later. Ends with its stdin.

    python -I -S -B delay.py PORT OTHER SECONDS

In place of `tc qdisc … netem`, which not every kernel has.
"""

from __future__ import annotations

import collections
import contextlib
import select
import socket
import sys
import time

ETH_P_ALL = 3  # linux/if_ether.h
SOL_PACKET, PACKET_ADD_MEMBERSHIP, PACKET_VNET_HDR = 263, 1, 15  # linux/if_packet.h
PACKET_IGNORE_OUTGOING, PACKET_MR_PROMISC = 23, 1
LARGEST = 1 << 17


def open_interface(name: str) -> socket.socket:
    """All that arrives there, whoever it is for, and not what we send ourselves."""
    # Protocol 0 until all is set: a frame of before would have another form.
    raw = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    index = socket.if_nametoindex(name)
    # Before each frame what the kernel still has to do to it: checksums and segments are not made on virtual wires.
    raw.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    raw.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    membership = index.to_bytes(4, sys.byteorder) + PACKET_MR_PROMISC.to_bytes(2, sys.byteorder) + bytes(10)
    raw.setsockopt(SOL_PACKET, PACKET_ADD_MEMBERSHIP, membership)
    raw.bind((name, ETH_P_ALL))
    return raw


def main(first: str, second: str, seconds: str) -> None:
    ends = [open_interface(first), open_interface(second)]
    opposite = {ends[0]: ends[1], ends[1]: ends[0]}
    waiting: collections.deque[tuple[float, socket.socket, bytes]] = collections.deque()
    print("ready", flush=True)
    while True:
        rest = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        ready, _, _ = select.select([sys.stdin, *ends], [], [], rest)
        if sys.stdin in ready:
            return
        for end in ends:
            if end in ready:
                waiting.append((time.monotonic() + float(seconds), opposite[end], end.recv(LARGEST)))
        while waiting and waiting[0][0] <= time.monotonic():
            _, target, frame = waiting.popleft()
            with contextlib.suppress(OSError):  # down, or full: a wire may lose frames
                target.send(frame)


if __name__ == "__main__":
    main(*sys.argv[1:])
