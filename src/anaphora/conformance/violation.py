"""What the kit finds."""

from __future__ import annotations


class Violation(Exception):  # noqa: N818 - it is a finding about a manager, no error of the kit
    """A manager did what no manager of its profile may do. `rule` names what was broken."""

    def __init__(self, rule: str, text: str) -> None:
        super().__init__(f"{rule}: {text}")
        self.rule = rule
        self.text = text
