"""Blocks of a paged key-value cache: who has them, and which can be had again for equal tokens. No torch.

    pool = BlockPool(512, 16)
    found = pool.match(tokens)                # blocks that already hold the first tokens, now shared
    block = pool.take()                       # None if none is free
    pool.keep(block, hash)                    # its tokens are computed; equal ones may share it from now on
    pool.release(blocks)                      # in the order of the sequence

A block whose tokens are known stays after its last sequence has ended, until its room is needed: least recently used
first, and the end of a sequence before its beginning. Equal tokens are found by a hash over all tokens up to the
block's end, so that a block is shared only after an equal beginning.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np


def block_hash(before: bytes, tokens: Sequence[int]) -> bytes:
    """Return the hash of a block of tokens after a beginning with the hash `before` (empty: none)."""
    return hashlib.blake2b(before + np.asarray(tokens, dtype="<i8").tobytes(), digest_size=16).digest()


class BlockPool:
    """`count` blocks of `size` positions. With `caching`, blocks of equal tokens after equal beginnings are shared."""

    def __init__(self, count: int, size: int, caching: bool = True) -> None:
        assert count > 0 and size > 0
        self.count, self.size, self.caching = count, size, caching
        self._users = [0] * count
        # Free blocks: those of unknown tokens first, then by their last use.
        self._free: OrderedDict[int, None] = OrderedDict((block, None) for block in range(count))
        self._hashes: dict[int, bytes] = {}
        self._known: dict[bytes, int] = {}

    @property
    def free(self) -> int:
        """Blocks that no sequence has."""
        return len(self._free)

    def extend_hashes(self, hashes: list[bytes], tokens: Sequence[int], until: int) -> None:
        """Add the hashes of the further whole blocks of the first `until` tokens."""
        for end in range((len(hashes) + 1) * self.size, until + 1, self.size):
            hashes.append(block_hash(hashes[-1] if hashes else b"", tokens[end - self.size : end]))

    def match(self, hashes: Iterable[bytes]) -> list[int]:
        """Return the blocks of the longest known beginning, without taking them."""
        found = []
        for one in hashes:
            block = self._known.get(one) if self.caching else None
            if block is None:
                break
            found.append(block)
        return found

    def unused(self, blocks: Iterable[int]) -> int:
        """Return how many of these blocks no sequence has."""
        return sum(self._users[block] == 0 for block in blocks)

    def share(self, blocks: Iterable[int]) -> None:
        """Take blocks that `match` returned, each once more."""
        for block in blocks:
            self._users[block] += 1
            self._free.pop(block, None)

    def take(self) -> int | None:
        """Take a block for new tokens; None if no block is free."""
        if not self._free:
            return None
        block, _ = self._free.popitem(last=False)
        known = self._hashes.pop(block, None)
        if known is not None:
            del self._known[known]
        self._users[block] = 1
        return block

    def keep(self, block: int, known: bytes) -> None:
        """Note that a taken block is full and computed. If another holds the same tokens, that one stays the known."""
        if self.caching and known not in self._known and block not in self._hashes:
            self._hashes[block] = known
            self._known[known] = block

    def release(self, blocks: Sequence[int]) -> None:
        """Give back a sequence's blocks, in the order of the sequence."""
        for block in reversed(blocks):
            assert self._users[block] > 0, f"block {block} is released twice"
            self._users[block] -= 1
            if self._users[block] == 0:
                self._free[block] = None
                if block not in self._hashes:
                    self._free.move_to_end(block, last=False)
