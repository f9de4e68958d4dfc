"""`memkv ingest`."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import rich_click as click

from memkv.cli.estimate import tell_estimate
from memkv.cli.output import Output, counted, output_options
from memkv.cli.progress import Bar, bar
from memkv.cli.retrieval import parse_pairs
from memkv.cli.target import Target, target_options
from memkv.errors import (
    BadRequestError,
    CollectionNotFound,
    MemKVError,
    NotFoundError,
    PayloadTooLargeError,
    UnprocessableDocumentError,
    UnsupportedMediaTypeError,
)

if TYPE_CHECKING:
    from memkv.sdk import MemKV
    from memkv.wire import Accepted, AcceptedDocument, DocumentUpload, Job, Metadata

_GLOBS = ("**/*.txt", "**/*.text", "**/*.md", "**/*.markdown")
_BATCH_FILES = 64  # sent together; small enough that a bad file costs little, large enough to fill a batch
_BATCH_BYTES = 4_000_000
_ABOUT_A_DOCUMENT = (
    BadRequestError,
    PayloadTooLargeError,
    UnprocessableDocumentError,
    UnsupportedMediaTypeError,
)


@dataclass(frozen=True, slots=True)
class FileResult:
    """What became of one file.

    Attributes:
        outcome: created, updated, unchanged, queued (with --no-wait) or failed.
    """

    external_id: str
    outcome: str
    document_id: str = ""
    error: str = ""
    hint: str = ""


@click.command()
@click.argument("paths", nargs=-1, required=True, metavar="PATH...")
@click.option(
    "-c", "--collection", required=True, metavar="NAME", help="Collection; made where it is missing."
)
@click.option(
    "--glob",
    "globs",
    multiple=True,
    metavar="PATTERN",
    help="Files of a directory.  [default: text and Markdown]",
)
@click.option("--external-id", metavar="ID", help="Instead of the path; for one file or for `-`.")
@click.option("--meta", multiple=True, metavar="KEY=VALUE", help="Metadata of every document.")
@click.option(
    "--wait/--no-wait", default=True, help="Wait until the documents can be asked.  [default: wait]"
)
@click.option("--dry-run", is_flag=True, help="Only say what it would cost; exit code 1 if it does not fit.")
@target_options
@output_options
@click.pass_context
def ingest(
    ctx: click.Context,
    paths: tuple[str, ...],
    collection: str,
    globs: tuple[str, ...],
    external_id: str | None,
    meta: tuple[str, ...],
    wait: bool,
    dry_run: bool,
    target: Target,
    out: Output,
) -> None:
    """Ingest files, directories or, as `-`, standard input. A document's external id is its path as given.

    An unchanged document costs nothing; a changed one replaces what it was.
    """
    names, results = _find(paths, globs or _GLOBS)
    if external_id is not None and len(names) + len(results) != 1:
        raise click.UsageError("--external-id names one document; give one PATH")
    metadata = parse_pairs(meta, "--meta")
    names, refused = _readable(names)
    results += refused
    if dry_run:
        with target.open(out) as client:
            batches = list(_batches(names, external_id, metadata, results))
            fits = tell_estimate([client.documents.estimate(collection, batch) for batch in batches], out)
        _tell_failures(results)
        ctx.exit(1 if not fits else 3 if results else 0)
    if names:
        with target.open(out) as client:
            _require_collection(client, collection, out)
            with bar(out, "ingesting") as progress:
                run = _Run(client, collection, wait, progress, len(names))
                for batch in _batches(names, external_id, metadata, results):
                    results += run.send(batch)
    _report(results, out)
    if not target.url and any(result.outcome == "queued" for result in results):
        out.note(
            "kept, but nothing works on it now: memkv serve goes on with it, and so does the next command "
            "that loads the models"
        )
    failed = sum(result.outcome == "failed" for result in results)
    ctx.exit(0 if not failed else 1 if failed == len(results) else 3)


class _Run:
    """Sends batches of documents and follows their jobs."""

    def __init__(self, client: MemKV, collection: str, wait: bool, progress: Bar, total: int) -> None:
        self._client = client
        self._collection = collection
        self._wait = wait
        self._progress = progress
        self._total = total
        self._done = 0

    def send(self, batch: Sequence[DocumentUpload]) -> list[FileResult]:
        """The result of each document. A batch that is refused is sent again one by one."""
        try:
            results = self._follow(self._client.documents.upload(self._collection, batch))
        except _ABOUT_A_DOCUMENT as error:
            if len(batch) > 1:
                return [result for document in batch for result in self.send([document])]
            results = [_failed(batch[0].external_id or "", error)]
        self._done += len(batch)
        self._progress(self._done, self._total, f"ingesting, {self._done} of {counted(self._total, 'file')}")
        return results

    def _follow(self, accepted: Accepted) -> list[FileResult]:
        job = accepted.job
        if self._wait and job is not None:
            job = self._client.jobs.wait(job, on_progress=self._progress.job)
        return [
            FileResult(document.external_id, document.outcome, document.id)
            if document.status == "ready"
            else self._look(document, job)
            for document in accepted.documents
        ]

    def _look(self, accepted: AcceptedDocument, job: Job | None) -> FileResult:
        """What became of a document that was not ready when it was accepted."""
        name, document_id = accepted.external_id, accepted.id
        if not self._wait:
            return FileResult(name, "queued", document_id)
        try:
            document = self._client.documents.retrieve(self._collection, document_id)
        except NotFoundError:
            return FileResult(name, "failed", document_id, error="deleted meanwhile", hint="ingest it again")
        if document.status == "ready":
            return FileResult(name, accepted.outcome, document_id)
        problem = document.error or next(iter(job.errors if job else []), None)
        return FileResult(
            name,
            "failed",
            document_id,
            error=problem.detail if problem else f"its job ended as {job.status if job else 'unknown'}",
            hint=problem.hint if problem else "memkv jobs list",
        )


def _require_collection(client: MemKV, name: str, out: Output) -> None:
    """Makes the collection where it is missing; one that exists is used with whatever settings it has."""
    try:
        client.collections.retrieve(name)
    except CollectionNotFound:
        client.collections.create(name)
        out.note(f"made collection {name}")


def _find(paths: Sequence[str], globs: Sequence[str]) -> tuple[list[str], list[FileResult]]:
    """The files behind the paths, in order and once each; and a failure for each path without any."""
    found: dict[str, None] = {}
    failures: list[FileResult] = []
    for given in paths:
        path = Path(given)
        if given == "-" or path.is_file():
            found[given] = None
        elif path.is_dir():
            inside = sorted({str(file) for glob in globs for file in path.glob(glob) if file.is_file()})
            found.update(dict.fromkeys(inside))
            if not inside:
                hint = "name others with --glob PATTERN"
                failures.append(
                    FileResult(given, "failed", error=f"no file matches {', '.join(globs)}", hint=hint)
                )
        else:
            failures.append(FileResult(given, "failed", error="no such file", hint="check the path"))
    return list(found), failures


def _readable(names: Sequence[str]) -> tuple[list[str], list[FileResult]]:
    """The files that are text, and why the others are not: said before any model is loaded."""
    from memkv.text.reader import read_text

    kept: list[str] = []
    refused: list[FileResult] = []
    for name in names:
        try:
            if name != "-":
                read_text(Path(name).read_bytes(), Path(name).name, max_bytes=sys.maxsize)
            kept.append(name)
        except OSError as error:
            refused.append(_unreadable(name, error))
        except MemKVError as error:
            refused.append(_failed(name, error))
    return kept, refused


def _batches(
    names: Sequence[str], external_id: str | None, metadata: Metadata, results: list[FileResult]
) -> Iterator[list[DocumentUpload]]:
    """The files' documents, several at a time. A file that cannot be read is added to `results`."""
    from memkv.wire import DocumentUpload

    batch: list[DocumentUpload] = []
    size = 0
    for name in names:
        try:
            data = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
        except OSError as error:
            results.append(_unreadable(name, error))
            continue
        if batch and (len(batch) == _BATCH_FILES or size + len(data) > _BATCH_BYTES):
            yield batch
            batch, size = [], 0
        key = external_id or ("stdin" if name == "-" else name)
        filename = "stdin.txt" if name == "-" else Path(name).name
        batch.append(DocumentUpload(data=data, filename=filename, external_id=key, metadata=metadata))
        size += len(data)
    if batch:
        yield batch


def _unreadable(name: str, error: OSError) -> FileResult:
    return FileResult(name, "failed", error=error.strerror or str(error), hint="check its rights")


def _failed(external_id: str, error: MemKVError) -> FileResult:
    return FileResult(external_id, "failed", error=error.detail, hint=error.hint)


def _tell_failures(results: Sequence[FileResult]) -> None:
    for result in results:
        if result.outcome == "failed":
            click.echo(
                f"{click.style('error:', fg='red', bold=True)} {result.external_id}: {result.error}", err=True
            )
            if result.hint:
                click.echo(f"{click.style('hint:', bold=True)} {result.hint}", err=True)


def _report(results: Sequence[FileResult], out: Output) -> None:
    _tell_failures(results)
    if out.is_json:
        out.json([asdict(result) for result in results])
        return
    if not out.quiet:
        out.rows(results, ("outcome", "document"), [(r.outcome, r.external_id) for r in results])
    counts = {
        outcome: sum(r.outcome == outcome for r in results)
        for outcome in sorted({r.outcome for r in results})
    }
    out.note(", ".join(f"{count} {outcome}" for outcome, count in counts.items()))
