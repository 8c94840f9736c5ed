"""Caches for other people's engines, on our manager and pages."""
