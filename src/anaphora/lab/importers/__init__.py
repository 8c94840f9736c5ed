"""Importers: what people have on disk, as one kind of record."""

from anaphora.lab.importers.formats import FORMATS, Log, detect, detect_in, open_requests, read_records
from anaphora.lab.importers.source import LogError, ReadReport

__all__ = ["FORMATS", "Log", "LogError", "ReadReport", "detect", "detect_in", "open_requests", "read_records"]
