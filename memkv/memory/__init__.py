"""The only place where store meets engine: ingest, query, forget."""

from memkv.memory.memory import Memory

__all__ = ["Memory"]
