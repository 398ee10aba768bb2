"""Who may speak on a TCP channel: both ends prove that they know the key, over two fresh nonces, and never send it."""

from __future__ import annotations

import hashlib
import hmac


def derive_key(secret: bytes, launch_id: str) -> bytes:
    """The key of one launch from a secret that several launches share (the cookie of a PBS job)."""
    return hmac.new(secret, launch_id.encode("ascii"), hashlib.sha256).digest()


def proof(key: bytes, side: str, *parts: str) -> str:
    """What only a holder of `key` can say about these nonces; `side` keeps an echo from being an answer."""
    return hmac.new(key, "\0".join((side, *parts)).encode("ascii"), hashlib.sha256).hexdigest()


def is_proof(given: object, key: bytes, side: str, *parts: str) -> bool:
    return isinstance(given, str) and hmac.compare_digest(given.encode(), proof(key, side, *parts).encode())
