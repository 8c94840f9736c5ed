"""Checks of what keeps equal tokens apart: salts, adapters, media."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anaphora.conformance.adapter import Prompt
from anaphora.conformance.checks.check import ScriptChecks, ids
from anaphora.conformance.script import run
from anaphora.identity import DEFAULT_NAMESPACE, Adapter, MediaSpan, Namespace

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anaphora.conformance.checks.check import Scenario
    from anaphora.conformance.script import Op

CHECKS = ScriptChecks()
PLACEHOLDER = 99


def lora(name: str, path: str, digest: str, salt: str | None = None) -> Namespace:
    """Return the namespace of an adapter."""
    return Namespace(adapter=Adapter(digest, name=name, path=path), salt=salt)


def kept_apart(size: int, namespaces: Sequence[Namespace]) -> Scenario:
    """Compute the same tokens under each namespace from nothing; then each finds its own."""
    tokens = ids(1, 2 * size + 1)
    script: list[Op] = []
    for expected in (0, 2 * size):
        for namespace in namespaces:
            script += run("a", Prompt(tokens, namespace), expected=expected)
    return 6 * len(namespaces), script


@CHECKS.add("CVE-2025-46570, vllm-project/vllm#17045")
def salt(size: int) -> Scenario:
    """Tenants with different salts, and those without one, never share."""
    return kept_apart(size, [DEFAULT_NAMESPACE, Namespace(salt="a"), Namespace(salt="b")])


@CHECKS.add("vllm-project/vllm#30931, #3264")
def adapter(size: int) -> Scenario:
    """Two LoRA adapters with one name and other weights elsewhere never share, nor does either with the base model."""
    return kept_apart(size, [lora("s", "/one", "aa"), lora("s", "/two", "bb"), DEFAULT_NAMESPACE])


@CHECKS.add("vllm-project/vllm#30931", lambda profile: profile.adapter_identity == "content")
def adapter_replaced_in_place(size: int) -> Scenario:
    """An adapter whose weights were replaced in place (same name, same path, other digest) finds nothing of the old
    ones."""
    return kept_apart(size, [lora("s", "/one", "aa"), lora("s", "/one", "bb")])


@CHECKS.add("sgl-project/sglang#24638")
def salt_against_adapter(size: int) -> Scenario:
    """No choice of salt imitates an adapter or another pair of the two: fields are not joined as text."""
    return kept_apart(
        size,
        [
            Namespace(salt="s"),
            lora("s", "s", "s"),
            lora("ab", "ab", "ab", salt="c"),
            lora("a", "a", "a", salt="bc"),
        ],
    )


@CHECKS.add("ROCm/ATOM#1358, kekzl/imp#1180")
def media(size: int) -> Scenario:
    """Different images behind equal placeholder tokens never share; the text before them does."""
    before = size + max(1, size // 2)
    tokens = (*ids(1, before), *[PLACEHOLDER] * size, *ids(7, size))

    def shown(image: str) -> Prompt:
        return Prompt(tokens, media=(MediaSpan(before, size, image),))

    whole = (len(tokens) - 1) // size * size
    shared = before // size * size
    return 32, [
        run("a", shown("X"), expected=0),
        run("b", shown("Y"), expected=shared),
        run("c", shown("X"), expected=whole),
        run("d", Prompt(tokens), expected=shared),
    ]


@CHECKS.add("ROCm/ATOM#2183")
def media_offset(size: int) -> Scenario:
    """An image that begins elsewhere is another prefix from there on: its rows stand at other places."""
    tokens = (PLACEHOLDER,) * (4 * size + 1)
    here, later = (Prompt(tokens, media=(MediaSpan(at, size + 1, "X"),)) for at in (size, size + 1))
    return 32, [
        run("a", here, expected=0),
        run("b", later, expected=size),
        run("c", here, expected=4 * size),
        run("d", later, expected=4 * size),
    ]
