"""Attention of new tokens over the paged cache: decodes and ragged prompt chunks in one call.

The reference cuts a step into tiles: some sequences, the same number of queries of each (padded to the longest), and
the blocks that these queries can see, gathered side by side. Sequences of like length share a tile, and a tile's
gathered keys, values and mask fit a fixed budget (a single query whose context alone is larger gets a tile to itself).
How a step is cut depends on its lengths, not on the layer, so it is derived once a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass

import torch
from torch.nn import functional

from vllm_lite.engine.step import StepShape
from vllm_lite.ops.workspace import Workspace

MAX_QUERIES_OF_TILE = 256
"""Queries of one sequence in a tile: shorter tiles skip more of the keys that causality hides."""
MAX_PADDING = 2
"""No sequence of a tile is longer than this many times the shortest."""


@dataclass(frozen=True)
class _Piece:
    """Consecutive queries of one sequence, and the blocks they see. Positions count tokens of the sequence."""

    sequence: int
    first_row: int
    first_position: int
    num_queries: int
    first_block: int
    num_blocks: int

    @property
    def end(self) -> int:
        return self.first_position + self.num_queries


@dataclass(frozen=True)
class _Tile:
    """B pieces, padded to Q queries and L keys. Padded queries repeat the piece's last one."""

    rows: torch.Tensor
    """[B, Q] int64, where in the step's tokens the queries lie."""
    is_query: torch.Tensor | None
    """[B, Q] false for padding; None where nothing is padded."""
    query_positions: torch.Tensor
    """[B, Q] int64"""
    key_positions: torch.Tensor
    """[B, L] int64"""
    head_blocks: torch.Tensor
    """[B * num_kv_heads * L / block_size] int64, rows of the cache seen as [num_blocks * num_kv_heads, ...]."""
    is_dead: torch.Tensor | None
    """[B, 1, K, 1] true for those of the last K keys that belong to no sequence or are in nobody's window."""


def attend(
    workspace: Workspace,
    shape: StepShape,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    scale: float,
    window: int | None,
    alibi_slopes: torch.Tensor | None,
    soft_cap: float | None,
    out: torch.Tensor,
) -> None:
    """Each query attends to its sequence's keys up to its own position; softmax in float32.

    The last query of sequence s stands at position `context_lens[s] - 1`; its keys and values are in the cache already.
    query and out [max_tokens, num_heads, head_dim], any stride over tokens, head h reads key head
    `h // (num_heads / num_kv_heads)`; caches as in `kv_cache.py`; query_starts [max_seqs + 1] int32; context_lens
    [max_seqs] int32, 0 leaves the sequence's rows of out alone; block_tables [max_seqs, max_blocks] int32, valid ids
    as far as the context reaches. `window`: a query sees itself and the window - 1 tokens before it. alibi_slopes
    [num_heads] float32: slope * (key position - query position) is added to a score. soft_cap: a scaled score s becomes
    soft_cap * tanh(s / soft_cap). What lies in slots beyond a context never matters, be it NaN.
    """
    num_heads = query.shape[1] if alibi_slopes is not None or soft_cap is not None else 1

    def cut() -> list[_Tile]:
        return list(_tiles(workspace, shape, key_cache, query_starts, context_lens, block_tables, window, num_heads))

    for tile in workspace.once_a_step(("attention", window, num_heads, key_cache.shape), cut):
        key, value = _gather(workspace, tile, key_cache, value_cache)
        mask = _mask(tile, window, alibi_slopes)
        result = _softmax_average(query[tile.rows], key, value, mask, scale, soft_cap)
        if tile.is_query is None:
            out[tile.rows] = result
        else:
            out[tile.rows[tile.is_query]] = result[tile.is_query]


