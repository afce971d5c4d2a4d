"""The stateful engine: one cache that only grows for each session, rejected cells masked. For devices without paged
attention (arXiv 2608.19147, "rewind by mask"; what keeps it exact is ours).

Sessions interleave, one forward each. A rewind is bookkeeping: the next segment's `start` says what is still looked at.
What makes its results equal, bit for bit, to plain decoding by the whole model and to a cache that was physically
trimmed (each rule has a test that fails without it):

1. A position keeps its lane: cells are left out so that it lies a multiple of 16 cells from where a cache without
   rejected rows has it (`layout.ALIGN`). Left-out cells cost no row of the matrices, only of attention: its kernel
   wants a query for each cell that is appended.
2. The cache is never empty: it begins with 16 cells of nobody. The attention kernel for an empty cache is another one.
3. No sum over a head's cells is shared between threads: their number divides that of the KV heads.
4. Never a forward of one row, in body or head: where the plugin does not quantize activations, its kernel for one row
   of 8-bit weights is another.

Windows, chunks of any size and single rows all go through one attention kernel, so nothing depends on a row's kind. The
cache is f16 (see `devices`): compaction copies it without rounding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import psutil

from swarm.engine.base import Output, check_rows, first_line
from swarm.engine.devices import profile
from swarm.engine.head import HEAD_ROWS_INPUT, MIN_ROWS, draw_wanted, gather_head_rows, head_rows
from swarm.engine.layout import ALIGN, Layout
from swarm.model.cells import BEAM_INPUT, CELLS_INPUT, LENGTHS_INPUT, ROWS_INPUT, attend_over_cells, mask_input
from swarm.model.cut import HIDDEN_INPUT, LOGITS_OUTPUT
from swarm.model.grouping import weight_group, weights_of_graph
from swarm.model.layers import TOKENS_INPUT
from swarm.model.shard import Shard
from swarm.protocol.errors import CapacityError, DeviceError, SessionError
from swarm.protocol.ids import SessionId
from swarm.protocol.limits import MAX_SEGMENT_ROWS
from swarm.protocol.messages import Segment
from swarm.protocol.tensors import Array

FORWARD_ROWS = 256
"""Of one forward; longer segments are run in several, with the same bits. Bounds what attention keeps at once."""

MASKED_CELLS = 128
"""A session's cache is compacted at a rewind when it has more masked cells than this, and than an eighth of those held.
Every row looks at every cell, and compaction saves the cells that the rewind would leave out: it pays soon."""

MASKED = -65504.0
"""Added to a score: far enough for a weight of exactly 0, and finite in f16."""


@dataclass(slots=True)
class _Session:
    """One session's cache on the device."""

    compiled: Any
    request: Any
    layout: Layout = field(default_factory=Layout)
    tokens: list[int] = field(default_factory=list)


