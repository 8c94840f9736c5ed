"""The laboratory's commands: options, and what is printed. Each imports what it needs when it runs."""

from anaphora.lab.commands.simulate import add_simulate

__all__ = ["add_simulate"]
