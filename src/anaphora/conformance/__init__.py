"""A kit that builders of other engines run on their block manager: `run(make)`, or `python -m anaphora.conformance`.

It asks one class of them, a `ManagerAdapter`, and reports what breaks a rule, what is a matter of choice, and how to
see each failure in a few operations.
"""

from anaphora.conformance.adapter import Counters, MakeManager, ManagerAdapter, NotOfferedError, Prompt
from anaphora.conformance.checks import Result
from anaphora.conformance.profile import ANAPHORA_HASH, ANAPHORA_RADIX, PROFILES, SGLANG, VLLM, Profile
from anaphora.conformance.report import Report, detect_profile, run

__all__ = [
    "ANAPHORA_HASH",
    "ANAPHORA_RADIX",
    "PROFILES",
    "SGLANG",
    "VLLM",
    "Counters",
    "MakeManager",
    "ManagerAdapter",
    "NotOfferedError",
    "Profile",
    "Prompt",
    "Report",
    "Result",
    "detect_profile",
    "run",
]
