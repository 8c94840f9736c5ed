"""What the Gateway API Inference Extension's conformance tests ask of an endpoint picker, and nothing for production.

The headers are those of the extension's reference picker (LWEPP; "Conformance Testing Support" in its README): a
request names the endpoints that may be chosen, and the answer's headers say what was chosen, by whom, and what served
it by the gateway's word.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

SELECTION_HEADER = "test-epp-endpoint-selection"
_SERVED_HEADER = "x-conformance-test-served-endpoint"
_SELECTED_HEADER = "x-conformance-test-selected-endpoint"
_POOL_HEADER = "x-conformance-test-epp-pool"


@dataclass(frozen=True, slots=True)
class Conformance:
    """pool: the picker's InferencePool as `namespace/name`, None without one."""

    pool: str | None = None

    def allowed(self, selection: str, names: Iterable[str]) -> frozenset[str] | None:
        """The replicas that a request's header names, None where it names none of ours: then all may be chosen."""
        return frozenset(endpoints_named(selection.split(","), names)) or None

    def response_headers(self, selected: str, served: str | None) -> list[tuple[str, str]]:
        """Headers of the answer. served: the endpoint by the gateway's word, None if it does not say."""
        missing = "fail: missing destination endpoint served metadata"
        told = [(_SERVED_HEADER, missing if served is None else served), (_SELECTED_HEADER, selected)]
        return told if self.pool is None else [*told, (_POOL_HEADER, self.pool)]


def endpoints_named(wished: Iterable[str], names: Iterable[str]) -> list[str]:
    """Those of `names` (HOST:PORT, IPv6 in brackets, perhaps #RANK) that are wished for: by HOST:PORT, with all ranks,
    or by HOST, at every port."""
    exact = {wish.strip() for wish in wished}
    hosts = {wish.strip("[]") for wish in exact}
    return [name for name in names if name.partition("#")[0] in exact or name.rpartition(":")[0].strip("[]") in hosts]
