"""The manifest: what a model is made of, so that a node can fetch only its layers and check every byte.

A model lies in the store as blobs, each named by the SHA-256 of its bytes: the *graph* (the IR's structure and its
small constants, a few MB, for everybody), the *tokenizer*, and the weights: *embedding*, one per *layer*, *head*. The
manifest names them all; its own hash is the model's id.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import cbor2

from swarm.protocol import limits
from swarm.protocol.errors import ModelError
from swarm.protocol.ids import BlobId, is_blob_id

FORMAT = 1


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A weight inside its blob; `name` is that of the graph's parameter that stands for it."""

    name: str
    type: str
    """OpenVINO's element type, such as ``u4``."""
    shape: tuple[int, ...]
    offset: int
    bytes: int


@dataclass(frozen=True, slots=True)
class BlobRef:
    id: BlobId
    bytes: int
    tensors: tuple[TensorRef, ...] = ()


ABSENT = BlobId("0" * 64)
"""In the place of a blob's id that is not known yet, for nobody has made it: size and tensors are known before."""

EMBEDDING = -1
"""The number of the embedding's part; layers have their own, the head has the number of layers."""


@dataclass(frozen=True, slots=True)
class Manifest:
    name: str
    source: str
    """What was given to ``--model`` on the node that made it; empty for the embedded default."""
    hidden_size: int
    vocabulary: int
    context_tokens: int
    kv_bytes_per_token: tuple[int, ...]
    """Keys and values of one position in f16, for each layer."""
    graph: BlobRef
    tokenizer: BlobRef
    embedding: BlobRef
    layers: tuple[BlobRef, ...]
    head: BlobRef
    tied: bool
    """The head reads weights of the embedding's blob too."""
    revision: str = ""
    """Commit of the source on the Hugging Face hub; empty where it did not come from there."""
    quantization: str = ""
    """How most of the weights are kept: ``Q4_K`` for a GGUF file's type, ``u4`` for OpenVINO's."""

    def weights(self, start: int, end: int) -> list[BlobRef]:
        """The weight blobs that layers ``[start, end)`` need, each once."""
        blobs = list(self.layers[start:end])
        last = end == len(self.layers)
        if start == 0 or (last and self.tied):
            blobs.insert(0, self.embedding)
        if last:
            blobs.append(self.head)
        return list({blob.id: blob for blob in blobs}.values())

    def blobs(self) -> Iterator[BlobRef]:
        yield from (self.graph, self.tokenizer, self.embedding, *self.layers, self.head)

    @property
    def is_whole(self) -> bool:
        """Every blob is known. One that is not is a *part*, or with none of its weights an *outline*."""
        return all(blob.id != ABSENT for blob in self.blobs())

    def part(self, start: int, end: int) -> list[BlobRef]:
        """What is exported as the layers ``[start, end)``: the embedding with the first, the head with the last."""
        first = [self.embedding] if start == 0 else []
        return [*first, *self.layers[start:end], *([self.head] if end == len(self.layers) else [])]

    def unknown(self, start: int, end: int) -> list[tuple[int, int]]:
        """The runs of layers in ``[start, end)`` whose `part` holds a blob that is not known, ascending."""
        runs: list[tuple[int, int]] = []
        for layer in range(start, end):
            if any(blob.id == ABSENT for blob in self.part(layer, layer + 1)):
                begin = runs.pop()[0] if runs and runs[-1][1] == layer else layer
                runs.append((begin, layer + 1))
        return runs

    def without(self, gone: Collection[BlobId]) -> Manifest:
        """The same with these weights not known."""
        return self._map(lambda blob: replace(blob, id=ABSENT) if blob.id in gone else blob)

    def _map(self, change: Callable[[BlobRef], BlobRef]) -> Manifest:
        layers = tuple(change(layer) for layer in self.layers)
        return replace(self, embedding=change(self.embedding), layers=layers, head=change(self.head))

    @property
    def total_bytes(self) -> int:
        return sum(blob.bytes for blob in self.blobs())

    def encode(self) -> bytes:
        """Canonical CBOR: the same manifest is the same bytes everywhere."""
        return cbor2.dumps({"format": FORMAT, **asdict(self)}, canonical=True)

    @staticmethod
    def decode(data: bytes) -> Manifest:
        """Read a manifest, which may come from a peer. Raises `ModelError` on anything that is not well formed."""
        if len(data) > limits.MAX_MANIFEST_BYTES:
            raise ModelError(
                "manifest too large", expected=f"at most {limits.MAX_MANIFEST_BYTES}", found=str(len(data))
            )
        try:
            raw = cbor2.loads(data)
            if raw["format"] != FORMAT:
                raise ModelError("a manifest of another format", expected=str(FORMAT), found=str(raw["format"])[:40])
            manifest = _read(raw)
        except ModelError:
            raise
        except Exception as error:
            # cbor2 and the reads below fail in many ways on crafted input; each means the same here.
            raise ModelError("not a manifest", found=f"{type(error).__name__}: {error}"[:200]) from None
        manifest._check()
        return manifest

    def _check(self) -> None:
        layers = len(self.layers)
        if not 1 <= layers <= limits.MAX_LAYERS or len(self.kv_bytes_per_token) != layers:
            raise ModelError("bad manifest", expected=f"1 to {limits.MAX_LAYERS} layers", found=str(layers))
        for name, value, high in (
            ("hidden_size", self.hidden_size, 2**20),
            ("vocabulary", self.vocabulary, limits.MAX_VOCABULARY),
            ("context_tokens", self.context_tokens, limits.MAX_CONTEXT_TOKENS),
            *(("kv_bytes_per_token", value, 2**24) for value in self.kv_bytes_per_token),
            *(("bytes", blob.bytes, limits.MAX_BLOB_BYTES) for blob in self.blobs()),
        ):
            if not 0 < value <= high:
                raise ModelError(f"bad {name} in a manifest", expected=f"1 to {high}", found=str(value))
        for blob in self.blobs():
            for tensor in blob.tensors:
                if min(tensor.offset, tensor.bytes, *tensor.shape) < 0 or tensor.offset + tensor.bytes > blob.bytes:
                    raise ModelError("a tensor outside its blob", found=tensor.name[:80])


