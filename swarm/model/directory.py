"""What a directory holds: a whole IR of a language model, or what is wrong with it."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

from swarm.model.files import IR_WEIGHTS
from swarm.protocol.errors import UsageError

_MAX_XML_BYTES = 512 * 1024 * 1024
_MAX_CONFIG_BYTES = 4 * 1024 * 1024


def check_ir(directory: Path) -> None:
    """Raises `UsageError` where the graph is no language model's, or the weights are cut short."""
    needed = check_graph(directory)
    if (size := (directory / IR_WEIGHTS).stat().st_size) < needed:
        raise UsageError(
            f"{directory / IR_WEIGHTS} is cut short",
            expected=f"at least {needed} bytes",
            found=f"{size} bytes",
            action="Copy or download it again.",
        )


def check_graph(directory: Path) -> int:
    """The bytes of weights that the IR in `directory` refers to. Raises `UsageError` where it is no language model."""
    inputs, caches, needed = _scan_ir(directory / "openvino_model.xml")
    if "input_ids" not in inputs or not caches:
        found = f"inputs {', '.join(sorted(inputs))[:120] or 'none'}, {caches} cache variables"
        raise UsageError(
            f"{directory} is not a language model",
            expected="an input input_ids and a KV cache in the graph",
            found=found,
            action="Export it with --task text-generation-with-past.",
        )
    return needed


def read_config(path: Path) -> dict[str, Any]:
    """A checkpoint's ``config.json``. Raises `UsageError`."""
    try:
        if path.stat().st_size > _MAX_CONFIG_BYTES:
            raise ValueError(f"over {_MAX_CONFIG_BYTES} bytes")
        config = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise ValueError(f"a {type(config).__name__}")
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(
            f"{path} cannot be read", expected="a JSON object", found=str(error)[:200], action="Download it again."
        ) from None
    return config


def _scan_ir(path: Path) -> tuple[set[str], int, int]:
    """Of an IR's xml: names of the inputs, number of cache variables, bytes of weights it refers to."""
    inputs: set[str] = set()
    caches = needed = 0
    kind = ""
    try:
        if path.stat().st_size > _MAX_XML_BYTES:
            raise UsageError("the IR's graph is too large", expected=f"at most {_MAX_XML_BYTES} bytes", found=str(path))
        with path.open("rb") as file:
            for event, element in ET.iterparse(file, events=("start", "end")):
                if event == "end":
                    element.clear()
                elif element.tag == "layer":
                    kind = element.get("type", "")
                    caches += kind == "ReadValue"
                    if kind == "Parameter":
                        inputs.add(element.get("name", ""))
                elif element.tag == "port" and kind == "Parameter":
                    inputs.update(element.get("names", "").split(","))
                elif element.tag == "data" and element.get("offset"):
                    needed = max(needed, int(element.get("offset", "0")) + int(element.get("size", "0")))
    except (ET.ParseError, ValueError, OSError) as error:
        raise UsageError(
            f"{path} cannot be read", expected="an OpenVINO IR", found=str(error)[:200], action="Export it again."
        ) from None
    return inputs - {""}, caches, needed
