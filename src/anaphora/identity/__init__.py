"""What makes two prefixes equal: namespaces, media, and the digests that name blocks."""

from anaphora.identity.digests import BlockDigests
from anaphora.identity.extras import EmbedsKey, Extras, MediaKey, extra_keys
from anaphora.identity.media import Media, MediaSpan, PromptEmbeds, validate_media
from anaphora.identity.namespace import DEFAULT_NAMESPACE, Adapter, Namespace
from anaphora.identity.vllm_digests import VllmAlgorithm, VllmDigests, VllmVersion, vllm_extra_keys

__all__ = [
    "DEFAULT_NAMESPACE",
    "Adapter",
    "BlockDigests",
    "EmbedsKey",
    "Extras",
    "Media",
    "MediaKey",
    "MediaSpan",
    "Namespace",
    "PromptEmbeds",
    "VllmAlgorithm",
    "VllmDigests",
    "VllmVersion",
    "extra_keys",
    "validate_media",
    "vllm_extra_keys",
]
