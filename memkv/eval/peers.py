"""Others' ways of reuse, as peers to compare with; memkv itself never serves them.

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


@dataclass(frozen=True, slots=True)
class Peer:
    """A way to reuse chunks that were prefilled apart.

    Attributes:
        share: of the later chunks' tokens, computed afresh as CacheBlend chooses them.
        behind_context: False prefills each chunk with nothing before it.
        temperature: keys of mapped tokens are divided by it (APE, Yang et al., arXiv 2502.05431, without its
            scaling of sums).
    """

    share: float = 0.0
    behind_context: bool = True
    temperature: float = 1.0


class PrivateCopies:
    """Logits of the gold answer under peers' ways of reuse."""

    def __init__(self, model: LoadedModel, layout: KVLayout) -> None:
        self._runner = ModelRunner(model)
        self._layers = layer_attention(model.spec, model.device)
        self._layout = layout

    def logits(self, prompt: Prompt, prefix: ChunkRef, peers: Sequence[Peer]) -> list[Tensor]:
        """For each way, logits [len(gold_ids), vocab_size]."""
        ids = [*prefix.token_ids, *(token for chunk in prompt.chunks for token in chunk.token_ids)]
        num_mapped = len(ids)
        ids += [*prompt.tail_ids, *prompt.gold_ids[:-1]]
        blocks_for = self._layout.blocks_for
        apart = [chunk.stored_position + chunk.num_tokens for chunk in prompt.chunks]
        num_blocks = blocks_for(len(ids)) + sum(map(blocks_for, apart))
        num_blocks += sum(blocks_for(chunk.num_tokens) for chunk in prompt.chunks)
        cache = KVCache(self._layout, num_blocks, self._runner.device)
        table = self._table(0, len(ids))
        start = prefix.num_tokens
        context = prompt.chunks[0].context_ids
        behind, first_block = self._prefill_apart(cache, prompt.chunks, context, start, blocks_for(len(ids)))
        alone = behind
        if not all(peer.behind_context for peer in peers):
            alone, _ = self._prefill_apart(cache, prompt.chunks, (), start, first_block)
        self._run(cache, table, ids, range(len(ids)), 0)
        full_values = self._values(cache, num_mapped)
        self._move(cache, behind)
        deviation = (self._values(cache, num_mapped) - full_values).square().sum(dim=-1)  # [num_mapped]
        exact = prompt.chunks[:1] if context == prefix.token_ids else ()
        first = prefix.num_tokens + sum(chunk.num_tokens for chunk in exact)
        order = (first + deviation[first:].argsort(descending=True)).tolist()
        found = []
        for peer in peers:
            self._move(cache, behind if peer.behind_context else alone, peer.temperature)
            fresh = sorted(order[: round(peer.share * (num_mapped - first))])
            positions = [*fresh, *range(num_mapped, len(ids))]
            tokens = [ids[position] for position in positions]
            found.append(self._run(cache, table, tokens, positions, len(prompt.gold_ids)))
        return found

    def _prefill_apart(
        self,
        cache: KVCache,
        chunks: Sequence[ChunkRef],
        context_ids: tuple[int, ...],
        position: int,
        first_block: int,
    ) -> tuple[_Moves, int]:
        """Every chunk behind a context of its own, in one pass, from `first_block` on.

        Returns:
            the moves of the chunks to `position` and behind, and the first block behind them all.
        """
        start, size = len(context_ids), self._layout.block_size
        parts: list[Part[None]] = []
        source: list[int] = []
        target: list[int] = []
        distance: list[int] = []
        for chunk in chunks:
            ids = [*context_ids, *chunk.token_ids]
            table = self._table(first_block, len(ids))
            parts.append(Part(None, TokenRun(table, ids, list(range(len(ids)))), len(ids)))
            source += range(first_block * size + start, first_block * size + len(ids))
            target += range(position, position + chunk.num_tokens)
            distance += [position - start] * chunk.num_tokens
            first_block += self._layout.blocks_for(len(ids))
            position += chunk.num_tokens
        self._runner.run(Batch.build(parts), cache)
        device = self._runner.device
        moves = _Moves(*(torch.tensor(values, device=device) for values in (source, target, distance)))
        return moves, first_block

    def _move(self, cache: KVCache, moves: _Moves, temperature: float = 1.0) -> None:
        """Copies keys and values, keys turned by the distance that they move and divided."""
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
            pieces = (keys / temperature).view(*keys.shape[:2], -1, self._layout.x).to(k_cache.dtype)
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
