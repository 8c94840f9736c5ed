"""`anaphora route` on the command line: options that do not fit together are named, and nothing starts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from anaphora.cli import main
from anaphora.router import route as route_module

if TYPE_CHECKING:
    from anaphora.router.route import RouteOptions


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("", "route needs --replica URL"),
        ("--pool-name x --endpoint-selector a=b", "--pool-name and --endpoint-selector exclude each other"),
        ("--endpoint-selector a=b", "--endpoint-selector and --endpoint-target-ports go together"),
        ("--endpoint-selector a=b --endpoint-target-ports 80,x", "expected ports like 8000,8001, got '80,x'"),
        ("--endpoint-selector a=b --endpoint-target-ports ,", "--endpoint-target-ports: expected a port"),
        ("--pool-namespace x --dns a:1", "--pool-namespace needs --pool-name or --endpoint-selector"),
        ("--pool-name x --kube-api ftp://x", "--kube-api: expected a URL like https://10.0.0.1:6443"),
        ("--pool-name x --kube-ca-file /x", "need --kube-api"),
        ("--dns a", "--dns: expected HOST:PORT"),
        ("--dns a:1 --dns-interval 0", "--dns-interval: expected seconds above 0"),
        ("--dns a:1 --kv-events-port 0", "--kv-events-port: expected 1 to 65535, got 0"),
        ("--dns a:1 --kv-replay-port 1", "--kv-replay-port needs --kv-events-port"),
        ("--dns a:1 --ext-proc-self-signed", "--ext-proc-self-signed needs --ext-proc ADDRESS"),
        ("--dns a:1 --ext-proc-conformance", "--ext-proc-conformance needs --ext-proc ADDRESS"),
        ("--dns a:1 --ext-proc :1 --ext-proc-self-signed --ext-proc-cert x --ext-proc-key x", "exclude each other"),
    ],
)
def test_options_that_do_not_fit_are_named(words: str, problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["route", *words.split()]) == 2
    assert problem in capsys.readouterr().err


def test_outside_of_a_cluster_a_pool_needs_an_api(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    assert main(["route", "--port", "0", "--pool-name", "x"]) == 1
    assert "name the API with --kube-api" in capsys.readouterr().err


def test_options_arrive_as_they_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[RouteOptions] = []

    def route(options: RouteOptions) -> int:
        taken.append(options)
        return 0

    monkeypatch.setattr(route_module, "route", route)
    words = (
        "--pool-name llama --pool-namespace ai --kube-api https://k:6443 --kube-token-file t --kube-ca-file c "
        "--dns a:1 --dns _http._tcp.b --dns-interval 2 --kv-events-port 5557 --kv-replay-port 5657 --drain-timeout 9 "
        "--resources r.yaml --ext-proc 0.0.0.0:9002 --ext-proc-self-signed --ext-proc-conformance"
    )
    assert main(["route", *words.split()]) == 0
    (options,) = taken
    cluster = options.cluster
    assert cluster is not None
    assert (cluster.pool_name, cluster.namespace, cluster.api_url) == ("llama", "ai", "https://k:6443")
    assert (str(cluster.token_file), str(cluster.ca_file)) == ("t", "c")
    assert [name.text for name in options.dns] == ["a:1", "_http._tcp.b"]
    assert (options.dns_interval_s, options.kv_events_port, options.kv_replay_port) == (2, 5557, 5657)
    assert (options.drain_s, str(options.resources_file), options.is_conformance_test) == (9, "r.yaml", True)
    assert options.ext_proc_certificate is not None
    assert options.ext_proc_certificate.startswith(b"-----BEGIN CERTIFICATE-----")
