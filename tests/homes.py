"""Homes of nodes that have the default model already: nothing is downloaded for them."""

from __future__ import annotations

import shutil
from pathlib import Path

import anyio

from swarm.model.store import Store
from swarm.ring.supply import acquire_model


def give_model(home: Path, gguf: Path) -> None:
    """Lay the default model's GGUF where a node looks before it downloads."""
    place = home / "store" / "work" / "default" / gguf.name
    place.parent.mkdir(parents=True, exist_ok=True)
    try:
        place.hardlink_to(gguf)
    except OSError:  # another file system
        shutil.copyfile(gguf, place)


def whole_store(home: Path, gguf: Path) -> Path:
    """The store of a home with the default model converted in it, and nothing to make it from again."""
    give_model(home, gguf)
    store = Store(home / "store")
    store.open()
    anyio.run(acquire_model, "", store, lambda *_: None)
    shutil.rmtree(store.root / "work")
    return store.root


def give_store(home: Path, store: Path) -> None:
    """A copy of `store`."""
    shutil.copytree(store, home / "store")
