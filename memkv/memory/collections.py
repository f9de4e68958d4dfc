"""A collection made ready for use: its prompt, its fingerprint checked, its way to stored KV."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import structlog

from memkv.admission import uses_to_keep
from memkv.engine.residency import ChunkRef
from memkv.errors import (
    BadRequestError,
    ConflictError,
    FingerprintMismatch,
    InsufficientStorageError,
    ServiceUnavailableError,
)
from memkv.kv.chunk import ChunkKV
from memkv.kv.fingerprint import Fingerprint, input_key, token_digest
from memkv.kv.layout import KVLayout
from memkv.memory.parts import Parts
from memkv.model.loader import LoadedModel
from memkv.store import Store
from memkv.store.chunk_store import PublishItem
from memkv.store.rows import CollectionRow, NewCollection
from memkv.text.primer import primer_ids
from memkv.text.prompt import SYSTEM_PROMPT, PromptTemplate, PromptTokenizer
from memkv.wire import CollectionCreate

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class OpenCollection:
    """`kv` reads and writes the collection's stored KV for the engine."""

    row: CollectionRow
    template: PromptTemplate
    layout: KVLayout
    prefix: ChunkRef
    kv: StoredKV
    secret: bytes  # of the tenant

    def key(self, token_ids: Sequence[int]) -> str:
        """The input key of a chunk of these tokens."""
        return input_key(self.secret, self.row.fingerprint_digest, self.row.prefix_ids, token_ids)

    def ref(self, key: str, token_ids: Sequence[int]) -> ChunkRef:
        return ChunkRef(key, self.prefix.token_ids, tuple(token_ids))


class StoredKV:
    """The engine's `KVSource` over the chunk store, for one collection. Safe from any thread."""

    def __init__(self, store: Store, row: CollectionRow, layout: KVLayout) -> None:
        self._chunks = store.chunks
        self._uses = store.uses
        self._row = row
        self._layout = layout

    def read(self, ref: ChunkRef) -> ChunkKV | None:
        return self._chunks.load(
            ref.input_key,
            tenant=self._row.tenant,
            fingerprint_digest=self._row.fingerprint_digest,
            layout=self._layout,
            context_ids=ref.context_ids,
            token_ids=ref.token_ids,
        )

    def write(self, ref: ChunkRef, kv: ChunkKV) -> None:
        """Keeps KV that was computed for a question, unless its text was forgotten meanwhile or too few
        questions needed it. Where disk, cap or database refuse it, the next query prefills again.
        """
        row = self._row
        wanted = 0 if ref.input_key == row.prefix_key else uses_to_keep(row.prefill)
        try:
            if wanted and self._uses.count(row.tenant, ref.input_key) < wanted:
                return
            self.publish([(ref, kv)])
            self._chunks.release_unused(self._row.tenant, [ref.input_key])
        except (InsufficientStorageError, ServiceUnavailableError) as error:
            _log.warning("kv_not_kept", input_key=ref.input_key, detail=error.detail)

    def publish(self, items: Sequence[tuple[ChunkRef, ChunkKV]]) -> None:
        """Makes chunks' KV durable. Raises `InsufficientStorageError`, `ServiceUnavailableError`."""
        row = self._row
        self._chunks.publish(
            [
                PublishItem(
                    input_key=ref.input_key,
                    fingerprint_digest=row.fingerprint_digest,
                    context_ids=ref.context_ids,
                    token_ids=ref.token_ids,
                    kv=kv,
                    tenant=row.tenant,
                    collection_id=row.id,
                )
                for ref, kv in items
            ]
        )


