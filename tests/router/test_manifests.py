"""The manifests in deploy/kubernetes: of the right form, fitting each other, and asking for no more than is used."""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import jsonschema
import msgspec
import pytest
import yaml

from anaphora.router.command import add_route
from anaphora.router.kubernetes.pool import PoolName, Selection
from anaphora.router.resource_file import read_resources
from anaphora.router.resources import InferencePool
from tests.router.fake_kubernetes import FakeKubernetes, pod
from tests.router.live_router import eventually, routing
from tests.router.test_kubernetes import eventually as soon
from tests.router.test_kubernetes import following
from tests.server.live_server import serving_fake

FOLDER = Path(__file__).parents[2] / "deploy/kubernetes"
SCHEMAS = Path(__file__).parent / "kubernetes_schemas"
CORE = json.loads((SCHEMAS / "core.json").read_text())
CUSTOM = yaml.safe_load((SCHEMAS / "custom.yaml").read_text())
FILES = sorted(path.name for path in FOLDER.glob("*.yaml") if path.name != "kustomization.yaml")
MANIFESTS = [item for name in FILES for item in yaml.safe_load_all((FOLDER / name).read_text())]


def name_of(manifest: dict[str, Any]) -> str:
    return f"{manifest['kind']}-{manifest['metadata']['name']}"


def only(kind: str, name: str | None = None) -> dict[str, Any]:
    """The manifest of a kind, by its name where there are several."""
    (found,) = (m for m in MANIFESTS if m["kind"] == kind and name in {None, m["metadata"]["name"]})
    return found  # type: ignore[no-any-return]


def check(manifest: dict[str, Any]) -> None:
    """Raises jsonschema.ValidationError."""
    kind = f"{manifest['apiVersion']}/{manifest['kind']}"
    if kind in CUSTOM["kinds"]:
        jsonschema.validate(manifest["metadata"], {**CORE, "$ref": "#/$defs/ObjectMeta"})
        jsonschema.validate(manifest["spec"], {"$defs": CUSTOM["$defs"], **CUSTOM["kinds"][kind]})
        assert manifest.keys() == {"apiVersion", "kind", "metadata", "spec"}
    else:
        jsonschema.validate(manifest, {**CORE, "$ref": f"#/$defs/{manifest['kind']}"})


@pytest.mark.parametrize("manifest", MANIFESTS, ids=name_of)
def test_every_manifest_has_the_form_of_its_kind(manifest: dict[str, Any]) -> None:
    check(manifest)


@pytest.mark.parametrize("manifest", MANIFESTS, ids=name_of)
def test_a_field_of_another_name_or_type_is_found(manifest: dict[str, Any]) -> None:
    part = "spec" if "spec" in manifest else "metadata"
    wrong = copy.deepcopy(manifest)
    wrong[part]["misspelt"] = 1
    with pytest.raises(jsonschema.ValidationError):
        check(wrong)
    wrong = copy.deepcopy(manifest)
    wrong[part] = dict.fromkeys(wrong[part], 5.5)
    with pytest.raises(jsonschema.ValidationError):
        check(wrong)


def test_the_pool_keeps_its_definitions_rules() -> None:
    spec = only("InferencePool")["spec"]
    assert "port" in spec["endpointPickerRef"], "a Service needs it"
    numbers = [port["number"] for port in spec["targetPorts"]]
    assert len(set(numbers)) == len(numbers)


def test_kustomize_takes_every_file() -> None:
    assert sorted(yaml.safe_load((FOLDER / "kustomization.yaml").read_text())["resources"]) == FILES


def template(name: str) -> dict[str, Any]:
    deployment = only("Deployment", name)["spec"]
    labels = deployment["template"]["metadata"]["labels"]
    assert deployment["selector"]["matchLabels"].items() <= labels.items()
    return deployment["template"]  # type: ignore[no-any-return]


def container_ports(name: str) -> dict[str, int]:
    (container,) = template(name)["spec"]["containers"]
    return {port["name"]: port["containerPort"] for port in container["ports"]}


def router_arguments() -> argparse.Namespace:
    (container,) = template("anaphora")["spec"]["containers"]
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_route(parser.add_subparsers().add_parser("route"))
    return parser.parse_args(container["args"])


def test_the_pool_selects_the_replicas_and_names_the_picker() -> None:
    pool = only("InferencePool")
    selected = pool["spec"]["selector"]["matchLabels"]
    assert selected.items() <= template("llama")["metadata"]["labels"].items()
    assert not selected.items() <= template("anaphora")["metadata"]["labels"].items()
    assert [port["number"] for port in pool["spec"]["targetPorts"]] == [container_ports("llama")["http"]]
    reference, service = pool["spec"]["endpointPickerRef"], only("Service")
    assert reference["name"] == service["metadata"]["name"]
    assert reference["port"]["number"] in {port["port"] for port in service["spec"]["ports"]}


