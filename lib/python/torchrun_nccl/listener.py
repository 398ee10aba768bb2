"""The launcher's TCP port: who connects has a few seconds and a few bytes to prove that it is one of our doors."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable

from . import authentication, channel
from .loop import Loop
from .node import facts

ADDRESSES = 12


class Listener:
    """accept: called with a node's index and its connected descriptor."""

    def __init__(self, loop: Loop, launch_id: str, key: bytes, accept: Callable[[int, int], None]) -> None:
        self._loop, self._launch_id, self._key, self._take = loop, launch_id, key, accept
        self._socket = facts.listen_on(0)
        self._socket.setblocking(False)
        loop.watch(self._socket.fileno(), self._accept)

    def addresses(self) -> str:
        """Where nodes find us, ``10.6.1.31:40123,[2001:db8::31]:40123``: every address that others could reach.

        Loopback comes last, for tasks that run on this very machine while its network is down.
        """
        port = self._socket.getsockname()[1]
        found = [
            address
            for interface in facts.interfaces()
            if not interface["loopback"]
            for address in interface["addresses"]
            if not address.startswith("fe80")
        ]
        names = [f"[{one}]" if ":" in one else one for one in (*found[:ADDRESSES], "127.0.0.1")]
        return ",".join(f"{name}:{port}" for name in names)

    def _accept(self) -> None:
        try:
            connection, _ = self._socket.accept()
        except OSError:
            return
        _Visitor(self._loop, connection, self._launch_id, self._key, self._take)


class _Visitor:
    def __init__(
        self, loop: Loop, connection: socket.socket, launch_id: str, key: bytes, accept: Callable[[int, int], None]
    ) -> None:
        self._loop, self._launch_id, self._key, self._take = loop, launch_id, key, accept
        self._connection = connection
        self._seen = bytearray()
        self._index = -1
        self._nonces = ("", "")
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._timer = loop.after(channel.GREETING_SECONDS, self._refuse)
        loop.watch(connection.fileno(), self._read)

    def _refuse(self) -> None:
        self._timer.cancel()
        if self._connection.fileno() >= 0:
            self._loop.forget(self._connection.fileno())
            self._connection.close()

    def _read(self) -> None:
        try:
            data = self._connection.recv(channel.GREETING_LIMIT)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self._seen += data
        try:
            if not data or len(self._seen) > channel.GREETING_LIMIT or not self._step():
                self._refuse()
        except (ValueError, OSError):
            self._refuse()

    def _step(self) -> bool:
        """Go on with what has come; False for somebody else."""
        if self._index < 0:
            found = channel.split_greeting(bytes(self._seen))
            if found is None or b"\n" not in found[2]:
                return True
            launch_id, index, rest = found
            if launch_id != self._launch_id:
                return False
            line, _, remaining = rest.partition(b"\n")
            theirs, mine = str(channel.decode(line).get("nonce")), secrets.token_hex(16)
            self._index, self._nonces, self._seen = index, (theirs, mine), bytearray(remaining)
            proof = authentication.proof(self._key, "launcher", launch_id, theirs, mine)
            self._connection.sendall(channel.encode({"nonce": mine, "proof": proof}))
        if b"\n" not in self._seen:
            return True
        given = channel.decode(bytes(self._seen.partition(b"\n")[0])).get("proof")
        if not authentication.is_proof(given, self._key, "door", self._launch_id, str(self._index), *self._nonces):
            return False
        self._timer.cancel()
        self._loop.forget(self._connection.fileno())
        self._take(self._index, self._connection.detach())
        return True
