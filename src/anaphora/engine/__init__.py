"""Continuous batching over a KVCacheManager."""
