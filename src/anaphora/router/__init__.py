"""The router: an HTTP proxy in front of a fleet that keeps its prefix hits."""
