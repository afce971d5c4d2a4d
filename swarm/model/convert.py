"""``python -m swarm.model.convert GGUF OUTDIR``: a GGUF file to an IR directory with tokenizers, by openvino_genai.

Run as a process of its own by `sources.acquire`: its memory goes back, and a crash in native code is only an error.
In a fresh process the same file gives the same bytes every time (openvino_genai 2026.4): node names count on. It takes
about 4 s for a 135M model, 25 s for a 1.5B one, and up to four times the file's size in memory.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import shutil
import struct
import sys
import tempfile
import xml.etree.ElementTree as ET
from pathlib import Path

from swarm.model import gguf
from swarm.model.files import IR_FILES
from swarm.model.requantize import requantize
from swarm.model.widen import has_narrow, widen
from swarm.protocol.errors import SwarmError, UsageError
from swarm.protocol.limits import MAX_CONTEXT_TOKENS

CONVERSION = 2
"""One more whenever the same file begins to give other bytes: what an older program made is then made anew."""

REFUSED = 2
"""Exit status; the reason is the last line on stderr."""

_TOKENS_KEPT = 8192
"""The converter's tokenizers drop all of a text but its last 8,192 tokens, without a word."""


def convert(source: Path, target: Path, as_written: bool = False) -> None:
    """Makes the IR directory `target` from the GGUF file `source`. Raises `UsageError`.

    `target` appears whole or not at all; where it exists already, the old one stays. `as_written` leaves the weights as
    openvino_genai writes them, for comparison.
    """
    header = gguf.read_header(source)
    gguf.check_convertible(header, source.name)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(
        prefix=f".{target.name}-", dir=target.parent, ignore_cleanup_errors=True
    ) as scratch:
        made = Path(scratch) / "ir"
        made.mkdir()
        _write_ir(source, header, made)
        missing = [name for name in IR_FILES if not (made / name).is_file()]
        if missing:
            raise _failed(source, f"no {', '.join(missing)} was written")
        lift_length_limit(made)
        config = configuration(header)
        if not as_written and (rewritten := _rewrite_weights(made, Path(scratch) / "rewritten")):
            config["weights_rewritten_int8"] = rewritten
        (made / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
        try:
            made.rename(target)
        except OSError:
            if not target.is_dir():  # otherwise another process was faster: the bytes are the same
                raise


def _write_ir(source: Path, header: gguf.Header, directory: Path) -> None:
    """Lets openvino_genai write its files into `directory`: it puts them beside the GGUF, so that is linked there.

    A file with a type that it does not read is written there with one that it does.
    """
    import openvino_genai

    link = directory / "model.gguf"
    if has_narrow(header):
        widen(source, header, link)
    else:
        _link(source, link)
    try:
        openvino_genai.LLMPipeline(str(link), "CPU", enable_save_ov_model=True)
    except Exception as error:  # openvino raises RuntimeError and others
        lines = [line for line in str(error).splitlines() if line.strip()]
        raise _failed(source, lines[-1] if lines else type(error).__name__) from error
    finally:
        gc.collect()  # Windows cannot rename files that are still mapped
        with contextlib.suppress(OSError):
            link.unlink()


def _link(source: Path, link: Path) -> None:
    try:
        os.link(source, link)
    except OSError:  # another file system, or one without links
        shutil.copyfile(source, link)


def _rewrite_weights(made: Path, scratch: Path) -> int:
    """Gives the model in `made` weights that CPUs run faster: how many were changed."""
    scratch.mkdir()
    rewritten = requantize(made, scratch)
    gc.collect()  # Windows cannot replace files that are still mapped
    for file in scratch.iterdir():
        file.replace(made / file.name)
    return rewritten


def lift_length_limit(directory: Path) -> None:
    """Raises the length that a converted tokenizer cuts texts to, from 8,192 to `MAX_CONTEXT_TOKENS`.

    The limit is an i32 constant of the graph, an input of its only ``Minimum``; its four bytes are replaced.
    """
    graph = ET.parse(directory / "openvino_tokenizer.xml").getroot()
    layers = {layer.get("id"): layer for layer in graph.iter("layer")}
    minima = {number for number, layer in layers.items() if layer.get("type") == "Minimum"}
    inputs = [layers[edge.get("from-layer")] for edge in graph.iter("edge") if edge.get("to-layer") in minima]
    constants = [data for layer in inputs if layer.get("type") == "Const" for data in layer.iter("data")]
    places = [data.get("offset") for layer in layers.values() for data in layer.iter("data") if data.get("offset")]
    with (directory / "openvino_tokenizer.bin").open("r+b") as weights:
        for data in constants:
            offset = data.get("offset", "")
            weights.seek(int(offset))
            # A constant that other layers share is none of this limit alone.
            if places.count(offset) == 1 and weights.read(4) == struct.pack("<i", _TOKENS_KEPT):
                weights.seek(int(offset))
                weights.write(struct.pack("<i", MAX_CONTEXT_TOKENS))


def configuration(header: gguf.Header) -> dict[str, str | int]:
    """What a GGUF says that the IR does not, under the names of a Hugging Face ``config.json``."""
    named = {
        "model_type": "general.architecture",
        "max_position_embeddings": f"{header.architecture}.context_length",
        "bos_token_id": "tokenizer.ggml.bos_token_id",
        "eos_token_id": "tokenizer.ggml.eos_token_id",
    }
    values = {name: header.metadata.get(key) for name, key in named.items()}
    return {name: value for name, value in values.items() if isinstance(value, (str, int))}


def _failed(source: Path, reason: str) -> UsageError:
    return UsageError(
        f"{source.name} cannot be converted",
        found=reason,
        action="Take another quantization of the model, or an OpenVINO IR directory of it.",
    )


def main(arguments: list[str]) -> int:
    """Exit status 0, or `REFUSED` with the reason as the last line on stderr."""
    if len(arguments) != 2:
        print("expected: python -m swarm.model.convert GGUF OUTDIR", file=sys.stderr)
        return REFUSED
    source, target = (Path(argument) for argument in arguments)
    try:
        convert(source, target)
    except (SwarmError, OSError) as error:
        print(str(error).replace("\n", " "), file=sys.stderr)
        return REFUSED
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
