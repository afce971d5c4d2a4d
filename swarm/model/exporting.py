"""From a Hugging Face checkpoint to a manifest and blobs in the store, by ``swarm.model.export`` in its own process.

Its memory, torch's among it, goes back when it ends, and a crash in native code is only an error.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from swarm.model.convert import REFUSED
from swarm.model.manifest import Manifest
from swarm.model.scratch import owned_name
from swarm.model.sources import Source
from swarm.model.store import Store
from swarm.model.watched import module_command, package_path, run_watched
from swarm.protocol.errors import ModelError, UsageError
from swarm.protocol.ids import BlobId

EXPORT_TIMEOUT_S = 8 * 3600.0
"""A whole checkpoint; a 70B model takes hours on a slow disk."""

QUANTIZATION = "INT4"
"""What the exporter makes where it is not told otherwise."""


def export_checkpoint(
    checkpoint: Path, source: Source, store: Store, workdir: Path, on_progress: Callable[[int, int], None]
) -> BlobId:
    """Puts all layers of the checkpoint in a directory into the store; the id of its manifest. Blocking; minutes.

    `on_progress(done, total)` counts bytes that the store gained, `total` 0; what it raises ends the work. Raises
    `UsageError` where the checkpoint cannot be exported, `ModelError` where the exporter fails.
    """
    scratch = workdir / "tmp" / owned_name()
    scratch.mkdir(parents=True)
    before = store.usage_bytes()
    try:
        result = scratch / "manifest"
        status, message = run_watched(
            module_command(
                "swarm.model.export",
                *(str(checkpoint.absolute()), str(store.root.absolute()), str(result.absolute())),
                *("--name", source.name, "--source", source.spec),
            ),
            EXPORT_TIMEOUT_S,
            lambda: on_progress(max(0, store.usage_bytes() - before), 0),
            scratch / "stderr",
            package_path(),
            scratch,
        )
        if status == REFUSED and message:
            raise UsageError(message)
        if status or not result.is_file():
            raise ModelError(
                f"{source.name} cannot be exported",
                found=f"the exporter ended with status {status}" + (f": {message}" if message else ""),
                action="It may have run out of memory: close other programs, or take an OpenVINO IR of the model.",
            )
        made = Manifest.decode(result.read_bytes())
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    manifest = replace(made, revision=source.revision, quantization=made.quantization or QUANTIZATION)
    identity = store.put_bytes(manifest.encode())
    store.mark_manifest(identity, manifest.name, manifest.source)
    return identity
