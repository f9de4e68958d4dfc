"""The first schema.

Revision: 0001, after nothing
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

_TEXT = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")
_ROW_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
_TABLES = (
    "store",
    "tenants",
    "collections",
    "documents",
    "document_values",
    "chunks",
    "kv_files",
    "jobs",
    "job_items",
)


def upgrade() -> None:
    _create_store()
    _create_collections()
    _create_documents()
    _create_chunks()
    _create_jobs()


def downgrade() -> None:
    for table in reversed(_TABLES):
        op.drop_table(table)


def _create_store() -> None:
    op.create_table(
        "store",
        sa.Column("id", sa.Integer(), autoincrement=False, nullable=False),
        _text("store_id"),
        _integer("epoch"),
        _integer("generation"),
        _integer("created_at"),
        sa.PrimaryKeyConstraint("id", name="pk_store"),
    )
    op.create_table(
        "tenants",
        _text("name"),
        sa.Column("secret", sa.LargeBinary(), nullable=False),
        _integer("created_at"),
        sa.PrimaryKeyConstraint("name", name="pk_tenants"),
    )


def _create_collections() -> None:
    op.create_table(
        "collections",
        _text("id"),
        _text("tenant"),
        _text("name"),
        _text("description"),
        _text("metadata"),
        _text("fingerprint_digest"),
        _text("fingerprint_json"),
        _text("embedder_name"),
        _text("embedder_digest"),
        sa.Column("dim", sa.Integer(), nullable=False),
        sa.Column("max_chunk_tokens", sa.Integer(), nullable=False),
        sa.Column("block_size", sa.Integer(), nullable=False),
        _text("prefill"),
        _text("system_prompt"),
        sa.Column("prefix_ids", sa.LargeBinary(), nullable=False),
        _text("prefix_key"),
        _integer("generation"),
        sa.Column("stamp", sa.LargeBinary(), nullable=False),
        _integer("created_at"),
        sa.PrimaryKeyConstraint("id", name="pk_collections"),
        sa.UniqueConstraint("tenant", "name", name="uq_collections_tenant_name"),
        _refers("collections", "tenant", "tenants", "name"),
    )
    op.create_index("ix_collections_prefix_key", "collections", ["prefix_key"])


def _create_documents() -> None:
    op.create_table(
        "documents",
        _text("id"),
        _text("tenant"),
        _text("collection_id"),
        _text("external_id"),
        _text("title"),
        _text("filename"),
        _text("media_type"),
        _text("metadata"),
        _text("text"),
        _integer("text_bytes"),
        _text("content_hash"),
        _text("status"),
        _integer("revision"),
        _text("error", nullable=True),
        sa.Column("num_chunks", sa.Integer(), nullable=False),
        _integer("num_tokens"),
        _integer("created_at"),
        _integer("updated_at"),
        sa.PrimaryKeyConstraint("id", name="pk_documents"),
        sa.UniqueConstraint("collection_id", "external_id", name="uq_documents_collection_id_external_id"),
        _refers("documents", "tenant", "tenants", "name"),
        _refers("documents", "collection_id", "collections", "id"),
    )
    op.create_index("ix_documents_collection_id_content_hash", "documents", ["collection_id", "content_hash"])
    op.create_index("ix_documents_collection_id_status", "documents", ["collection_id", "status"])
    op.create_table(
        "document_values",
        _text("document_id"),
        _text("key"),
        _text("collection_id"),
        _text("kind"),
        _text("string", nullable=True),
        sa.Column("number", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("document_id", "key", name="pk_document_values"),
        _refers("document_values", "document_id", "documents", "id", ondelete="CASCADE"),
    )
    op.create_index("ix_document_values_collection_id_key", "document_values", ["collection_id", "key"])


def _create_chunks() -> None:
    op.create_table(
        "chunks",
        sa.Column("row_id", _ROW_ID, nullable=False),
        _text("id"),
        _text("tenant"),
        _text("collection_id"),
        _text("document_id"),
        sa.Column("ordinal", sa.Integer(), nullable=False),
        _integer("span_start"),
        _integer("span_end"),
        _text("text"),
        _text("label"),
        sa.Column("token_ids", sa.LargeBinary(), nullable=False),
        _text("input_key"),
        sa.Column("embedding", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("row_id", name="pk_chunks"),
        sa.UniqueConstraint("id", name="uq_chunks_id"),
        sa.UniqueConstraint("document_id", "ordinal", name="uq_chunks_document_id_ordinal"),
        _refers("chunks", "tenant", "tenants", "name"),
        _refers("chunks", "collection_id", "collections", "id"),
        _refers("chunks", "document_id", "documents", "id"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_chunks_collection_id", "chunks", ["collection_id"])
    op.create_index("ix_chunks_tenant_input_key", "chunks", ["tenant", "input_key"])
    op.create_table(
        "kv_files",
        _text("input_key"),
        _text("tenant"),
        _text("fingerprint_digest"),
        _text("file_digest"),
        sa.Column("num_tokens", sa.Integer(), nullable=False),
        _integer("num_bytes"),
        _integer("created_at"),
        sa.PrimaryKeyConstraint("input_key", name="pk_kv_files"),
        _refers("kv_files", "tenant", "tenants", "name"),
    )


def _create_jobs() -> None:
    op.create_table(
        "jobs",
        _text("id"),
        _text("tenant"),
        _text("collection_id"),
        _text("kind"),
        _text("status"),
        _integer("sequence"),
        _text("stage"),
        _integer("done"),
        _integer("total"),
        _text("unit"),
        _text("counts"),
        _text("error", nullable=True),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("cancel_requested", sa.Integer(), nullable=False),
        _integer("lease_epoch", nullable=True),
        _text("lease_owner", nullable=True),
        _integer("created_at"),
        _integer("started_at", nullable=True),
        _integer("finished_at", nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_jobs"),
        _refers("jobs", "tenant", "tenants", "name"),
    )
    op.create_index("ix_jobs_status_sequence", "jobs", ["status", "sequence"])
    op.create_table(
        "job_items",
        _text("job_id"),
        sa.Column("ordinal", sa.Integer(), autoincrement=False, nullable=False),
        _text("document_id"),
        _text("status"),
        _text("error", nullable=True),
        sa.PrimaryKeyConstraint("job_id", "ordinal", name="pk_job_items"),
        _refers("job_items", "job_id", "jobs", "id", ondelete="CASCADE"),
    )
    op.create_index("ix_job_items_document_id", "job_items", ["document_id"])


def _text(name: str, *, nullable: bool = False) -> sa.Column[str]:
    return sa.Column(name, _TEXT, nullable=nullable)


def _integer(name: str, *, nullable: bool = False) -> sa.Column[int]:
    return sa.Column(name, sa.BigInteger(), nullable=nullable)


def _refers(
    table: str, column: str, other: str, target: str, *, ondelete: str | None = None
) -> sa.ForeignKeyConstraint:
    return sa.ForeignKeyConstraint(
        [column], [f"{other}.{target}"], name=f"fk_{table}_{column}_{other}", ondelete=ondelete
    )
