"""`memkv query`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import rich_click as click

from memkv.cli.output import Output, counted, output_options, printable
from memkv.cli.retrieval import Retrieval, retrieval_options
from memkv.cli.target import Target, target_options

if TYPE_CHECKING:
    from memkv.sdk import AnswerStream
    from memkv.wire import CitationSource, QueryResponse


@click.command()
@click.argument("question")
@retrieval_options
@click.option(
    "--policy",
    metavar="NAME",
    help="What to compute afresh: auto, exact, order, map, head:N, neighbours:N, select:R, mass:P.",
)
@click.option(
    "--reuse",
    type=click.Choice(["auto", "off", "strict"]),
    default="auto",
    show_default=True,
    help="off: compute everything; strict: fail rather than compute what should have been stored.",
)
@click.option("--stream/--no-stream", default=False, help="Print tokens as they come.")
@click.option("--max-tokens", type=click.IntRange(min=1), help="Longest answer.  [default: 128]")
@click.option("--temperature", type=click.FloatRange(0, 2), default=0.0, help="0: the likeliest token.")
@click.option("--seed", type=click.IntRange(min=0), help="Of sampling.")
@target_options
@output_options
def query(
    question: str,
    retrieval: Retrieval,
    policy: str | None,
    reuse: Literal["auto", "off", "strict"],
    stream: bool,
    max_tokens: int | None,
    temperature: float,
    seed: int | None,
    target: Target,
    out: Output,
) -> None:
    """Answer QUESTION from a collection, with citations."""
    from memkv.wire import QueryResponse

    with target.open(out) as client:
        ask = client.query_stream if stream and not out.is_json else client.query
        answer = ask(
            question,
            collection=retrieval.collection,
            top_k=retrieval.top_k,
            filter=retrieval.filter,
            min_score=retrieval.min_score,
            policy=policy,
            reuse=reuse,
            max_tokens=max_tokens,
            temperature=temperature,
            seed=seed,
        )
        if isinstance(answer, QueryResponse):
            response = answer
            if not out.is_json:
                click.echo(printable(response.answer))
        else:
            response = _print_stream(answer)
    if out.is_json:
        out.json(response)
    elif not out.quiet:
        tell(response)
        if response.reuse.fallback_reason:
            out.note(f"note: {response.reuse.fallback_reason}")


def tell(response: QueryResponse) -> None:
    """The citations with their quotes, and what was reused."""
    lines = source_lines(response)
    if lines:
        click.echo()
    for line in lines:
        click.echo(line)
    click.echo(f"\n{usage_line(response)}")


def source_lines(response: QueryResponse) -> list[str]:
    """`[1] document: "quote"` for each source of the answer, once."""
    texts = {chunk.chunk_id: chunk.text for chunk in response.chunks}
    sources = [
        _source_text(source, texts.get(source.chunk_id, ""))
        for citation in response.citations
        for source in citation.sources
    ]
    return [f"[{number}] {text}" for number, text in enumerate(dict.fromkeys(sources), 1)]


def usage_line(response: QueryResponse) -> str:
    """Tokens by what became of them, the policy and the time to the first token, in one line."""
    usage, reuse, timings = response.usage, response.reuse, response.timings
    parts = [
        counted(usage.prompt_tokens, "prompt token"),
        f"{usage.cached_tokens} cached",
        f"{usage.prefilled_tokens} prefilled",
        f"reuse {reuse.mode}, policy {reuse.policy}",
        f"first token {timings.ttft_ms:.0f} ms",
        f"{counted(usage.completion_tokens, 'token')} in {timings.total_ms / 1000:.1f} s",
    ]
    if reuse.healed_chunks:
        parts.append(f"{counted(reuse.healed_chunks, 'chunk')} healed")
    return " · ".join(parts)


def _source_text(source: CitationSource, chunk_text: str) -> str:
    quote = " ".join(printable(chunk_text[source.quote.start : source.quote.end]).split())
    name = source.external_id or source.title or source.document_id
    return f'{click.style(printable(name), bold=True)}: "{quote}"'


def _print_stream(stream: AnswerStream) -> QueryResponse:
    """Prints the answer as it comes and returns the whole response."""
    from memkv.wire import OutputDelta

    with stream:
        for event in stream:
            if isinstance(event, OutputDelta):
                click.echo(printable(event.text), nl=False)
        click.echo()
        return stream.response
