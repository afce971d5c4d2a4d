"""Blobs in the making: pieces in any order, and whatever happens to the file between two owners."""

from __future__ import annotations

import errno
import hashlib
import itertools
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.model import partial as partial_module
from swarm.model.partial import PartialBlob
from swarm.model.store import Store
from swarm.protocol.errors import StoreError
from swarm.protocol.ids import BlobId

PIECE = 64
"""In the place of a mebibyte."""

DATA = bytes(range(250)) * 2
COUNT = 8
ID = BlobId(hashlib.sha256(DATA).hexdigest())
DEAD = "999999999-0"


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partial_module, "PIECE_BYTES", PIECE)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store(tmp_path / "store")
    store.open()
    return store


def fresh() -> Iterator[Store]:
    """For hypothesis, which wants a new one for every example."""
    with tempfile.TemporaryDirectory() as directory:
        store = Store(Path(directory))
        store.open()
        yield store


def piece(index: int, data: bytes = DATA) -> bytes:
    return data[index * PIECE : (index + 1) * PIECE]


def fill(partial: PartialBlob, indices: Any = range(COUNT), data: bytes = DATA) -> None:
    for index in indices:
        partial.put(index, piece(index, data))


def begun(store: Store) -> Path:
    return store.root / "partial" / ID


def litter(store: Store) -> list[str]:
    return [path.name for name in ("tmp", "partial") for path in (store.root / name).iterdir()]


@given(st.permutations(range(COUNT)), st.lists(st.integers(0, COUNT), max_size=3), st.booleans())
@settings(max_examples=60)
def test_pieces_in_any_order_over_any_number_of_owners(order: list[int], pauses: list[int], reopen: bool) -> None:
    for store in fresh():
        done: set[int] = set()
        cuts = sorted({0, COUNT, *pauses})
        for start, stop in itertools.pairwise(cuts):
            with store.partial(ID, len(DATA)) as partial:
                assert set(range(COUNT)) - set(partial.missing) == done
                fill(partial, order[start:stop])
            done |= set(order[start:stop])
            if reopen:
                store.open()
        with store.partial(ID, len(DATA)) as partial:
            assert partial.digests == tuple(hashlib.sha256(piece(index)).digest() for index in range(COUNT))
            assert partial.finish()
        assert store.read(ID) == DATA
        assert litter(store) == []


