"""Captures of KV events: what each replica holds after each batch. Frames dumped as JSONL {topic, seq, ts, events}."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from anaphora.lab.importers.fields import FieldError, Fields

if TYPE_CHECKING:
    from collections.abc import Iterator

    from anaphora.lab.importers.source import Document

BlockName = int | str


@dataclass(frozen=True, slots=True)
class ReplicaState:
    """What a replica holds after a batch of events.

    num_missed: batches that never arrived before this one, by their numbers.
    num_unknown_removed: blocks that were reported gone and that nobody had reported stored.
    """

    line: int
    replica: str
    model: str
    sequence: int
    time_s: float | None
    num_blocks: int
    num_missed: int
    num_unknown_removed: int


class KVEvents:
    """Replays a capture. Events are vLLM's: arrays with the tag first, or objects with `type`."""

    def __init__(self) -> None:
        self._blocks: dict[str, set[tuple[BlockName, str, int]]] = {}
        self._last: dict[str, int] = {}

    def parse(self, document: Document) -> Iterator[ReplicaState]:
        """The replica's state after this batch."""
        batch = Fields(document.value)
        topic = batch.text("topic") or ""
        kind, _, rest = topic.partition("@")
        replica, _, model = rest.partition("@") if kind == "kv" else (topic, "", "")
        sequence = batch.need_count("seq")
        blocks = self._blocks.setdefault(replica, set())
        last = self._last.get(replica)
        self._last[replica] = sequence
        num_unknown = 0
        for number, event in enumerate(batch.items("events")):
            num_unknown += _apply(blocks, event, f"events[{number}]")
        yield ReplicaState(
            document.line,
            replica,
            model,
            sequence,
            batch.time_s("ts"),
            len(blocks),
            max(0, sequence - last - 1) if last is not None else 0,
            num_unknown,
        )


_STORED = (
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
)
_REMOVED = ("block_hashes", "medium", "group_idx")


def _apply(blocks: set[tuple[BlockName, str, int]], event: object, path: str) -> int:
    """Apply an event; return how many removed blocks were unknown."""
    if isinstance(event, list) and event:
        tag, values = str(event[0]), event[1:]
        names = {"BlockStored": (*_STORED, "group_idx"), "BlockRemoved": _REMOVED}.get(tag, ())
        fields = Fields(dict(zip(names, values, strict=False)), path)
    else:
        fields = Fields(event, path)
        tag = str(fields.values.get("type"))
    if tag == "AllBlocksCleared":
        blocks.clear()
        return 0
    if tag not in {"BlockStored", "BlockRemoved"}:
        raise FieldError(f"{path}: expected BlockStored, BlockRemoved or AllBlocksCleared")
    medium, group = fields.label("medium") or "GPU", fields.count("group_idx") or 0
    names_of_blocks = fields.items("block_hashes")
    if not all(isinstance(name, (int, str)) for name in names_of_blocks):
        raise fields.wrong("block_hashes", "a list of integers or strings")
    keys = [(name, medium, group) for name in names_of_blocks if isinstance(name, (int, str))]
    if tag == "BlockStored":
        blocks.update(keys)
        return 0
    num_unknown = sum(key not in blocks for key in keys)
    blocks.difference_update(keys)
    return num_unknown


def looks_kv_events(value: object) -> bool:
    """A batch of KV events."""
    return isinstance(value, dict) and "seq" in value and "events" in value
