"""Who owns which KV block: allocate, fork, copy-on-write, prefix reuse, free. Knows ids and counts, never their K/V.

A block is in one of three states: owned by one sequence or more, free and blank, or free with content that another
sequence may still reuse. Content is named by `Prefix`: the tokens of the block and, through its parent, all tokens
before them. Two prefixes are equal only when all their tokens are, so a collision of hashes can never give a sequence
the keys and values of other tokens.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

TokenIds = Sequence[int]


def hash_block(parent_hash: int, token_ids: bytes) -> int:
    """The hash of a block's tokens, chained to that of the blocks before it."""
    return hash((parent_hash, token_ids))


class Prefix:
    """The tokens from the start of a sequence to the end of one full block. Immutable, usable as a key."""

    __slots__ = ("_hash", "parent", "token_ids")

    def __init__(self, parent: Prefix | None, token_ids: bytes) -> None:
        """`token_ids` are the block's, as the bytes of an array: a long prompt has many, and bytes are hashed fast."""
        self.parent = parent
        self.token_ids = token_ids
        self._hash: int = hash_block(0 if parent is None else parent._hash, token_ids)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Prefix):
            return NotImplemented
        mine: Prefix | None = self
        theirs: Prefix | None = other
        while mine is not theirs:  # keys that came out of one table share their ancestors: this is one round then
            if mine is None or theirs is None:
                return False
            if mine._hash != theirs._hash or mine.token_ids != theirs.token_ids:
                return False
            mine, theirs = mine.parent, theirs.parent
        return True


@dataclass
class BlockTable:
    """The blocks of one sequence in order. Only the block manager writes to it."""

    block_ids: array[int] = field(default_factory=lambda: array("i"))
    prefix: Prefix | None = None
    """Names the content of the first `num_named_blocks` blocks, which are full and computed."""
    num_named_blocks: int = 0


