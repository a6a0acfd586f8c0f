"""Blocks under long random runs, where a paged array of tokens shows whether each sequence still owns its content."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.helpers.engine_fakes import check_blocks
from vllm_lite.engine import block_manager
from vllm_lite.engine.block_manager import BlockManager, BlockTable, Prefix

BLOCK_SIZE = 4
NUM_BLOCKS = 24


@dataclass
class Owner:
    token_ids: list[int]
    table: BlockTable = field(default_factory=BlockTable)
    num_computed: int = 0


class Simulation:
    """Sequences that write their tokens into a paged array through their tables, and never lose one."""

    def __init__(self) -> None:
        self.manager = BlockManager(NUM_BLOCKS, BLOCK_SIZE, enable_prefix_caching=True)
        self.memory = [[-1] * BLOCK_SIZE for _ in range(NUM_BLOCKS)]
        self.owners: list[Owner] = []
        self.num_hits = 0
        self.num_copies = 0

    def admit(self, token_ids: list[int]) -> None:
        found = self.manager.find_prefix(token_ids)
        assert len(found) * BLOCK_SIZE < len(token_ids)
        num_free = self.manager.num_free_blocks
        fits = self.manager.can_admit([(len(token_ids), found)])
        if fits:
            owner = Owner(token_ids, num_computed=len(found) * BLOCK_SIZE)
            self.manager.share_prefix(owner.table, found)
            self.owners.append(owner)
            self.num_hits += len(found)
            assert self.manager.can_allocate(owner.table, owner.num_computed, len(token_ids))
        else:
            assert self.manager.num_blocks_for(len(token_ids)) > num_free - len(found)

    def compute(self, index: int, num_tokens: int, register: bool) -> None:
        """Writes some tokens; where all are written already, new ones."""
        owner = self.owners[index % len(self.owners)]
        if owner.num_computed == len(owner.token_ids):
            owner.token_ids = [*owner.token_ids, *(num_tokens + i & 1 for i in range(num_tokens))]
        start, end = owner.num_computed, min(owner.num_computed + num_tokens, len(owner.token_ids))
        room = self.manager.num_writable_tokens(owner.table, start)
        assert self.manager.can_allocate(owner.table, start, end) == (end - start <= room)
        if end - start > room:
            return
        for source, destination in self.manager.allocate(owner.table, start, end):
            self.memory[destination] = list(self.memory[source])
            self.num_copies += 1
        for position in range(start, end):
            block_id = owner.table.block_ids[position // BLOCK_SIZE]
            self.memory[block_id][position % BLOCK_SIZE] = owner.token_ids[position]
        owner.num_computed = end
        if register:
            self.manager.register_computed(owner.table, owner.token_ids, end)

    def fork(self, index: int) -> None:
        parent = self.owners[index % len(self.owners)]
        self.owners.append(Owner(list(parent.token_ids), self.manager.fork(parent.table), parent.num_computed))

    def free(self, index: int, forget: bool) -> None:
        owner = self.owners.pop(index % len(self.owners))
        if forget:
            self.manager.forget_content(owner.table)
        self.manager.free(owner.table)
        assert not owner.table.block_ids

    def check(self) -> None:
        check_blocks(self.manager, [owner.table for owner in self.owners])
        for owner in self.owners:
            content = [token_id for block_id in owner.table.block_ids for token_id in self.memory[block_id]]
            assert content[: owner.num_computed] == owner.token_ids[: owner.num_computed]


def test_ten_thousand_random_operations() -> None:
    simulation = Simulation()
    dice = random.Random(0)
    prefixes = [[dice.randrange(2) for _ in range(12)] for _ in range(3)]
    for _ in range(10_000):
        choice = dice.choices(["admit", "compute", "fork", "free"], [3, 8, 1, 2])[0]
        if choice == "admit":
            simulation.admit(dice.choice(prefixes) + [dice.randrange(2) for _ in range(dice.randrange(1, 9))])
        elif simulation.owners and choice == "compute":
            simulation.compute(dice.randrange(99), dice.randrange(1, 7), dice.random() < 0.9)
        elif simulation.owners and choice == "fork":
            simulation.fork(dice.randrange(99))
        elif simulation.owners:
            simulation.free(dice.randrange(99), dice.random() < 0.05)
        simulation.check()
    assert simulation.num_hits > 500 and simulation.num_copies > 50
    while simulation.owners:
        simulation.free(0, False)
    assert simulation.manager.num_free_blocks == NUM_BLOCKS


class BlockMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.simulation = Simulation()

    @rule(token_ids=st.lists(st.integers(0, 1), min_size=1, max_size=24))
    def admit(self, token_ids: list[int]) -> None:
        self.simulation.admit(token_ids)

    @precondition(lambda self: self.simulation.owners)
    @rule(index=st.integers(0, 99), num_tokens=st.integers(1, 9), register=st.booleans())
    def compute(self, index: int, num_tokens: int, register: bool) -> None:
        self.simulation.compute(index, num_tokens, register)

    @precondition(lambda self: self.simulation.owners)
    @rule(index=st.integers(0, 99))
    def fork(self, index: int) -> None:
        self.simulation.fork(index)

    @precondition(lambda self: self.simulation.owners)
    @rule(index=st.integers(0, 99), forget=st.booleans())
    def free(self, index: int, forget: bool) -> None:
        self.simulation.free(index, forget)

    @invariant()
    def nothing_is_lost(self) -> None:
        self.simulation.check()


class CollidingBlockMachine(BlockMachine):
    """The same with a hash that tells nothing apart."""

    def __init__(self) -> None:
        super().__init__()
        self._patch = pytest.MonkeyPatch()
        self._patch.setattr(block_manager, "hash_block", lambda parent_hash, token_ids: 7)

    def teardown(self) -> None:
        self._patch.undo()


TestBlockManager = BlockMachine.TestCase
TestBlockManager.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
TestCollidingHash = CollidingBlockMachine.TestCase
TestCollidingHash.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)


def computed(manager: BlockManager, token_ids: list[int]) -> BlockTable:
    """A table whose tokens are all computed and reusable."""
    table = BlockTable()
    manager.allocate(table, 0, len(token_ids))
    manager.register_computed(table, token_ids, len(token_ids))
    return table


def test_content_is_reusable_only_once_it_is_computed() -> None:
    manager = BlockManager(8, BLOCK_SIZE, enable_prefix_caching=True)
    table = BlockTable()
    manager.allocate(table, 0, 8)
    assert manager.find_prefix([1] * 9) == []
    manager.register_computed(table, [1] * 8, 5)
    assert manager.find_prefix([1] * 9) == table.block_ids[:1].tolist()
    manager.register_computed(table, [1] * 8, 8)
    assert manager.find_prefix([1] * 9) == table.block_ids.tolist()


def test_the_last_token_is_always_computed() -> None:
    manager = BlockManager(8, BLOCK_SIZE, enable_prefix_caching=True)
    table = computed(manager, [1] * 8)
    assert manager.find_prefix([1] * 8) == table.block_ids[:1].tolist()
    assert manager.find_prefix([1] * 4) == []


def test_equal_tokens_after_others_are_another_content() -> None:
    manager = BlockManager(8, BLOCK_SIZE, enable_prefix_caching=True)
    computed(manager, [1] * 4 + [2] * 4)
    assert manager.find_prefix([2] * 4 + [1]) == []
    assert manager.find_prefix([3] * 4 + [2] * 4 + [1]) == []


def test_nothing_is_reused_where_that_is_off() -> None:
    manager = BlockManager(8, BLOCK_SIZE, enable_prefix_caching=False)
    computed(manager, [1] * 8)
    assert manager.find_prefix([1] * 9) == []


def test_the_least_recently_used_content_goes_first_and_blank_blocks_before_it() -> None:
    manager = BlockManager(6, BLOCK_SIZE, enable_prefix_caching=True)
    first, second = computed(manager, [1] * 8), computed(manager, [2] * 8)
    manager.free(second)
    manager.free(first)
    manager.allocate(BlockTable(), 0, 2 * BLOCK_SIZE)
    assert len(manager.find_prefix([1] * 9)) == len(manager.find_prefix([2] * 9)) == 2
    manager.allocate(BlockTable(), 0, BLOCK_SIZE)
    assert len(manager.find_prefix([2] * 9)) == 1, "the end of a sequence goes before its start"
    manager.allocate(BlockTable(), 0, BLOCK_SIZE)
    assert len(manager.find_prefix([2] * 9)) == 0
    assert len(manager.find_prefix([1] * 9)) == 2


def test_free_blocks_that_are_reused_count_as_taken() -> None:
    manager = BlockManager(4, BLOCK_SIZE, enable_prefix_caching=True)
    table = computed(manager, [1] * 8)
    found = manager.find_prefix([1] * 17)
    assert manager.can_admit([(16, found)]) and not manager.can_admit([(17, found)])
    manager.free(table)
    assert manager.can_admit([(16, found)]) and not manager.can_admit([(17, found)])
    assert manager.can_admit([(12, found), (12, found)]) and not manager.can_admit([(12, found), (13, found)])


def test_a_twin_of_known_content_keeps_the_chain() -> None:
    """Two sequences compute the same tokens in the same step; the first to be noted gives the name."""
    manager = BlockManager(9, BLOCK_SIZE, enable_prefix_caching=True)
    first, twin = BlockTable(), BlockTable()
    for table in (first, twin):
        manager.allocate(table, 0, 8)
    manager.register_computed(first, [1] * 8, 8)
    manager.register_computed(twin, [1] * 8, 8)
    manager.allocate(twin, 8, 12)
    manager.register_computed(twin, [1] * 12, 12)
    assert manager.find_prefix([1] * 13) == [*first.block_ids, twin.block_ids[2]]
    check_blocks(manager, [first, twin])


def test_content_is_found_again_when_what_comes_before_it_was_computed_anew() -> None:
    manager = BlockManager(8, BLOCK_SIZE, enable_prefix_caching=True)
    table, start = computed(manager, [1] * 8), BlockTable()
    manager.share_prefix(start, table.block_ids[:1])
    manager.forget_content(start)
    assert manager.find_prefix([1] * 9) == []
    anew = computed(manager, [1] * 4)
    assert manager.find_prefix([1] * 9) == [anew.block_ids[0], table.block_ids[1]]
    check_blocks(manager, [table, start, anew])


def test_prefixes_are_equal_when_all_their_tokens_are() -> None:
    def chain(*blocks: bytes) -> Prefix:
        prefix = None
        for block in blocks:
            prefix = Prefix(prefix, block)
        assert prefix is not None
        return prefix

    assert chain(b"12", b"34") == chain(b"12", b"34")
    assert chain(b"12", b"34") != chain(b"34")
    assert chain(b"12", b"34") != chain(b"11", b"34")
    assert chain(b"12") != b"12"


def test_colliding_prefixes_of_different_length_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_manager, "hash_block", lambda parent_hash, token_ids: 7)
    assert Prefix(Prefix(None, b"1"), b"1") != Prefix(None, b"1")


def test_a_shared_block_is_copied_for_all_but_its_last_owner() -> None:
    manager = BlockManager(8, BLOCK_SIZE, enable_prefix_caching=True)
    table = computed(manager, [1] * 6)
    fork = manager.fork(table)
    assert manager.num_blocks_missing(fork, 6, 7) == 1
    assert manager.allocate(fork, 6, 7) == [(table.block_ids[1], fork.block_ids[1])]
    assert manager.num_blocks_missing(table, 6, 7) == 0
    assert manager.allocate(table, 6, 7) == []
    check_blocks(manager, [table, fork])


def test_forgotten_content_is_not_reused() -> None:
    manager = BlockManager(8, BLOCK_SIZE, enable_prefix_caching=True)
    table = computed(manager, [1] * 8)
    manager.forget_content(table)
    manager.free(table)
    assert manager.find_prefix([1] * 9) == []
    check_blocks(manager, [])
