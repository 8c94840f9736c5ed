"""Checks of block names, which travel to routers, tiers and peers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from anaphora.conformance.adapter import Prompt
from anaphora.conformance.checks.check import Check, Result, ids
from anaphora.conformance.checks.identity import lora
from anaphora.conformance.checks.vectors import NAMES, PROMPTS
from anaphora.conformance.pages import Pages, Prefix
from anaphora.conformance.play import Play
from anaphora.conformance.script import Op, begin, computed, finish
from anaphora.conformance.violation import Violation
from anaphora.identity import MediaSpan, Namespace

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anaphora.conformance.adapter import MakeManager
    from anaphora.conformance.profile import Profile


class NamesOfPrompts:
    """Names that a manager gives to the blocks of prompts, and the operations that it took."""

    def __init__(self, make: MakeManager, profile: Profile, block_size: int) -> None:
        self.play = Play(make, 64, block_size, profile)

    def of(self, prompt: Prompt) -> Sequence[bytes]:
        """Return the names of a prompt's full blocks. Raises Violation if there are not so many names."""
        script: list[Op] = [begin("a", prompt), computed("a")]
        for op in script:
            self.play.do(op)
        names = list(self.play.manager.block_names("a"))
        self.play.do(finish("a"))
        num_full = len(prompt.token_ids) // self.play.block_size
        if len(names) != num_full:
            raise Violation("names", f"{len(names)} names for {num_full} computed full blocks")
        return names


@dataclass(frozen=True)
class DistinctNamesCheck(Check):
    """Names tell prefixes apart, and nothing else."""

    name: str = "names of blocks"
    about: str = (
        "Two blocks have one name exactly if all that their KV depends on is equal: tokens, salt, adapter, media."
    )
    source: str = "sgl-project/sglang#24568, novitalabs/pegaflow#450, ROCm/ATOM#1358"

    def examine(self, make: MakeManager, profile: Profile, block_size: int) -> Result:
        """Name the blocks of prompts that share a lot, and compare."""
        if not make(1, block_size).offers("block_names"):
            return self.result("not applicable", "not offered: block_names")
        names = NamesOfPrompts(make, profile, block_size)
        pages = Pages(profile, 1, block_size)
        known: dict[Prefix, bytes] = {}
        owners: dict[bytes, Prefix] = {}
        try:
            for prompt in _prompts(block_size) * 2:
                for position, name in enumerate(names.of(prompt)):
                    prefix = pages.prefix(prompt, prompt.token_ids).cut((position + 1) * block_size)
                    if known.setdefault(prefix, name) != name:
                        raise Violation("names", f"the block of {prefix} has two names")
                    if owners.setdefault(name, prefix) != prefix:
                        raise Violation("names", f"{owners[name]} and {prefix} have one name")
        except Violation as violation:
            return self.result("failed", str(violation), names.play.steps[-6:])
        return self.result("passed", f"{len(known)} blocks")


def _prompts(size: int) -> list[Prompt]:
    tokens = ids(1, 3 * size)
    other = (*ids(1000, size), *tokens[size:])
    image = MediaSpan(size, 1, "X")
    return [
        Prompt(tokens),
        Prompt(other),
        Prompt(tokens[size:]),
        Prompt(tokens, Namespace(salt="a")),
        Prompt(tokens, lora("a", "a", "a")),
        Prompt(tokens, lora("a", "b", "b")),
        Prompt(tokens, lora("a", "a", "a", salt="a")),
        Prompt(tokens, media=(image,)),
        Prompt(tokens, media=(MediaSpan(size, 1, "Y"),)),
        Prompt(tokens, Namespace(salt="a"), (image,)),
    ]


@dataclass(frozen=True)
class GoldenNamesCheck(Check):
    """Names are bit for bit those of vLLM."""

    name: str = "golden names"
    about: str = "Names that are said to be vLLM's are so to the last bit, in every process."
    source: str = "LMCache/LMCache#1139, #2136"

    def examine(self, make: MakeManager, profile: Profile, block_size: int) -> Result:
        """Compare with the vectors for this block size."""
        manager = make(1, block_size)
        algorithm = manager.digest_algorithm
        if algorithm is None or not manager.offers("block_names"):
            return self.result("not applicable", "not offered: digest_algorithm and block_names")
        if (algorithm, block_size, "plain") not in NAMES:
            return self.result("not applicable", f"no vectors for {algorithm} and blocks of {block_size}")
        for kind, prompt in PROMPTS.items():
            names = NamesOfPrompts(make, profile, block_size)
            try:
                found = names.of(prompt)[-1].hex()
                expected = NAMES[algorithm, block_size, kind]
                if found != expected:
                    raise Violation("golden names", f"{kind}: {found}, vLLM says {expected}")
            except Violation as violation:
                return self.result("failed", str(violation), names.play.steps)
        return self.result("passed", f"{algorithm}, {len(PROMPTS)} vectors")
