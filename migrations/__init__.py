"""Alembic migrations of memkv's database; `memkv.store.schema` runs them."""