@given(st.sets(st.integers(0, COUNT - 1), min_size=1), st.data())
@settings(max_examples=100)
def test_a_file_cut_or_damaged_at_any_byte_repairs_itself(here: set[int], data: st.DataObject) -> None:
    """What is not as it was written is fetched again, and nothing else."""
    for store in fresh():
        with store.partial(ID, len(DATA)) as partial:
            fill(partial, here)
        file = begun(store)
        content = bytearray(file.read_bytes())
        at = data.draw(st.integers(0, len(content) - 1))
        if data.draw(st.booleans()):
            file.write_bytes(content[:at])
            survive = set[int]()
        else:
            content[at] ^= data.draw(st.integers(1, 255))
            file.write_bytes(content)
            survive = here - {at // PIECE if at < len(DATA) else (at - len(DATA)) // 32}
        with store.partial(ID, len(DATA)) as partial:
            assert set(range(COUNT)) - set(partial.missing) == survive
            fill(partial, partial.missing)
            assert partial.finish()
        assert store.read(ID) == DATA


def test_threads_put_at_once(store: Store) -> None:
    with store.partial(ID, len(DATA)) as partial, ThreadPoolExecutor(COUNT) as pool:
        list(pool.map(lambda index: partial.put(index, piece(index)), [*range(COUNT)] * 5))
        assert partial.missing == []
        assert partial.finish()
    assert store.read(ID) == DATA


def test_wrong_pieces_are_replaced(store: Store) -> None:
    wrong = DATA[: 3 * PIECE] + b"?" + DATA[3 * PIECE + 1 :]
    with store.partial(ID, len(DATA)) as partial:
        fill(partial, data=wrong)
        assert not partial.finish()
        assert partial.recheck() == []  # the disk has what came
        partial.forget([3])
        assert partial.missing == [3]
        fill(partial, [3])
        assert partial.finish()
    assert store.read(ID) == DATA


def test_what_the_disk_lost_is_noticed(store: Store) -> None:
    with store.partial(ID, len(DATA)) as partial:
        fill(partial)
        (claim,) = (store.root / "partial").iterdir()
        with claim.open("r+b") as file:
            file.seek(5 * PIECE)
            file.write(b"?")
        assert partial.recheck() == [5]
        assert partial.missing == [5]
        fill(partial, [5])
        assert partial.finish()
    assert store.read(ID) == DATA


def test_a_blob_of_nothing(store: Store) -> None:
    empty = BlobId(hashlib.sha256(b"").hexdigest())
    with store.partial(empty, 0) as partial:
        assert partial.missing == []
        assert partial.finish()
    assert store.read(empty) == b""


def test_pieces_of_another_length(store: Store) -> None:
    with store.partial(ID, len(DATA)) as partial:
        for length in (0, PIECE - 1, PIECE + 1):
            with pytest.raises(StoreError, match="another length"):
                partial.put(0, bytes(length))
        with pytest.raises(StoreError, match="8 of 8 pieces missing"):
            partial.finish()
    with pytest.raises(ValueError, match="not open"):
        partial.put(0, piece(0))
    with pytest.raises(StoreError, match="bad size"):
        store.partial(ID, 2**60)


def test_another_size_starts_anew(store: Store) -> None:
    with store.partial(ID, len(DATA)) as partial:
        fill(partial, [0])
    with store.partial(ID, len(DATA) + 1) as partial:
        assert 0 in partial.missing


def test_two_owners_of_one_blob_do_not_meet(store: Store) -> None:
    with store.partial(ID, len(DATA)) as first:
        fill(first, [0, 1])
        with store.partial(ID, len(DATA)) as second:
            assert len(second.missing) == COUNT
            fill(second)
            assert second.finish()
        fill(first, range(2, COUNT))
        assert first.finish()
    assert store.read(ID) == DATA
    assert litter(store) == []


def test_of_two_beginnings_the_larger_stays(store: Store) -> None:
    with store.partial(ID, len(DATA)) as first:
        fill(first, [0, 6])
        with store.partial(ID, len(DATA)) as second:
            fill(second, [3])
    with store.partial(ID, len(DATA)) as partial:
        assert set(range(COUNT)) - set(partial.missing) == {0, 6}


@pytest.mark.parametrize("repair", [True, False])
def test_what_dead_processes_left_is_taken_up(store: Store, repair: bool) -> None:
    with store.partial(ID, len(DATA)) as partial:
        fill(partial, [1])
    begun(store).rename(begun(store).with_name(f"{ID}.{DEAD}"))
    if repair:
        store.open()
        assert litter(store) == [ID]
    with store.partial(ID, len(DATA)) as partial:
        store.open()  # what a living process works on stays
        assert 1 not in partial.missing
        fill(partial)
        assert partial.finish()


FETCHER = """
import sys
from pathlib import Path
from swarm.model import partial
from swarm.model.store import Store
partial.PIECE_BYTES = 64
data, blob = bytes(range(250)) * 2, sys.argv[2]
store = Store(Path(sys.argv[1]))
store.open()
print("ready", flush=True)
for turn in range(10**6):
    with store.partial(blob, len(data)) as one:
        for index in range(8):
            one.put(index, data[index * 64:][:64])
        assert one.finish()
    if turn % 3:
        store.path(blob).unlink()
    store.put_bytes(b"%d" % (turn % 7))
"""


def test_killed_at_any_moment(store: Store) -> None:
    """A real process, killed while it writes: whatever is in the store is whole, and what is begun goes on."""
    chance = random.Random(7)
    for _ in range(6):
        with subprocess.Popen(
            [sys.executable, "-c", FETCHER, str(store.root), ID], stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]
        ) as process:
            assert process.stdout is not None
            assert process.stdout.readline().strip() == b"ready"
            time.sleep(chance.random() * 0.05)  # any moment will do
            process.kill()
        store.open()
        assert not list((store.root / "tmp").iterdir())
        for path in (store.root / "blobs").glob("*/*"):
            store.verify(BlobId(path.name))
        with store.partial(ID, len(DATA)) as partial:
            fill(partial, partial.missing)
            assert partial.finish()
        assert store.read(ID) == DATA
        store.path(ID).unlink()


@pytest.mark.parametrize("written", [0, 30])
def test_a_full_disk_names_the_numbers_and_loses_nothing(
    store: Store, monkeypatch: pytest.MonkeyPatch, written: int
) -> None:
    def full(file: Any, at: int, data: Any) -> None:
        file.seek(at)
        file.write(data[:written])
        raise OSError(errno.ENOSPC, "No space left on device")

    with store.partial(ID, len(DATA)) as partial:
        fill(partial, [0, 2])
        with monkeypatch.context() as patch:
            patch.setattr(partial_module, "_write", full)
            patch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=33))
            with pytest.raises(StoreError, match=f"disk is full; expected {PIECE} more bytes; found 33 bytes free"):
                partial.put(1, piece(1))
    with store.partial(ID, len(DATA)) as partial:
        assert set(range(COUNT)) - set(partial.missing) == {0, 2}
        fill(partial, partial.missing)
        assert partial.finish()


def test_a_blob_that_will_not_fit_is_refused_before_it_is_fetched(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    with store.partial(ID, len(DATA)) as partial:
        fill(partial, [0])
    assert store.begun_bytes(ID) == len(DATA) + COUNT * 32
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=99))
        with pytest.raises(StoreError, match=f"expected {len(DATA) - PIECE} more bytes; found 99"):
            store.partial(ID, len(DATA)).__enter__()
    with store.partial(ID, len(DATA)) as partial:
        assert 0 not in partial.missing


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs a file that cannot be written")
def test_a_place_that_cannot_be_written(store: Store) -> None:
    (store.root / "partial").rmdir()
    (store.root / "partial").write_bytes(b"")
    with pytest.raises(StoreError, match="--home"):
        store.partial(ID, len(DATA)).__enter__()
