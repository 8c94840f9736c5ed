"""Request bodies of OpenAI's and Anthropic's APIs as parts of a prompt, in the order in which a model reads them."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

from anaphora.lab.importers.fields import FieldError, Fields
from anaphora.lab.record import Part

if TYPE_CHECKING:
    from anaphora.lab.record import LoggedRequest, Section

TTLS = {"5m": 300, "1h": 3600, "30m": 1800, "12h": 43_200}
_SPLITTING = (
    "tool_choice",
    "thinking",
    "response_format",
    "reasoning_effort",
    "verbosity",
    "output_config",
    "speed",
    "text",
    "reasoning",
)
"""Settings by which some caches keep prompts apart."""


def fill_from_body(request: LoggedRequest, body: Fields) -> None:
    """Read a request's body, of whichever API, into the record."""
    request.model = body.text("model") or request.model
    salt = body.label("cache_salt") or body.label("extra_key")
    request.salt = request.salt or salt
    request.tenant = request.tenant or body.label("user") or body.label("prompt_cache_key")
    metadata = body.values.get("metadata")
    if isinstance(metadata, dict) and request.session is None:
        request.session = Fields(metadata, "metadata").label("session_id")
    request.parameters = {name: _digest(body.values[name]) for name in _SPLITTING if body.values.get(name) is not None}
    if is_anthropic(body):
        request.parts = tuple(anthropic_parts(body))
        request.auto_ttl_s = _ttl_s(body)
    else:
        request.parts = tuple(openai_parts(body))


def is_anthropic(body: Fields) -> bool:
    """Whether a body is one of Anthropic's: the system prompt stands beside the messages, or blocks are marked."""
    if body.has("system") or body.has("cache_control") or body.has("anthropic_version"):
        return True
    if not body.has("max_tokens", "messages"):
        return False
    tools = body.values.get("tools")
    if isinstance(tools, list) and tools and isinstance(tools[0], dict):
        return "input_schema" in tools[0]
    blocks = [block for _, block in _blocks(body)]
    return any("cache_control" in block or str(block.get("type")) in {"tool_use", "tool_result"} for block in blocks)


def _blocks(body: Fields) -> list[tuple[int, dict[str, object]]]:
    found: list[tuple[int, dict[str, object]]] = []
    for number, message in enumerate(body.items("messages")):
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, list):
            found += [(number, block) for block in content if isinstance(block, dict)]
    return found


def openai_parts(body: Fields) -> list[Part]:
    """Parts of a chat, response or completion body: tools, then messages in their order."""
    parts = _tool_parts(body)
    if body.has("messages"):
        parts += _message_parts(body, "messages")
    elif isinstance(body.values.get("input"), list):
        instructions = body.text("instructions")
        if instructions:
            parts.append(Part("instructions", "system", "system", instructions))
        parts += _message_parts(body, "input")
    elif isinstance(body.values.get("input"), str):
        instructions = body.text("instructions")
        if instructions:
            parts.append(Part("instructions", "system", "system", instructions))
        parts.append(Part("input", "messages", "user", str(body.values["input"])))
    elif isinstance(body.values.get("prompt"), str):
        parts.append(Part("prompt", "prompt", "", str(body.values["prompt"])))
    elif not parts:
        raise FieldError("messages: expected a list (or prompt or input, a string)")
    return parts


def anthropic_parts(body: Fields) -> list[Part]:
    """Parts of a Messages body: tools, system, messages, whatever the order of its keys."""
    parts = _tool_parts(body)
    system = body.values.get("system")
    if isinstance(system, str):
        if system:
            parts.append(Part("system", "system", "system", system))
    else:
        for number, item in enumerate(body.items("system")):
            parts.append(_block_part(item, f"system[{number}]", "system", "system"))
    parts += _message_parts(body, "messages")
    return parts


def _tool_parts(body: Fields) -> list[Part]:
    parts = []
    for number, tool in enumerate(body.items("tools")):
        path = f"tools[{number}]"
        ttl_s = _ttl_s(Fields(tool, path))
        bare = {name: value for name, value in Fields(tool, path).values.items() if name != "cache_control"}
        parts.append(Part(path, "tools", "", _compact(bare), "tool", ttl_s))
    return parts


def _message_parts(body: Fields, name: str) -> list[Part]:
    parts: list[Part] = []
    is_leading = True
    for number, item in enumerate(body.items(name)):
        path = f"{name}[{number}]"
        message = Fields(item, path)
        role = message.text("role") or message.text("type") or "user"
        is_leading = is_leading and role in {"system", "developer"}
        section: Section = "system" if is_leading else "messages"
        content = message.values.get("content")
        if isinstance(content, str):
            parts.append(Part(f"{path}.content", section, role, content))
        elif content is not None:
            for place, block in enumerate(message.items("content")):
                parts.append(_block_part(block, f"{path}.content[{place}]", section, role))
        for place, call in enumerate(message.items("tool_calls")):
            parts.append(Part(f"{path}.tool_calls[{place}]", section, role, _compact(call), "tool_use"))
        if content is None and not message.values.get("tool_calls"):
            rest = {key: value for key, value in message.values.items() if key not in {"role", "content"}}
            if rest:
                parts.append(Part(path, section, role, _compact(rest), message.text("type") or "item"))
    return parts


def _block_part(item: object, path: str, section: Section, role: str) -> Part:
    if isinstance(item, str):
        return Part(path, section, role, item)
    block = Fields(item, path)
    kind = block.text("type") or "text"
    text = block.values.get("text")
    ttl_s = _ttl_s(block)
    if isinstance(text, str):
        return Part(f"{path}.text", section, role, text, "text", ttl_s)
    bare = {name: value for name, value in block.values.items() if name not in {"cache_control", "cachePoint"}}
    return Part(path, section, role, _compact(bare), kind, ttl_s)


def _ttl_s(block: Fields) -> int | None:
    """How long the breakpoint at a block's end lasts, in any API's words; None where there is none."""
    for name, default in (("cache_control", "5m"), ("cachePoint", "5m"), ("prompt_cache_breakpoint", "30m")):
        marker = block.values.get(name)
        if isinstance(marker, dict):
            return TTLS.get(str(marker.get("ttl", default)), TTLS[default])
    return None


def _compact(value: object) -> str:
    """JSON with the writer's order of keys, which is part of what a model reads."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _digest(value: object) -> str:
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode("utf-8", "replace"), digest_size=8).hexdigest()
