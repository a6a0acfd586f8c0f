"""Attention of new tokens over the paged cache: decodes and ragged prompt chunks in one call.

The reference cuts a step into tiles: some sequences, the same number of queries of each (padded to the longest), and
the blocks that these queries can see, gathered side by side. Sequences of like length share a tile, and a tile's
gathered keys, values and mask fit a fixed budget (a single query whose context alone is larger gets a tile to itself).
How a step is cut depends on its lengths, not on the layer, so it is derived once a step. `cuda_attention.py` has the
CUDA kernels' part.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple, dataclass, replace

import torch
from torch.nn import functional

from vllm_lite.engine.step import StepShape
from vllm_lite.ops import cpu_attention
from vllm_lite.ops.cuda_attention import Scoring, decode, prefill
from vllm_lite.ops.workspace import Workspace

MAX_QUERIES_OF_TILE = 256
"""Queries of one sequence in a tile: shorter tiles skip more of the keys that causality hides."""
MAX_PADDING = 2
"""No sequence of a tile is longer than this many times the shortest."""
MAX_MASK_KEPT = 2**20
"""Elements up to which a tile's mask is kept for the layers to come."""


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
    """B pieces, padded to Q queries and L keys. Padded queries repeat their piece's last one."""

    rows: torch.Tensor
    """[B, Q] int64, where in the step's tokens the queries lie."""
    row_range: slice | None
    """The same where they lie one after the other, none padded."""
    is_query: torch.Tensor | None
    """[B, Q] false for padding; None where nothing is padded."""
    query_positions: torch.Tensor
    """[B, Q] int64"""
    key_positions: torch.Tensor
    """[B, L] int64"""
    head_blocks: torch.Tensor
    """[N] int64, rows of the cache seen as [num_blocks * num_kv_heads, block_size * head_dim]; N is B * num_kv_heads
    times the blocks of a piece."""
    key_range: slice
    """The L keys among those of the gathered blocks."""
    dead_rows: torch.Tensor | None
    """int64, the gathered [N * block_size, head_dim] that lie in the L keys but are seen by no query of their piece."""
    mask: torch.Tensor | None
    """As `_mask` gives, if it is small enough to keep."""
    needs_mask: bool


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
    if (kernels := workspace.cuda) is not None:
        scoring = Scoring(scale, window, alibi_slopes, soft_cap)
        decode(workspace, kernels, shape, query, key_cache, value_cache, context_lens, block_tables, scoring, out)
        prefill(kernels, shape, query, key_cache, value_cache, query_starts, context_lens, block_tables, scoring, out)
        return
    if workspace.cpu is not None:
        scoring = Scoring(scale, window, alibi_slopes, soft_cap)
        caches, tables = (key_cache, value_cache), (query_starts, context_lens, block_tables)
        cpu_attention.attend(workspace, workspace.cpu, shape, query, caches, tables, scoring, out)
        return
    is_plain = alibi_slopes is not None or soft_cap is not None
    scores_per_key = query.shape[1] if is_plain else 1

    def cut() -> list[_Tile]:
        cache = key_cache.shape
        budget = workspace.scratch_bytes
        lens = query_starts[: shape.num_seqs + 1].tolist(), context_lens[: shape.num_seqs].tolist()
        groups = _groups(*lens, cache, key_cache.dtype.itemsize, window, scores_per_key, budget)
        return [_tile(group, block_tables, cache, window, query.dtype) for group in groups]

    for tile in workspace.once_a_step(("attention", window, is_plain), cut):
        num_seqs, num_queries = tile.rows.shape
        key, value = _gather(workspace, tile, key_cache, value_cache)
        mask = _mask(tile, window, query.dtype) if tile.needs_mask and tile.mask is None else tile.mask
        if tile.row_range is None:
            queries = query[tile.rows]
        else:
            queries = query[tile.row_range].view(num_seqs, num_queries, *query.shape[1:])
        if is_plain:
            bias = None if alibi_slopes is None else _alibi(tile, alibi_slopes)
            result = _plain_attention(queries, key, value, mask, scale, soft_cap, bias)
        else:
            result = _fused_attention(queries, key, value, mask, scale)
        if tile.row_range is not None:
            out[tile.row_range].view(result.shape).copy_(result)
        elif tile.is_query is None:
            out[tile.rows] = result
        else:
            out[tile.rows[tile.is_query]] = result[tile.is_query]