class BlockManager:
    """Hands out the blocks of one KV cache.

    Question and action come in pairs: `can_allocate` before `allocate`, `can_admit` before `share_prefix`. An action
    whose question is answered no is our own bug, and an assertion.
    """

    def __init__(self, num_blocks: int, block_size: int, *, enable_prefix_caching: bool) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._enable_prefix_caching = enable_prefix_caching
        self._ref_counts = [0] * num_blocks
        self._prefix_of: list[Prefix | None] = [None] * num_blocks
        self._block_of: dict[Prefix, int] = {}
        self._blank_ids = list(range(num_blocks - 1, -1, -1))
        self._reusable_ids: OrderedDict[int, None] = OrderedDict()
        """Free blocks with content, the least recently used first."""

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no sequence owns, whether blank or with content."""
        return len(self._blank_ids) + len(self._reusable_ids)

    def num_blocks_for(self, num_tokens: int) -> int:
        """How many blocks hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def find_prefix(self, token_ids: TokenIds) -> list[int]:
        """The blocks that hold the longest computed start of `token_ids`, in order.

        The last token is never part of it, because a sequence must compute a token to get the next one.
        """
        block_ids: list[int] = []
        if not self._enable_prefix_caching:
            return block_ids
        parent: Prefix | None = None
        for tokens in self._full_blocks(token_ids, 0, (len(token_ids) - 1) // self.block_size):
            block_id = self._block_of.get(Prefix(parent, tokens))
            if block_id is None:
                break
            block_ids.append(block_id)
            parent = self._prefix_of[block_id]
        return block_ids

    def can_admit(self, group: Sequence[tuple[int, Sequence[int]]], num_reserved: int = 0) -> bool:
        """Whether sequences fit into the free blocks together and leave `num_reserved` of them.

        Each is its number of tokens and the blocks that `find_prefix` found for it.
        """
        num_new = sum(self.num_blocks_for(num_tokens) - len(block_ids) for num_tokens, block_ids in group)
        reused = {block_id for _, block_ids in group for block_id in block_ids}
        num_reused_from_free = sum(self._ref_counts[block_id] == 0 for block_id in reused)
        return num_new + num_reused_from_free + num_reserved <= self.num_free_blocks

    def share_prefix(self, table: BlockTable, prefix_block_ids: Sequence[int]) -> None:
        """Gives an empty table the blocks that `find_prefix` found."""
        assert not table.block_ids
        for block_id in prefix_block_ids:
            self._reusable_ids.pop(block_id, None)
            self._ref_counts[block_id] += 1
        table.block_ids.extend(prefix_block_ids)
        table.prefix = self._prefix_of[prefix_block_ids[-1]] if prefix_block_ids else None
        table.num_named_blocks = len(prefix_block_ids)

    def num_blocks_missing(self, table: BlockTable, start: int, end: int) -> int:
        """How many free blocks it takes to write the tokens from `start` to before `end`.

        These are the blocks that the table lacks, and one for each that other sequences own too.
        """
        num_owned = len(table.block_ids)
        num_shared = 0
        for index in range(start // self.block_size, num_owned):
            num_shared += self._ref_counts[table.block_ids[index]] > 1
        return max(self.num_blocks_for(end) - num_owned, 0) + num_shared

    def can_allocate(self, table: BlockTable, start: int, end: int) -> bool:
        """Whether `allocate` can succeed."""
        return self.num_blocks_missing(table, start, end) <= self.num_free_blocks

    def num_writable_tokens(self, table: BlockTable, start: int) -> int:
        """How many tokens from `start` on `allocate` could find room for."""
        num_shared = self.num_blocks_missing(table, start, start)
        return (len(table.block_ids) + self.num_free_blocks - num_shared) * self.block_size - start

    def allocate(self, table: BlockTable, start: int, end: int) -> list[tuple[int, int]]:
        """Makes the blocks of the tokens from `start` to before `end` exist and belong to this sequence alone.

        Returns the (source, destination) block ids whose content must be copied before anything is written.
        """
        copies: list[tuple[int, int]] = []
        for index in range(start // self.block_size, len(table.block_ids)):
            source = table.block_ids[index]
            if self._ref_counts[source] > 1:
                destination = self._take_free_block()
                self._ref_counts[source] -= 1
                table.block_ids[index] = destination
                copies.append((source, destination))
        for _ in range(self.num_blocks_for(end) - len(table.block_ids)):
            table.block_ids.append(self._take_free_block())
        return copies

    def fork(self, table: BlockTable) -> BlockTable:
        """Another table with the same blocks; whoever writes to a shared one first gets a copy."""
        for block_id in table.block_ids:
            self._ref_counts[block_id] += 1
        return BlockTable(table.block_ids[:], table.prefix, table.num_named_blocks)

    def register_computed(self, table: BlockTable, token_ids: TokenIds, num_computed_tokens: int) -> None:
        """Makes the full blocks of the first `num_computed_tokens` tokens reusable: their K/V exist now."""
        if not self._enable_prefix_caching:
            return
        num_full_blocks = num_computed_tokens // self.block_size
        for tokens in self._full_blocks(token_ids, table.num_named_blocks, num_full_blocks):
            prefix = Prefix(table.prefix, tokens)
            block_id = table.block_ids[table.num_named_blocks]
            # Where another block already holds the same content, this one stays without a name.
            first_id = self._block_of.setdefault(prefix, block_id)
            if first_id == block_id:
                self._prefix_of[block_id] = prefix
            table.prefix = self._prefix_of[first_id]
            table.num_named_blocks += 1

    def forget_content(self, table: BlockTable) -> None:
        """Makes sure that nobody reuses what the table's blocks hold, because it may be wrong."""
        for block_id in table.block_ids:
            self._forget(block_id)

    def free(self, table: BlockTable) -> None:
        """Gives the table's blocks back and empties it. Blocks that others own stay theirs."""
        for block_id in reversed(table.block_ids):  # the end of a sequence is less likely to be reused than its start
            self._ref_counts[block_id] -= 1
            if self._ref_counts[block_id] == 0:
                if self._prefix_of[block_id] is None:
                    self._blank_ids.append(block_id)
                else:
                    self._reusable_ids[block_id] = None
        table.block_ids = array("i")
        table.prefix = None
        table.num_named_blocks = 0

    def _take_free_block(self) -> int:
        """A blank block, else the least recently used one, whose content is forgotten."""
        assert self.num_free_blocks > 0, "ask can_allocate first"
        if self._blank_ids:
            block_id = self._blank_ids.pop()
        else:
            block_id, _ = self._reusable_ids.popitem(last=False)
            self._forget(block_id)
        self._ref_counts[block_id] = 1
        return block_id

    def _forget(self, block_id: int) -> None:
        prefix = self._prefix_of[block_id]
        if prefix is not None:
            del self._block_of[prefix]
            self._prefix_of[block_id] = None

    def _full_blocks(self, token_ids: TokenIds, start: int, end: int) -> Iterator[bytes]:
        """The tokens of the blocks with the indices from `start` to before `end`, as `Prefix` takes them."""
        ids = array("i", token_ids[start * self.block_size : end * self.block_size])
        data, num_bytes = ids.tobytes(), ids.itemsize * self.block_size
        for index in range(0, len(data), num_bytes):
            yield data[index : index + num_bytes]
