from collections.abc import Sequence

from anaphora.compiled.absent import ChainKind

def pack(ids: Sequence[int], /) -> bytes | None: ...
def chain(
    kind: ChainKind, parent: bytes, ids: bytes, block_size: int, before: bytes, after: bytes, portable: bool = False, /
) -> list[bytes] | None: ...
