"""A replay buffer of whole blocks, bounded in blocks and bytes; the oldest are evicted."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import numpy as np

from ludus.core.tree import map_tree
from ludus.core.types import Segments


class BlockReplay:
    """Keeps copies, so that the blocks themselves can be released. Counts additions, evictions and refusals."""

    def __init__(self, blocks: int, max_bytes: int) -> None:
        self._blocks, self._max_bytes = blocks, max_bytes
        self._kept: deque[Segments] = deque()
        self._sizes: deque[int] = deque()
        self.nbytes = 0
        self.added = self.evicted = self.refused = 0

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, segments: Segments) -> bool:
        """Keep a copy; return False (and count a refusal) if the block alone exceeds the memory limit."""
        size = segments.nbytes
        if size > self._max_bytes:
            self.refused += 1
            return False
        while self._kept and (len(self._kept) >= self._blocks or self.nbytes + size > self._max_bytes):
            self._kept.popleft()
            self.nbytes -= self._sizes.popleft()
            self.evicted += 1
        arrays = {name: map_tree(np.copy, tree) for name, tree in segments.arrays().items()}
        self._kept.append(replace(segments, cache={}, **arrays))
        self._sizes.append(size)
        self.nbytes += size
        self.added += 1
        return True

    def __getitem__(self, index: int) -> Segments:
        """Index 0 is the oldest."""
        return self._kept[index]
