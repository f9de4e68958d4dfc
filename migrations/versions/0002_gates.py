"""What reuse costs a model, by policy and kind of tasks.

Revision: 0002, after 0001
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

_TEXT = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")


def upgrade() -> None:
    op.create_table(
        "gates",
        *(sa.Column(name, _TEXT, nullable=False) for name in ("model_digest", "data", "kind", "policy")),
        sa.Column("questions", sa.Integer(), nullable=False),
        *(sa.Column(name, sa.Double(), nullable=False) for name in ("fresh", "dnll_high", "accuracy_full")),
        sa.Column("measured_at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("model_digest", "data", "kind", "policy", name="pk_gates"),
    )


def downgrade() -> None:
    op.drop_table("gates")
