"""The checks, by what they look at."""

from anaphora.conformance.checks import ends, hits, identity, memory
from anaphora.conformance.checks.check import Check, Result, Status
from anaphora.conformance.checks.choices import CHOICE_CHECKS
from anaphora.conformance.checks.generated import GeneratedCheck
from anaphora.conformance.checks.names import DistinctNamesCheck, GoldenNamesCheck

__all__ = ["CHOICE_CHECKS", "Check", "Result", "Status", "all_checks"]


def all_checks(num_scripts: int, seed: int) -> list[Check]:
    """Return every check, in the order of a report."""
    return [
        *CHOICE_CHECKS,
        *hits.CHECKS,
        *identity.CHECKS,
        *memory.CHECKS,
        *ends.CHECKS,
        DistinctNamesCheck(),
        GoldenNamesCheck(),
        GeneratedCheck(num_scripts, seed),
    ]
