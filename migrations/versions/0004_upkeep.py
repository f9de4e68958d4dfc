"""What keeping a store takes: whose a block file is, when it was read and used last; a cap and the model's
name of a collection; arguments of jobs.

Revision: 0004, after 0003
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

_TEXT = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")

# A file is its collection's; of a shared one, the first's. What nobody refers to is nobody's.
_FILL_OWNERS = """
    UPDATE kv_files SET collection_id = COALESCE(
        (SELECT MIN(c.collection_id) FROM chunks c
          WHERE c.tenant = kv_files.tenant AND c.input_key = kv_files.input_key),
        (SELECT MIN(l.id) FROM collections l WHERE l.prefix_key = kv_files.input_key),
        '')
"""


def upgrade() -> None:
    op.add_column("kv_files", sa.Column("collection_id", _TEXT, nullable=False, server_default=""))
    op.add_column("kv_files", sa.Column("generation", sa.BigInteger(), nullable=False, server_default="0"))
    op.add_column("kv_files", sa.Column("verified_at", sa.BigInteger(), nullable=True))
    op.create_index("ix_kv_files_collection_id", "kv_files", ["collection_id"])
    op.execute(_FILL_OWNERS)
    op.create_table(
        "kv_uses",
        sa.Column("input_key", _TEXT, nullable=False),
        sa.Column("tenant", _TEXT, nullable=False),
        sa.Column("uses", sa.BigInteger(), nullable=False),
        sa.Column("used_at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("input_key", name="pk_kv_uses"),
        sa.ForeignKeyConstraint(["tenant"], ["tenants.name"], name="fk_kv_uses_tenant_tenants"),
    )
    op.add_column("collections", sa.Column("model_name", _TEXT, nullable=False, server_default=""))
    op.add_column(
        "collections", sa.Column("max_kv_bytes", sa.BigInteger(), nullable=False, server_default="0")
    )
    op.add_column("jobs", sa.Column("arguments", _TEXT, nullable=True))


def downgrade() -> None:
    op.drop_column("jobs", "arguments")
    op.drop_column("collections", "max_kv_bytes")
    op.drop_column("collections", "model_name")
    op.drop_table("kv_uses")
    op.drop_index("ix_kv_files_collection_id", "kv_files")
    for name in ("verified_at", "generation", "collection_id"):
        op.drop_column("kv_files", name)
