"""Under a real, local Ray: calls go where their prefix is, engines answer OpenAI's clients."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import httpx
import openai
import pytest

from tests.tiny_models import write_gguf_model

ray = pytest.importorskip("ray", reason="needs Ray: pip install 'anaphora[ray]'")
serve = pytest.importorskip("ray.serve", reason="needs Ray Serve: pip install 'anaphora[ray]'")

from ray.serve.config import RequestRouterConfig

from anaphora.integrations.ray_serve import HttpCall, openai_app

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's own
ENGINE: Any = {"executor": "reference", "kv_memory_bytes": 2**20, "max_num_seqs": 4}
QUIET: Any = {"ray_actor_options": {"num_cpus": 0}, "logging_config": {"log_level": "ERROR"}}


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """A running Ray, whose Serve listens at this port."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(_source()), os.environ.get("PYTHONPATH")]))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        chosen: int = free.getsockname()[1]
    ray.init(num_cpus=4, include_dashboard=False, object_store_memory=100 * 2**20, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": chosen})
    try:
        yield chosen
    finally:
        serve.shutdown()
        ray.shutdown()


def _source() -> Path:
    from pathlib import Path

    import anaphora

    return Path(anaphora.__file__).parent.parent


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_gguf_model(tmp_path_factory.mktemp("model") / "tiny.gguf", max_context=2048))


