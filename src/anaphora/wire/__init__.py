"""KV events between processes: vLLM's form and our own, and who follows them.

What needs ZMQ is imported from its modules: `publisher`, `subscriber`.
"""

from anaphora.wire.anaphora_codec import AnaphoraCodec, EventBatch
from anaphora.wire.decoder import WireError
from anaphora.wire.follower import EventFollower, FindableNames, decode_vllm
from anaphora.wire.frames import Frames
from anaphora.wire.vllm_codec import GroupKind, VllmEventFormat, events_of
from anaphora.wire.vllm_messages import VllmBatch, decode_batch, encode_batch

__all__ = [
    "AnaphoraCodec",
    "EventBatch",
    "EventFollower",
    "FindableNames",
    "Frames",
    "GroupKind",
    "VllmBatch",
    "VllmEventFormat",
    "WireError",
    "decode_batch",
    "decode_vllm",
    "encode_batch",
    "events_of",
]
