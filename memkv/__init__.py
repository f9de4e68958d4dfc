"""memkv: a RAG memory server with paged KV reuse."""

__version__ = "0.1.0"
