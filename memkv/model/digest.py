"""Digests of a model's weights and of its tokenizer: what makes stored KV valid or not.

The weights' bytes are hashed with xxh3-128 (faster than any disk), file by file in parallel, and
each file's hash is kept by (device, inode, size, mtime, ctime), so that a start reads no weights twice. What
the config says about the computation is hashed with them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import xxhash
from transformers import PreTrainedTokenizerBase

from memkv.errors import ModelDamaged

_PIECE = 1 << 20  # stays in a core's cache between the read and the hash
_MOST_KEPT = 4096
# A file changed this lately could change again within the resolution of its timestamps.
_SETTLED_NS = 2_000_000_000

# Of a config, what cannot change keys or values. Everything else is hashed, known to us or not.
_IRRELEVANT = frozenset(
    {
        *("_name_or_path", "architectures", "auto_map", "transformers_version", "dtype", "torch_dtype"),
        *("use_cache", "output_attentions", "output_hidden_states", "return_dict", "initializer_range"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "id2label", "label2id", "problem_type"),
        *("attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "chunk_size_feed_forward"),
    }
)


def weights_digest(directory: Path, files: Sequence[str], cache: Path | None = None) -> str:
    """64 hex digits over the content of the weight files and the config's relevant fields.

    Args:
        directory: holds config.json and the files.
        files: names of the safetensors files that are loaded.
        cache: JSON file of known hashes; None is `default_cache()`. A damaged or unwritable one is no error.

    Raises:
        ModelDamaged: a file is missing, unreadable, or changes while it is read.
    """
    known = _Cache(cache or default_cache())
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        hashes = list(pool.map(lambda name: _file_hash(directory / name, known), sorted(files)))
    known.save()
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    described = {
        "files": [[name, digest] for name, digest in zip(sorted(files), hashes, strict=True)],
        "config": {key: value for key, value in config.items() if key not in _IRRELEVANT},
    }
    return _blake2b(json.dumps(described, sort_keys=True, separators=(",", ":")).encode())


def tokenizer_digest(directory: Path, tokenizer: PreTrainedTokenizerBase) -> str:
    """64 hex digits over what makes ids of text: vocabulary and rules, special tokens, chat template."""
    rules = directory / "tokenizer.json"
    backend = rules.read_bytes() if rules.is_file() else tokenizer.backend_tokenizer.to_str().encode()
    described = {
        "rules": _blake2b(backend),
        "length": len(tokenizer),
        "special_tokens": {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
        "chat_template": tokenizer.chat_template,
    }
    return _blake2b(json.dumps(described, sort_keys=True, separators=(",", ":")).encode())


def default_cache() -> Path:
    """$XDG_CACHE_HOME/memkv/weight-hashes.json, or the same below ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "memkv" / "weight-hashes.json"


def _blake2b(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=32).hexdigest()


def _file_hash(path: Path, known: _Cache) -> str:
    try:
        with path.open("rb", buffering=0) as file:
            before = _identity(os.fstat(file.fileno()))
            found = known.get(before)
            if found is None:
                found = _content_hash(file.fileno())
                if _identity(os.fstat(file.fileno())) != before:
                    raise ModelDamaged(f"{path} changes while it is read", hint="wait until it is complete")
                known.put(before, found, settled=time.time_ns() - path.stat().st_mtime_ns > _SETTLED_NS)
            return found
    except OSError as error:
        raise ModelDamaged(f"cannot read {path}: {error.strerror}") from error


def _content_hash(descriptor: int) -> str:
    state = xxhash.xxh3_128()
    buffer = bytearray(_PIECE)
    view = memoryview(buffer)
    while count := os.readv(descriptor, [buffer]):
        state.update(view[:count])
    return state.hexdigest()


def _identity(stat: os.stat_result) -> str:
    return f"{stat.st_dev}:{stat.st_ino}:{stat.st_size}:{stat.st_mtime_ns}:{stat.st_ctime_ns}"


class _Cache:
    """Hashes by file identity. Only an aid: whatever is wrong with the file, hashes are computed again."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._hashes = self._read()
        self._new: dict[str, str] = {}

    def get(self, identity: str) -> str | None:
        return self._hashes.get(identity)

    def put(self, identity: str, digest: str, *, settled: bool) -> None:
        if settled:
            self._new[identity] = digest

    def save(self) -> None:
        """Adds the new hashes, atomically; what another process wrote meanwhile is kept."""
        if not self._new:
            return
        merged = {**self._read(), **self._new}
        latest = dict(list(merged.items())[-_MOST_KEPT:])
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(
                "w", dir=self._path.parent, prefix=f".{self._path.name}.", delete=False
            ) as file:
                json.dump(latest, file)
            os.replace(file.name, self._path)

    def _read(self) -> dict[str, str]:
        try:
            read: Any = json.loads(self._path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        if not isinstance(read, Mapping):
            return {}
        return {k: v for k, v in read.items() if isinstance(v, str) and len(v) == 32}
