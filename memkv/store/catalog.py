"""Every SQL statement of memkv, one method per transaction; `jobs.py` holds those about jobs.

    catalog_store        the store's row, tenants       catalog_documents    accept, read, delete
    catalog_collections                                 catalog_chunks       commit, list, vectors
    catalog_files        which key has KV               catalog_search       a search's rows
    catalog_gates        what reuse costs a model       catalog_filters      a filter as SQL
    catalog_keys         who may ask a server for what
    catalog_upkeep       which files are needed, read, used
    catalog_starved      documents whose KV found no room

The tenant is the first argument of everything that a tenant owns, and every statement names it. Methods take
and return plain rows (`rows.py`).
"""

from __future__ import annotations

from memkv.store.catalog_chunks import ChunkStatements
from memkv.store.catalog_collections import CollectionStatements
from memkv.store.catalog_documents import DocumentStatements
from memkv.store.catalog_files import FileStatements
from memkv.store.catalog_gates import GateStatements
from memkv.store.catalog_keys import KeyStatements
from memkv.store.catalog_search import SearchStatements
from memkv.store.catalog_starved import StarvedStatements
from memkv.store.catalog_store import StoreStatements
from memkv.store.catalog_upkeep import UpkeepStatements


class Catalog(
    StoreStatements,
    CollectionStatements,
    DocumentStatements,
    ChunkStatements,
    SearchStatements,
    FileStatements,
    GateStatements,
    KeyStatements,
    UpkeepStatements,
    StarvedStatements,
):
    """Made of a `Database`."""
