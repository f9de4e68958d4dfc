"""When the process that runs a job was last heard of.

Revision: 0005, after 0004
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("jobs", sa.Column("heartbeat_at", sa.BigInteger(), nullable=True))


def downgrade() -> None:
    op.drop_column("jobs", "heartbeat_at")
