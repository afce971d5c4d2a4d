"""Chains of shards out of a layer store, the whole model beside them, and a comparison to the last bit."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import openvino as ov

from swarm.engine.kinds import ExactEngine, make_engine
from swarm.engine.selftest import Chain, segment
from swarm.model.cut import cut
from swarm.model.manifest import Manifest
from swarm.model.publish import publish
from swarm.model.shard import Shard, load_shard
from swarm.model.store import Store
from swarm.model.tiny import tiny_model
from swarm.model.tokenizer import TOKENIZER_IRS, Tokenizer
from swarm.protocol.config import PAGED
from swarm.protocol.tensors import Array
from tests.prompts import PROMPTS

DEVICE = "CPU"

KV_TOKENS = 4096

THREADS = 1
"""A node of the benchmarks is one core; on a busy machine one thread is also the fastest."""


@dataclass(frozen=True, slots=True)
class Published:
    """A model as an IR directory and in a layer store."""

    ir: Path
    store: Store
    manifest: Manifest
    kind: str = PAGED
    """Of the engines that `whole` and `chain` build."""

    @property
    def layers(self) -> int:
        return len(self.manifest.layers)

    def whole(self, kv_tokens: int) -> Chain:
        """All layers of the original IR in one shard: what everything is compared with."""
        model = cut(ov.Core().read_model(self.ir / "openvino_model.xml"), 0, self.layers)
        return Chain([make_engine(self.kind, Shard(model), DEVICE, kv_tokens, self.manifest.vocabulary, THREADS)])

    def engine(self, start: int, end: int, kv_tokens: int) -> ExactEngine:
        """Layers ``[start, end)`` out of the store."""
        shard = load_shard(self.manifest, self.store, start, end)
        return make_engine(self.kind, shard, DEVICE, kv_tokens, self.manifest.vocabulary, THREADS)

    def chain(self, cuts: Sequence[int], kv_tokens: int) -> Chain:
        """Shards out of the store, cut before the layers `cuts`."""
        ends = [0, *cuts, self.layers]
        return Chain([self.engine(a, b, kv_tokens) for a, b in itertools.pairwise(ends)])


def published(ir: Path, root: Path, kind: str = PAGED) -> Published:
    """Put the model in directory `ir` into a new store at `root`."""
    store = Store(root)
    store.open()
    identity = publish(ir, store, ir.name, "", lambda _done, _total: None)
    return Published(ir, store, Manifest.decode(store.read(identity)), kind)


def write_tiny_ir(directory: Path, layers: int = 3, seed: int = 7) -> Path:
    """`tiny_model` as an IR directory; its tokenizer files are there, and empty."""
    directory.mkdir(parents=True, exist_ok=True)
    ov.save_model(tiny_model(layers, seed), directory / "openvino_model.xml", compress_to_fp16=False)
    for name in TOKENIZER_IRS:
        (directory / name).write_bytes(b"")
    return directory


def even_cuts(layers: int, stages: int) -> list[int]:
    """Where `stages` shards of about equal size begin, the first aside."""
    return [layers * i // stages for i in range(1, stages)]


@dataclass(frozen=True, slots=True)
class Plain:
    """A prompt, its plain greedy continuation by one session alone, and the logits of every row."""

    prompt: list[int]
    tokens: list[int]
    logits: Array
    """``[prompt + tokens - 1, vocabulary]``: row i is what the token at position i+1 is chosen from."""

    @property
    def ids(self) -> list[int]:
        return self.prompt + self.tokens


def plain(chain: Chain, session: int, prompt: Sequence[int], count: int) -> Plain:
    """Prefill in one segment, then one row at a time, nobody else in the batch."""
    drawn, rows = chain.run([segment(session, 0, prompt, len(prompt))])
    tokens, logits = [drawn[0][-1]], [rows]
    while len(tokens) < count:
        drawn, rows = chain.run([segment(session, len(prompt) + len(tokens) - 1, tokens[-1:])])
        tokens.append(drawn[0][0])
        logits.append(rows)
    return Plain(list(prompt), tokens, np.concatenate(logits))


def assert_same_bits(found: Array, expected: Array, what: str) -> None:
    """Every logit equal in all its bits."""
    assert found.shape == expected.shape, what
    if found.tobytes() != expected.tobytes():
        row = int(np.flatnonzero((found.view(np.uint32) != expected.view(np.uint32)).any(axis=-1))[0])
        worst = float(np.abs(found - expected).max())
        raise AssertionError(f"{what}: row {row} of {len(found)} is the first that differs, by {worst:g} at most")


def assert_decodes_like(chain: Chain, session: int, expected: Plain, count: int, what: str) -> None:
    """One session alone, following its own tokens, against a reference: prefill and `count` tokens."""
    prompt = expected.prompt
    drawn, rows = chain.run([segment(session, 0, prompt, len(prompt))])
    assert_same_bits(rows, expected.logits[: len(prompt)], f"{what}, prefill")
    token = drawn[0][-1]
    for i in range(count - 1):
        assert token == expected.tokens[i]
        at = len(prompt) + i
        drawn, rows = chain.run([segment(session, at, [token])])
        assert_same_bits(rows, expected.logits[at : at + 1], f"{what}, position {at}")
        token = drawn[0][0]


def replay(chain: Chain, session: int, expected: Plain) -> Array:
    """The logits of every row, as `Plain.logits`, where the chain is fed what the reference was."""
    rows = [chain.run([segment(session, 0, expected.prompt, len(expected.prompt))])[1]]
    for i, token in enumerate(expected.tokens[:-1]):
        rows.append(chain.run([segment(session, len(expected.prompt) + i, [token])])[1])
    return np.concatenate(rows)


def assert_decode_together(chain: Chain, expected: Sequence[Plain], count: int, what: str) -> None:
    """All sessions in one forward, a row each, against each alone."""
    tokens = []
    for session, one in enumerate(expected):
        drawn, rows = chain.run([segment(session, 0, one.prompt, len(one.prompt))])
        assert_same_bits(rows, one.logits[: len(one.prompt)], f"{what}, session {session}, prefill")
        tokens.append(drawn[0][-1])
    for i in range(count - 1):
        batch = [segment(s, len(one.prompt) + i, [tokens[s]]) for s, one in enumerate(expected)]
        results, rows = chain.run(batch)
        for session, one in enumerate(expected):
            at = len(one.prompt) + i
            place = f"{what}, session {session}, position {at}"
            assert_same_bits(rows[session : session + 1], one.logits[at : at + 1], place)
        tokens = [drawn[0] for drawn in results]


def reference(model: Published, names: Sequence[str], count: int) -> dict[str, Plain]:
    tokenizer = Tokenizer.load(model.ir)
    whole = model.whole(KV_TOKENS)
    found = {}
    for session, name in enumerate(names):
        found[name] = plain(whole, session, tokenizer.encode(PROMPTS[name]), count)
        whole.engines[0].reset()
    return found


def chain_of(model: Published, stages: int) -> Chain:
    return model.chain(even_cuts(model.layers, stages), KV_TOKENS)


def chain_reset(chain: Chain) -> None:
    for engine in chain.engines:
        engine.reset()