def _gather(
    workspace: Workspace, tile: _Tile, key_cache: torch.Tensor, value_cache: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The tile's keys and values, [B, num_kv_heads, L, head_dim] each. Dead ones are 0, for 0 * NaN is NaN."""
    _, num_kv_heads, block_size, head_dim = key_cache.shape
    num_seqs, num_keys = tile.key_positions.shape
    flat = (tile.head_blocks.shape[0], block_size * head_dim)
    gathered = workspace.scratch(key_cache.dtype, flat, flat)
    for cache, part in zip((key_cache, value_cache), gathered):
        torch.index_select(cache.view(-1, block_size * head_dim), 0, tile.head_blocks, out=part)
    key, value = (part.view(num_seqs, num_kv_heads, num_keys, head_dim) for part in gathered)
    if tile.is_dead is not None:
        first = num_keys - tile.is_dead.shape[2]
        key[:, :, first:].masked_fill_(tile.is_dead, 0.0)
        value[:, :, first:].masked_fill_(tile.is_dead, 0.0)
    return key, value


def _mask(tile: _Tile, window: int | None, alibi_slopes: torch.Tensor | None) -> torch.Tensor:
    """[B, 1, Q, L] true for what a query sees, or with ALiBi [B, num_heads, Q, L] float32 to be added."""
    distance = tile.key_positions[:, None, :] - tile.query_positions[:, :, None]
    is_seen = distance <= 0
    if window is not None:
        is_seen &= distance > -window
    if alibi_slopes is None:
        return is_seen[:, None]
    bias = alibi_slopes[:, None, None] * distance[:, None]
    return bias.masked_fill_(~is_seen[:, None], -torch.inf)


def _softmax_average(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    soft_cap: float | None,
) -> torch.Tensor:
    """query [B, Q, num_heads, D]; key and value [B, num_kv_heads, L, D]; mask as `_mask` gives. As the query."""
    num_seqs, num_queries, num_heads, head_dim = query.shape
    if soft_cap is not None:
        return _soft_capped(query, key, value, mask, scale, soft_cap)
    if mask.is_floating_point():
        mask = mask.to(query.dtype)
    if num_queries == 1:
        # The heads that share a key head become the queries of one head: the keys are read once.
        grouped = query.view(num_seqs, key.shape[1], num_heads // key.shape[1], head_dim)
        if mask.is_floating_point():
            mask = mask.view(num_seqs, *grouped.shape[1:3], mask.shape[-1])
        result = functional.scaled_dot_product_attention(grouped, key, value, attn_mask=mask, scale=scale)
        return result.reshape(query.shape)
    result = functional.scaled_dot_product_attention(
        query.transpose(1, 2), key, value, attn_mask=mask, scale=scale, enable_gqa=num_heads != key.shape[1]
    )
    return result.transpose(1, 2)


def _soft_capped(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scale: float, soft_cap: float
) -> torch.Tensor:
    """The same by plain products in float32: torch's fused attention cannot cap scores."""
    repeats = query.shape[2] // key.shape[1]
    keys, values = (part.float().repeat_interleave(repeats, dim=1) for part in (key, value))
    scores = query.transpose(1, 2).float() @ keys.transpose(2, 3) * scale
    scores = soft_cap * torch.tanh(scores / soft_cap)
    scores = scores + mask if mask.is_floating_point() else scores.masked_fill(~mask, -torch.inf)
    return (torch.softmax(scores, dim=-1) @ values).transpose(1, 2).to(query.dtype)


def _tiles(
    workspace: Workspace,
    shape: StepShape,
    key_cache: torch.Tensor,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    window: int | None,
    num_mask_heads: int,
) -> Iterator[_Tile]:
    _, num_kv_heads, block_size, head_dim = key_cache.shape
    bytes_per_key = 2 * num_kv_heads * head_dim * key_cache.dtype.itemsize
    bytes_per_score = 4 * num_mask_heads
    starts, lens = query_starts[: shape.num_seqs + 1].tolist(), context_lens[: shape.num_seqs].tolist()
    max_queries = max(1, workspace.scratch_bytes // (bytes_per_score * max(1, shape.max_context_len)))
    pieces = list(_pieces(starts, lens, block_size, window, min(max_queries, MAX_QUERIES_OF_TILE)))

    def cost(num_pieces: int, num_queries: int, num_blocks: int) -> int:
        return num_pieces * num_blocks * block_size * (bytes_per_key + num_queries * bytes_per_score)

    for group in _groups(pieces, cost, workspace.scratch_bytes):
        yield _tile(group, block_tables, block_size, num_kv_heads, window)


def _pieces(
    starts: list[int], lens: list[int], block_size: int, window: int | None, max_queries: int
) -> Iterator[_Piece]:
    for sequence, (first_row, end_row, context_len) in enumerate(zip(starts, starts[1:], lens)):
        if context_len == 0:
            continue
        for row in range(first_row, end_row, max_queries):
            num_queries = min(max_queries, end_row - row)
            first_position = context_len - (end_row - row)
            first_key = 0 if window is None else max(0, first_position - window + 1)
            first_block = first_key // block_size
            num_blocks = -(-(first_position + num_queries) // block_size) - first_block
            yield _Piece(sequence, row, first_position, num_queries, first_block, num_blocks)


def _groups(pieces: list[_Piece], cost: Callable[[int, int, int], int], budget: int) -> Iterator[list[_Piece]]:
    """Pieces of like size, as many together as the budget of bytes allows, at least one. Decodes stay apart."""
    group: list[_Piece] = []
    most_queries = 0
    for piece in sorted(pieces, key=lambda piece: (piece.num_queries > 1, piece.num_blocks, piece.num_queries)):
        most_queries = max(most_queries, piece.num_queries)
        if group and (
            (piece.num_queries > 1) != (group[0].num_queries > 1)
            or piece.num_blocks > MAX_PADDING * group[0].num_blocks
            or most_queries > MAX_PADDING * min(other.num_queries for other in (*group, piece))
            or cost(len(group) + 1, most_queries, piece.num_blocks) > budget
        ):
            yield group
            group, most_queries = [], piece.num_queries
        group.append(piece)
    if group:
        yield group


def _tile(
    group: list[_Piece], block_tables: torch.Tensor, block_size: int, num_kv_heads: int, window: int | None
) -> _Tile:
    device = block_tables.device
    sequence, first_row, first_position, num_queries, first_block, num_blocks = (
        torch.tensor(column, device=device).unsqueeze(1) for column in zip(*map(astuple, group))
    )
    most_blocks, most_queries = (max(getattr(p, name) for p in group) for name in ("num_blocks", "num_queries"))
    steps = torch.minimum(torch.arange(most_queries, device=device), num_queries - 1)
    blocks = first_block + torch.arange(most_blocks, device=device).clamp_max(num_blocks - 1)
    block_ids = block_tables[sequence, blocks].long()
    heads = torch.arange(num_kv_heads, device=device).unsqueeze(1)
    key_positions = first_block * block_size + torch.arange(most_blocks * block_size, device=device)
    first_seen = first_position + 1 - window if window is not None else torch.zeros_like(first_position)
    is_dead = (key_positions >= first_position + num_queries) | (key_positions < first_seen)
    first_dead = 0 if window is not None else min(p.end - p.first_block * block_size for p in group)
    is_padded = any(p.num_queries < most_queries for p in group)
    return _Tile(
        rows=first_row + steps,
        is_query=torch.arange(most_queries, device=device) < num_queries if is_padded else None,
        query_positions=first_position + steps,
        key_positions=key_positions,
        head_blocks=(block_ids.unsqueeze(1) * num_kv_heads + heads).flatten(),
        is_dead=is_dead[:, None, first_dead:, None] if is_dead.any() else None,
    )
