"""Collections may have a primer; what reuse costs is kept by fingerprint and form of prompts.

What was kept by model alone is given up: it did not say behind which prefix it was measured.

Revision: 0003, after 0002
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

_TEXT = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")


def upgrade() -> None:
    op.add_column("collections", sa.Column("primer", sa.Boolean(), nullable=False, server_default=sa.false()))
    op.drop_table("gates")
    _create_gates("fingerprint_digest", "data", "chunk_tokens", "length", "kind", "policy")


def downgrade() -> None:
    op.drop_table("gates")
    _create_gates("model_digest", "data", "kind", "policy")
    op.drop_column("collections", "primer")


def _create_gates(*keys: str) -> None:
    op.create_table(
        "gates",
        *(
            sa.Column(
                name,
                sa.Integer() if name in ("chunk_tokens", "length") else _TEXT,
                nullable=False,
                autoincrement=False,
            )
            for name in keys
        ),
        sa.Column("questions", sa.Integer(), nullable=False),
        *(sa.Column(name, sa.Double(), nullable=False) for name in ("fresh", "dnll_high", "accuracy_full")),
        sa.Column("measured_at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint(*keys, name="pk_gates"),
    )
