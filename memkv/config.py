"""One frozen configuration, built once: flag > environment > file > default, each value with its origin.

A file is `memkv.toml` in the working directory, then `$XDG_CONFIG_HOME/memkv/config.toml`, then
`/etc/memkv/memkv.toml`: the first that exists. Variables are `MEMKV_<SECTION>__<KEY>`; the ones used daily
also have a short name (`MEMKV_PORT`), listed in `SHORT_NAMES`.
"""

from __future__ import annotations

import difflib
import math
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from memkv import admission
from memkv.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ServerConfig:
    host: str = "127.0.0.1"
    port: int = 8000
    insecure: bool = False  # allows an address other than loopback although there is no key
    max_body_bytes: int = 10_000_000
    drain_seconds: float = 30.0  # how long SIGTERM waits for running requests
    threads: int = 16  # requests that may wait for the store or the engine at the same time
    queue_seconds: float = 10.0  # how long a request may wait for one of these threads before it gets 503


@dataclass(frozen=True, slots=True)
class StoreConfig:
    data_dir: str = "memkv-data"
    database_url: str = ""  # empty: SQLite inside data_dir
    busy_seconds: float = 5.0  # bounded wait for a locked database
    max_kv_bytes: int = 0  # of block files; 0: as much as the disk holds
    max_tenant_kv_bytes: int = 0  # of each tenant's
    scrub_hours: float = 168.0  # every block file is read once in so many; 0: never by itself
    scrub_rate_bytes: int = 20_000_000  # read in a second, at most, for that


@dataclass(frozen=True, slots=True)
class ModelConfig:
    model: str = "smollm2-135m-instruct"  # a directory, an installed name or a hub name
    embedder: str = "all-minilm-l6-v2"
    models_dir: str = ""  # empty: $XDG_CACHE_HOME/memkv/models
    device: str = "auto"  # auto | cpu | cuda | cuda:N, or several with commas between them
    dtype: str = "auto"  # of weights and compute: auto is float32 on a CPU, bfloat16 on a GPU


@dataclass(frozen=True, slots=True)
class KVConfig:
    dtype: str = "bfloat16"
    block_size: int = 16


@dataclass(frozen=True, slots=True)
class EngineConfig:
    pool_bytes: int = 0  # 0: most of what a GPU has left, 2 GB on a CPU
    host_bytes: int = 0  # host memory for chunks that a GPU's pool has no room for; 0: as host_share says
    host_share: float = 0.25  # of the machine's free memory, up to 16 GiB, for the chunks of its GPUs
    max_batch_tokens: int = 4096  # fresh tokens in one step
    max_running: int = 64
    queue_seconds: float = 30.0  # how long a request may wait for blocks
    threads: int = 0  # 0: calibrated
    compile: bool = True  # on a GPU: the model's layers, by torch, in half a minute at the first start
    continuation_share: float = 0.25  # of the pool, at most, for what ended answers leave to later ones
    warm_share: float = 0.25  # of pool and host memory, for what was mapped most, when a memory is opened


@dataclass(frozen=True, slots=True)
class IngestConfig:
    chunk_tokens: int = 256
    prefill: str = "eager"  # eager | on_first_use | after_N_uses
    batch_chunks: int = 16  # prefilled and published together
    max_document_bytes: int = 10_000_000


@dataclass(frozen=True, slots=True)
class QueryConfig:
    policy: str = "auto"
    top_k: int = 4
    min_score: float = 0.0
    max_tokens: int = 128
    gate_dnll: float = 0.1
    gate_questions: int = 100


@dataclass(frozen=True, slots=True)
class LogConfig:
    level: str = "info"
    format: str = "auto"  # auto | console | json


SHORT_NAMES = {
    "MEMKV_HOST": "server.host",
    "MEMKV_PORT": "server.port",
    "MEMKV_DATA_DIR": "store.data_dir",
    "MEMKV_DATABASE_URL": "store.database_url",
    "MEMKV_MODEL": "model.model",
    "MEMKV_EMBEDDER": "model.embedder",
    "MEMKV_MODELS_DIR": "model.models_dir",
    "MEMKV_DEVICE": "model.device",
    "MEMKV_LOG_LEVEL": "log.level",
    "MEMKV_LOG_FORMAT": "log.format",
}

