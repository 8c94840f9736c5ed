"""Tenants: who a request comes from, by its API key."""

from __future__ import annotations

import hashlib
import tomllib
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

_HASHED = "sha256:"


class KeysError(Exception):
    """A keys file cannot be used; the message says where and why, without a key."""


class Tenants:
    """API keys and the tenants that they are of. Keys are kept hashed, so their comparison tells nothing by its time.

    keys: by tenant, each as it is, or as "sha256:" and the hexadecimal SHA-256 of it.
    """

    def __init__(self, keys: Mapping[str, Sequence[str]]) -> None:
        self._by_hash: dict[bytes, str] = {}
        for tenant, of_tenant in keys.items():
            for number, key in enumerate(of_tenant):
                digest = _digest(key, f"{tenant}[{number}]")
                if self._by_hash.setdefault(digest, tenant) != tenant:
                    raise KeysError(f"{tenant}[{number}]: the same key as of {self._by_hash[digest]}")
        if not self._by_hash:
            raise KeysError("expected at least one key")

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a TOML file with a table `tenants`: a list of keys for each.

        Raises KeysError.
        """
        try:
            parsed = tomllib.loads(path.read_text())
            tenants = parsed["tenants"]
            if set(parsed) != {"tenants"} or not all(
                isinstance(keys, list) and all(isinstance(key, str) for key in keys) for keys in tenants.values()
            ):
                raise KeysError("expected a table 'tenants' alone, with a list of strings for each tenant")
            return cls(tenants)
        except (OSError, UnicodeDecodeError) as error:
            raise KeysError(f"{path}: {getattr(error, 'strerror', None) or 'no text'}") from None
        except tomllib.TOMLDecodeError as error:
            raise KeysError(f"{path}: no TOML: {error}") from None
        except (KeyError, AttributeError):
            raise KeysError(f"{path}: expected a table 'tenants'") from None
        except KeysError as error:
            raise KeysError(f"{path}: {error}") from None

    def of_key(self, key: str) -> str | None:
        """The tenant that `key` is of, None if there is none."""
        return self._by_hash.get(hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest())

    def of_headers(self, headers: Mapping[str, str]) -> str | None:
        """The tenant of a request, by `Authorization: Bearer KEY` or `X-Api-Key: KEY`."""
        scheme, _, key = headers.get("authorization", "").partition(" ")
        return self.of_key(key.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", ""))


def _digest(key: str, where: str) -> bytes:
    if not key.startswith(_HASHED):
        if not key:
            raise KeysError(f"{where}: an empty key")
        return hashlib.sha256(key.encode()).digest()
    try:
        digest = bytes.fromhex(key.removeprefix(_HASHED))
    except ValueError:
        digest = b""
    if len(digest) != hashlib.sha256().digest_size:
        raise KeysError(f"{where}: expected 64 hexadecimal digits after {_HASHED}")
    return digest
