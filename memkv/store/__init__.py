"""The durable side of memkv: SQL is the truth; block files and vector indexes are derived from it.

store.py            opening, recovery, and every operation that spans the parts below
catalog*.py jobs.py the SQL statements           tables.py schema.py database.py   what they run on
chunk_store.py      KV of chunks                 block_file.py block_directory.py durable_files.py
vector_index.py     exact search                 search.py filters.py
lock.py             one process at a time
"""

from memkv.store.rows import DEFAULT_TENANT
from memkv.store.store import Store

__all__ = ["DEFAULT_TENANT", "Store"]
