"""SaltTags: what stands for a salt outside the process."""

from __future__ import annotations

from hashlib import blake2b

from anaphora.identity.digests import MAX_KEY_BYTES, MIN_KEY_BYTES

SALT_TAG_BYTES = 16


class SaltTags:
    """Keyed BLAKE2b of a salt. Equal salts have equal tags under one key, so holders of the key can tell whose blocks
    they read about; nobody can find a salt by trying candidates without it.

    key: 16 to 64 secret bytes. It may be the key of the fleet's block digests: the domains are apart.
    """

    def __init__(self, key: bytes) -> None:
        if not MIN_KEY_BYTES <= len(key) <= MAX_KEY_BYTES:
            raise ValueError(f"key: expected {MIN_KEY_BYTES} to {MAX_KEY_BYTES} bytes, got {len(key)}")
        self._state = blake2b(digest_size=SALT_TAG_BYTES, key=key, person=b"salt tag")

    def tag(self, salt: str) -> bytes:
        """Return the 16 bytes that stand for `salt`."""
        state = self._state.copy()
        state.update(salt.encode("utf-8", "surrogatepass"))
        return state.digest()
