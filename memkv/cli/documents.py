"""`memkv documents list|show|delete`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import rich_click as click

from memkv.cli.output import Output, output_options
from memkv.cli.paging import PageOptions, page_options
from memkv.cli.retrieval import parse_filters
from memkv.cli.target import Target, target_options

if TYPE_CHECKING:
    from memkv.wire import DocumentStatus

_collection = click.option("-c", "--collection", required=True, metavar="NAME", help="Their collection.")


@click.group()
def documents() -> None:
    """What was ingested. A document is named by its id or by its external id."""


@documents.command("list")
@_collection
@click.option(
    "--status",
    type=click.Choice(["pending", "ready", "failed"]),
    help="Only documents in this state.",
)
@click.option(
    "--filter", "filters", multiple=True, metavar="KEY=VALUE", help="Only documents with this metadata."
)
@page_options
@target_options
@output_options
def list_command(
    collection: str,
    status: DocumentStatus | None,
    filters: tuple[str, ...],
    page: PageOptions,
    target: Target,
    out: Output,
) -> None:
    """The documents of a collection."""
    with target.open(out, models=False) as client:
        found = client.documents.list(
            collection,
            status=status,
            filter=parse_filters(filters),
            limit=page.limit,
            after=page.after,
            order=page.order,
        ).page
    out.rows(
        found,
        ("external id", "status", "chunks", "tokens", "updated", "id"),
        [(d.external_id, d.status, d.chunks, d.tokens, d.updated_at, d.id) for d in found.data],
    )
    if found.has_more:
        out.note(f"more: --after {found.last_id}")


@documents.command()
@click.argument("document")
@_collection
@target_options
@output_options
def show(document: str, collection: str, target: Target, out: Output) -> None:
    """One document: its state, and what went wrong with it."""
    with target.open(out, models=False) as client:
        found = client.documents.retrieve(collection, document)
    pairs: list[tuple[str, object]] = [
        ("external id", found.external_id),
        ("id", found.id),
        ("title", found.title),
        ("status", found.status),
        ("chunks", found.chunks),
        ("tokens", found.tokens),
        ("metadata", found.metadata or "none"),
        ("content hash", found.content_hash),
        ("created", found.created_at),
        ("updated", found.updated_at),
    ]
    if found.error is not None:
        pairs += [("error", found.error.detail), ("hint", found.error.hint)]
    out.fields(found, pairs)


@documents.command()
@click.argument("names", nargs=-1, required=True, metavar="DOCUMENT...")
@_collection
@click.option("--yes", is_flag=True, help="Do not ask.")
@target_options
@output_options
def delete(names: tuple[str, ...], collection: str, yes: bool, target: Target, out: Output) -> None:
    """Forget documents: no question that starts later sees them."""
    if not yes:
        click.confirm(f"Delete {', '.join(names)} from {collection}?", abort=True, err=True)
    with target.open(out, models=False) as client:
        for name in names:
            client.documents.delete(collection, name)
    out.fields({"deleted": list(names)}, [("deleted", name) for name in names])
