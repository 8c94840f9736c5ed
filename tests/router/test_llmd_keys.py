"""llm-d's block keys, against what its own code computed."""

from __future__ import annotations

import json
from array import array
from pathlib import Path
from typing import Any

import pytest

from anaphora.router.llmd.keys import approximate_keys, precise_keys

VECTORS = json.loads((Path(__file__).parents[1] / "golden/llmd/keys.json").read_text())


@pytest.mark.parametrize(
    "vector", VECTORS, ids=lambda v: f"{v['Scheme'][:7]}-{v['NTokens']}-{v['BlockSize']}-{v['Salt']}"
)
def test_keys_are_llmds(vector: dict[str, Any]) -> None:
    assert vector["TokenRule"] == "(i*7919+1)%32000"
    tokens = [(i * 7919 + 1) % 32000 for i in range(vector["NTokens"])]
    if vector["Scheme"].startswith("precise"):
        media = {int(block): items for block, items in (vector["MM"] or {}).items()}
        keys = precise_keys(
            tokens, vector["Model"], block_size=vector["BlockSize"], hash_seed=vector["Seed"], salt=vector["Salt"],
            media=media,
        )  # fmt: skip
    else:
        keys = approximate_keys(
            array("i", tokens).tobytes(), vector["Model"], block_size=vector["BlockSize"], salt=vector["Salt"],
            max_blocks=int(vector["Scheme"].split()[-1].rstrip(")")),
        )  # fmt: skip
    assert list(map(str, keys)) == vector["Keys"]
