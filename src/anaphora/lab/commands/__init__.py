"""The laboratory's commands: options, and what is printed. Each imports what it needs when it runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anaphora.lab.commands.chain import add_chain
from anaphora.lab.commands.compare import add_compare
from anaphora.lab.commands.explain import add_explain
from anaphora.lab.commands.providers import add_providers
from anaphora.lab.commands.simulate import add_simulate
from anaphora.lab.commands.workload import add_workload

if TYPE_CHECKING:
    import argparse


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add them to the program's."""
    add_simulate(commands.add_parser("simulate", help="what a trace would find in other caches"))
    add_chain(commands.add_parser("chain", help="what a higher hit rate does to batch, throughput and first token"))
    add_explain(commands.add_parser("explain", help="why a log's hit rate is what it is, and what would change it"))
    add_compare(commands.add_parser("compare", help="what one request could take from another, and where that ends"))
    add_providers(commands.add_parser("providers", help="what a log costs under each provider's prompt cache"))
    add_workload(commands.add_parser("workload", help="make a trace or a request log of a kind of traffic"))


__all__ = ["add_commands"]
