"""Models of the hub, from a local server that behaves like it."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from anaphora.model import ModelError, load_model
from anaphora.model.hub import fetch_from_hub, is_hub_name
from tests.tiny_models import write_hf_model


class Hub:
    """Serves a folder as tiny-org/tiny; large files come by redirect, named by their SHA-256."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.requests: list[tuple[str, str | None]] = []
        self.token: str | None = None
        self.announced_sha256: str | None = None
        self.is_broken = False
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                hub.requests.append((self.path, self.headers.get("Authorization")))
                hub.answer(self)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        if self.is_broken:
            return self._respond(handler, 503)
        if self.token and handler.headers.get("Authorization") != f"Bearer {self.token}":
            return self._respond(handler, 401)
        if handler.path.startswith("/storage/"):
            return self._respond(handler, 200, (self.folder / handler.path.removeprefix("/storage/")).read_bytes())
        prefix = "/tiny-org/tiny/resolve/main/"
        file = self.folder / handler.path.removeprefix(prefix)
        if not handler.path.startswith(prefix) or not file.is_file():
            return self._respond(handler, 404)
        if file.suffix != ".safetensors":
            return self._respond(handler, 200, file.read_bytes())
        digest = self.announced_sha256 or hashlib.sha256(file.read_bytes()).hexdigest()
        headers = {"Location": f"{self.url}/storage/{file.name}", "X-Linked-Etag": f'"{digest}"'}
        return self._respond(handler, 302, headers=headers)

    def _respond(
        self, handler: BaseHTTPRequestHandler, status: int, body: bytes = b"", headers: dict[str, str] | None = None
    ) -> None:
        handler.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(body)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ANAPHORA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    for name in ("HF_TOKEN", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "cache"


@pytest.fixture
def hub(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    server = Hub(write_hf_model(tmp_path / "served"))
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    yield server
    server.close()


def leftovers(cache: Path) -> list[str]:
    return [path.name for path in cache.iterdir() if path.name != "hub"]


def test_a_model_is_fetched_and_loads_like_the_folder_that_it_was(hub: Hub, cache: Path) -> None:
    model = load_model("tiny-org/tiny")
    assert model.name == "tiny-org/tiny"
    assert model.revision == load_model(hub.folder).revision
    assert leftovers(cache) == []


def test_sharded_weights_and_a_template_file_are_fetched(hub: Hub) -> None:
    (hub.folder / "model.safetensors").unlink()
    write_hf_model(hub.folder, num_shards=2)
    (hub.folder / "chat_template.jinja").write_text("from its own file")
    model = load_model("tiny-org/tiny")
    assert model.revision == load_model(hub.folder).revision
    assert model.chat_template is not None
    assert model.chat_template.render([]) == "from its own file"


def test_what_is_in_the_cache_is_used_without_asking(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = fetch_from_hub("tiny-org/tiny")
    asked = len(hub.requests)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert fetch_from_hub("tiny-org/tiny") == folder
    assert len(hub.requests) == asked


def test_progress_names_each_file_and_ends_at_its_size(hub: Hub) -> None:
    seen: dict[str, tuple[int, int | None]] = {}
    fetch_from_hub("tiny-org/tiny", progress=lambda name, done, total: seen.update({name: (done, total)}))
    size = (hub.folder / "model.safetensors").stat().st_size
    assert seen["fetching tiny-org/tiny/model.safetensors"] == (size, size)


def test_the_token_opens_gated_models(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.token = "secret"
    with pytest.raises(ModelError, match=r"refused access \(HTTP 401\).*HF_TOKEN"):
        fetch_from_hub("tiny-org/tiny")
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert (fetch_from_hub("tiny-org/tiny") / "config.json").is_file()


def test_a_hub_out_of_order_is_said_to_be(hub: Hub, cache: Path) -> None:
    hub.is_broken = True
    with pytest.raises(ModelError, match=r"the hub answered HTTP 503 .*hf download tiny-org/tiny"):
        fetch_from_hub("tiny-org/tiny")
    assert leftovers(cache) == []


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_missing_file_is_named_and_nothing_is_left(hub: Hub, cache: Path, missing: str) -> None:
    (hub.folder / missing).unlink()
    with pytest.raises(ModelError, match=f"tiny-org/tiny: the hub has no {missing}"):
        fetch_from_hub("tiny-org/tiny")
    assert leftovers(cache) == []
    assert not (cache / "hub").exists()


def test_files_damaged_on_the_way_are_refused(hub: Hub, cache: Path) -> None:
    hub.announced_sha256 = "0" * 64
    with pytest.raises(ModelError, match=r"model\.safetensors: damaged on the way"):
        fetch_from_hub("tiny-org/tiny")
    assert leftovers(cache) == []


def test_an_index_cannot_reach_outside_the_folder(hub: Hub) -> None:
    (hub.folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../../b.safetensors"}}')
    with pytest.raises(ModelError, match=r"'\.\./\.\./b\.safetensors' is not allowed"):
        fetch_from_hub("tiny-org/tiny")


@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:9", "nonsense", "http://[bad"])
def test_without_an_answer_the_message_says_what_to_do(
    cache: Path, monkeypatch: pytest.MonkeyPatch, endpoint: str
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    with pytest.raises(ModelError, match=r"no answer from .*hf download tiny-org/tiny.*pass its path.*default one"):
        load_model("tiny-org/tiny")
    assert leftovers(cache) == []


def test_offline_means_never_to_ask(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelError, match=r"HF_HUB_OFFLINE forbids asking the hub.*hf download tiny-org/tiny"):
        fetch_from_hub("tiny-org/tiny")
    assert hub.requests == []


@pytest.mark.parametrize("name", ["one", "a/b/c", "../x", "a/..", "/abs/path", "a/b.gguf", "a b/c", "", "a/"])
def test_what_is_no_name_of_the_hub_is_refused(name: str) -> None:
    assert not is_hub_name(name)
    with pytest.raises(ModelError, match="must be ORG/NAME"):
        fetch_from_hub(name)