class StatefulEngine:
    """Implements `base.Engine` on any shard whose attention takes its mask as an input."""

    def __init__(
        self,
        shard: Shard,
        device: str,
        kv_tokens: int,
        vocabulary: int,
        threads: int | None = None,
        cache: Path | None = None,
    ) -> None:
        """Compile `shard` (whose model is used up) for `device` with room for `kv_tokens` positions; blocking, seconds.

        Token ids lie in ``[0, vocabulary)``. `threads` limits the CPU threads of inference. Under `cache` the plugin
        may keep what it compiled. Raises `DeviceError` where the device refuses and `UnsupportedModelError` where the
        attention is another.
        """
        self._device = device
        self._settings = profile(device)
        self._vocabulary = vocabulary
        self._kv_tokens = kv_tokens
        self._weights = shard.weights
        self._last = shard.model.outputs[0].get_any_name() == LOGITS_OUTPUT
        self._output_size = 0 if self._last else shard.model.outputs[0].get_partial_shape()[2].get_length()
        self._first = any(TOKENS_INPUT in port.get_names() for port in shard.model.inputs)
        self.hidden_size = 0 if self._first else _hidden_size(shard.model)
        self._properties = dict(self._settings.properties)
        if cache is not None and self._settings.keeps_compiled:
            self._properties["CACHE_DIR"] = str(cache)
        heads = _kv_heads(shard.model)
        if device == "CPU":
            self._properties["DYNAMIC_QUANTIZATION_GROUP_SIZE"] = shard.group or weight_group(
                weights_of_graph(shard.model)
            )
            self._properties["INFERENCE_NUM_THREADS"] = dividing_threads(heads, threads or usable_cores())
        parts = attend_over_cells(shard.model)
        if self._last:
            gather_head_rows(parts.model, axis=1)
            parts.model.validate_nodes_and_infer_types()
        self._model = parts.model
        self._compiled = self._compile()
        self._idle = [self._compiled]
        """Compiled models without a session, where each has its own."""
        self._inputs = {name for port in self._compiled.inputs for name in port.get_names()}
        self._masks = ov.Core().compile_model(parts.masks, "CPU", _MASK_PROPERTIES).create_infer_request()
        self._mask_inputs = {name for port in self._masks.model_inputs for name in port.get_names()}
        self._sessions: dict[SessionId, _Session] = {}
        self._drawn_from: list[Array] = []

    @property
    def max_rows(self) -> int:
        return MAX_SEGMENT_ROWS

    @property
    def free_tokens(self) -> int:
        return self._kv_tokens - sum(session.layout.held for session in self._sessions.values())

    @property
    def shares(self) -> bool:
        return False

    def check(self, segment: Segment) -> None:
        check_rows(segment, self._vocabulary, self.hidden_size)
        if len(segment.tokens) > MAX_SEGMENT_ROWS:
            raise CapacityError(
                "a segment too large", expected=f"at most {MAX_SEGMENT_ROWS} rows", found=str(len(segment.tokens))
            )
        held = self._held(segment.session)
        if segment.start > held:
            raise SessionError(
                "a gap in the session's cache", expected=f"start at most {held}", found=str(segment.start)
            )
        if segment.start + len(segment.tokens) > self._kv_tokens:
            raise CapacityError(
                "a session longer than the KV cache",
                expected=f"at most {self._kv_tokens} positions",
                found=str(segment.start + len(segment.tokens)),
            )

    def run(self, batch: Sequence[Segment]) -> list[Output]:
        self._drawn_from = []
        try:
            self._reserve(batch)
            return [self._run(segment) for segment in batch]
        except RuntimeError as error:
            raise DeviceError("the device failed in a forward", found=first_line(error)) from None

    def adopt(self, session: SessionId, tokens: Sequence[int]) -> int:
        """0: every session has a cache of its own."""
        return 0

    def close_session(self, session: SessionId) -> None:
        closed = self._sessions.pop(session, None)
        if closed is not None and self._settings.model_per_session:
            self._idle.append(closed.compiled)

    def reset(self) -> None:
        for session in list(self._sessions):
            self.close_session(session)

    def close(self) -> None:
        self._sessions.clear()
        self._drawn_from = []
        del self._idle, self._compiled, self._masks, self._model, self._weights

    def logits(self) -> Array:
        """Of the last batch's wanted rows, ``[rows, vocabulary]`` f32 in batch order."""
        return np.concatenate(self._drawn_from) if self._drawn_from else np.empty((0, self._vocabulary), np.float32)

    def validate_state(self) -> None:
        """Every session's ids, positions and cells agree, and all fit."""
        for session in self._sessions.values():
            session.layout.validate_state()
            assert session.layout.held == len(session.tokens)
        assert 0 <= self.free_tokens <= self._kv_tokens
        assert sum(s.layout.cells - ALIGN for s in self._sessions.values()) <= self._most_cells

    @property
    def _most_cells(self) -> int:
        """Of all sessions together, masked ones included."""
        return self._kv_tokens + MASKED_CELLS

    def _held(self, session: SessionId) -> int:
        found = self._sessions.get(session)
        return found.layout.held if found else 0

    def _reserve(self, batch: Sequence[Segment]) -> None:
        """Make room for `batch`. Raises `SessionError` or `CapacityError`; then nothing has changed."""
        need = 0
        for segment in batch:
            self.check(segment)
            need += segment.start + len(segment.tokens) - self._held(segment.session)
        if need > self.free_tokens:
            raise CapacityError(
                "the KV cache is full",
                expected=f"{need} free positions",
                found=f"{self.free_tokens} of {self._kv_tokens}, {len(self._sessions)} sessions",
                action="Wait for another answer to end, or add a PC.",
            )
        for segment in batch:
            session = self._sessions.get(segment.session) or self._open(segment.session)
            self._rewind(session, segment.start)
        cells = sum(session.layout.cells - ALIGN for session in self._sessions.values())
        # At most one gap each, and no cell of a batch that fits is left out of this sum.
        cells += sum(len(segment.tokens) + ALIGN for segment in batch)
        for session in sorted(self._sessions.values(), key=lambda one: -one.layout.masked):
            if cells <= self._most_cells or not session.layout.masked:
                break
            cells -= session.layout.masked
            self._compact(session)

    def _rewind(self, session: _Session, start: int) -> None:
        layout = session.layout
        if start == layout.held:
            return
        del session.tokens[start:]
        layout.rewind(start)
        if layout.masked > max(MASKED_CELLS, layout.held // 8) or not start:
            self._compact(session)

    def _compact(self, session: _Session) -> None:
        """Trim the cache physically to what is looked at. Some milliseconds: every cell is copied out and in again."""
        spans = [slice(0, ALIGN), *(cells for _, cells in session.layout.spans())]
        for variable in session.request.query_state():
            cells = variable.state.data
            variable.state = ov.Tensor(np.concatenate([cells[:, :, span] for span in spans], axis=2))
        session.layout.compact()

    def _open(self, name: SessionId) -> _Session:
        compiled = self._compiled
        if self._settings.model_per_session:
            compiled = self._idle.pop() if self._idle else self._compile()
        session = self._sessions[name] = _Session(compiled, compiled.create_infer_request())
        for variable in session.request.query_state():
            _, heads, _, size = variable.state.shape
            variable.state = ov.Tensor(np.zeros((1, heads, ALIGN, size), np.float32))
        return session

    def _run(self, segment: Segment) -> Output:
        session = self._sessions[segment.session]
        session.tokens += segment.tokens
        count = len(segment.tokens)
        hidden = np.empty((count, self._output_size), np.float32)
        logits = []
        for first in range(0, count, FORWARD_ROWS):
            rows = range(first, min(first + FORWARD_ROWS, count))
            wanted = rows[max(0, count - segment.wanted - first) :]
            result = self._forward(session, segment, rows, wanted)
            if self._last:
                logits.append(result[: len(wanted)].copy())
            else:
                hidden[rows.start : rows.stop] = result[: len(rows)]
        if not self._last:
            return Output(hidden=hidden)
        self._drawn_from += logits
        return draw_wanted(segment, np.concatenate(logits), session.tokens)

    def _forward(self, session: _Session, segment: Segment, rows: range, wanted: range) -> Array:
        """Run some `rows` of `segment`: the hidden rows, or the logits of those that are `wanted`, and padding.

        ``[rows or wanted, hidden or vocabulary]`` f32, a view until the session's next forward.
        """
        start, count = segment.start + rows.start, len(rows)
        fed = max(count, MIN_ROWS)
        gap = session.layout.append(count)
        positions = np.full((1, fed), start, np.int64)
        positions[0, :count] = range(start, start + count)
        values: dict[str, Array] = {
            "attention_mask": np.ones((1, start + count), np.int64),
            "position_ids": positions,
            BEAM_INPUT: np.zeros(1, np.int32),
            # What is left out is filled with the first row: any finite value does, its weight is 0.
            CELLS_INPUT: np.array([0] * gap + list(range(count)), np.int64),
            ROWS_INPUT: np.array([*range(gap, gap + count), *[gap] * (fed - count)], np.int64),
            **self._mask(session.layout, start, count, gap),
        }
        if segment.hidden is None:
            values[TOKENS_INPUT] = np.zeros((1, fed), np.int64)
            values[TOKENS_INPUT][0, :count] = segment.tokens[rows.start : rows.stop]
        else:
            values[HIDDEN_INPUT] = np.zeros((1, fed, self.hidden_size), np.float32)
            values[HIDDEN_INPUT][0, :count] = segment.hidden[rows.start : rows.stop]
        if self._last:
            values[HEAD_ROWS_INPUT] = head_rows([row - rows.start for row in wanted])
        for name in self._inputs:
            session.request.set_tensor(name, ov.Tensor(values[name]))
        session.request.infer()
        result: Array = session.request.get_output_tensor(0).data
        return result.reshape(-1, result.shape[-1])

    def _mask(self, layout: Layout, start: int, count: int, gap: int) -> dict[str, Array]:
        """The model's own masks, made for positions, with their columns where the cells lie: ``[1, 1, new, cells]``."""
        total = start + count
        known = {
            LENGTHS_INPUT: np.array([count, total], np.int64),
            "attention_mask": np.ones((1, total), np.int64),
            "position_ids": np.arange(start, total)[None],
        }
        for name in self._mask_inputs:
            self._masks.set_tensor(name, ov.Tensor(known[name]))
        self._masks.infer()
        masks = {}
        for number in range(len(self._masks.model_outputs)):
            logical = self._masks.get_output_tensor(number).data
            hidden = False if logical.dtype == bool else MASKED
            mask = np.full((1, 1, gap + count, layout.cells), hidden, logical.dtype)
            mask[:, :, :gap] = not hidden if logical.dtype == bool else 0.0
            for positions, cells in layout.spans():
                mask[:, :, gap:, cells] = logical[..., positions]
            masks[mask_input(number)] = mask
        return masks

    def _compile(self) -> Any:
        try:
            return ov.Core().compile_model(self._model, self._device, self._properties)
        except RuntimeError as error:
            raise DeviceError(f"{self._device} cannot compile the shard", found=first_line(error)) from None


_MASK_PROPERTIES = {"INFERENCE_NUM_THREADS": 1, "INFERENCE_PRECISION_HINT": "f32", "PERFORMANCE_HINT": "LATENCY"}


def usable_cores() -> int:
    """Physical cores that this process may run on."""
    allowed = len(psutil.Process().cpu_affinity()) if hasattr(psutil.Process, "cpu_affinity") else 1 << 30
    return max(1, min(allowed, psutil.cpu_count(logical=False) or 1))


def dividing_threads(heads: int, cores: int) -> int:
    """The most threads, `cores` at most, among which `heads` KV heads are shared without splitting one (rule 3)."""
    return max(count for count in range(1, cores + 1) if heads % count == 0)


def _kv_heads(model: ov.Model) -> int:
    """KV heads of a layer; where layers differ, what divides them all."""
    shapes = [n.get_output_partial_shape(0) for n in model.get_ops() if n.get_type_name() == "ReadValue"]
    return math.gcd(*(shape[1].get_length() for shape in shapes))


def _hidden_size(model: ov.Model) -> int:
    size: int = model.input(HIDDEN_INPUT).get_partial_shape()[2].get_length()
    return size
