"""Providers' prompt caches: their rules as dated data, a log replayed under each, what it costs, where to put marks."""
