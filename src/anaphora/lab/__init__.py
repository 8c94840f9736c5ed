"""The laboratory: from a log or a trace to what was reused, what was not and why, and what would change it. Offline."""
