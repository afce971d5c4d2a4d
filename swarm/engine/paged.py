"""The paged engine: rows of many sessions in one forward, KV cache in blocks.

What makes its results equal, bit for bit, to plain decoding by the whole model, for any cut, batch mix, window and
history of rewinds (each rule has a test that fails without it):

1. The cache is f16 (see `devices`).
2. DECODE rows go in as siblings: each row is its own subsequence of one row over the same block table. The attention
   kernel for one query row differs in the last bits from the one for several.
3. Never a forward of one row: the matrix kernel for one row differs too. A scratch row pads it, in body and head.
4. The hidden input has its static size (see `_restore_hidden_size`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
from openvino._offline_transformations import paged_attention_transformation

from swarm.engine.base import Output, check_rows, first_line
from swarm.engine.blocks import BlockPool, BlockTable
from swarm.engine.devices import profile
from swarm.engine.head import HEAD_ROWS_INPUT, MIN_ROWS, draw_wanted, gather_head_rows, head_rows
from swarm.engine.shortlist import EXTRA_IDS_INPUT, SHORT_ROWS_INPUT, Shortlist, add_short_head
from swarm.model.cut import HIDDEN_INPUT, LOGITS_OUTPUT
from swarm.model.grouping import weight_group, weights_of_graph
from swarm.model.layers import TOKENS_INPUT
from swarm.model.shard import Shard
from swarm.protocol.errors import CapacityError, DeviceError
from swarm.protocol.ids import SessionId
from swarm.protocol.messages import RowKind, Segment
from swarm.protocol.tensors import Array

MAX_ROWS = 1024
"""Of a forward. More rows add little speed and much working memory."""


_NOTHING = np.empty(0, np.int64)


class PagedEngine:
    """Implements `base.Engine` on any shard that the paged-attention pass takes."""

    def __init__(
        self,
        shard: Shard,
        device: str,
        kv_tokens: int,
        vocabulary: int,
        threads: int | None = None,
        cache: Path | None = None,
        shortlist: Shortlist | None = None,
        *,
        margins: bool = False,
    ) -> None:
        """Compile `shard` (whose model is used up) for `device` with room for `kv_tokens` positions; blocking, seconds.

        Token ids lie in ``[0, vocabulary)``. `threads` limits the CPU threads of inference. Under `cache` the plugin
        may keep what it compiled. For drafts: with a `shortlist` sessions that it suits draw from it, and with
        `margins` tokens come with theirs.

        Raises `DeviceError` where the device refuses.
        """
        settings = profile(device)
        self._margins = margins
        self._device = device
        self._vocabulary = vocabulary
        self._weights = shard.weights
        model = shard.model
        self._last = model.outputs[0].get_any_name() == LOGITS_OUTPUT
        self._first = any(TOKENS_INPUT in port.get_names() for port in model.inputs)
        self.hidden_size = 0 if self._first else _hidden_size(model)
        properties = dict(settings.properties)
        if cache is not None and settings.keeps_compiled:
            properties["CACHE_DIR"] = str(cache)
        if device == "CPU":
            properties["DYNAMIC_QUANTIZATION_GROUP_SIZE"] = shard.group or weight_group(weights_of_graph(model))
            if threads is not None:
                properties["INFERENCE_NUM_THREADS"] = threads
        try:
            paged_attention_transformation(model)
            if not self._first:
                _restore_hidden_size(model, self.hidden_size)
            self._shortlist = shortlist if shortlist is not None and add_short_head(model, shortlist.ids) else None
            if self._last:
                gather_head_rows(model, axis=0)
            model.validate_nodes_and_infer_types()
            self._compiled = ov.Core().compile_model(model, device, properties)
        except RuntimeError as error:
            raise DeviceError(f"{device} cannot compile the shard", found=first_line(error)) from None
        self._pool = BlockPool(-(-kv_tokens // settings.block_tokens), settings.block_tokens)
        self._request = self._compiled.create_infer_request()
        self._caches = self._allocate_caches()
        self._has_positions = any("position_ids" in port.get_names() for port in self._compiled.inputs)

    @property
    def max_rows(self) -> int:
        return MAX_ROWS

    @property
    def free_tokens(self) -> int:
        return self._pool.free_blocks * self._pool.size

    @property
    def shares(self) -> bool:
        return True

    def check(self, segment: Segment) -> None:
        check_rows(segment, self._vocabulary, self.hidden_size)
        if len(segment.tokens) > MAX_ROWS:
            raise CapacityError(
                "a segment too large", expected=f"at most {MAX_ROWS} rows", found=str(len(segment.tokens))
            )
        self._pool.check(segment.session, segment.start, len(segment.tokens))
        end, most = segment.start + len(segment.tokens), self._pool.blocks * self._pool.size
        if end > most:
            raise CapacityError(
                "a session longer than the KV cache", expected=f"at most {most} positions", found=str(end)
            )

    def run(self, batch: Sequence[Segment]) -> list[Output]:
        self._pool.reserve((segment.session, segment.start, len(segment.tokens)) for segment in batch)
        tables = [self._pool.extend(each.session, each.start, each.tokens, each.kind) for each in batch]
        self._copy_blocks(tables)
        rows = _Rows(batch, tables)
        if rows.count < MIN_ROWS:
            rows.pad(self._pool.SCRATCH)
        self._set_inputs(rows, batch)
        listed = self._set_head_rows(rows.wanted, tables) if self._last else None
        try:
            self._request.infer()
        except RuntimeError as error:
            raise DeviceError("the device failed in a forward", found=first_line(error)) from None
        for table in tables:
            self._pool.publish(table)
        result = self._request.get_output_tensor(0 if listed is None else 1).data
        if self._last:
            return self._draw(batch, tables, result, listed)
        hidden = result.reshape(result.shape[0], -1)
        return [Output(hidden=hidden[first : first + count].copy()) for first, count in rows.spans]

    def adopt(self, session: SessionId, tokens: Sequence[int]) -> int:
        table = self._pool.adopt(session, tokens)
        self._copy_blocks([table])
        return len(table.tokens)

    def close_session(self, session: SessionId) -> None:
        self._pool.close(session)

    def reset(self) -> None:
        self._pool.reset()

    def close(self) -> None:
        del self._request, self._caches, self._compiled, self._weights

    def logits(self) -> Array:
        """Of the last forward's wanted rows, ``[rows, vocabulary]`` f32 in batch order; a view until the next one."""
        data: Array = self._request.get_output_tensor(0).data
        return data.reshape(-1, data.shape[-1])

    def validate_state(self) -> None:
        """Assert the invariants; for tests and debugging."""
        self._pool.validate_state()

    def _set_inputs(self, rows: _Rows, batch: Sequence[Segment]) -> None:
        if self._first:
            self._set(TOKENS_INPUT, np.array(rows.tokens, np.int64))
        else:
            hidden = np.empty((rows.count, self.hidden_size), np.float32)
            for segment, (first, count) in zip(batch, rows.spans, strict=True):
                hidden[first : first + count] = segment.hidden
            hidden[sum(count for _, count in rows.spans) :] = 0.0
            self._set(HIDDEN_INPUT, hidden)
        if self._has_positions:
            self._set("position_ids", np.array(rows.positions, np.int64))
        self._set("past_lens", np.array(rows.past, np.int32))
        self._set("subsequence_begins", np.array(rows.begins, np.int32))
        self._set("block_indices", np.array(rows.blocks, np.int32))
        self._set("block_indices_begins", np.array(rows.block_begins, np.int32))
        self._set("max_context_len", np.array(max(rows.positions) + 1, np.int32))

    def _copy_blocks(self, tables: Sequence[BlockTable]) -> None:
        """Copy on write: what a session shares and is about to change becomes its own."""
        for source, target in (table.copy for table in tables if table.copy is not None):
            for cache in self._caches:
                _block(cache, source).copy_to(_block(cache, target))

    def _set(self, name: str, values: Array) -> None:
        self._request.set_tensor(name, ov.Tensor(values))

    def _set_head_rows(self, wanted: Sequence[int], tables: Sequence[BlockTable]) -> Array | None:
        """Send the wanted rows to one of the heads. The ids whose logits it computes; None: all."""
        extra = None if self._shortlist is None else self._shortlist.missing(table.tokens for table in tables)
        self._set(HEAD_ROWS_INPUT, head_rows(wanted) if extra is None else _NOTHING)
        if self._shortlist is None:
            return None
        self._set(SHORT_ROWS_INPUT, _NOTHING if extra is None else np.array(wanted, np.int64))
        self._set(EXTRA_IDS_INPUT, _NOTHING if extra is None else extra)
        return None if extra is None else np.concatenate([self._shortlist.ids, extra])

    def _draw(
        self, batch: Sequence[Segment], tables: Sequence[BlockTable], result: Array, listed: Array | None
    ) -> list[Output]:
        logits = result.reshape(-1, result.shape[-1])  # where nothing is wanted a short head has no rows at all
        outputs, row = [], 0
        for segment, table in zip(batch, tables, strict=True):
            rows = logits[row : row + segment.wanted]
            outputs.append(draw_wanted(segment, rows, table.tokens, listed, margins=self._margins))
            row += segment.wanted
        return outputs

    def _allocate_caches(self) -> list[ov.Tensor]:
        """One tensor ``[blocks, heads, block, size]`` for each key and value cache; memory is touched as it is used."""
        context: Any = None if self._device == "CPU" else self._compiled.get_context()
        caches = []
        for port in self._compiled.inputs:
            name = port.get_any_name()
            if not name.startswith(("key_cache.", "value_cache.")):
                continue
            axes = [axis.get_length() for axis in port.get_partial_shape() if axis.is_static]
            shape = ov.Shape([self._pool.blocks + 1, *axes])
            kind = port.get_element_type()
            tensor = ov.Tensor(kind, shape) if context is None else context.create_tensor(kind, shape, {})
            self._request.set_tensor(name, tensor)
            caches.append(tensor)
        return caches


