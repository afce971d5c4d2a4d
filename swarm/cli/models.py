"""``models``: what is in the store of this PC, the removal of a model, and the fetching of one without a node."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Sequence
from typing import Any, TextIO

import anyio.to_thread

from swarm.cli.args import Models
from swarm.model.inventory import StoredModel, models_in, remove
from swarm.model.store import Store
from swarm.protocol.config import Settings
from swarm.protocol.errors import UsageError
from swarm.protocol.messages import Phase
from swarm.ring.supply import acquire_model
from swarm.ui.figures import clean, duration, size, size_of

TOLD_EVERY_S = 2.0
"""A progress that is not shown in a terminal."""

MIN_ID_CHARS = 6
"""Of a model's id, to name it by its beginning."""


async def run_models(settings: Settings, request: Models, as_json: bool, out: TextIO, err: TextIO) -> None:
    """List, remove or fetch. Works while a node runs. Raises `SwarmError`."""
    store = Store(settings.home / "store", settings.disk_bytes)
    await anyio.to_thread.run_sync(store.open)
    found = await anyio.to_thread.run_sync(models_in, store)
    if request.action == "list":
        _list(store, found, as_json, out)
    elif request.action == "rm":
        model = choose(found, request.target)
        freed = await anyio.to_thread.run_sync(remove, store, model)
        answer = {"id": model.id, "name": model.name, "freed_bytes": freed}
        print(json.dumps(answer) if as_json else f"removed {clean(model.name)}: {size(freed)} freed", file=out)
    else:
        progress = _Progress(err)
        try:
            identity = await acquire_model(request.target, store, progress.report, newest=True)
        finally:
            progress.end()
        found = await anyio.to_thread.run_sync(models_in, store)
        model = next(model for model in found if model.id == identity)
        pulled = f"{clean(model.name)} is here: {size(model.bytes)}, {model.layers} layers"
        print(json.dumps(as_object(model)) if as_json else pulled, file=out)


def choose(found: Sequence[StoredModel], text: str) -> StoredModel:
    """The model that a person names: by name, by what it was made from, or by the beginning of its id.

    Raises `UsageError` where that is none or several, or a node works with it.
    """
    named = [model for model in found if text in (model.name, model.source)]
    if not named and len(text) >= MIN_ID_CHARS:
        named = [model for model in found if model.id.startswith(text.lower())]
    if len(named) != 1:
        candidates = named or found
        listed = ", ".join(f"{clean(model.name)} ({model.id[:12]})" for model in candidates[:6])
        raise UsageError(
            f"several models are called {text!r}" if named else f"no model {text!r} in the store",
            expected=f"one of {listed}" if listed else "a model that is here, and there is none",
            action="Name it by its id." if named else "python node.py models lists what is here.",
        )
    if named[0].in_use:
        raise UsageError(
            f"{clean(named[0].name)} is in use by the node that runs here",
            expected="a model that nobody works with",
            action="Stop the node first.",
        )
    return named[0]


def as_object(model: StoredModel) -> dict[str, Any]:
    """For ``--json``."""
    return {
        "id": model.id,
        "name": model.name,
        "source": model.source,
        "revision": model.revision,
        "quantization": model.quantization,
        "bytes": model.bytes,
        "here_bytes": model.here_bytes,
        "compiled_bytes": model.compiled_bytes,
        "layers": model.layers,
        "layers_here": model.layers_here,
        "last_used": round(model.used, 3),
        "in_use": model.in_use,
    }


def table(found: Sequence[StoredModel], now: float) -> list[str]:
    """Lines for people."""
    rows = [("model", "id", "here", "layers", "weights", "last used", "from")]
    for model in found:
        used = "now" if model.in_use else f"{duration(max(0.0, now - model.used))} ago"
        here = size(model.bytes) if model.here_bytes == model.bytes else size_of(model.here_bytes, model.bytes)
        here += f" + {size(model.compiled_bytes)} compiled" if model.compiled_bytes else ""
        layers = f"{model.layers_here} of {model.layers}"
        source = clean(model.source) + (f" ({model.revision[:12]})" if model.revision else "")
        rows.append((clean(model.name), model.id[:12], here, layers, clean(model.quantization), used, source))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _list(store: Store, found: Sequence[StoredModel], as_json: bool, out: TextIO) -> None:
    used, free = store.usage_bytes(), shutil.disk_usage(store.root).free
    if as_json:
        space = {"used_bytes": used, "limit_bytes": store.limit_bytes, "free_bytes": free}
        print(json.dumps({"models": [as_object(model) for model in found], **space}, indent=2), file=out)
        return
    lines = table(found, time.time()) if found else ["no model is here"]
    limit = f" of {size(store.limit_bytes)}" if store.limit_bytes is not None else ""
    print(*lines, f"the store takes {size(used)}{limit}; {size(free)} free on the disk", sep="\n", file=out)


class _Progress:
    """One line that is overwritten in a terminal, else a line now and then."""

    def __init__(self, err: TextIO) -> None:
        self._err = err
        self._told = 0.0
        self._open = False

    def report(self, phase: Phase, what: str, done: int, total: int, rate: float) -> None:
        if phase is Phase.IDLE or time.monotonic() - self._told < (0.2 if self._err.isatty() else TOLD_EVERY_S):
            return
        self._told = time.monotonic()
        amount = size_of(done, total) if total else size(done)
        line = f"{phase.name.lower()} {clean(what)}: {amount}" + (f" at {size(rate)}/s" if rate else "")
        self._open = self._err.isatty()
        self._err.write(f"\r\x1b[K{line[:100]}" if self._open else f"{line}\n")
        self._err.flush()

    def end(self) -> None:
        if self._open:
            self._err.write("\r\x1b[K")
            self._err.flush()
