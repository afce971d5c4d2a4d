"""The token log: ids of a session, and with which kernel each position's row was computed.

It is the truth of a session. A cache that was lost is rebuilt from it, bit for bit, because a replay repeats for every
position what was done the first time: prefilled rows go in as prefill chunks (any chunk of 2 or more rows gives the
same bits), decoded rows as sibling rows (alone or several at once: the same bits).

The invariant behind it: a maximal run of PREFILL positions is never one position long. A lone new token is a decode
row from the start, and a rewind that would leave a lone prefilled position drops that position too.

Behind the certain tokens the log may have a drafted tail. `confirm` moves the border, one drawn token at a time, and
drops the tail where it turns out wrong::

    prompt  answer so far   drafted
    ├───────────┴───────────┼────────┤
    0       fed ≤       certain     len
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from swarm.coordinator.chunks import MIN_PREFILL_ROWS, prefill_chunks, sibling_chunks
from swarm.protocol.messages import RowKind

_COMPARE = 1024
"""Ids compared at once where a prefix is looked for; a speed-up only."""


def prompt_kinds(rows: int, first: bytes = b"") -> bytes:
    """A `RowKind` for each row of a prompt: the `first` as they are, the others prefilled, a lone one decoded."""
    rest = rows - len(first)
    return first + bytes((RowKind.PREFILL if rest >= MIN_PREFILL_ROWS else RowKind.DECODE,)) * rest


def common_prefix(one: Sequence[int], other: Sequence[int], most: int) -> int:
    """How many of the first `most` are equal; both have as many."""
    same = 0
    while same < most:
        end = min(same + _COMPARE, most)
        if list(one[same:end]) != list(other[same:end]):
            break
        same = end
    while same < most and one[same] == other[same]:
        same += 1
    return same


@dataclass(frozen=True, slots=True)
class Piece:
    """Positions ``[start, end)`` that go into one segment."""

    start: int
    end: int
    kind: RowKind

    @property
    def rows(self) -> int:
        return self.end - self.start


class TokenLog:
    """Ids and kinds by absolute position, how many are certain, and how many of the certain rows have been run."""

    def __init__(self) -> None:
        self._ids: list[int] = []
        self._kinds = bytearray()
        self._certain = 0
        self._fed = 0

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def certain(self) -> int:
        """Positions whose tokens a person gave or the model drew; the drafted ones follow."""
        return self._certain

    @property
    def fed(self) -> int:
        """Positions that every stage holds. The last drawn token is in the log before its row is run."""
        return self._fed

    def ids(self, start: int, end: int) -> tuple[int, ...]:
        return tuple(self._ids[start:end])

    def kinds(self, start: int, end: int) -> tuple[RowKind, ...]:
        return tuple(RowKind(kind) for kind in self._kinds[start:end])

    def kind_bytes(self) -> bytes:
        """The `RowKind` of every row, a byte each."""
        return bytes(self._kinds)

    def append_prompt(self, ids: Sequence[int], kinds: bytes = b"") -> None:
        """Tokens that a person gave: run as `kinds` says and `prompt_kinds` completes it. Drops what is drafted."""
        self.drop_drafted()
        self._ids += ids
        self._kinds += prompt_kinds(len(ids), kinds)
        self._certain = len(self._ids)

    def begin(self, prompt: Sequence[int], kinds: bytes = b"") -> int:
        """Become `prompt`, run as in `append_prompt`; how many of its first rows need not be run again."""
        held = self.reusable(prompt, kinds)
        self.truncate(held)
        self.append_prompt(prompt[held:], prompt_kinds(len(prompt), kinds)[held:])
        return held

    def append_drafted(self, ids: Sequence[int]) -> None:
        """Tokens that the model may draw."""
        self._append(ids, RowKind.DECODE)

    def confirm(self, token: int) -> bool:
        """The model drew `token` at the first position that is not certain; False where another one was drafted there.

        Then the drafted tail is gone.
        """
        agreed = self._certain == len(self._ids) or self._ids[self._certain] == token
        if not agreed:
            self.drop_drafted()
        if self._certain == len(self._ids):
            self._append((token,), RowKind.DECODE)
        self._certain += 1
        return agreed

    def drop_drafted(self) -> None:
        del self._ids[self._certain :]
        del self._kinds[self._certain :]

    def mark_fed(self, end: int) -> None:
        """Every stage holds the positions before `end`, which are certain."""
        if not self._fed <= end <= self._certain:
            raise ValueError(f"position {end} is outside [{self._fed}, {self._certain}]")
        self._fed = end

    def lose_caches(self) -> None:
        """No stage holds anything any more."""
        self._fed = 0

    def truncate(self, length: int) -> None:
        """Forget the positions from `length` on, and one more where a lone prefilled one would be left."""
        length = self._without_lone_prefill(length)
        del self._ids[length:]
        del self._kinds[length:]
        self._certain = min(self._certain, length)
        self._fed = min(self._fed, length)

    def reusable(self, prompt: Sequence[int], kinds: bytes = b"") -> int:
        """How many first rows of `prompt`, run as in `append_prompt`, are held; at least its last two are run again.

        The last one alone would be a decoded row, and its bits not those of the same prompt without a cache: the same
        request with the same seed would get another answer the second time.
        """
        wanted = prompt_kinds(len(prompt), kinds)
        same = common_prefix(self._ids, prompt, max(0, min(self._fed, len(prompt) - 2)))
        same = common_prefix(self._kinds, wanted, same)
        if wanted[same : same + 2] == bytes((RowKind.PREFILL, RowKind.DECODE)):
            same = max(0, same - 1)
        return self._without_lone_prefill(same)

    def pieces(self, chunk_rows: int, sibling_rows: int) -> Iterator[Piece]:
        """What is certain and not yet run, in order, no piece larger than the limit of its kind."""
        position = self._fed
        while position < self._certain:
            kind, end = RowKind(self._kinds[position]), min(self._run_end(position), self._certain)
            rows = end - position
            divided = (
                prefill_chunks(rows, chunk_rows) if kind is RowKind.PREFILL else sibling_chunks(rows, sibling_rows)
            )
            for size in divided:
                yield Piece(position, position + size, kind)
                position += size

    def check(self) -> None:
        """Assert the invariants; for tests and debugging."""
        assert len(self._ids) == len(self._kinds)
        assert 0 <= self._fed <= self._certain <= len(self._ids)
        assert not any(kind != RowKind.DECODE for kind in self._kinds[self._certain :])
        position = 0
        while position < len(self._ids):
            end = self._run_end(position)
            assert self._kinds[position] == RowKind.DECODE or end - position >= MIN_PREFILL_ROWS
            position = end

    def _append(self, ids: Sequence[int], kind: RowKind) -> None:
        self._ids += ids
        self._kinds += bytes([kind]) * len(ids)

    def _run_end(self, start: int) -> int:
        """End of the run of one kind that `start` lies in."""
        other = RowKind.DECODE if self._kinds[start] == RowKind.PREFILL else RowKind.PREFILL
        end = self._kinds.find(bytes([other]), start)
        return len(self._kinds) if end < 0 else end

    def _without_lone_prefill(self, length: int) -> int:
        prefilled = length > 0 and self._kinds[length - 1] == RowKind.PREFILL
        lone = prefilled and (length == 1 or self._kinds[length - 2] == RowKind.DECODE)
        return length - 1 if lone else length
