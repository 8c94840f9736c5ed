"""Models of the Hugging Face hub, over plain HTTP."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

import httpx

from anaphora.model import hf_folder
from anaphora.model.errors import ModelError
from anaphora.model.fetch import cache_folder, staging_folder
from anaphora.model.progress import Progress, no_progress

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_OPTIONAL = (hf_folder.TOKENIZER_CONFIG, hf_folder.GENERATION_CONFIG, hf_folder.CHAT_TEMPLATE)
_TIMEOUT = httpx.Timeout(30.0, connect=10.0)


def is_hub_name(ref: str) -> bool:
    """Whether `ref` is spelled like a model's name on the hub: ORG/NAME."""
    return _NAME.fullmatch(ref) is not None and not ref.endswith(".gguf")


def fetch_from_hub(name: str, *, revision: str = "main", progress: Progress = no_progress) -> Path:
    """Folder with the model's configuration, safetensors and tokenizer, fetched first if it is not in the cache folder.

    A folder that is there is used as it is: a model that changed on the hub is fetched again when it is deleted.
    Environment: HF_ENDPOINT (default https://huggingface.co), HF_TOKEN for gated models, HF_HUB_OFFLINE=1 to never ask.

    Raises:
        ModelError: no network, no such model, no access, or files that are missing or damaged; the message says what
            to do.
    """
    if not is_hub_name(name):
        raise ModelError(f"model: {name!r} is not allowed; it must be ORG/NAME")
    target = cache_folder() / "hub" / name.replace("/", "--") / revision.replace("/", "--")
    if target.is_dir():
        return target
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in {"1", "true", "yes", "on"}:
        raise ModelError(
            f"{name} is not in {cache_folder()}, and HF_HUB_OFFLINE forbids asking the hub. {_advice(name)}"
        )
    token = os.environ.get("HF_TOKEN")
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    with (
        staging_folder() as staging,
        httpx.Client(headers=headers, timeout=_TIMEOUT, follow_redirects=True) as client,
    ):
        download = _Download(client, f"{endpoint}/{name}/resolve/{revision}", name, staging, progress)
        _fetch_all(download)
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            staging.rename(target)
        except OSError:
            if not target.is_dir():  # else another process was faster, with the same files
                raise
    return target


def _fetch_all(download: _Download) -> None:
    download.require(hf_folder.CONFIG)
    download.require(hf_folder.TOKENIZER)
    for optional in _OPTIONAL:
        download.try_fetch(optional)
    if download.try_fetch(hf_folder.WEIGHTS_INDEX):
        for shard in hf_folder.shard_names(hf_folder.read_json(download.folder / hf_folder.WEIGHTS_INDEX)):
            download.require(shard)
    else:
        download.require(hf_folder.WEIGHTS)


class _Download:
    """Files of one model on the hub, into one folder."""

    def __init__(self, client: httpx.Client, url: str, name: str, folder: Path, progress: Progress) -> None:
        self.folder = folder
        self._client = client
        self._url = url
        self._name = name
        self._progress = progress

    def require(self, file: str) -> None:
        """Fetch a file that must be there."""
        if not self.try_fetch(file):
            raise ModelError(f"{self._name}: the hub has no {file} (asked for {self._url}/{file})")

    def try_fetch(self, file: str) -> bool:
        """Fetch a file; False if there is none."""
        try:
            with self._client.stream("GET", f"{self._url}/{file}") as response:
                if response.status_code == httpx.codes.NOT_FOUND:
                    return False
                if response.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
                    raise ModelError(
                        f"{self._name}: the hub refused access (HTTP {response.status_code}): no such model, or a "
                        "gated one. Check the name; for a gated model accept its licence on the hub and set HF_TOKEN"
                    )
                response.raise_for_status()
                self._save(file, response)
        except httpx.HTTPStatusError as error:
            status = error.response.status_code
            raise ModelError(
                f"{self._name}: the hub answered HTTP {status} to {self._url}/{file}. {_advice(self._name)}"
            ) from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ModelError(f"{self._name}: no answer from {self._url}: {error}. {_advice(self._name)}") from None
        return True

    def _save(self, file: str, response: httpx.Response) -> None:
        length = response.headers.get("Content-Length")
        total = int(length) if length and "Content-Encoding" not in response.headers else None
        label = f"fetching {self._name}/{file}"
        digest, done = hashlib.sha256(), 0
        with (self.folder / file).open("wb") as output:
            for chunk in response.iter_bytes(1 << 20):
                output.write(chunk)
                digest.update(chunk)
                done += len(chunk)
                if done != total:
                    self._progress(label, done, total)
        self._progress(label, done, done)
        # Large files are named by their SHA-256, in the answer that redirects to their storage.
        for answer in (*response.history, response):
            expected = answer.headers.get("X-Linked-Etag", "").strip('"')
            if _SHA256.fullmatch(expected) and expected != digest.hexdigest():
                raise ModelError(f"{self._name}/{file}: damaged on the way: its sha256 is not {expected}")


def _advice(name: str) -> str:
    return (
        f"On a machine with a network, fetch it with `hf download {name} --local-dir FOLDER`, copy FOLDER here and "
        "pass its path as the model; or leave the model out to use the default one, which comes with pip"
    )
