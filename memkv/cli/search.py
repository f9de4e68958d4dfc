"""`memkv search`."""

from __future__ import annotations

import rich_click as click

from memkv.cli.output import Output, counted, output_options, printable
from memkv.cli.retrieval import Retrieval, retrieval_options
from memkv.cli.target import Target, target_options

_SHOWN = 300  # characters of a chunk


@click.command()
@click.argument("query")
@retrieval_options
@target_options
@output_options
def search(query: str, retrieval: Retrieval, target: Target, out: Output) -> None:
    """Find the chunks nearest to QUERY, without asking the model."""
    with target.open(out) as client:
        found = client.search(
            query,
            collection=retrieval.collection,
            top_k=retrieval.top_k,
            filter=retrieval.filter,
            min_score=retrieval.min_score,
        )
    if out.is_json:
        out.json(found)
        return
    for chunk in found.data:
        name = chunk.external_id or chunk.title
        where = f"characters {chunk.start} to {chunk.end}, {counted(chunk.tokens, 'token')}"
        click.echo(f"{chunk.score:.3f}  {click.style(printable(name), bold=True)}  {where}")
        text = " ".join(printable(chunk.text).split())
        click.echo(f"       {text[:_SHOWN]}{'...' if len(text) > _SHOWN else ''}\n")
    out.note(f"{counted(len(found.data), 'chunk')} in {found.retrieve_ms:.0f} ms")