def join(manifests: Sequence[Manifest]) -> Manifest:
    """The whole of several parts. Raises `ModelError` where they do not fit each other, or a blob is in none."""
    joined = merge(manifests)
    if not joined.is_whole:
        missing = [i for i, blob in enumerate(joined.layers) if blob.id == ABSENT]
        raise ModelError(
            "parts of a model are missing",
            expected=f"all of {len(joined.layers)} layers, embedding and head",
            found=f"no layers {missing}"[:200] if missing else "no embedding or no head",
        )
    return joined


def merge(manifests: Sequence[Manifest]) -> Manifest:
    """What several parts of the same model know together. Raises `ModelError` where they do not fit each other."""
    merged = manifests[0]
    for other in manifests[1:]:
        bare = [replace(one, embedding=_NOTHING, head=_NOTHING, layers=()) for one in (merged, other)]
        if bare[0] != bare[1] or len(merged.layers) != len(other.layers):
            differing = [name for name, value in asdict(bare[0]).items() if value != asdict(bare[1])[name]]
            raise ModelError(
                "the parts of a model do not fit each other",
                expected="the same model, exported by the same versions",
                found=f"another {', '.join(differing) or 'number of layers'}",
            )
        merged = replace(
            merged,
            embedding=_merge_blob(merged.embedding, other.embedding),
            layers=tuple(_merge_blob(a, b) for a, b in zip(merged.layers, other.layers, strict=True)),
            head=_merge_blob(merged.head, other.head),
        )
    return merged


_NOTHING = BlobRef(ABSENT, 1)


def _merge_blob(one: BlobRef, other: BlobRef) -> BlobRef:
    known = other if one.id == ABSENT else one
    if replace(one, id=known.id) != replace(other, id=known.id):
        raise ModelError("the parts of a model do not fit each other", found="another form of the same layer")
    if other.id not in (ABSENT, known.id):
        raise ModelError("two nodes made different blobs of the same layer", expected=one.id, found=other.id)
    return known


def blob_id(data: bytes) -> BlobId:
    return BlobId(hashlib.sha256(data).hexdigest())


def _read(raw: dict[str, Any]) -> Manifest:
    return Manifest(
        name=_text(raw["name"]),
        source=_text(raw["source"]),
        hidden_size=_integer(raw["hidden_size"]),
        vocabulary=_integer(raw["vocabulary"]),
        context_tokens=_integer(raw["context_tokens"]),
        kv_bytes_per_token=tuple(_integer(value) for value in raw["kv_bytes_per_token"]),
        graph=_blob(raw["graph"]),
        tokenizer=_blob(raw["tokenizer"]),
        embedding=_blob(raw["embedding"]),
        layers=tuple(_blob(value) for value in raw["layers"]),
        head=_blob(raw["head"]),
        tied=raw["tied"] is True,
        revision=_text(raw.get("revision", "")),
        quantization=_text(raw.get("quantization", "")),
    )


def _blob(raw: dict[str, Any]) -> BlobRef:
    if not is_blob_id(raw["id"]):
        raise ModelError("bad blob id in a manifest", found=repr(raw["id"])[:80])
    tensors = tuple(
        TensorRef(
            _text(t["name"]),
            _text(t["type"]),
            tuple(_integer(axis) for axis in t["shape"]),
            _integer(t["offset"]),
            _integer(t["bytes"]),
        )
        for t in raw["tensors"]
    )
    return BlobRef(BlobId(raw["id"]), _integer(raw["bytes"]), tensors)


def _text(value: object) -> str:
    if not isinstance(value, str) or len(value) > limits.MAX_TEXT_CHARS:
        raise ModelError("bad text in a manifest", found=repr(value)[:80])
    return value


def _integer(value: object) -> int:
    if type(value) is not int or not -(2**63) <= value < 2**63:
        raise ModelError("bad number in a manifest", found=repr(value)[:80])
    return value
