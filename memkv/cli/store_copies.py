"""`memkv store export|import|snapshot`: copies of what is stored."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import rich_click as click

from memkv.cli.log import log_warnings_to_stderr
from memkv.cli.output import Output, bytes_text, counted, output_options
from memkv.cli.progress import bar, steps
from memkv.cli.target import Target, target_options

if TYPE_CHECKING:
    from memkv.wire import Exported, Imported, Snapshot

_PARTIAL = 3


@click.command()
@click.argument("archive", metavar="FILE", type=click.Path(path_type=Path, dir_okay=False))
@click.option(
    "-c", "--collection", "names", multiple=True, metavar="NAME", help="Only these.  [default: all]"
)
@click.option("--kv/--no-kv", default=False, help="Their block files, too; big.  [default: no-kv]")
@click.option("--dry-run", is_flag=True, help="Only say what would be in it.")
@target_options
@output_options
def export(
    archive: Path, names: tuple[str, ...], kv: bool, dry_run: bool, target: Target, out: Output
) -> None:
    """Write collections to a new FILE: a tar of their settings, texts and vectors.

    Of a server, FILE is a name in archives/ of its data directory. Otherwise this needs the store for itself.
    """
    done = _export_there(archive, names, kv, dry_run, target, out) if target.url else None
    if done is None:
        from memkv.memory.stored import StoredMemory

        with StoredMemory.open_store(target.config()) as memory, bar(out, "exporting") as progress:
            done = memory.export(
                archive,
                names,
                with_kv=kv,
                dry_run=dry_run,
                on_progress=lambda name, count, total: progress(count, total, f"exporting {name}"),
            )
    size = f"{bytes_text(done.bytes)} and the texts" if dry_run else bytes_text(done.bytes)
    out.fields(
        done,
        [
            ("would write" if dry_run else "archive", f"{done.path} ({size})"),
            ("collections", ", ".join(done.collections)),
            ("documents", done.documents),
            ("vectors", done.vectors),
            ("block files", done.kv_files),
        ],
    )


def _export_there(
    archive: Path, names: tuple[str, ...], kv: bool, dry_run: bool, target: Target, out: Output
) -> Exported:
    with target.open(out, models=False) as client, bar(out, "exporting") as progress:
        work = client.store.export(str(archive), names, kv=kv, dry_run=dry_run, on_progress=progress.job)
    assert work.exported is not None, "bug: an export that tells nothing"
    return work.exported


@click.command("import")
@click.argument("archive", metavar="FILE", type=click.Path(path_type=Path, dir_okay=False))
@click.option(
    "--kv/--no-kv",
    default=False,
    help="Take its block files for the same tokens, fingerprint and prefix: trust who made it.",
)
@click.option("--dry-run", is_flag=True, help="Only check the archive and say what is in it.")
@target_options
@output_options
@click.pass_context
def import_command(
    ctx: click.Context, archive: Path, kv: bool, dry_run: bool, target: Target, out: Output
) -> None:
    """Ingest the collections of an archive. Nothing in it is trusted: texts are cut here, and embedded
    unless the same embedder made its vectors and samples prove it.

    Of a server, FILE is a name in archives/ of its data directory. Otherwise this needs the store for itself.
    Exit code 2 where the archive is refused, 3 where some documents failed.
    """
    done = _import_there(archive, kv, dry_run, target, out) if target.url else None
    if done is None:
        from memkv.memory import Memory

        config = target.config()
        log_warnings_to_stderr()
        with steps(out) as tell:
            memory = Memory.open(config, on_progress=tell)
        with memory, bar(out, "importing") as progress:
            done = memory.import_archive(
                archive,
                with_kv=kv,
                dry_run=dry_run,
                on_progress=lambda name, count, total: progress(count, total, f"importing {name}"),
            )
    out.fields(
        done,
        [
            ("would import" if dry_run else "imported", ", ".join(done.collections) or "nothing"),
            ("documents", f"{done.documents}{f' ({done.failed} failed)' if done.failed else ''}"),
            ("vectors taken", done.vectors_taken),
            ("kv taken", counted(done.kv_taken, "block file")),
            ("before", bytes_text(done.bytes_before)),
            ("after", bytes_text(done.bytes_after)),
        ],
    )
    ctx.exit(_PARTIAL if done.failed else 0)


def _import_there(archive: Path, kv: bool, dry_run: bool, target: Target, out: Output) -> Imported:
    with target.open(out) as client, bar(out, "importing") as progress:
        work = client.store.import_(str(archive), kv=kv, dry_run=dry_run, on_progress=progress.job)
    assert work.imported is not None, "bug: an import that tells nothing"
    return work.imported


@click.group()
def snapshot() -> None:
    """The whole store as it was at one moment: a copy of the database, and links to the block files."""


@snapshot.command()
@click.option("--dry-run", is_flag=True, help="Only say what would be kept.")
@target_options
@output_options
def create(dry_run: bool, target: Target, out: Output) -> None:
    """Keep the store as it is now. Block files are shared: they take no space until they are let go of."""
    with target.open(out, models=False) as client, bar(out, "copying") as progress:
        made = client.store.create_snapshot(dry_run=dry_run, on_progress=progress.job).snapshot
    out.fields(
        made,
        [
            ("snapshot", made.id or "none made"),
            ("database", bytes_text(made.database_bytes)),
            ("block files", f"{made.kv_files} ({bytes_text(made.kv_bytes)}, shared)"),
        ],
    )


@snapshot.command("list")
@target_options
@output_options
def list_command(target: Target, out: Output) -> None:
    """The snapshots, the oldest first."""
    with target.open(out, models=False) as client:
        found = client.store.snapshots()
    out.rows(
        found,
        ("id", "time", "database", "block files", "kv"),
        [
            (s.id, s.time, bytes_text(s.database_bytes), s.kv_files, bytes_text(s.kv_bytes))
            for s in found.data
        ],
    )


@snapshot.command()
@click.argument("snapshot_id", metavar="SNAPSHOT")
@click.option("--dry-run", is_flag=True, help="Only say what it is.")
@target_options
@output_options
def delete(snapshot_id: str, dry_run: bool, target: Target, out: Output) -> None:
    """Delete a snapshot; files that it alone kept go with it."""
    with target.open(out, models=False) as client, bar(out, "deleting"):
        found = next((each for each in client.store.snapshots().data if each.id == snapshot_id), None)
        if not dry_run or found is None:  # one that is not there is refused
            client.store.delete_snapshot(snapshot_id)
    size = f" ({bytes_text(found.database_bytes)}, and block files that nothing else keeps)" if found else ""
    verb = "would delete" if dry_run else "deleted"
    out.fields({"deleted": snapshot_id, "dry_run": dry_run}, [(verb, f"{snapshot_id}{size}")])


@snapshot.command()
@click.argument("snapshot_id", metavar="SNAPSHOT")
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--dry-run", is_flag=True, help="Only say whether it can be restored.")
@target_options
@output_options
def restore(snapshot_id: str, yes: bool, dry_run: bool, target: Target, out: Output) -> None:
    """Bring the store back to a snapshot: what came after it is gone.

    A server lets running requests end, restores, and serves again. Otherwise this needs the store for itself.
    Exit code 1 where it was not restored; the store is then as it was.
    """
    if not yes and not dry_run:
        click.confirm("Everything since that snapshot will be gone. Restore it?", abort=True, err=True)
    found = (_restore_there if target.url else _restore_here)(snapshot_id, dry_run, target, out)
    out.fields(found, [("would restore" if dry_run else "restored", found.id), ("of", found.time)])


def _restore_there(snapshot_id: str, dry_run: bool, target: Target, out: Output) -> Snapshot:
    with target.open(out) as client, bar(out, "restoring") as progress:
        if dry_run:
            return client.store.check_snapshot(snapshot_id).snapshot
        return client.store.restore_snapshot(snapshot_id, on_progress=progress.job).snapshot


def _restore_here(snapshot_id: str, dry_run: bool, target: Target, out: Output) -> Snapshot:
    from memkv.store.snapshots import restore_snapshot
    from memkv.wire import Snapshot

    config = target.config()
    with bar(out, "looking" if dry_run else "restoring"):
        found = restore_snapshot(
            Path(config.store.data_dir),
            config.store.database_url or None,
            snapshot_id,
            busy_seconds=config.store.busy_seconds,
            dry_run=dry_run,
        )
    return Snapshot(**asdict(found))
