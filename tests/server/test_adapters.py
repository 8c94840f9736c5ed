"""LoRA adapters as clients see them: each a model of its own, by its name."""

from __future__ import annotations

from typing import TYPE_CHECKING

import httpx
import pytest

from anaphora.cli import main
from anaphora.engine.build import build_engine
from anaphora.engine.service import EngineService
from anaphora.model import load_model
from anaphora.server.app import OpenAIServer
from anaphora.server.served_model import ServedModel
from tests.server.live_server import running
from tests.tiny_adapters import write_adapter
from tests.tiny_models import write_hf_model

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PROMPT = "the cat sat on the mat and the dog ran after the ball while rain fell on the hills " * 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hf_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[httpx.Client]:
    model = load_model(folder)
    adapters = {name: write_adapter(folder.parent / name, model.shape, seed=i) for i, name in enumerate("ab")}
    engine = build_engine(model, executor="reference", kv_memory_bytes=1 << 20, adapters=adapters)
    api = OpenAIServer(EngineService(engine), ServedModel.of(model, engine))
    with running(api) as (_, url), httpx.Client(base_url=url, timeout=30) as http:
        yield http


def complete(client: httpx.Client, model: str) -> dict[str, object]:
    body = {"model": model, "prompt": PROMPT, "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    response = client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    answer = response.json()
    return {
        "model": answer["model"],
        "text": answer["choices"][0]["text"],
        "cached": answer["usage"]["prompt_tokens_details"]["cached_tokens"],
    }


def test_each_answers_under_its_name_and_shares_prefixes_with_itself_alone(client: httpx.Client) -> None:
    names = ("tiny", "a", "b")
    first = [complete(client, name) for name in names]
    again = [complete(client, name) for name in names]
    assert [answer["model"] for answer in first] == list(names)
    assert [answer["cached"] for answer in first] == [0, 0, 0]
    assert all(answer["cached"] for answer in again)
    assert len({answer["text"] for answer in first}) == 3
    assert [answer["text"] for answer in again] == [answer["text"] for answer in first]


def test_they_are_listed_with_the_model_that_they_adapt(client: httpx.Client) -> None:
    listed = client.get("/v1/models").json()["data"]
    assert [(entry["id"], entry.get("parent")) for entry in listed] == [("tiny", None), ("a", "tiny"), ("b", "tiny")]
    assert client.get("/v1/models/b").json() == listed[2]


def test_other_names_are_refused_with_those_that_there_are(client: httpx.Client) -> None:
    response = client.post("/v1/completions", json={"model": "c", "prompt": "x"})
    assert response.status_code == 404
    assert response.json()["error"]["message"] == ("The model 'c' does not exist; this server has 'tiny', 'a', 'b'.")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["a=/nowhere"], 1, "/nowhere: expected a folder with adapter_config.json"),
        (["tiny=/nowhere"], 1, "--adapter: 'tiny' is the model's own name"),
        (["a=/x", "a=/y"], 2, "--adapter: two have the same name"),
    ],
)
def test_the_command_line_refuses_what_cannot_be(
    folder: Path, arguments: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [part for argument in arguments for part in ("--adapter", argument)]
    assert main(["serve", str(folder), "--port", "0", *flags]) == code
    assert message in capsys.readouterr().err
