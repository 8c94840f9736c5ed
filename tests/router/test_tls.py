"""Replicas with https: trusted by whom, and asked for our certificate."""

from __future__ import annotations

import contextlib
import ssl
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import trustme

from anaphora.router.prompt import TextEstimate
from anaphora.router.replica import ReplicaSpec
from anaphora.router.route import RouteError, RouteOptions, build_app
from anaphora.router.tls import ReplicaTls, TlsError
from anaphora.server.app import OpenAIServer
from anaphora.server.run import Server
from tests.router.live_router import LiveRouter, eventually
from tests.server.fake_engine import FakeEngine
from tests.server.live_server import running

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """ca.pem signs the replica's server.pem and the router's client.pem; other.pem is another authority's."""
    authority, other = trustme.CA(), trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    other.cert_pem.write_to_path(str(tmp_path / "other.pem"))
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(str(tmp_path / "server.pem"))
    client = authority.issue_cert("router")
    client.private_key_and_cert_chain_pem.write_to_path(str(tmp_path / "client.pem"))
    client.private_key_pem.write_to_path(str(tmp_path / "client.key"))
    client.cert_chain_pems[0].write_to_path(str(tmp_path / "client.crt"))
    authority.issue_cert("elsewhere.test").private_key_and_cert_chain_pem.write_to_path(str(tmp_path / "elsewhere.pem"))
    return tmp_path


@contextlib.contextmanager
def secure_replica(files: Path, certificate: str = "server.pem", *, asks: bool = False) -> Iterator[str]:
    def make(api: Any, **options: Any) -> Server:
        server = Server(api, **options)
        server.config.ssl_certfile = files / certificate
        if asks:
            server.config.ssl_ca_certs = str(files / "ca.pem")
            server.config.ssl_cert_reqs = ssl.CERT_REQUIRED
        return server

    engine = FakeEngine()
    with running(OpenAIServer(engine.service, engine.model), make) as (_, url):
        yield url.replace("http://", "https://")


@contextlib.contextmanager
def routing(url: str, tls: ReplicaTls) -> Iterator[LiveRouter]:
    app = build_app(RouteOptions(replicas=(ReplicaSpec.of(url),), tls=tls, probe_s=0.05), TextEstimate())
    with running(app) as (_, own), httpx.Client(base_url=own, timeout=10) as client:  # type: ignore[arg-type]
        yield LiveRouter(own, app, client)


def is_healthy(router: LiveRouter) -> bool | None:
    (entry,) = router.replicas().values()
    return entry["healthy"]  # type: ignore[no-any-return]


def test_a_replica_whose_certificate_the_authority_signed_is_probed_and_answers(files: Path) -> None:
    with secure_replica(files) as url, routing(url, ReplicaTls(files / "ca.pem")) as router:
        eventually(lambda: is_healthy(router))
        response = router.complete("abc")
        assert response.status_code == 200, response.text
        assert response.headers["x-anaphora-replica"] == url.removeprefix("https://")


@pytest.mark.parametrize("certificate", ["server.pem", "elsewhere.pem"])
def test_another_authority_or_another_hosts_certificate_is_refused(files: Path, certificate: str) -> None:
    authority = "other.pem" if certificate == "server.pem" else "ca.pem"
    with secure_replica(files, certificate) as url, routing(url, ReplicaTls(files / authority)) as router:
        eventually(lambda: is_healthy(router) is False)
        assert router.complete("abc").status_code == 503


def test_a_replica_that_asks_for_a_certificate_gets_ours(files: Path) -> None:
    with secure_replica(files, asks=True) as url:
        with routing(url, ReplicaTls(files / "ca.pem", files / "client.crt", files / "client.key")) as router:
            eventually(lambda: is_healthy(router))
            assert router.complete("abc").status_code == 200
        with routing(url, ReplicaTls(files / "ca.pem")) as router:
            eventually(lambda: is_healthy(router) is False)


def test_without_checks_any_certificate_will_do_and_a_warning_says_so(
    files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with secure_replica(files, "elsewhere.pem") as url, routing(url, ReplicaTls(verifies=False)) as router:
        eventually(lambda: is_healthy(router))
        assert router.complete("abc").status_code == 200
    assert "--replica-insecure" in capsys.readouterr().err


def test_files_that_are_of_no_use_are_named(files: Path) -> None:
    (files / "empty.pem").write_text("")
    with pytest.raises(TlsError, match=r"--replica-ca: .*absent\.pem: no such file"):
        ReplicaTls(files / "absent.pem").context()
    with pytest.raises(TlsError, match=r"--replica-ca: .*empty\.pem: "):
        ReplicaTls(files / "empty.pem").context()
    with pytest.raises(TlsError, match=r"--replica-cert, --replica-key: .*client\.crt and .*server\.pem: "):
        ReplicaTls(None, files / "client.crt", files / "server.pem").context()
    with pytest.raises(TlsError, match="--replica-key needs --replica-cert"):
        ReplicaTls(key=files / "client.key").context()
    with pytest.raises(RouteError, match="exclude each other"):
        build_app(RouteOptions(tls=ReplicaTls(files / "ca.pem", verifies=False)), TextEstimate())


def test_a_key_with_a_passphrase_is_refused_instead_of_asked_for(files: Path) -> None:
    serialization = pytest.importorskip("cryptography.hazmat.primitives.serialization")
    key = serialization.load_pem_private_key((files / "client.key").read_bytes(), None)
    sealed = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"secret"),
    )
    (files / "sealed.key").write_bytes(sealed)
    with pytest.raises(TlsError, match=r"--replica-key: .*sealed\.key: the key has a passphrase"):
        ReplicaTls(None, files / "client.crt", files / "sealed.key").context()
