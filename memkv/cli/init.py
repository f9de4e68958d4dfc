"""`memkv init`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import rich_click as click

from memkv.cli.output import Output, bytes_text, output_options
from memkv.cli.settings import file_text
from memkv.errors import ConfigError, InsufficientStorageError

if TYPE_CHECKING:
    from memkv.config import Config

_LEAST_FREE = 500_000_000  # bytes; a model, a database and some twenty thousand tokens of KV
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@click.command()
@click.option("--data-dir", help="Where documents' blocks, indexes and the database go.")
@click.option("--model", help="Language model: a directory, an installed name or a hub name.")
@click.option("--embedder", help="Embedder: a directory, an installed name or a hub name.")
@click.option(
    "--config",
    "file",
    type=click.Path(path_type=Path, dir_okay=False),
    default=Path("memkv.toml"),
    show_default=True,
    help="Configuration file to write; an existing one is kept.",
)
@output_options
def init(data_dir: str | None, model: str | None, embedder: str | None, file: Path, out: Output) -> None:
    """Write memkv.toml, make the data directory and look at the disk."""
    from memkv.config import Config, load_config

    flags = {"store.data_dir": data_dir, "model.model": model, "model.embedder": embedder}
    chosen = {key: value for key, value in flags.items() if value is not None}
    written = _write(file, {"store.data_dir": Config().store.data_dir} | chosen)
    config = load_config(chosen, file=file)
    directory = Path(config.store.data_dir)
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise ConfigError(
            f"{directory} is not a directory", hint="give another one: memkv init --data-dir DIR"
        ) from error
    free = shutil.disk_usage(directory).free
    if free < _LEAST_FREE:
        raise InsufficientStorageError(
            f"only {bytes_text(free)} are free on the disk of {directory}",
            hint="free some space, or choose another disk: memkv init --data-dir DIR",
        )
    per_token = kv_bytes_per_token(config)
    result = {
        "config": str(file),
        "config_written": written,
        "data_dir": str(directory),
        "free_bytes": free,
        "model": config.model.model,
        "model_installed": per_token is not None,
        "kv_bytes_per_token": per_token,
    }
    out.fields(
        result,
        [
            ("configuration", f"{file} ({'written' if written else 'kept as it is'})"),
            ("data directory", f"{directory} ({bytes_text(free)} free)"),
            ("model", f"{config.model.model}{'' if per_token else ' (not installed)'}"),
            ("a token's KV", _room(per_token, free)),
        ],
    )
    if per_token is None:
        out.note(f"next: memkv models install {config.model.model} {config.model.embedder}")
    else:
        out.note("next: memkv ingest PATH... -c NAME")


def _write(file: Path, chosen: dict[str, str]) -> bool:
    """False where the file exists already: it is never overwritten."""
    text = file_text(chosen)
    try:
        with file.open("x", encoding="utf-8") as target:
            target.write(text)
    except FileExistsError:
        return False
    except OSError as error:
        raise ConfigError(
            f"cannot write {file}: {error.strerror}", hint="give a file you may write: --config FILE"
        ) from error
    return True


def _room(per_token: int | None, free: int) -> str:
    if per_token is None:
        return "known once the model is installed"
    return f"{per_token:,} B: the free disk holds {free // per_token:,} tokens"


def kv_bytes_per_token(config: Config) -> int | None:
    """Bytes that a token's keys and values take on disk; None where the model is not here."""
    root = Path(config.model.models_dir).expanduser() if config.model.models_dir else None
    for place in (Path(config.model.model), (root or _models_dir()) / config.model.model):
        try:
            shape = json.loads((place / "config.json").read_text(encoding="utf-8"))
            heads = shape.get("num_key_value_heads") or shape["num_attention_heads"]
            head_dim = shape.get("head_dim") or shape["hidden_size"] // shape["num_attention_heads"]
            return int(2 * shape["num_hidden_layers"] * heads * head_dim * _DTYPE_BYTES[config.kv.dtype])
        except (OSError, ValueError, KeyError):
            continue
    return None


def _models_dir() -> Path:
    from memkv.model.install import default_models_dir

    return default_models_dir()
