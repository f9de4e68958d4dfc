"""Vectors that come with an archive's texts, so that a big one is not embedded all over again.

They are taken where the archive names the very embedder that runs here, for texts that are cut here as they
were there. Each must be finite and of length one; of every batch one, chosen by chance, is computed here and
compared, and after one that differs none is taken any more.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import IO

import msgspec
import numpy as np
from numpy.typing import NDArray

from memkv.errors import BadRequestError
from memkv.memory.transfer import ArchivedDocument, vectors_member
from memkv.store.archive import ArchiveReader
from memkv.text.embedder import Embedder

_VECTOR_TYPE = np.dtype("<f4")
_UNIT = 1e-3  # how far a length may be from one
_SAME = 0.999  # cosine of the same text's vectors on two machines, at least

Vectors = dict[str, NDArray[np.float32]]  # by the chunk's text


class ArchivedVectors:
    """Of one collection, in the order of its documents. Raises BadRequestError where some are missing."""

    def __init__(self, archive: ArchiveReader, number: int, embedder: Embedder) -> None:
        self._embedder = embedder
        self._source: IO[bytes] | None = None
        if _embedder_of(archive, number) == embedder.digest:
            self._source = archive.open(vectors_member(number))

    def take(self, documents: Sequence[ArchivedDocument]) -> Vectors:
        """The vectors of the next documents' chunks."""
        if self._source is None:
            return {}
        found: Vectors = {}
        for document in documents:
            rows = self._rows(len(document.chunks))
            for (start, end), row in zip(document.chunks, rows, strict=True):
                if abs(float(np.linalg.norm(row)) - 1.0) < _UNIT:  # and so it is finite
                    found[document.text[start:end]] = row
        if found and not self._is_the_embedders(random.choice(list(found)), found):
            self._source = None
            return {}
        return found

    def _rows(self, count: int) -> NDArray[np.float32]:
        assert self._source is not None, "bug: there are none"
        size = count * self._embedder.dim * _VECTOR_TYPE.itemsize
        data = self._source.read(size)
        if len(data) != size:
            raise BadRequestError(
                "the archive is refused: it has fewer vectors than chunks",
                hint="export it again: memkv store export FILE",
            )
        rows = np.frombuffer(data, dtype=_VECTOR_TYPE).astype(np.float32, copy=False)
        return rows.reshape(count, self._embedder.dim)

    def _is_the_embedders(self, text: str, vectors: Vectors) -> bool:
        return float(self._embedder.embed([text])[0] @ vectors[text]) > _SAME


def _embedder_of(archive: ArchiveReader, number: int) -> str:
    """The digest of the embedder that a collection's vectors are from; empty where there are none."""
    try:
        digests = msgspec.convert(archive.manifest.get("embedders", []), list[str])
    except msgspec.ValidationError as error:
        raise BadRequestError(
            f"the archive is refused: {error}", hint="export it again: memkv store export FILE"
        ) from error
    return digests[number] if number < len(digests) else ""
