"""Two loops in C where there was a compiler at installation; `absent`, which leaves all to the pure forms, elsewhere.

`ANAPHORA_PURE=1` in the environment leaves C out. `IN_USE` says which it is.
"""

from __future__ import annotations

import os
from contextlib import suppress

from anaphora.compiled import absent

pack, chain = absent.pack, absent.chain
if not os.environ.get("ANAPHORA_PURE"):
    with suppress(ImportError):
        from anaphora.compiled import _loops

        pack, chain = _loops.pack, _loops.chain

IN_USE = pack is not absent.pack

__all__ = ["IN_USE", "chain", "pack"]
