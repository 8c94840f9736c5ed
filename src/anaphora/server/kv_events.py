"""KV events of a server: the options, and the publisher that they make."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from anaphora.wire import AnaphoraCodec, VllmEventFormat
from anaphora.wire.publisher import EventPublisher

if TYPE_CHECKING:
    from anaphora.cache.events import Event


@dataclass(frozen=True, slots=True)
class KvEventOptions:
    """Where and how KV events are published: see `EventPublisher`.

    form: vLLM's messages or our own. clear_salts: write salts as they are, in vLLM's form; otherwise a tag stands in
    their place.
    """

    endpoint: str
    replay_endpoint: str | None = None
    topic: str = ""
    connects: bool = False
    form: Literal["vllm", "anaphora"] = "vllm"
    clear_salts: bool = False


class KvEvents:
    """One server's publisher.

    Raises EndpointError.
    """

    def __init__(self, options: KvEventOptions) -> None:
        form = VllmEventFormat(clear_salts=options.clear_salts) if options.form == "vllm" else AnaphoraCodec()
        self._options = options
        self.publisher = EventPublisher(
            options.endpoint,
            options.replay_endpoint,
            encode=form.encode,
            connects=options.connects,
            topic=options.topic,
        )
        self.num_by_type = {"BlockStored": 0, "BlockRemoved": 0, "AllBlocksCleared": 0}

    def publish(self, events: list[Event]) -> None:
        """Publish what one step did. Never waits."""
        for event in events:
            self.num_by_type[type(event).__name__] += 1
        self.publisher.publish(events)

    def describe(self) -> dict[str, object]:
        """The effective settings, by data-parallel rank, as vLLM 0.32 answers GET /kv_event_sources."""
        return {
            "0": {
                "publisher": "zmq",
                "endpoint": self.publisher.endpoint,
                "replay_endpoint": self.publisher.replay_endpoint,
                "topic": self._options.topic,
            }
        }
