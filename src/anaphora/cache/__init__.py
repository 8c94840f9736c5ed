"""The core: which blocks hold which prefix, who uses them, and what goes first. Standard library only."""