_NOT_OURS = {"MEMKV_URL", "MEMKV_API_KEY", "MEMKV_TIMEOUT", "MEMKV_CUDA"}  # the client's and the build's
_CHOICES = {
    "kv.dtype": ("bfloat16", "float32"),
    "kv.block_size": (8, 16, 32),
    "model.dtype": ("auto", "float32", "bfloat16"),
    "log.level": ("debug", "info", "warning", "error"),
    "log.format": ("auto", "console", "json"),
}
_AT_LEAST = {
    "server.port": 0,
    "server.max_body_bytes": 1,
    "server.drain_seconds": 0,
    "server.threads": 1,
    "server.queue_seconds": 0,
    "store.busy_seconds": 0,
    "store.max_kv_bytes": 0,
    "store.max_tenant_kv_bytes": 0,
    "store.scrub_hours": 0,
    "store.scrub_rate_bytes": 1,
    "engine.pool_bytes": 0,
    "engine.host_bytes": 0,
    "engine.host_share": 0,
    "engine.max_batch_tokens": 1,
    "engine.max_running": 1,
    "engine.queue_seconds": 0,
    "engine.threads": 0,
    "engine.continuation_share": 0,
    "engine.warm_share": 0,
    "ingest.chunk_tokens": 16,
    "ingest.batch_chunks": 1,
    "ingest.max_document_bytes": 1,
    "query.top_k": 1,
    "query.max_tokens": 1,
    "query.gate_questions": 1,
}
_AT_MOST = {"engine.host_share": 1, "engine.continuation_share": 1, "engine.warm_share": 1}
_FORMS = {  # how to write a value of a type; True: it is a size in bytes
    (bool, False): "true or false",
    (int, False): "a whole number, such as 4",
    (int, True): "bytes, such as 2000000000, 500M or 2GiB",
    (float, False): "a number, such as 0.5",
    (str, False): "a string, in quotes",
}
_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*(k|m|g|t)?(i?)b?\s*$", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Config:
    server: ServerConfig = field(default_factory=ServerConfig)
    store: StoreConfig = field(default_factory=StoreConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    kv: KVConfig = field(default_factory=KVConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    ingest: IngestConfig = field(default_factory=IngestConfig)
    query: QueryConfig = field(default_factory=QueryConfig)
    log: LogConfig = field(default_factory=LogConfig)
    origins: Mapping[str, str] = field(default_factory=dict)  # "server.port" -> "MEMKV_PORT"

    def origin(self, key: str) -> str:
        """Where the value of `section.key` came from."""
        return self.origins.get(key, "default")

    def items(self) -> list[tuple[str, object, str]]:
        """Every (section.key, value, origin)."""
        found: list[tuple[str, object, str]] = []
        for key in _keys():
            section, name = key.split(".")
            found.append((key, getattr(getattr(self, section), name), self.origin(key)))
        return found


def load_config(
    flags: Mapping[str, object] | None = None,
    *,
    env: Mapping[str, str] | None = None,
    file: Path | None = None,
) -> Config:
    """Builds the configuration.

    Args:
        flags: `section.key` -> value from the command line; None values are not set.
        env: the environment; `os.environ` by default.
        file: a configuration file; by default the first of the usual places that exists.

    Raises:
        ConfigError: for an unknown key (with the nearest known one) or a value out of range.
    """
    values: dict[str, tuple[object, str]] = {}
    path = file if file is not None else _find_file(env if env is not None else os.environ)
    if path is not None:
        values.update({key: (value, str(path)) for key, value in _read_file(path).items()})
    for name, text in (env if env is not None else os.environ).items():
        key = _key_of_variable(name)
        if key is not None:
            values[key] = (text, name)
    for key, value in (flags or {}).items():
        if value is not None:
            _require_known(key, "flag")
            values[key] = (value, "flag")
    return _build(values)


def _build(values: Mapping[str, tuple[object, str]]) -> Config:
    sections: dict[str, dict[str, Any]] = {}
    for key, (raw, origin) in values.items():
        section, name = key.split(".")
        sections.setdefault(section, {})[name] = _parse(key, raw, origin)
    changed: dict[str, Any] = {
        name: replace(getattr(Config(), name), **keys) for name, keys in sections.items()
    }
    return Config(**changed, origins={key: origin for key, (_, origin) in values.items()})


def _keys() -> dict[str, type]:
    """Every `section.key` with the type of its default."""
    default = Config()
    return {
        f"{section.name}.{key.name}": type(getattr(getattr(default, section.name), key.name))
        for section in fields(Config)
        if section.name != "origins"
        for key in fields(getattr(default, section.name))
    }


def _parse(key: str, raw: object, origin: str) -> object:
    kind = _keys()[key]
    try:
        value = _convert(kind, raw, is_size=key.endswith("_bytes"))
    except (ValueError, OverflowError) as error:
        raise ConfigError(
            f"{key} = {raw!r} ({origin}) is not a {kind.__name__}", hint=_FORMS[kind, key.endswith("_bytes")]
        ) from error
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{key} = {raw!r} ({origin}) is not possible", hint="a finite number")
    choices = _CHOICES.get(key)
    if choices is not None and value not in choices:
        raise ConfigError(
            f"{key} = {raw!r} ({origin}) is not possible", hint="one of " + ", ".join(map(str, choices))
        )
    if key == "ingest.prefill" and not admission.is_possible(str(value)):
        raise ConfigError(f"{key} = {raw!r} ({origin}) is not possible", hint=admission.CHOICES)
    least = _AT_LEAST.get(key)
    if least is not None and isinstance(value, int | float) and not value >= least:
        raise ConfigError(f"{key} = {raw!r} ({origin}) is too small", hint=f"at least {least}")
    most = _AT_MOST.get(key)
    if most is not None and isinstance(value, int | float) and not value <= most:
        raise ConfigError(f"{key} = {raw!r} ({origin}) is too large", hint=f"at most {most}")
    return value


def _convert(kind: type, raw: object, *, is_size: bool) -> object:
    if kind is bool:
        if isinstance(raw, bool):
            return raw
        word = str(raw).strip().lower()
        if word in ("1", "true", "yes", "on"):
            return True
        if word in ("0", "false", "no", "off"):
            return False
        raise ValueError(raw)
    if isinstance(raw, bool):
        raise ValueError(raw)
    if kind is int and is_size and isinstance(raw, str):
        return parse_size(raw)
    if kind is int:
        return int(raw) if isinstance(raw, int | str) else _refuse(raw)
    if kind is float:
        return float(raw) if isinstance(raw, int | float | str) else _refuse(raw)
    return raw if isinstance(raw, str) else _refuse(raw)


def _refuse(raw: object) -> object:
    raise ValueError(raw)


def parse_size(text: str) -> int:
    """`"10M"`, `"1.5 GiB"`, `"4096"` to bytes. Raises ValueError."""
    match = _SIZE.match(text)
    if match is None:
        raise ValueError(text)
    number, unit, binary = match.groups()
    power = " kmgt".index(unit.lower()) if unit else 0
    return int(float(number) * (1024 if binary else 1000) ** power)


def _find_file(env: Mapping[str, str]) -> Path | None:
    home = env.get("XDG_CONFIG_HOME") or str(Path(env.get("HOME", "~")).expanduser() / ".config")
    places = (Path("memkv.toml"), Path(home) / "memkv" / "config.toml", Path("/etc/memkv/memkv.toml"))
    return next((place for place in places if place.is_file()), None)


def _read_file(path: Path) -> dict[str, object]:
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"cannot read {path}: {error.strerror}", hint="name another file: --config FILE"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path} is not valid TOML: {error}", hint="memkv init --config FILE writes a valid one"
        ) from error
    found: dict[str, object] = {}
    for section, table in tree.items():
        if not isinstance(table, dict):
            raise ConfigError(
                f"{path}: {section!r} stands outside a section", hint="put it under a [section]"
            )
        for name, value in table.items():
            key = f"{section}.{name}"
            _require_known(key, str(path))
            found[key] = value
    return found


def _key_of_variable(name: str) -> str | None:
    if name in SHORT_NAMES:
        return SHORT_NAMES[name]
    if not name.startswith("MEMKV_") or name in _NOT_OURS:
        return None
    if "__" not in name:
        near = difflib.get_close_matches(name, SHORT_NAMES, n=1, cutoff=0.85)
        if near:
            raise ConfigError(f"{name} is not a variable of memkv", hint=f"did you mean {near[0]}?")
        return None
    key = name.removeprefix("MEMKV_").lower().replace("__", ".", 1)
    _require_known(key, name)
    return key


def _require_known(key: str, origin: str) -> None:
    known = _keys()
    if key not in known:
        near = difflib.get_close_matches(key, known, n=1)
        raise ConfigError(
            f"unknown configuration key {key} ({origin})",
            hint=f"did you mean {near[0]}?" if near else "memkv config show lists those that there are",
        )
