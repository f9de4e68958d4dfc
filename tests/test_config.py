"""Configuration: precedence, origins, and errors that name the fix."""

from __future__ import annotations

from pathlib import Path

import pytest

from memkv.config import SHORT_NAMES, Config, load_config
from memkv.errors import ConfigError


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "memkv.toml"
    path.write_text('[server]\nport = 9000\n[engine]\npool_bytes = "64 MiB"\n', encoding="utf-8")
    return path


def test_flag_beats_environment_beats_file_beats_default(file: Path) -> None:
    env = {"MEMKV_PORT": "9001", "MEMKV_STORE__DATA_DIR": "here"}
    config = load_config({"server.port": 9002, "server.host": None}, env=env, file=file)
    assert config.server.port == 9002
    assert config.origin("server.port") == "flag"
    assert config.store.data_dir == "here"
    assert config.origin("store.data_dir") == "MEMKV_STORE__DATA_DIR"
    assert config.engine.pool_bytes == 64 * 1024**2
    assert config.origin("engine.pool_bytes") == str(file)
    assert config.server.host == "127.0.0.1"
    assert config.origin("server.host") == "default"


def test_environment_beats_file(file: Path) -> None:
    assert load_config(env={"MEMKV_PORT": "9001"}, file=file).server.port == 9001
    assert load_config(env={}, file=file).server.port == 9000


@pytest.mark.parametrize(("name", "key"), SHORT_NAMES.items())
def test_every_short_name_sets_its_key(name: str, key: str) -> None:
    text = {"server.port": "1", "log.level": "debug", "log.format": "json"}.get(key, "word")
    config = load_config(env={name: text, "HOME": "/nonexistent"})
    assert config.origin(key) == name
    assert text in [str(value) for k, value, _ in config.items() if k == key]


@pytest.mark.parametrize(
    ("text", "size"),
    [("4096", 4096), ("10M", 10_000_000), ("1.5GiB", 3 * 1024**3 // 2), ("2 kb", 2000), ("1t", 10**12)],
)
def test_sizes_carry_units(text: str, size: int) -> None:
    assert load_config({"engine.pool_bytes": text}, env={}).engine.pool_bytes == size


def test_an_unknown_key_names_the_nearest_one(tmp_path: Path) -> None:
    path = tmp_path / "memkv.toml"
    path.write_text("[server]\nprot = 1\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"server\.prot") as caught:
        load_config(env={}, file=path)
    assert "server.port" in caught.value.hint
    with pytest.raises(ConfigError, match="MEMKV_PROT") as caught:
        load_config(env={"MEMKV_PROT": "1"})
    assert "MEMKV_PORT" in caught.value.hint
    with pytest.raises(ConfigError, match="MEMKV_STORE__DATADIR") as caught:
        load_config(env={"MEMKV_STORE__DATADIR": "x"})
    assert "store.data_dir" in caught.value.hint


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("server.port", "many"),
        ("server.port", -1),
        ("server.port", True),
        ("server.insecure", "perhaps"),
        ("kv.dtype", "int4"),
        ("kv.block_size", 7),
        ("engine.pool_bytes", "12 parsecs"),
        ("engine.queue_seconds", "nan"),
        ("engine.continuation_share", 1.01),
        ("engine.continuation_share", -0.1),
        ("ingest.prefill", "never"),
        ("store.data_dir", 5),
    ],
)
def test_a_value_out_of_range_is_refused_with_its_key(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=key):
        load_config({key: value}, env={})


@pytest.mark.parametrize("text", ["port = 1", "[server", "[server]\nport = 1\nport = 2", "\udcff"])
def test_a_broken_file_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "memkv.toml"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ConfigError, match=r"memkv\.toml"):
        load_config(env={}, file=path)


def test_foreign_variables_are_left_alone() -> None:
    env = {"MEMKV_URL": "http://localhost", "MEMKV_TEST_DATA": "/x", "PATH": "/bin", "HOME": "/nonexistent"}
    assert load_config(env=env) == Config()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("MEMKV_SERVER__DRAIN_SECONDS", "inf"),
        ("MEMKV_QUERY__MIN_SCORE", "nan"),
        ("MEMKV_ENGINE__POOL_BYTES", "lots"),
        ("MEMKV_ENGINE__POOL_BYTES", "9" * 400),
        ("MEMKV_PORT", "eighty"),
        ("MEMKV_SERVER__INSECURE", "perhaps"),
    ],
)
def test_a_value_that_is_none_says_what_is_one(name: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(env={name: text})
    assert caught.value.hint
