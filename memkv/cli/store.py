"""`memkv store stats|ls|show|gc|evict|compact|quarantine`; what takes long stands in `store_work.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import rich_click as click

from memkv.cli.output import Output, bytes_text, counted, output_options
from memkv.cli.paging import PageOptions, page_options
from memkv.cli.progress import bar
from memkv.cli.sizes import SIZE
from memkv.cli.store_copies import export, import_command, snapshot
from memkv.cli.store_work import reprefill, verify, warm
from memkv.cli.target import Target, target_options

if TYPE_CHECKING:
    from memkv.wire import StoreChange

_KEY_SHOWN = 16  # digits of a key in a list
_PARTIAL = 3

_dry_run = click.option("--dry-run", is_flag=True, help="Only say what would be removed.")


@click.group()
def store() -> None:
    """The block files and the database behind them."""


@store.command()
@target_options
@output_options
def stats(target: Target, out: Output) -> None:
    """What is stored, how big it is, what was found damaged; of a server, which collections are stale."""
    with target.open(out, models=False) as client:
        found = client.store.stats()
    out.fields(
        found,
        [
            ("data directory", found.data_dir),
            ("collections", found.collections),
            ("documents", found.documents),
            ("chunks", f"{found.chunks} ({counted(found.tokens, 'token')})"),
            ("block files", f"{found.kv_files} ({bytes_text(found.kv_bytes)})"),
            ("database", ", ".join(f"{key} {value}" for key, value in found.database.items())),
            ("pool", ", ".join(f"{count} {state}" for state, count in found.pool.items()) or "none"),
            ("counters", ", ".join(f"{count} {name}" for name, count in found.counters.items()) or "none"),
            *(("stale", f"{name}: memkv store reprefill {name}") for name in found.stale or ()),
            *((("stale", "not told without a model: memkv doctor"),) if found.stale is None else ()),
            *(("warning", warning) for warning in found.warnings),
        ],
    )


@store.command()
@click.option("-c", "--collection", default="", metavar="NAME", help="Only files made for this collection.")
@click.option("--unused", is_flag=True, help="Only files whose key nothing refers to.")
@page_options
@target_options
@output_options
def ls(collection: str, unused: bool, page: PageOptions, target: Target, out: Output) -> None:
    """The block files, in order of their keys."""
    with target.open(out, models=False) as client:
        found = client.store.files(
            collection=collection, unused=unused, limit=page.limit, after=page.after, order=page.order
        ).page
    out.rows(
        found,
        ("key", "collection", "tokens", "size", "chunks", "uses", "used", "verified"),
        [
            (
                file.key[:_KEY_SHOWN],
                file.collection,
                file.tokens,
                bytes_text(file.bytes),
                file.chunks,
                file.uses,
                file.used_at or "never",
                file.verified_at or "never",
            )
            for file in found.data
        ],
    )
    if found.has_more:
        out.note(f"more: --after {found.last_id}")


@store.command()
@click.argument("key")
@target_options
@output_options
@click.pass_context
def show(ctx: click.Context, key: str, target: Target, out: Output) -> None:
    """One block file, by its KEY or eight or more of its first digits; every byte is checked.

    Exit code 1 where it is damaged.
    """
    with target.open(out, models=False) as client:
        found = client.store.file(key)
    file = found.file
    out.fields(
        found,
        [
            ("key", file.key),
            ("file", found.name),
            ("fingerprint", found.fingerprint),
            ("collection", file.collection or "deleted"),
            ("tokens", file.tokens),
            ("size", bytes_text(file.bytes)),
            ("created", file.created_at),
            ("verified", file.verified_at or "never"),
            ("used", f"{file.uses} times, last {file.used_at}" if file.uses else "never"),
            *(("chunk", f"{r.ordinal} of {r.external_id} in {r.collection}") for r in found.references),
            ("bytes", f"{found.damage.kind}: {found.damage.detail}" if found.damage else "as written"),
        ],
    )
    ctx.exit(1 if found.damage else 0)


@store.command()
@click.option("--force", is_flag=True, help="Although a fifth of the store or more would go.")
@_dry_run
@target_options
@output_options
@click.pass_context
def gc(ctx: click.Context, force: bool, dry_run: bool, target: Target, out: Output) -> None:
    """Remove files that nothing refers to: left by kills, by jobs given up, by deleted collections.

    Deleting documents needs no gc. Exit code 1 where a fifth of the store or more would go, 3 where something
    could not be removed.
    """
    with target.open(out, models=False) as client, bar(out, "collecting garbage") as progress:
        work = client.store.gc(dry_run=dry_run, force=force, on_progress=progress.job)
    _tell(ctx, work.change, out)


@store.command()
@click.option("-c", "--collection", metavar="NAME", help="Only what was made for this collection.")
@click.option("--to", "to_bytes", type=SIZE, metavar="SIZE", help="Until so much is left, such as 20GB.")
@click.option("--all", "everything", is_flag=True, help="Until nothing is left.")
@_dry_run
@target_options
@output_options
@click.pass_context
def evict(
    ctx: click.Context,
    collection: str | None,
    to_bytes: int | None,
    everything: bool,
    dry_run: bool,
    target: Target,
    out: Output,
) -> None:
    """Remove block files, those used longest ago first. They are prefilled again when they are used.

    Exit code 3 where something could not be removed.
    """
    if everything == (to_bytes is not None):
        raise click.UsageError("give --to SIZE, or --all")
    with target.open(out, models=False) as client, bar(out, "evicting") as progress:
        work = client.store.evict(
            collection=collection, to_bytes=to_bytes or 0, dry_run=dry_run, on_progress=progress.job
        )
    _tell(ctx, work.change, out)


@store.command()
@_dry_run
@target_options
@output_options
@click.pass_context
def compact(ctx: click.Context, dry_run: bool, target: Target, out: Output) -> None:
    """Give the space of deleted rows back to the disk of the database.

    Block files need none of this: each goes as a whole. On PostgreSQL this is VACUUM.
    """
    with target.open(out, models=False) as client, bar(out, "compacting") as progress:
        work = client.store.compact(dry_run=dry_run, on_progress=progress.job)
    _tell(ctx, work.change, out)


@store.command()
@click.option("--purge", is_flag=True, help="Remove what was set aside.")
@_dry_run
@target_options
@output_options
@click.pass_context
def quarantine(ctx: click.Context, purge: bool, dry_run: bool, target: Target, out: Output) -> None:
    """The damaged files that were set aside, and why. Nothing needs them: each is prefilled again on use.

    Exit code 3 where something could not be removed.
    """
    with target.open(out, models=False) as client, bar(out, "looking") as progress:
        if purge:
            work = client.store.purge_quarantine(dry_run=dry_run, on_progress=progress.job)
            _tell(ctx, work.change, out)
            return
        found = client.store.quarantine()
    out.rows(
        found,
        ("time", "kind", "size", "detail", "name"),
        [(file.time, file.kind, bytes_text(file.bytes), file.detail, file.name) for file in found.files],
    )


def _tell(ctx: click.Context, change: StoreChange, out: Output) -> None:
    out.fields(
        change,
        [
            ("would remove" if change.dry_run else "removed", _removed(change)),
            ("before", bytes_text(change.bytes_before)),
            ("after", bytes_text(change.bytes_after)),
        ],
    )
    if change.failed:
        out.note(f"{counted(change.failed, 'file')} could not be removed: check the directory's permissions")
        ctx.exit(_PARTIAL)


def _removed(change: StoreChange) -> str:
    size = bytes_text(change.bytes)
    return f"{counted(change.files, 'file')}, {size}" if change.files else size


for _command in (verify, warm, reprefill, export, import_command, snapshot):
    store.add_command(_command)