def _gather(
    workspace: Workspace, tile: _Tile, key_cache: torch.Tensor, value_cache: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The tile's keys and values, [B, num_kv_heads, L, head_dim] each. Dead ones are 0, for 0 * NaN is NaN."""
    _, num_kv_heads, block_size, head_dim = key_cache.shape
    size = (tile.head_blocks.shape[0], block_size * head_dim)
    parts = workspace.scratch(key_cache.dtype, size, size)
    for cache, part in zip((key_cache, value_cache), parts):
        torch.index_select(cache.view(-1, size[1]), 0, tile.head_blocks, out=part)
        if tile.dead_rows is not None:
            part.view(-1, head_dim).index_fill_(0, tile.dead_rows, 0.0)
    key, value = (part.view(tile.rows.shape[0], num_kv_heads, -1, head_dim)[:, :, tile.key_range] for part in parts)
    return key, value


def _mask(tile: _Tile, window: int | None, dtype: torch.dtype) -> torch.Tensor:
    """[B, 1, Q, L] in the query's dtype: 0 for what a query sees, -inf for what it does not."""
    distance = tile.key_positions[:, None, None, :] - tile.query_positions[:, None, :, None]
    is_hidden = distance > 0
    if window is not None:
        is_hidden |= distance <= -window
    return torch.zeros(is_hidden.shape, dtype=dtype, device=is_hidden.device).masked_fill_(is_hidden, -torch.inf)


def _alibi(tile: _Tile, slopes: torch.Tensor) -> torch.Tensor:
    """[B, num_heads, Q, L] float32."""
    distance = tile.key_positions[:, None, None, :] - tile.query_positions[:, None, :, None]
    return slopes[:, None, None] * distance


def _fused_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """query and result [B, Q, num_heads, D]; key and value [B, num_kv_heads, L, D]; mask [B, 1, Q, L]."""
    num_seqs, num_queries, num_heads, head_dim = query.shape
    if num_queries == 1:
        # The heads that share a key head become the queries of one head: the keys are read once.
        grouped = query.view(num_seqs, key.shape[1], num_heads // key.shape[1], head_dim)
        result = functional.scaled_dot_product_attention(grouped, key, value, attn_mask=mask, scale=scale)
        return result.reshape(query.shape)
    result = functional.scaled_dot_product_attention(
        query.transpose(1, 2), key, value, attn_mask=mask, scale=scale, enable_gqa=num_heads != key.shape[1]
    )
    return result.transpose(1, 2)


def _plain_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    soft_cap: float | None,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """The same step by step in float32: torch's fused attention caps no scores and rounds what is added to them."""
    num_seqs, num_queries, num_heads, head_dim = query.shape
    grouped = query.transpose(1, 2).float().reshape(num_seqs, key.shape[1], -1, head_dim)
    scores = grouped @ key.float().transpose(2, 3) * scale
    scores = scores.view(num_seqs, num_heads, num_queries, -1)
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    if bias is not None:
        scores = scores + bias
    if mask is not None:
        scores = scores + mask
    weights = torch.softmax(scores, dim=-1).view(*grouped.shape[:3], -1)
    return (weights @ value.float()).view(num_seqs, num_heads, num_queries, head_dim).transpose(1, 2).to(query.dtype)


def _groups(
    starts: list[int],
    lens: list[int],
    cache: torch.Size,
    itemsize: int,
    window: int | None,
    scores_per_key: int,
    budget: int,
) -> Iterator[list[_Piece]]:
    """Pieces of like size, as many together as the budget of bytes allows, at least one. Decodes stay apart."""
    _, num_kv_heads, block_size, head_dim = cache
    max_queries = budget // (4 * scores_per_key * max(lens, default=1)) if any(lens) else 1
    max_queries = max(1, min(max_queries, MAX_QUERIES_OF_TILE))
    bytes_per_key = 2 * num_kv_heads * head_dim * itemsize
    pieces = list(_pieces(starts, lens, block_size, window, max_queries))
    group: list[_Piece] = []
    most_queries = 0
    for piece in sorted(pieces, key=lambda piece: (piece.num_queries > 1, piece.num_blocks, piece.num_queries)):
        most_queries = max(most_queries, piece.num_queries)
        num_keys = (len(group) + 1) * piece.num_blocks * block_size
        if group and (
            (piece.num_queries > 1) != (group[0].num_queries > 1)
            or piece.num_blocks > MAX_PADDING * group[0].num_blocks
            or most_queries > MAX_PADDING * min(other.num_queries for other in (*group, piece))
            or num_keys * (bytes_per_key + 4 * scores_per_key * most_queries) > budget
        ):
            yield group
            group, most_queries = [], piece.num_queries
        group.append(piece)
    if group:
        yield group


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


def _tile(
    group: list[_Piece], block_tables: torch.Tensor, cache: torch.Size, window: int | None, dtype: torch.dtype
) -> _Tile:
    _, num_kv_heads, block_size, _ = cache
    device = block_tables.device
    group = sorted(group, key=lambda piece: piece.first_row)
    sequence, first_row, first_position, num_queries, first_block, num_blocks = (
        torch.tensor(column, device=device).unsqueeze(1) for column in zip(*map(astuple, group))
    )
    most_blocks, most_queries = int(num_blocks.max()), int(num_queries.max())
    steps = torch.minimum(torch.arange(most_queries, device=device), num_queries - 1)
    rows = first_row + steps
    is_padded = bool((num_queries < most_queries).any())
    is_in_order = not is_padded and int(rows[-1, -1] - rows[0, 0]) == rows.numel() - 1

    blocks = first_block + torch.arange(most_blocks, device=device).clamp_max(num_blocks - 1)
    heads = torch.arange(num_kv_heads, device=device).unsqueeze(1)
    head_blocks = block_tables[sequence, blocks].long().unsqueeze(1) * num_kv_heads + heads

    positions = first_block * block_size + torch.arange(most_blocks * block_size, device=device)
    is_dead = positions >= first_position + num_queries
    if window is not None:
        is_dead |= positions <= first_position - window
    alive = (~is_dead).any(dim=0).nonzero()
    key_range = slice(int(alive[0]), int(alive[-1]) + 1)
    is_outside = torch.ones_like(is_dead[0])
    is_outside[key_range] = False
    is_dead &= ~is_outside
    dead_rows = is_dead.unsqueeze(1).expand(-1, num_kv_heads, -1).flatten().nonzero().squeeze(1)
    tile = _Tile(
        rows=rows,
        row_range=slice(int(rows[0, 0]), int(rows[-1, -1]) + 1) if is_in_order else None,
        is_query=torch.arange(most_queries, device=device) < num_queries if is_padded else None,
        query_positions=first_position + steps,
        key_positions=positions[:, key_range],
        head_blocks=head_blocks.flatten(),
        key_range=key_range,
        dead_rows=dead_rows if len(dead_rows) else None,
        mask=None,
        needs_mask=most_queries > 1 or len(dead_rows) > 0,
    )
    num_scores = len(group) * most_queries * (key_range.stop - key_range.start)
    if tile.needs_mask and num_scores <= MAX_MASK_KEPT:
        tile = replace(tile, mask=_mask(tile, window, dtype))
    return tile