class Collections:
    """Opens collections and remembers them by id."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._lock = threading.Lock()
        self._open: dict[str, OpenCollection] = {}

    def template(self, system_prompt: str, primer: bool) -> PromptTemplate:
        """The prompt of a collection; an empty system prompt means the default one."""
        return template_of(self._parts.tokenizer, system_prompt, primer)

    def layout(self, block_size: int) -> KVLayout:
        spec = self._parts.model.spec
        return KVLayout(
            num_layers=spec.num_layers,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            block_size=block_size,
            dtype=self._parts.config.kv.dtype,
        )

    def fingerprint(self, layout: KVLayout, prefix_ids: Sequence[int]) -> Fingerprint:
        return fingerprint_of(self._parts.model, layout, prefix_ids)

    def new(self, request: CollectionCreate) -> NewCollection:
        """The row of a collection for the model at hand. Raises `BadRequestError`, `LayoutError`."""
        config, parts = self._parts.config, self._parts
        template = self.template(request.system_prompt or "", request.primer)
        layout = self.layout(request.block_size or config.kv.block_size)
        fingerprint = self.fingerprint(layout, template.prefix_ids)
        chunk_tokens = request.chunk_tokens or config.ingest.chunk_tokens
        room = parts.model.spec.max_context - len(template.prefix_ids)
        if chunk_tokens >= room:
            raise BadRequestError(
                f"a prefix of {len(template.prefix_ids)} tokens and chunks of {chunk_tokens} exceed the "
                f"model's context of {parts.model.spec.max_context}",
                hint="shorten the system prompt or lower chunk_tokens",
            )
        return NewCollection(
            name=request.name,
            fingerprint_digest=fingerprint.digest,
            fingerprint_json=fingerprint.canonical_json(),
            embedder_name=parts.embedder.name,
            embedder_digest=parts.embedder.digest,
            dim=parts.embedder.dim,
            max_chunk_tokens=chunk_tokens,
            block_size=layout.block_size,
            prefill=request.prefill or config.ingest.prefill,
            system_prompt=request.system_prompt or "",
            prefix_ids=tuple(template.prefix_ids),
            primer=request.primer,
            description=request.description,
            metadata=request.metadata,
            model_name=parts.model.name,
            max_kv_bytes=request.max_kv_bytes,
        )

    def by_name(self, tenant: str, name: str) -> OpenCollection:
        """Raises `CollectionNotFound`, `FingerprintMismatch`."""
        return self.open(self._parts.store.catalog.get_collection(tenant, name))

    def open(self, row: CollectionRow) -> OpenCollection:
        """Raises `FingerprintMismatch` where the collection's KV is not this process's."""
        with self._lock:
            known = self._open.get(row.id)
        if known is not None:
            return known
        opened = self._build(row)
        with self._lock:
            self._open[row.id] = opened
        return opened

    def forget(self, collection_id: str) -> None:
        with self._lock:
            self._open.pop(collection_id, None)

    def is_stale(self, row: CollectionRow) -> bool:
        """Whether it was made with another model, embedder or setting than this process has."""
        with self._lock:
            known = self._open.get(row.id)
        if known is not None and known.row.fingerprint_digest == row.fingerprint_digest:
            return False
        return self._why_stale(row) != ""

    def _build(self, row: CollectionRow) -> OpenCollection:
        why = self._why_stale(row)
        if why:
            raise FingerprintMismatch(
                f"collection {row.name!r} was made with another {why}",
                hint="start memkv with the model and settings that made it, or make it anew for these: "
                f"memkv store reprefill {row.name}",
            )
        template = self.template(row.system_prompt, row.primer)
        layout = self.layout(row.block_size)
        kv = StoredKV(self._parts.store, row, layout)
        prefix = ChunkRef(row.prefix_key, (), tuple(row.prefix_ids))
        secret = self._parts.store.catalog.tenant_secret(row.tenant)
        return OpenCollection(row, template, layout, prefix, kv, secret)

    def _why_stale(self, row: CollectionRow) -> str:
        """What differs; empty where nothing does."""
        template = self.template(row.system_prompt, row.primer)
        here = self.fingerprint(self.layout(row.block_size), template.prefix_ids)
        if here.digest != row.fingerprint_digest:
            return ", ".join(here.differences(Fingerprint.from_json(row.fingerprint_json)))
        return "" if row.embedder_digest == self._parts.embedder.digest else f"embedder: {row.embedder_name}"


def require_same_settings(row: CollectionRow, new: NewCollection) -> None:
    """Raises `ConflictError` where an existing collection is not the one asked for."""
    names = (
        "system_prompt",
        "primer",
        "fingerprint_digest",
        "embedder_digest",
        "max_chunk_tokens",
        "prefill",
        "max_kv_bytes",
        "description",
    )
    different = [name for name in names if getattr(row, name) != getattr(new, name)]
    if dict(row.metadata) != dict(new.metadata):
        different.append("metadata")
    if different:
        raise ConflictError(
            f"collection {row.name!r} exists with another {', '.join(different)}",
            hint="ask for it by name alone, or choose another name",
        )


def template_of(tokenizer: PromptTokenizer, system_prompt: str = "", primer: bool = False) -> PromptTemplate:
    """Of a collection with these settings."""
    template = PromptTemplate.from_tokenizer(tokenizer, system_prompt or SYSTEM_PROMPT)
    return template.with_primer(primer_ids(tokenizer)) if primer else template


def fingerprint_of(model: LoadedModel, layout: KVLayout, prefix_ids: Sequence[int]) -> Fingerprint:
    """Everything that KV made by this model, in this layout, behind this prefix depends on."""
    spec = model.spec
    layers = [{"kind": layer.kind, "window": layer.window, "softcap": layer.softcap} for layer in spec.layers]
    return Fingerprint(
        weights_digest=model.weights_digest,
        tokenizer_digest=model.tokenizer_digest,
        architecture=spec.architecture,
        rope=spec.rope_description,
        layers=json.dumps(layers, sort_keys=True, separators=(",", ":")),
        kv_dtype=layout.dtype,
        compute_dtype=model.dtype,
        prefix_digest=token_digest((), prefix_ids).hex(),
        **{name: value for name, value in asdict(layout).items() if name != "dtype"},
    )