class Client:
    """Talks to one application."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.http = httpx.Client(base_url=url, timeout=60)

    def chat(self, *contents: str, **fields: Any) -> httpx.Response:
        messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]
        body = {"model": "tiny", "messages": messages, "max_tokens": 8, "temperature": 0, "ignore_eos": True, **fields}
        response = self.http.post("/v1/chat/completions", json=body)
        assert response.status_code == 200, response.text
        return response


@contextlib.contextmanager
def serving(port: int, name: str, model: str, **options: Any) -> Iterator[Client]:
    options = {"replica_options": QUIET, "ingress_options": QUIET, "engine": ENGINE, **options}
    serve.run(openai_app(model, **options), name=name, route_prefix=f"/{name}")
    client = Client(f"http://127.0.0.1:{port}/{name}")
    try:
        yield client
    finally:
        client.http.close()
        serve.delete(name)


def answer_of(response: httpx.Response) -> str:
    return response.json()["choices"][0]["message"]["content"]


def cached(response: httpx.Response) -> int:
    return response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def replica_of(response: httpx.Response) -> str:
    return response.headers["x-anaphora-replica"]


def eventually(condition: Callable[[], Any], timeout_s: float = 30) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it never came to hold"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def app(port: int, model: str) -> Iterator[Client]:
    with serving(port, "both", model, num_replicas=2) as client:
        yield client


def test_conversations_stay_where_their_prefix_is_and_predictions_are_what_engines_report(app: Client) -> None:
    homes = set()
    for topic in ("stars", "ships", "salt", "songs", "wheat", "rain", "glass", "moths"):
        said = [f"{topic}: tell me all that is known about {topic}, in five long parts. " * 3]
        replicas = []
        for _ in range(3):
            response = app.chat(*said)
            replicas.append(replica_of(response))
            assert int(response.headers["x-anaphora-predicted-cached-tokens"]) == cached(response)
            said += [answer_of(response), "And then?"]
            time.sleep(0.3)  # for events on their way
        assert len(set(replicas)) == 1
        assert cached(response) > 100
        homes.add(replicas[0])
    assert len(homes) == 2, "prompts that have nothing in common are spread"


def test_openais_client_streams_and_the_text_is_that_of_the_whole_answer(app: Client) -> None:
    client = openai.OpenAI(base_url=f"{app.url}/v1", api_key="none", max_retries=0)
    asked: Any = [{"role": "user", "content": "Count."}]
    options: Any = {"model": "tiny", "messages": asked, "max_tokens": 12, "temperature": 0}
    whole = client.chat.completions.create(**options)
    stream = client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True})
    parts = list(stream)
    assert "".join(part.choices[0].delta.content or "" for part in parts if part.choices) == (
        whole.choices[0].message.content
    )
    assert parts[-1].usage is not None
    assert parts[-1].usage.completion_tokens == whole.usage.completion_tokens  # type: ignore[union-attr]


def test_faults_are_answered_as_by_the_server_itself(app: Client) -> None:
    refused = app.http.post("/v1/chat/completions", json={"model": "tiny", "messages": "no list"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "messages")
    unknown = app.http.post("/v1/completions", json={"model": "other", "prompt": "a"})
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
    assert app.http.get("/v2").json()["error"]["code"] == "unknown_url"
    assert app.http.post("/v1/chat/completions", content=b"{").status_code == 400
    assert app.http.get("/v1/models").json()["data"][0]["id"] == "tiny"
    assert app.http.get("/health").json() == {"status": "ok"}


def test_a_client_that_goes_away_frees_its_place(app: Client) -> None:
    engines = serve.get_deployment_handle("engines", "both").options(method_name="answer", stream=True)

    def show(metric: str) -> dict[str, float]:
        """The metric at each engine: which of them answers is up to the prompt."""
        shown: dict[str, float] = {}
        for i in range(12):
            call = HttpCall("GET", "/metrics", b"", [], b'{"prompt": "%d of many"}' % i)
            head, *body = list(engines.remote(call))
            lines = b"".join(body).decode().splitlines()
            name = dict(head.headers)[b"x-anaphora-replica"].decode()
            shown[name] = sum(float(line.split()[-1]) for line in lines if line.startswith(metric))
        return shown

    body = {"model": "tiny", "prompt": "a", "max_tokens": 1900, "ignore_eos": True, "stream": True}
    for _ in range(3):
        with app.http.stream("POST", "/v1/completions", json=body) as response:
            assert next(response.iter_bytes())
    eventually(lambda: sum(show('anaphora_requests_total{finish_reason="abort').values()) == 3)
    assert set(show("anaphora_requests_running").values()) == {0}


def test_a_prefix_that_many_ask_for_at_once_is_computed_by_few_and_the_rest_spreads(app: Client) -> None:
    from concurrent.futures import ThreadPoolExecutor

    def ask(i: int) -> httpx.Response:
        return app.chat(f"Whatever else, each of us begins with one long and equal text. {'Same. ' * 40}{i}")

    with ThreadPoolExecutor(8) as pool:
        responses = list(pool.map(ask, range(16)))
    assert sum(map(cached, responses)) > 0.6 * sum(r.json()["usage"]["prompt_tokens"] for r in responses)


def test_a_replica_that_dies_is_replaced_and_what_it_had_is_forgotten(port: int, model: str) -> None:
    with serving(port, "mortal", model, num_replicas=2) as client:
        said = ["Remember this text well, since you will have to leave soon. " * 4]
        first = client.chat(*said)
        time.sleep(0.3)
        assert cached(client.chat(*said)) > 0
        names = [actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)]
        dead = next(name for name in names if replica_of(first) in name)
        ray.kill(ray.get_actor(dead, namespace="serve"))
        after = client.chat(*said)
        assert replica_of(after) != replica_of(first)
        assert int(after.headers["x-anaphora-predicted-cached-tokens"]) == cached(after) == 0
        time.sleep(0.3)
        assert cached(client.chat(*said)) > 0


def test_several_ingresses_know_the_same_by_the_engines_events(port: int, model: str) -> None:
    with serving(port, "twin", model, num_replicas=2, num_ingress_replicas=2) as client:
        for topic in range(6):
            said = [f"{topic}: one conversation, whichever ingress it comes through. " * 3]
            homes = set()
            for _ in range(4):
                response = client.chat(*said)
                homes.add(replica_of(response))
                said += [answer_of(response), "Go on."]
                time.sleep(0.3)
            assert len(homes) == 1
            assert cached(response) > 100


def test_any_deployment_can_be_routed_so_and_is_hit_more_often_than_by_two_choices(port: int) -> None:
    def run(name: str, router: Any) -> float:
        @serve.deployment(num_replicas=4, request_router_config=router, max_ongoing_requests=8, **QUIET)
        class Cache:
            """Remembers the last eight texts' heads, as an engine with a small cache would."""

            def __init__(self) -> None:
                self.heads: dict[str, None] = {}

            async def __call__(self, body: dict[str, Any]) -> bool:
                head = body["prompt"][:400]
                is_hit = self.heads.pop(head, self) is None
                self.heads[head] = None
                if len(self.heads) > 8:
                    del self.heads[next(iter(self.heads))]
                return is_hit

        handle = serve.run(Cache.bind(), name=name, route_prefix=None)
        hits = Counter()
        for turn in range(6):
            for user in range(24):
                hits[handle.remote({"prompt": f"{user:04d} " * 80 + f"turn {turn}"}).result()] += 1
        serve.delete(name)
        return hits[True] / hits.total()

    ours = RequestRouterConfig(
        request_router_class="anaphora.integrations.ray_serve.PrefixRouter",
        request_router_kwargs={"num_blocks": 8 * 26},
    )
    by_prefix, by_two_choices = run("ours", ours), run("rays", RequestRouterConfig())
    assert by_prefix > 0.75  # 5/6 is all that there is
    assert by_two_choices < 0.5


def test_arguments_that_are_none_of_the_routers_are_refused_by_name(port: int) -> None:
    from anaphora.integrations.ray_serve import PrefixRouter, build_app

    router = PrefixRouter.__new__(PrefixRouter)
    with pytest.raises(ValueError, match=r"unknown \['thrifty'\]; allowed are .*'thrift'"):
        router.initialize_state(thrifty=1)
    with pytest.raises(ValueError, match=r"unknown arguments \['modle'\]"):
        build_app({"modle": "x"})
    with pytest.raises(ValueError, match="num_replicas: expected a whole number, got 'two'"):
        build_app({"num_replicas": "two"})
    assert json.dumps(build_app({"num_replicas": "2", "executor": "reference"})._bound_deployment.name) == '"openai"'
