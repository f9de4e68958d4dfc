"""`memkv collections list|show|create|update|delete`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import rich_click as click

from memkv.cli.output import Output, bytes_text, output_options
from memkv.cli.paging import PageOptions, page_options
from memkv.cli.sizes import SIZE
from memkv.cli.target import Target, target_options

if TYPE_CHECKING:
    from memkv.wire import Collection, Prefill

_WHEN = "When chunks are prefilled and kept: eager, on_first_use or after_N_uses."
_BLOCK_SIZES: dict[str | None, Literal[8, 16, 32] | None] = {None: None, "8": 8, "16": 16, "32": 32}


@click.group()
def collections() -> None:
    """Named sets of documents that share one model, one embedder and one prefix."""


@collections.command("list")
@page_options
@target_options
@output_options
def list_command(page: PageOptions, target: Target, out: Output) -> None:
    """The collections."""
    with target.open(out, models=False) as client:
        found = client.collections.list(limit=page.limit, after=page.after, order=page.order).page
    out.rows(
        found,
        ("name", "documents", "chunks", "tokens", "kv", "model"),
        [
            (c.name, c.counts.documents, c.counts.chunks, c.counts.tokens, bytes_text(c.kv_bytes), c.model)
            for c in found.data
        ],
    )


@collections.command()
@click.argument("name")
@target_options
@output_options
def show(name: str, target: Target, out: Output) -> None:
    """One collection: its settings and what is in it."""
    with target.open(out, models=False) as client:
        _show(client.collections.retrieve(name), out)


@collections.command()
@click.argument("name")
@click.option("--description", default="", help="What the collection is for.")
@click.option("--chunk-tokens", type=click.IntRange(16, 4096), help="Largest chunk.  [default: 256]")
@click.option("--block-size", type=click.Choice(["8", "16", "32"]), help="Tokens in a block.  [default: 16]")
@click.option("--prefill", metavar="WHEN", help=f"{_WHEN}  [default: eager]")
@click.option("--max-kv", type=SIZE, default=0, metavar="SIZE", help="Most KV, such as 20GB; 0: no cap.")
@click.option("--system-prompt", help="What the model is told before the documents.")
@click.option("--primer", is_flag=True, help="Let documents of memkv's own stand before all others.")
@click.option("--exist-ok", is_flag=True, help="Not an error where it exists already with the same settings.")
@target_options
@output_options
def create(
    name: str,
    description: str,
    chunk_tokens: int | None,
    block_size: Literal["8", "16", "32"] | None,
    prefill: Prefill | None,
    max_kv: int,
    system_prompt: str | None,
    primer: bool,
    exist_ok: bool,
    target: Target,
    out: Output,
) -> None:
    """Make a collection."""
    with target.open(out) as client:
        make = client.collections.get_or_create if exist_ok else client.collections.create
        made = make(
            name,
            description=description,
            chunk_tokens=chunk_tokens,
            block_size=_BLOCK_SIZES[block_size],
            prefill=prefill,
            max_kv_bytes=max_kv,
            system_prompt=system_prompt,
            primer=primer,
        )
    _show(made, out)


@collections.command()
@click.argument("name")
@click.option("--description", help="What the collection is for.")
@click.option("--prefill", metavar="WHEN", help=_WHEN)
@click.option("--max-kv", type=SIZE, metavar="SIZE", help="Most KV, such as 20GB; 0: no cap.")
@target_options
@output_options
def update(
    name: str,
    description: str | None,
    prefill: Prefill | None,
    max_kv: int | None,
    target: Target,
    out: Output,
) -> None:
    """Change a collection. What is stored already stays: memkv store evict makes room below a lower cap."""
    with target.open(out, models=False) as client:
        changed = client.collections.update(
            name, description=description, prefill=prefill, max_kv_bytes=max_kv
        )
    _show(changed, out)


@collections.command()
@click.argument("name")
@click.option("--yes", is_flag=True, help="Do not ask.")
@target_options
@output_options
def delete(name: str, yes: bool, target: Target, out: Output) -> None:
    """Delete a collection with its documents and their KV."""
    if not yes:
        click.confirm(f"Delete collection {name} with all its documents?", abort=True, err=True)
    with target.open(out, models=False) as client:
        client.collections.delete(name)
    out.fields({"deleted": name}, [("deleted", name)])


def _show(found: Collection, out: Output) -> None:
    statuses = ", ".join(f"{count} {status}" for status, count in found.by_status.items() if count)
    out.fields(
        found,
        [
            ("name", found.name),
            ("id", found.id),
            ("description", found.description),
            ("model", found.model),
            ("fingerprint", found.fingerprint),
            ("embedder", found.embedder),
            ("chunk tokens", found.chunk_tokens),
            ("block size", found.block_size),
            ("prefill", found.prefill),
            ("prefix tokens", f"{found.prefix_tokens}{' with primer' if found.primer else ''}"),
            ("documents", f"{found.counts.documents}{f' ({statuses})' if statuses else ''}"),
            ("chunks", found.counts.chunks),
            ("tokens", found.counts.tokens),
            ("kv", bytes_text(found.kv_bytes)),
            ("kv cap", bytes_text(found.max_kv_bytes) if found.max_kv_bytes else "none"),
            ("created", found.created_at),
        ],
    )