def test_the_service_reaches_the_router_where_it_listens() -> None:
    service = only("Service")
    assert service["spec"]["selector"].items() <= template("anaphora")["metadata"]["labels"].items()
    ports = container_ports("anaphora")
    assert {port["targetPort"] for port in service["spec"]["ports"]} == set(ports)
    arguments = router_arguments()
    assert (arguments.port, arguments.host) == (ports["http"], "0.0.0.0")
    assert arguments.ext_proc == f"0.0.0.0:{ports['ext-proc']}"


def test_the_router_follows_the_pool_and_its_replicas_events() -> None:
    arguments = router_arguments()
    assert arguments.pool_name == only("InferencePool")["metadata"]["name"]
    ports = container_ports("llama")
    assert (arguments.kv_events_port, arguments.kv_replay_port) == (ports["kv-events"], ports["kv-replay"])
    (replica,) = template("llama")["spec"]["containers"]
    (events,) = (a.removeprefix("--kv-events-config=") for a in replica["args"] if a.startswith("--kv-events-config="))
    told = json.loads(events)
    assert told["endpoint"] == f"tcp://*:{ports['kv-events']}"
    assert told["replay_endpoint"] == f"tcp://*:{ports['kv-replay']}"


def test_the_route_leads_from_the_gateway_to_the_pool() -> None:
    route = only("HTTPRoute")["spec"]
    assert [parent["name"] for parent in route["parentRefs"]] == [only("Gateway")["metadata"]["name"]]
    backends = [backend for rule in route["rules"] for backend in rule["backendRefs"]]
    pool = only("InferencePool")
    assert backends == [
        {"group": pool["apiVersion"].partition("/")[0], "kind": "InferencePool", "name": pool["metadata"]["name"]}
    ]


def test_the_account_is_the_routers_and_has_the_role() -> None:
    account, role, binding = only("ServiceAccount"), only("Role"), only("RoleBinding")
    name = account["metadata"]["name"]
    assert template("anaphora")["spec"]["serviceAccountName"] == name
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": name}]
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    assert template("llama")["spec"]["automountServiceAccountToken"] is False


def asked(request: str) -> tuple[str, str, str, str | None]:
    """API group, resource, verb and the one name of a request, as the API server's authorizer sees it."""
    url = urlsplit(request)
    query = parse_qs(url.query)
    head, _, resource = url.path.rpartition("/")
    group = "" if head.startswith("/api/") else head.split("/")[2]
    selector = query.get("fieldSelector", [""])[0]
    name = selector.removeprefix("metadata.name=") if selector else None
    return group, resource, "watch" if "watch" in query else "list", name


def test_the_role_permits_all_that_the_router_asks_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anaphora.router.kubernetes.reflector._MIN_WAIT_S", 0.001)
    rules = only("Role")["rules"]
    granted = {
        (group, resource, verb, name)
        for rule in rules
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
        for name in rule.get("resourceNames", [None])
    }
    pool = only("InferencePool")
    groups = [g for rule in rules if "inferenceobjectives" in rule["resources"] for g in rule["apiGroups"]]
    pool_path = "/apis/inference.networking.k8s.io/v1/namespaces/ai/inferencepools"
    others = [
        f"/apis/{group}/v1alpha2/namespaces/ai/{plural}"
        for group in groups
        for plural in ("inferenceobjectives", "inferencemodelrewrites")
    ]
    cluster = FakeKubernetes(kinds=("/api/v1/namespaces/ai/pods", pool_path, *others), token=None)
    cluster.put(pool_path, pool)
    cluster.put("/api/v1/namespaces/ai/pods", pod("a", "10.0.0.1", labels=template("llama")["metadata"]["labels"]))

    async def test() -> None:
        async with following(cluster, PoolName("ai", pool["metadata"]["name"])) as router:
            await soon(lambda: router.taking == {"10.0.0.1:8000"})
            await soon(lambda: cluster.num_watches >= 6)

    asyncio.run(test())
    assert set(map(asked, cluster.requests)) == granted


def test_the_router_reads_its_own_manifests() -> None:
    pool = msgspec.convert(only("InferencePool"), InferencePool)
    assert Selection.of(pool) == Selection("app=llama", (8000,))
    resources = read_resources(FOLDER / "objectives.yaml", pool.metadata.name)
    assert [objective.spec.priority for objective in resources.objectives] == [-1]
    (rewrite,) = resources.rewrites
    (replica,) = template("llama")["spec"]["containers"]
    targets = {f"--model={target.model_rewrite}" for rule in rewrite.spec.rules for target in rule.targets}
    assert targets <= set(replica["args"])


def test_probes_ask_for_what_the_router_answers() -> None:
    (container,) = template("anaphora")["spec"]["containers"]
    with serving_fake() as server, routing(server.url) as router:
        for probe in ("readinessProbe", "livenessProbe"):
            path = container[probe]["httpGet"]["path"]
            eventually(lambda path=path: router.client.get(path).status_code == 200)
    with routing() as empty:
        assert empty.client.get(container["readinessProbe"]["httpGet"]["path"]).status_code == 503
        assert empty.client.get(container["livenessProbe"]["httpGet"]["path"]).status_code == 200
