"""`memkv keys list|show|create|update|rotate|revoke`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, cast

import rich_click as click

from memkv.cli.durations import DURATION
from memkv.cli.output import Output, output_options
from memkv.cli.paging import PageOptions, page_options
from memkv.cli.target import Target, target_options

if TYPE_CHECKING:
    from memkv.memory import Memory
    from memkv.sdk.client import Keys
    from memkv.wire import AccessKey, Scope

_SCOPE = click.Choice(["read", "write", "admin"])
_SCOPES = "read: search, ask and list; write: also ingest, change and delete; admin: everything."
_COLLECTIONS = "Only for this collection; may be repeated.  [default: all]"
_OUT = (
    "if no valid key of scope admin is left, memkv keys create --scope admin on the data directory makes one"
)


@click.group()
def keys() -> None:
    """Who may ask a server for what. On a data directory these work beside its server."""


@keys.command("list")
@page_options
@target_options
@output_options
def list_command(page: PageOptions, target: Target, out: Output) -> None:
    """The keys, also revoked and expired ones, with the beginnings of their secrets."""
    with _open(target, out) as client:
        found = client.list(limit=page.limit, after=page.after, order=page.order).page
    out.rows(
        found,
        ("id", "name", "secret", "scope", "collections", "status", "expires"),
        [
            (key.id, key.name, f"{key.prefix}...", key.scope, _collections(key), key.status, _expiry(key))
            for key in found.data
        ],
    )


@keys.command()
@click.argument("key_id", metavar="KEY")
@target_options
@output_options
def show(key_id: str, target: Target, out: Output) -> None:
    """One key."""
    with _open(target, out) as client:
        _show(client.retrieve(key_id), out)


@keys.command()
@click.option("--name", default="", help="For people.")
@click.option("--scope", type=_SCOPE, default="read", show_default=True, help=_SCOPES)
@click.option("-c", "--collection", "collections", multiple=True, metavar="NAME", help=_COLLECTIONS)
@click.option(
    "--expires", type=DURATION, default=0, metavar="TIME", help="When, such as 90d or 12h.  [default: never]"
)
@target_options
@output_options
def create(
    name: str, scope: Scope, collections: tuple[str, ...], expires: int, target: Target, out: Output
) -> None:
    """Make a key. Its secret is shown now and never again.

    From the first key on, a server asks for one. That one has to be of scope admin.
    """
    with _open(target, out) as client:
        made = client.create(name=name, scope=scope, collections=collections or None, expires_in=expires)
    _show(made, out, made.secret)


@keys.command()
@click.argument("key_id", metavar="KEY")
@click.option("--name", help="For people.")
@click.option("--scope", type=_SCOPE, help=_SCOPES)
@click.option("-c", "--collection", "collections", multiple=True, metavar="NAME", help="Only for these.")
@click.option("--expires", type=DURATION, metavar="TIME", help="From now, such as 90d or 12h; or never.")
@click.option("--force", is_flag=True, help="Although no valid key of scope admin would be left.")
@target_options
@output_options
def update(
    key_id: str,
    name: str | None,
    scope: Scope | None,
    collections: tuple[str, ...],
    expires: int | None,
    force: bool,
    target: Target,
    out: Output,
) -> None:
    """Change a key; its secret stays."""
    with _open(target, out) as client:
        changed = client.update(
            key_id,
            name=name,
            scope=scope,
            collections=collections or None,
            expires_in=expires,
            force=force,
        )
    _show(changed, out)


@keys.command()
@click.argument("key_id", metavar="KEY")
@target_options
@output_options
def rotate(key_id: str, target: Target, out: Output) -> None:
    """Give a key another secret, shown now and never again. The old one is refused at once."""
    with _open(target, out) as client:
        made = client.rotate(key_id)
    _show(made, out, made.secret)


@keys.command()
@click.argument("key_id", metavar="KEY")
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--force", is_flag=True, help="Although no valid key of scope admin would be left.")
@target_options
@output_options
def revoke(key_id: str, yes: bool, force: bool, target: Target, out: Output) -> None:
    """Refuse a key from now on, for good. A store that had a key goes on asking for one."""
    if not yes:
        click.confirm(f"Revoke key {key_id}?", abort=True, err=True)
    with _open(target, out) as client:
        client.delete(key_id, force=force)
    out.fields({"revoked": key_id}, [("revoked", key_id)])
    if force:
        out.note(_OUT)


@contextmanager
def _open(target: Target, out: Output) -> Iterator[Keys]:
    """A server's keys, or those of a data directory, whether or not a server has it open."""
    if target.url:
        with target.open(out) as client:
            yield client.keys
        return
    from types import SimpleNamespace

    from memkv.memory.stored import open_keys
    from memkv.sdk.client import Keys
    from memkv.sdk.local import LocalSender

    with open_keys(target.config()) as opened:
        yield Keys(LocalSender(cast("Memory", SimpleNamespace(keys=opened))))


def _show(key: AccessKey, out: Output, secret: str = "") -> None:
    out.fields(
        key,
        [
            ("id", key.id),
            ("name", key.name),
            ("scope", key.scope),
            ("collections", _collections(key)),
            ("status", key.status),
            ("expires", _expiry(key)),
            ("secret", secret or f"{key.prefix}..."),
        ],
    )
    if secret:
        out.note("the secret is not shown again; clients take it from MEMKV_API_KEY")
    for note in key.notes:
        out.note(note)


def _collections(key: AccessKey) -> str:
    return "all" if key.collections is None else ", ".join(key.collections)


def _expiry(key: AccessKey) -> str:
    return key.expires_at or "never"