class _Rows:
    """A batch flattened into the inputs of the paged-attention pass."""

    def __init__(self, batch: Sequence[Segment], tables: Sequence[BlockTable]) -> None:
        self.tokens: list[int] = []
        self.positions: list[int] = []
        self.past: list[int] = []
        self.begins = [0]
        self.blocks: list[int] = []
        self.block_begins = [0]
        self.spans: list[tuple[int, int]] = []
        self.wanted: list[int] = []
        for segment, table in zip(batch, tables, strict=True):
            count, first = len(segment.tokens), len(self.tokens)
            self.spans.append((first, count))
            self.wanted += range(first + count - segment.wanted, first + count)
            if segment.kind is RowKind.PREFILL:
                self._add(segment.tokens, segment.start, table.blocks)
            else:
                for offset, token in enumerate(segment.tokens):
                    self._add((token,), segment.start + offset, table.blocks)

    @property
    def count(self) -> int:
        return len(self.tokens)

    def pad(self, scratch: int) -> None:
        """A row of its own in the scratch block."""
        self._add((0,), 0, [scratch])

    def _add(self, tokens: Sequence[int], start: int, blocks: Sequence[int]) -> None:
        self.tokens += tokens
        self.positions += range(start, start + len(tokens))
        self.past.append(start)
        self.begins.append(len(self.tokens))
        self.blocks += blocks
        self.block_begins.append(len(self.blocks))


def _block(cache: ov.Tensor, block: int) -> ov.Tensor:
    """A view of one block of a cache."""
    begin, end = [0] * len(cache.shape), list(cache.shape)
    begin[0], end[0] = block, block + 1
    view: ov.Tensor = type(cache)(cache, ov.Coordinate(begin), ov.Coordinate(end))
    return view


def _hidden_size(model: ov.Model) -> int:
    size: int = model.input(HIDDEN_INPUT).get_partial_shape()[2].get_length()
    return size


def _restore_hidden_size(model: ov.Model, hidden_size: int) -> None:
    """The pass leaves ``[?, ?]``; without the static size the shard's first norm is not fused and its bits change."""
    for parameter in model.get_parameters():
        if HIDDEN_INPUT in parameter.output(0).get_names():
            parameter.set_partial_shape(ov.PartialShape([-1, hidden_size]))
