"""CacheBlend's choice of tokens, as a peer to compare with; memkv itself never serves it.

CacheBlend (Yao et al., arXiv 2405.16444) computes afresh those *tokens* of the chunks whose values in the
second layer differ most from what a full prefill gives there. Single tokens do not fit whole shared blocks,
so here every sequence gets a private copy of its chunks, with keys turned to where they stand:

    one private segment | prefix | chunk A, copied | chunk B, copied | tail |      position == stored_position
    computed afresh                    ^  ^^            ^     ^   ^    ^^^^

The full prefill that the choice needs is taken as free, which favours the peer. EPIC's head tokens (Hu et
al., arXiv 2410.15332) need no code: 16 and 32 of them are the policies head:1 and head:2 of 16-token blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from memkv.engine.batch import Batch, Part
from memkv.engine.kv_cache import KVCache
from memkv.engine.model_runner import ModelRunner
from memkv.engine.residency import ChunkRef
from memkv.engine.token_run import TokenRun
from memkv.eval.prompts import Prompt
from memkv.kernels.reference import rotate
from memkv.kv.block_table import BlockTable, Segment
from memkv.kv.layout import KVLayout
from memkv.model.attention import layer_attention
from memkv.model.loader import LoadedModel

_CHOICE_LAYER = 1  # counted from 0


@dataclass(frozen=True, slots=True)
class _Moves:
    """Tokens from where they were prefilled to where they stand in the prompt: int64 [num_tokens] each."""

    source: Tensor  # slots
    target: Tensor
    distance: Tensor  # positions


class CacheBlend:
    """Logits of the gold answer where a share of the chunks' tokens is computed afresh."""

    def __init__(self, model: LoadedModel, layout: KVLayout) -> None:
        self._runner = ModelRunner(model)
        self._layers = layer_attention(model.spec, model.device)
        self._layout = layout

    def logits(self, prompt: Prompt, prefix: ChunkRef, shares: Sequence[float]) -> list[Tensor]:
        """For each share of the later chunks' tokens, logits [len(gold_ids), vocab_size]."""
        ids = [*prefix.token_ids, *(token for chunk in prompt.chunks for token in chunk.token_ids)]
        num_mapped = len(ids)
        ids += [*prompt.tail_ids, *prompt.gold_ids[:-1]]
        blocks_for = self._layout.blocks_for
        apart = [prefix.num_tokens + chunk.num_tokens for chunk in prompt.chunks]
        num_blocks = blocks_for(len(ids)) + sum(map(blocks_for, apart))
        cache = KVCache(self._layout, num_blocks, self._runner.device)
        table = self._table(0, len(ids))
        moves = self._prefill_apart(cache, prompt.chunks, prefix, blocks_for(len(ids)))
        self._run(cache, table, ids, range(len(ids)), 0)
        full_values = self._values(cache, num_mapped)
        self._move(cache, moves)
        deviation = (self._values(cache, num_mapped) - full_values).square().sum(dim=-1)  # [num_mapped]
        first = prefix.num_tokens + prompt.chunks[0].num_tokens  # what lies before is exact
        order = (first + deviation[first:].argsort(descending=True)).tolist()
        found = []
        for share in shares:
            self._move(cache, moves)
            fresh = sorted(order[: round(share * (num_mapped - first))])
            positions = [*fresh, *range(num_mapped, len(ids))]
            tokens = [ids[position] for position in positions]
            found.append(self._run(cache, table, tokens, positions, len(prompt.gold_ids)))
        return found

    def _prefill_apart(
        self, cache: KVCache, chunks: Sequence[ChunkRef], prefix: ChunkRef, first_block: int
    ) -> _Moves:
        """Every chunk behind a prefix of its own, in one pass, from `first_block` on."""
        start, size = prefix.num_tokens, self._layout.block_size
        parts, source, target, distance = [], [], [], []
        position = start
        for chunk in chunks:
            ids = [*prefix.token_ids, *chunk.token_ids]
            table = self._table(first_block, len(ids))
            parts.append(Part(None, TokenRun(table, ids, list(range(len(ids)))), len(ids)))
            source += range(first_block * size + start, first_block * size + len(ids))
            target += range(position, position + chunk.num_tokens)
            distance += [position - start] * chunk.num_tokens
            first_block += self._layout.blocks_for(len(ids))
            position += chunk.num_tokens
        self._runner.run(Batch.build(parts), cache)
        device = self._runner.device
        return _Moves(*(torch.tensor(values, device=device) for values in (source, target, distance)))

    def _move(self, cache: KVCache, moves: _Moves) -> None:
        """Copies keys and values, keys turned by the distance that they move."""
        size = self._layout.block_size
        from_block, from_offset = moves.source // size, moves.source % size
        to_block, to_offset = moves.target // size, moves.target % size
        for index, layer in enumerate(self._layers):
            k_cache, v_cache = cache.layer(index)
            keys = (
                k_cache[from_block, :, :, from_offset, :].flatten(2).float()
            )  # [tokens, kv_heads, head_dim]
            if layer.rotation is not None:
                angle = moves.distance[:, None, None] * layer.rotation.inv_freq.to(keys.device)
                keys = rotate(keys, angle.cos().float(), angle.sin().float(), layer.rotation.interleaved)
            pieces = keys.unflatten(-1, (-1, self._layout.x)).to(k_cache.dtype)
            k_cache[to_block, :, :, to_offset, :] = pieces
            v_cache[to_block, :, :, to_offset] = v_cache[from_block, :, :, from_offset]

    def _values(self, cache: KVCache, count: int) -> Tensor:
        """Values of the layer that chooses, of the prompt's first tokens: [count, kv_heads * head_dim]."""
        slots = torch.arange(count, device=self._runner.device)  # the prompt's blocks begin at 0, in order
        _, v_cache = cache.layer(_CHOICE_LAYER)
        size = self._layout.block_size
        return v_cache[slots // size, :, :, slots % size].float().flatten(1)

    def _run(
        self, cache: KVCache, table: BlockTable, ids: list[int], positions: Sequence[int], num_logits: int
    ) -> Tensor:
        run = TokenRun(table, ids, list(positions))
        logits = self._runner.run(Batch.build([Part(None, run, len(ids), num_logits)]), cache).logits
        return torch.empty(0) if logits is None else logits.float()

    def _table(self, first_block: int, num_tokens: int) -> BlockTable:
        """One private segment in blocks that stand behind each other."""
        blocks = range(first_block, first_block + self._layout.blocks_for(num_tokens))
        table = BlockTable(self._layout.block_size)
        table.append(Segment(tuple(blocks), num_tokens, 0, 0, private=True))
        return table
