"""One chunk's KV as one immutable file.

    offset  bytes
         0      8  magic
         8      4  format version
        12      4  header bytes, a multiple of 4,096
        16     32  fingerprint digest
        48     32  input key
        80     32  token digest: every token attended to and the chunk's own
       112     16  dtype, padded with NUL
       128     16  layers, kv heads, head dim, block size            4 x uint32
       144     12  context tokens, tokens, blocks                    3 x uint32
       156      4  zero
       160      8  bytes of one block
       168    8 n  xxh3-64 of each block
         .      .  zero
     end-8      8  xxh3-64 of the header before it
    header       n blocks, in `KVLayout` order

All integers are little-endian. The xxh3-128 of the whole file stands in the file's name and in SQL, so a file
proves itself only together with the row that names it. The per-block sums say where a file was damaged.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import xxhash

from memkv.kv.chunk import ChunkKV
from memkv.kv.layout import KVLayout
from memkv.store.durable_files import Damage, read_file
from memkv.store.rows import KVFileRow

FORMAT_VERSION = 1
ALIGNMENT = 4096

_MAGIC = b"memkvKV\n"
_FIXED = struct.Struct("<8sII32s32s32s16s4I3I4xQ")
_SUM = struct.Struct("<Q")
_NAME = re.compile(r"^([0-9a-f]{64})\.([0-9a-f]{32})\.kv\Z")


@dataclass(frozen=True, slots=True)
class BlockFileIdentity:
    """What a file must hold to be the one that was asked for."""

    input_key: str  # 64 hex digits
    fingerprint_digest: str  # 64 hex digits
    token_digest: bytes  # 32
    layout: KVLayout
    context_tokens: int
    num_tokens: int

    @property
    def num_blocks(self) -> int:
        return self.layout.blocks_for(self.num_tokens)

    @property
    def header_bytes(self) -> int:
        return _header_bytes(self.num_blocks)

    @property
    def file_bytes(self) -> int:
        return file_bytes(self.layout, self.num_tokens)


def file_bytes(layout: KVLayout, num_tokens: int) -> int:
    """How long the file of a chunk is."""
    return _header_bytes(layout.blocks_for(num_tokens)) + layout.bytes_for(num_tokens)


def file_name(input_key: str, file_digest: str) -> str:
    return f"{input_key}.{file_digest}.kv"


def parse_file_name(name: str) -> tuple[str, str] | None:
    """Input key and digest; None for a name that is not a block file's."""
    match = _NAME.match(name)
    return (match[1], match[2]) if match else None


def encode_header(identity: BlockFileIdentity, kv: ChunkKV) -> bytes:
    """The header of the file that holds `kv`."""
    assert kv.layout == identity.layout and kv.num_tokens == identity.num_tokens, "bug: another chunk's KV"
    sums = [xxhash.xxh3_64_intdigest(kv.block(index)) for index in range(kv.num_blocks)]
    body = _fixed_part(identity) + b"".join(_SUM.pack(value) for value in sums)
    body = body.ljust(identity.header_bytes - _SUM.size, b"\0")
    return body + _SUM.pack(xxhash.xxh3_64_intdigest(body))


def file_digest(parts: Sequence[bytes | bytearray | memoryview]) -> str:
    """xxh3-128 over all bytes of a file, 32 hex digits."""
    digest = xxhash.xxh3_128()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def read_block_file(
    path: Path, identity: BlockFileIdentity, expected_digest: str, on_bytes: Callable[[], None] | None = None
) -> ChunkKV | Damage:
    """The KV in a file, every byte verified before any is returned. Never raises for what the file holds.

    Args:
        on_bytes: called when they are in memory and still to be verified.
    """
    data = read_file(path, size=identity.file_bytes)
    if on_bytes is not None:
        on_bytes()
    return data if isinstance(data, Damage) else decode_block_file(data, identity, expected_digest)


def decode_block_file(
    data: bytes | bytearray | memoryview, identity: BlockFileIdentity, expected_digest: str
) -> ChunkKV | Damage:
    """The same for the bytes of a file."""
    if len(data) != identity.file_bytes:
        return Damage("size", f"{len(data)} bytes, not {identity.file_bytes}")
    view = memoryview(data).toreadonly()
    header, blocks = view[: identity.header_bytes], view[identity.header_bytes :]
    damage = _check_header(header, identity)
    if damage is None and file_digest([view]) != expected_digest:
        damage = _locate_damage(header, blocks, identity)
    return damage or ChunkKV(identity.layout, identity.num_tokens, blocks)


def token_digest_of(header: bytes) -> bytes:
    """What the beginning of a file says it was made of; nothing is checked."""
    return header[80:112]


def check_block_file(path: Path, row: KVFileRow) -> Damage | None:
    """What a scrubber can say of a row's file without its tokens and layout; reads the whole file."""
    data = read_file(path, size=row.num_bytes)
    if isinstance(data, Damage):
        return data
    if file_digest([data]) != row.file_digest:
        return Damage("digest", "its bytes are not those that were written")
    if len(data) < ALIGNMENT:
        return Damage("header", "shorter than a header")
    magic, version, _, fingerprint, key, *_ = _FIXED.unpack_from(data)
    if magic != _MAGIC or version != FORMAT_VERSION:
        return Damage("header", "not a block file of this format")
    if key.hex() != row.input_key:
        return Damage("input_key", "it belongs to another chunk")
    if fingerprint.hex() != row.fingerprint_digest:
        return Damage("fingerprint", "it was made by another model")
    return None


def _header_bytes(num_blocks: int) -> int:
    used = _FIXED.size + (num_blocks + 1) * _SUM.size
    return -(-used // ALIGNMENT) * ALIGNMENT


def _fixed_part(identity: BlockFileIdentity) -> bytes:
    layout = identity.layout
    return _FIXED.pack(
        _MAGIC,
        FORMAT_VERSION,
        identity.header_bytes,
        bytes.fromhex(identity.fingerprint_digest),
        bytes.fromhex(identity.input_key),
        identity.token_digest,
        layout.dtype.encode(),
        layout.num_layers,
        layout.num_kv_heads,
        layout.head_dim,
        layout.block_size,
        identity.context_tokens,
        identity.num_tokens,
        identity.num_blocks,
        layout.bytes_per_block,
    )


_FIELDS = (
    ("magic", 0, 8),
    ("version", 8, 16),
    ("fingerprint", 16, 48),
    ("input_key", 48, 80),
    ("tokens", 80, 112),
    ("layout", 112, 144),
    ("tokens", 144, 160),
    ("layout", 160, 168),
)


def _check_header(header: memoryview, identity: BlockFileIdentity) -> Damage | None:
    expected = _fixed_part(identity)
    for name, start, end in _FIELDS:
        if header[start:end] != expected[start:end]:
            return Damage(name, f"the header's bytes {start} to {end} are not what was expected")
    (stored,) = _SUM.unpack(header[-_SUM.size :])
    if stored != xxhash.xxh3_64_intdigest(header[: -_SUM.size]):
        return Damage("header", "the header's checksum is wrong")
    return None


def _locate_damage(header: memoryview, blocks: memoryview, identity: BlockFileIdentity) -> Damage:
    size = identity.layout.bytes_per_block
    bad = [
        index
        for index in range(identity.num_blocks)
        if _SUM.unpack_from(header, _FIXED.size + index * _SUM.size)[0]
        != xxhash.xxh3_64_intdigest(blocks[index * size : (index + 1) * size])
    ]
    if not bad:
        return Damage("digest", "a sound file, but not the one that was written")
    return Damage("digest", f"damaged blocks: {', '.join(map(str, bad[:20]))}")
