"""What makes KV valid, and the names under which it is kept.

Two digests name a chunk's KV. The *input key* says what went in: tenant secret, fingerprint, every token
attended to and the chunk's own tokens. The digest of the bytes says what came out (`store.block_file`).
"""

from __future__ import annotations

import hashlib
import json
import sys
from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields

FORMAT_VERSION = 1
NUMERICS = "1"  # raise it when a kernel or the model seam changes what it computes
POSITION_POLICY = "chunk-coordinates, query rotated"


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Every input that a block depends on besides its tokens. Any two that differ never share a block."""

    weights_digest: str
    tokenizer_digest: str
    architecture: str
    rope: str  # canonical JSON of the effective RoPE, layer by layer
    layers: str  # canonical JSON: kind, window and soft-cap of each layer
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    kv_dtype: str
    compute_dtype: str
    prefix_digest: str  # of the token ids that every chunk is prefilled behind
    kv_scales_digest: str = ""
    adapter_digest: str = ""
    adapter_scale: float = 1.0
    tensor_parallel: str = "0/1"  # rank/size
    pipeline_parallel: str = "0/1"
    position_policy: str = POSITION_POLICY
    numerics: str = NUMERICS
    format_version: int = FORMAT_VERSION

    def canonical_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"), ensure_ascii=True)

    @property
    def digest(self) -> str:
        """BLAKE2b-256 of the canonical JSON, 64 hex digits."""
        return hashlib.blake2b(self.canonical_json().encode(), digest_size=32).hexdigest()

    @classmethod
    def from_json(cls, text: str) -> Fingerprint:
        return cls(**json.loads(text))

    def differences(self, other: Fingerprint) -> list[str]:
        """Names of the fields that differ."""
        return [f.name for f in fields(self) if getattr(self, f.name) != getattr(other, f.name)]


def encode_tokens(token_ids: Sequence[int]) -> bytes:
    """Little-endian int32, four bytes a token."""
    ids = array("i", token_ids)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tobytes()


def decode_tokens(data: bytes) -> list[int]:
    ids = array("i")
    ids.frombytes(data)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tolist()


def token_digest(context: Sequence[int], tokens: Sequence[int]) -> bytes:
    """BLAKE2b-256 of the tokens attended to and the chunk's own, the border between them included."""
    digest = hashlib.blake2b(digest_size=32)
    _add_tokens(digest, context, tokens)
    return digest.digest()


def input_key(
    tenant_secret: bytes, fingerprint_digest: str, context: Sequence[int], tokens: Sequence[int]
) -> str:
    """Keyed BLAKE2b-256 over everything that a chunk's KV depends on, 64 hex digits.

    The tenant's secret is the key, so no tenant can name, guess or share another's blocks.
    """
    assert tenant_secret, "bug: a tenant without a secret"  # an empty key would leave the digest unkeyed
    digest = hashlib.blake2b(key=tenant_secret, digest_size=32, person=b"memkv-input-key")
    digest.update(bytes.fromhex(fingerprint_digest))
    _add_tokens(digest, context, tokens)
    return digest.hexdigest()


def _add_tokens(digest: hashlib.blake2b, context: Sequence[int], tokens: Sequence[int]) -> None:
    digest.update(len(context).to_bytes(8, "little"))
    digest.update(encode_tokens(context))
    digest.update(encode_tokens(tokens))
