"""KV events between processes: vLLM's form and our own."""

from anaphora.wire.anaphora_codec import AnaphoraCodec, EventBatch
from anaphora.wire.decoder import WireError
from anaphora.wire.frames import Frames
from anaphora.wire.vllm_codec import GroupKind, VllmEventFormat, events_of
from anaphora.wire.vllm_messages import VllmBatch, decode_batch, encode_batch

__all__ = [
    "AnaphoraCodec",
    "EventBatch",
    "Frames",
    "GroupKind",
    "VllmBatch",
    "VllmEventFormat",
    "WireError",
    "decode_batch",
    "encode_batch",
    "events_of",
]
