"""TLS towards replicas whose URL begins with https: whom to trust, and who we are."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


class TlsError(ValueError):
    """Files that give no TLS; the message names the option and what is wrong."""


@dataclass(frozen=True, slots=True)
class ReplicaTls:
    """How replicas with https are reached.

    authority: certificates (PEM) that theirs must be signed by; None: the system's.
    certificate, key: ours (PEM), for replicas that ask for one. The key may be in the certificate's file; it has no
        passphrase.
    verifies: whether a replica's certificate and host name are checked at all. Without, whoever is in between reads
        every prompt.
    """

    authority: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    verifies: bool = True

    def context(self) -> ssl.SSLContext:
        """Return what connections are made with. TLS 1.2 at least, as Python's defaults are. Raises TlsError."""
        if self.key is not None and self.certificate is None:
            raise TlsError("--replica-key needs --replica-cert")
        if not self.verifies and self.authority is not None:
            raise TlsError("--replica-insecure and --replica-ca exclude each other")
        try:
            context = ssl.create_default_context(cafile=None if self.authority is None else str(self.authority))
        except (OSError, ssl.SSLError) as error:
            raise TlsError(f"--replica-ca: {self.authority}: {_reason(error)}") from None
        if not self.verifies:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        if self.certificate is not None:
            try:
                context.load_cert_chain(self.certificate, self.key, password=_no_passphrase)
            except (OSError, ssl.SSLError) as error:
                files = " and ".join(str(file) for file in (self.certificate, self.key) if file is not None)
                raise TlsError(f"--replica-cert, --replica-key: {files}: {_reason(error)}") from None
            except _PassphraseError:
                raise TlsError(
                    f"--replica-key: {self.key or self.certificate}: the key has a passphrase; none is allowed"
                ) from None
        return context


class _PassphraseError(Exception):
    pass


def _no_passphrase() -> str:
    raise _PassphraseError  # else OpenSSL would ask for it on the terminal


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return "no certificate and key in PEM that belong together" if error.reason is None else error.reason.lower()
    return (getattr(error, "strerror", None) or str(error)).lower()
