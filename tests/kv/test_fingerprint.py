"""What makes KV valid: every field counts, and nothing new is forgotten."""

from __future__ import annotations

import hashlib
from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memkv.config import KVConfig, ModelConfig
from memkv.kv.fingerprint import (
    Fingerprint,
    decode_tokens,
    encode_tokens,
    input_key,
    token_digest,
)

BASE = Fingerprint(
    weights_digest="a" * 64,
    tokenizer_digest="b" * 64,
    architecture="LlamaForCausalLM",
    rope='[{"theta":1e4}]',
    layers='[{"kind":"attention","window":0}]',
    num_layers=30,
    num_kv_heads=3,
    head_dim=64,
    block_size=16,
    kv_dtype="bfloat16",
    compute_dtype="float32",
    prefix_digest="c" * 64,
)

# Another value for every field. A field that is added has to be added here, and then changes the digest.
CHANGED: dict[str, object] = {
    "weights_digest": "a" * 63 + "b",
    "tokenizer_digest": "b" * 63 + "c",
    "architecture": "MistralForCausalLM",
    "rope": '[{"theta":5e5}]',
    "layers": '[{"kind":"attention","window":128}]',
    "num_layers": 31,
    "num_kv_heads": 4,
    "head_dim": 128,
    "block_size": 32,
    "kv_dtype": "float32",
    "compute_dtype": "bfloat16",
    "prefix_digest": "c" * 63 + "d",
    "kv_scales_digest": "e" * 64,
    "adapter_digest": "f" * 64,
    "adapter_scale": 0.5,
    "tensor_parallel": "1/2",
    "pipeline_parallel": "0/2",
    "position_policy": "absolute",
    "numerics": "other",
    "format_version": 1_000_000,
}

# Every setting that could change KV: by which fields of the fingerprint, or why it cannot.
SETTINGS: dict[str, tuple[str, ...] | str] = {
    "ModelConfig.model": ("weights_digest", "tokenizer_digest", "architecture", "rope", "layers"),
    "ModelConfig.dtype": ("compute_dtype",),
    "ModelConfig.embedder": "finds chunks; no key or value depends on it",
    "ModelConfig.models_dir": "where files lie; their digests are hashed",
    "ModelConfig.device": "the same numbers up to rounding; `numerics` changes when a kernel's result does",
    "KVConfig.dtype": ("kv_dtype",),
    "KVConfig.block_size": ("block_size",),
}


def test_every_field_is_known_here() -> None:
    assert {field.name for field in fields(Fingerprint)} == set(CHANGED)


@pytest.mark.parametrize("name", sorted(CHANGED))
def test_every_field_alone_changes_digest_and_keys(name: str) -> None:
    other = replace(BASE, **{name: CHANGED[name]})  # type: ignore[arg-type]
    assert getattr(other, name) != getattr(BASE, name)
    assert other.digest != BASE.digest
    assert other.differences(BASE) == [name]
    assert input_key(b"tenant", other.digest, (1,), (2,)) != input_key(b"tenant", BASE.digest, (1,), (2,))


def test_every_setting_is_hashed_or_declared_irrelevant() -> None:
    settings = {
        f"{section.__name__}.{field.name}" for section in (ModelConfig, KVConfig) for field in fields(section)
    }
    assert settings == set(SETTINGS)
    hashed = {name for names in SETTINGS.values() if isinstance(names, tuple) for name in names}
    assert hashed <= set(CHANGED)


def test_the_digest_is_the_same_in_every_process() -> None:
    assert BASE.digest == "a1e2d5d296c08fa123362eb01f62418a4db7595bf95b57c0d77cf29a58a57808"
    assert Fingerprint.from_json(BASE.canonical_json()) == BASE


tokens = st.lists(st.integers(0, 2**31 - 1), max_size=30)


@given(tokens)
def test_tokens_survive_their_encoding(ids: list[int]) -> None:
    data = encode_tokens(ids)
    assert len(data) == 4 * len(ids)
    assert data == b"".join(token.to_bytes(4, "little") for token in ids)
    assert decode_tokens(data) == ids


def test_a_token_id_that_does_not_fit_is_refused() -> None:
    with pytest.raises(OverflowError):
        encode_tokens([2**31])


@given(tokens, tokens, st.data())
def test_the_border_between_context_and_tokens_counts(
    context: list[int], own: list[int], data: st.DataObject
) -> None:
    whole = context + own
    border = data.draw(st.integers(0, len(whole)))
    moved = (whole[:border], whole[border:])
    same = border == len(context)
    key = input_key(b"tenant", BASE.digest, context, own)
    assert (input_key(b"tenant", BASE.digest, *moved) == key) is same
    assert (token_digest(*moved) == token_digest(context, own)) is same


@given(tokens, tokens, tokens)
def test_context_and_tokens_count(context: list[int], own: list[int], other: list[int]) -> None:
    key = input_key(b"tenant", BASE.digest, context, own)
    assert (input_key(b"tenant", BASE.digest, other, own) == key) is (other == context)
    assert (input_key(b"tenant", BASE.digest, context, other) == key) is (other == own)


@given(st.binary(min_size=1, max_size=64), st.binary(min_size=1, max_size=64))
def test_the_tenant_counts(one: bytes, other: bytes) -> None:
    keys = {input_key(secret, BASE.digest, (1, 2), (3,)) for secret in (one, other)}
    assert len(keys) == (1 if one == other else 2)


def test_a_key_cannot_be_computed_without_the_secret() -> None:
    unkeyed = hashlib.blake2b(digest_size=32, person=b"memkv-input-key")
    unkeyed.update(bytes.fromhex(BASE.digest))
    unkeyed.update((1).to_bytes(8, "little") + encode_tokens([1]) + encode_tokens([2]))
    assert input_key(b"tenant", BASE.digest, [1], [2]) != unkeyed.hexdigest()
    with pytest.raises(AssertionError, match="secret"):
        input_key(b"", BASE.digest, [1], [2])
