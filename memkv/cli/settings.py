"""What each configuration key means, what is possible, and the file that `memkv init` writes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING

from memkv.errors import BadRequestError, ConfigError

if TYPE_CHECKING:
    from memkv.config import Config

MEANING = {
    "server.host": "address to listen on",
    "server.port": "port to listen on",
    "server.insecure": "answer other machines although there is no access key: nothing checks who asks",
    "server.max_body_bytes": "largest request body",
    "server.drain_seconds": "how long SIGTERM waits for running requests",
    "server.threads": "requests that may wait for the store or the engine at the same time",
    "server.queue_seconds": "how long a request may wait for one of these threads before it gets 503",
    "store.data_dir": "block files, vector indexes and, unless told otherwise, the database",
    "store.database_url": "PostgreSQL or SQLite; empty: SQLite in the data directory",
    "store.busy_seconds": "how long a locked database is waited for",
    "store.max_kv_bytes": "of all block files; 0: as much as the disk holds",
    "store.max_tenant_kv_bytes": "of each tenant's block files; 0: no cap",
    "store.scrub_hours": "every block file is read and checked once in so many hours; 0: never by itself",
    "store.scrub_rate_bytes": "bytes a second, at most, that are read for that",
    "model.model": "language model: a directory, an installed name or a hub name",
    "model.embedder": "embedder: a directory, an installed name or a hub name",
    "model.models_dir": "where installed models lie; empty: ~/.cache/memkv/models",
    "model.device": "auto, cpu, cuda or cuda:N; several with commas between them serve side by side",
    "model.dtype": "of weights and compute; auto: float32 on a CPU, bfloat16 on a GPU",
    "kv.dtype": "of stored keys and values: bfloat16 or float32",
    "kv.block_size": "tokens in a block: 8, 16 or 32",
    "engine.pool_bytes": "memory for blocks; 0: most of what a GPU has left beside the model, 2 GB on a CPU",
    "engine.host_bytes": "pinned host memory for chunks that a GPU's pool has no room for, for each GPU; "
    "torch takes the next power of two; 0: as engine.host_share says",
    "engine.host_share": "part of the machine's free memory, up to 16 GiB, taken for the chunks of its GPUs "
    "where engine.host_bytes is 0, on a CPU none; a single command on a data directory takes it only "
    "where it is set",
    "engine.max_batch_tokens": "fresh tokens in one step",
    "engine.max_running": "sequences that generate at the same time",
    "engine.queue_seconds": "how long a request may wait for blocks",
    "engine.threads": "CPU threads; 0: measured at start",
    "engine.compile": "compile the model's layers by torch, on a GPU, in half a minute at the first start; "
    "a single command on a data directory does so only where it is set",
    "engine.continuation_share": "part of the pool that ended exact answers may keep for later ones; 0: none",
    "engine.warm_share": "part of pool and host memory filled at start with what was mapped most, "
    "and by warming; 0: none",
    "ingest.chunk_tokens": "largest chunk",
    "ingest.prefill": "when chunks are prefilled and kept: eager, on_first_use or after_N_uses",
    "ingest.batch_chunks": "chunks prefilled and published together",
    "ingest.max_document_bytes": "largest document",
    "query.policy": "auto, exact, order, map, head:N, neighbours:N, select:R, mass:P",
    "query.top_k": "chunks retrieved for a question",
    "query.min_score": "least similarity of a retrieved chunk",
    "query.max_tokens": "longest answer",
    "query.gate_dnll": "what a policy may cost to be taken by auto: nats a token, against a full prefill",
    "query.gate_questions": "questions that a policy must have been measured on, of each kind of tasks",
    "log.level": "debug, info, warning or error",
    "log.format": "auto, console or json",
}


def require_possible(config: Config) -> Config:
    """The same configuration, if the engine knows what it names.

    Raises:
        ConfigError: there is no such policy.
    """
    from memkv.engine.reuse import parse_policy

    try:
        if config.query.policy != "auto":
            parse_policy(config.query.policy)
    except BadRequestError as error:
        raise ConfigError(
            f"query.policy = {config.query.policy!r} ({config.origin('query.policy')}) is not possible",
            hint=f"auto, {error.hint}",
        ) from error
    return config


def variable_of(key: str) -> str:
    """The environment variable that sets `section.key`: the short name where there is one."""
    from memkv.config import SHORT_NAMES

    short = {known: name for name, known in SHORT_NAMES.items()}
    return short.get(key, "MEMKV_" + key.upper().replace(".", "__"))


def file_text(chosen: Mapping[str, object]) -> str:
    """A `memkv.toml` with every key: the chosen ones set, the others commented out at their defaults."""
    from memkv.config import Config

    lines = [
        "# memkv's configuration. A flag wins over a MEMKV_* variable, a variable over this file.",
        "# Every key is listed; those behind a # stand at their default.",
    ]
    section = ""
    for key, default, _ in Config().items():
        if key.partition(".")[0] != section:
            section = key.partition(".")[0]
            lines += ["", f"[{section}]"]
        setting = f"{key.partition('.')[2]} = {_toml(chosen.get(key, default))}"
        lines.append(f"{'' if key in chosen else '# '}{setting}  # {MEANING[key]}")
    return "\n".join(lines) + "\n"


def _toml(value: object) -> str:
    """A bool, number or string as TOML, whose scalars of these kinds are JSON's."""
    return json.dumps(value)
