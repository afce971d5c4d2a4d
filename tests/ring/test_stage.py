"""A node's stage: prepared beside the one that serves, cut over to, dropped; without a model."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import anyio
import anyio.lowlevel
import numpy as np
import pytest
from anyio.abc import TaskGroup
from anyio.lowlevel import checkpoint

from swarm.engine.base import Engine, Output
from swarm.model.inventory import Pins, pins
from swarm.model.manifest import BlobRef, Manifest
from swarm.model.store import Store
from swarm.protocol.config import STATEFUL
from swarm.protocol.errors import DeviceError, ModelError, SwarmError
from swarm.protocol.ids import BlobId, Epoch, NodeId, SessionId
from swarm.protocol.limits import MAX_MANIFEST_BYTES
from swarm.protocol.messages import Message, Phase, RowKind, Segment
from swarm.protocol.plan import Plan, Stage
from swarm.protocol.sampling import GREEDY
from swarm.ring import stage as stage_module
from swarm.ring.blob_client import BlobSource
from swarm.ring.cutover import Cutover
from swarm.ring.plan import keep_rings
from swarm.ring.stage import StageHost
from swarm.ring.transfer import FetchSummary, TransferProgress

pytestmark = pytest.mark.anyio

A, B = NodeId("a" * 32), NodeId("b" * 32)
WAIT_S = 20.0
MEMORY = 1000


def _blob(number: int, size: int = 10) -> BlobRef:
    return BlobRef(BlobId(f"{number:064x}"), size)


MANIFEST = Manifest(
    name="fake",
    source="",
    hidden_size=4,
    vocabulary=100,
    context_tokens=128,
    kv_bytes_per_token=(1,) * 6,
    graph=_blob(1),
    tokenizer=_blob(2),
    embedding=_blob(3),
    layers=tuple(_blob(10 + layer) for layer in range(6)),
    head=_blob(4),
    tied=False,
)
MODEL = BlobId("f" * 64)


def plan(number: int, start: int = 0, end: int = 3, *, size: int = 400, kv: int = 64, model: BlobId = MODEL) -> Plan:
    """Our node holds ``[start, end)``, another one the rest behind it or before it."""
    ours, rest = Stage(A, "a", start, end, "CPU", size), Stage(B, "b", 0 if start else end, start or 6, "CPU", size)
    return Plan(Epoch(number, B), model, (rest, ours) if start else (ours, rest), kv)


def without_us(number: int) -> Plan:
    return Plan(Epoch(number, B), MODEL, (Stage(B, "b", 0, 6, "CPU", 400),), 64)


class FakeEngine:
    """Implements `base.Engine`: draws 7s and passes zeros on."""

    max_rows = 64
    free_tokens = 1000

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.hidden_size = 7 if stage.start else 0  # wider than the model's: a cache crosses too
        self.runs: list[RowKind] = []
        self.closed = False

    def check(self, segment: Segment) -> None:
        pass

    def run(self, batch: Sequence[Segment]) -> list[Output]:
        assert not self.closed
        self.runs += [segment.kind for segment in batch]
        for segment in batch:
            found = 0 if segment.hidden is None else segment.hidden.shape[1]
            assert found == self.hidden_size
        if self.stage.end == 6:
            return [Output(drawn=(7,) * segment.wanted) for segment in batch]
        return [Output(hidden=np.zeros((len(segment.tokens), 4), np.float32)) for segment in batch]

    def close_session(self, session: SessionId) -> None:
        pass

    def reset(self) -> None:
        pass

    def close(self) -> None:
        assert not self.closed, "closed twice"
        self.closed = True


@dataclass
class Bench:
    """A stage host, with everything around it that it asks."""

    built: list[FakeEngine] = field(default_factory=list)
    fetched: list[list[BlobId]] = field(default_factory=list)
    sent: list[tuple[NodeId, Message]] = field(default_factory=list)
    phases: list[Phase] = field(default_factory=list)
    gate: threading.Event = field(default_factory=threading.Event)
    """While it is not set, building waits."""
    building: threading.Event = field(default_factory=threading.Event)
    error: SwarmError | None = None
    most_alive: int = 0

    def __post_init__(self) -> None:
        self.gate.set()

    @property
    def alive(self) -> list[FakeEngine]:
        return [engine for engine in self.built if not engine.closed]

    def build(self, _manifest: Manifest, _store: Store, stage: Stage, _plan: Plan) -> Engine:
        self.building.set()
        assert self.gate.wait(WAIT_S)
        if self.error is not None:
            raise self.error
        engine = FakeEngine(stage)
        self.built.append(engine)
        self.most_alive = max(self.most_alive, len(self.alive))
        return engine

    async def fetch_all(
        self,
        wanted: Sequence[tuple[BlobId, int]],
        sources: Sequence[BlobSource],
        on_progress: Callable[[TransferProgress], None],
    ) -> FetchSummary:
        self.fetched.append([blob for blob, _ in wanted])
        return FetchSummary({B: sum(size for _, size in wanted)})

    async def send(self, to: NodeId, message: Message) -> None:
        self.sent.append((to, message))

    def report(self, phase: Phase, what: str, done: int, total: int, rate: float) -> None:
        self.phases.append(phase)


@pytest.fixture
def bench() -> Bench:
    return Bench()


@pytest.fixture
async def host(bench: Bench, tmp_path: Path) -> AsyncIterator[StageHost]:
    store = Store(tmp_path)
    store.open()
    host = StageHost(A, store, bench, bench.send, MEMORY, bench.report, bench.build)
    yield host
    bench.gate.set()
    await host.release()
    assert not bench.alive


@pytest.fixture
async def tasks() -> AsyncIterator[TaskGroup]:
    async with anyio.create_task_group() as group:
        yield group
        group.cancel_scope.cancel()


# --- the host -------------------------------------------------------------------------------------------------------


async def test_prepare_fetches_builds_and_warms_up(bench: Bench, host: StageHost) -> None:
    await host.prepare(plan(1, 0, 3), MANIFEST, [])
    (engine,) = bench.built
    assert bench.fetched == [[blob.id for blob in MANIFEST.weights(0, 3)]]
    assert (engine.stage.start, engine.stage.end) == (0, 3)
    assert engine.runs == [RowKind.PREFILL, RowKind.DECODE]
    assert bench.phases == [Phase.COMPILE, Phase.WARM_UP]
    assert host.fetched == {B: 40}
    assert host.worker is None


async def test_a_node_without_a_stage_is_ready_at_once(bench: Bench, host: StageHost) -> None:
    await host.prepare(without_us(1), MANIFEST, [])
    assert not bench.built
    assert not bench.fetched


async def test_activate_serves(bench: Bench, host: StageHost, tasks: TaskGroup) -> None:
    await host.prepare(plan(1, 3, 6), MANIFEST, [])
    await host.activate(plan(1, 3, 6), tasks)
    assert host.worker is not None
    hidden = np.zeros((1, 7), np.float32)
    segment = Segment(SessionId("b" * 8 + "-1-00000000"), B, Epoch(1, B), 0, 0, RowKind.DECODE, (5,), 1, GREEDY, hidden)
    await host.worker.deliver(segment)
    with anyio.fail_after(WAIT_S):
        while not bench.sent:
            await anyio.lowlevel.checkpoint()
    assert bench.sent[0][0] == B


async def test_a_worker_sees_its_own_ring_alone(bench: Bench, host: StageHost, tasks: TaskGroup) -> None:
    last = NodeId("c" * 32)
    ring = (Stage(A, "a", 0, 3, "CPU", 1), Stage(last, "c", 3, 6, "CPU", 1))
    both = Plan(Epoch(1, B), MODEL, (Stage(B, "b", 0, 6, "CPU", 1), *ring), 64, ring_token_ms=(10.0, 12.0))
    await host.prepare(both, MANIFEST, [])
    await host.activate(both, tasks)
    assert host.worker is not None
    assert host.worker.plan.stages == ring
    assert host.worker.expected_sender(last) == last, "the coordinator, not the last stage of the other ring"


async def test_the_same_layers_under_a_new_epoch_keep_their_engine(
    bench: Bench, host: StageHost, tasks: TaskGroup
) -> None:
    for number in (1, 2, 3):
        await host.prepare(plan(number), MANIFEST, [])
        await host.activate(plan(number), tasks)
        assert host.worker is not None
        assert host.worker.plan.epoch.number == number
    assert len(bench.built) == 1


async def test_a_ring_that_stays_serves_on_with_its_caches(bench: Bench, host: StageHost, tasks: TaskGroup) -> None:
    await host.prepare(plan(1), MANIFEST, [])
    await host.activate(plan(1), tasks)
    worker = host.worker
    assert worker is not None
    same = keep_rings(plan(2), plan(1))
    await host.prepare(same, MANIFEST, [])
    await host.activate(same, tasks)
    assert host.worker is worker
    worker.broken = "out of memory"
    await host.activate(keep_rings(plan(3), same), tasks)
    assert host.worker is not worker, "a device that fails is tried anew"


@pytest.mark.parametrize(
    "other",
    [plan(2, 0, 4), plan(2, 3, 6), plan(2, kv=128), plan(2, model=BlobId("e" * 64))],
    ids=["more layers", "other layers", "cache", "model"],
)
async def test_other_layers_cache_or_model_need_another(
    bench: Bench, host: StageHost, tasks: TaskGroup, other: Plan
) -> None:
    await host.prepare(plan(1), MANIFEST, [])
    await host.activate(plan(1), tasks)
    await host.prepare(other, MANIFEST, [])
    assert len(bench.alive) == 2
    assert host.worker is not None  # the old one serves meanwhile
    assert host.worker.plan == plan(1)
    await host.activate(other, tasks)
    assert [engine.closed for engine in bench.built] == [True, False]


async def test_two_shards_that_do_not_fit_are_never_there_together(
    bench: Bench, host: StageHost, tasks: TaskGroup
) -> None:
    await host.prepare(plan(1, size=600), MANIFEST, [])
    await host.activate(plan(1, size=600), tasks)
    await host.prepare(plan(2, 0, 4, size=600), MANIFEST, [])
    assert host.worker is None
    assert bench.most_alive == 1
    await host.activate(plan(2, 0, 4, size=600), tasks)
    assert host.worker is not None


async def test_a_plan_of_another_engine_is_prepared_anew(bench: Bench, host: StageHost) -> None:
    await host.prepare(plan(1), MANIFEST, [])
    await host.prepare(replace(plan(2), engine=STATEFUL), MANIFEST, [])
    await host.prepare(replace(plan(3), engine=STATEFUL), MANIFEST, [])
    assert [engine.closed for engine in bench.built] == [True, False]


async def test_of_two_prepared_in_a_row_the_first_goes(bench: Bench, host: StageHost) -> None:
    await host.prepare(plan(1), MANIFEST, [])
    await host.prepare(plan(2, 0, 5), MANIFEST, [])
    assert [engine.closed for engine in bench.built] == [True, False]
    assert bench.most_alive == 1


async def test_what_was_not_prepared_cannot_be_activated(bench: Bench, host: StageHost, tasks: TaskGroup) -> None:
    with pytest.raises(ModelError, match="not prepared"):
        await host.activate(plan(1), tasks)
    with pytest.raises(ModelError, match="without a stage"):
        await host.activate(without_us(1), tasks)
    assert host.worker is None


async def test_a_device_that_fails_leaves_the_old_stage_serving(
    bench: Bench, host: StageHost, tasks: TaskGroup
) -> None:
    await host.prepare(plan(1), MANIFEST, [])
    await host.activate(plan(1), tasks)
    bench.error = DeviceError("out of memory")
    with pytest.raises(DeviceError):
        await host.prepare(plan(2, 0, 5), MANIFEST, [])
    assert host.worker is not None
    assert len(bench.alive) == 1


async def test_what_serves_stays_pinned_while_another_model_is_prepared(
    bench: Bench, host: StageHost, tasks: TaskGroup, tmp_path: Path
) -> None:
    def pinned() -> Pins:
        return pins(Store(tmp_path))

    other = BlobId("e" * 64)
    await host.prepare(plan(1), MANIFEST, [])
    layers = {layer.id for layer in MANIFEST.layers[:3]}
    assert pinned().blobs >= {MODEL, MANIFEST.graph.id, MANIFEST.tokenizer.id, *layers}
    await host.activate(plan(1), tasks)
    await host.prepare(plan(2, 3, 6, model=other), MANIFEST, [])
    assert pinned().models == {MODEL, other}
    assert pinned().blobs >= {layer.id for layer in MANIFEST.layers}
    await host.activate(plan(2, 3, 6, model=other), tasks)
    assert pinned().models == {other}
    assert not pinned().blobs & layers


async def test_room_is_made_of_what_the_other_stages_have(
    bench: Bench, host: StageHost, tasks: TaskGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, set[BlobId]]] = []
    monkeypatch.setattr(
        stage_module, "make_room", lambda _store, needed, _keep, elsewhere: asked.append((needed, set(elsewhere)))
    )
    await host.prepare(plan(1, 3, 6), MANIFEST, [])
    await host.activate(plan(1, 3, 6), tasks)
    await host.prepare(plan(2, 2, 6), MANIFEST, [])
    assert asked == [(40, set()), (50, {blob.id for blob in MANIFEST.weights(0, 3)})]


# --- one thing after the other --------------------------------------------------------------------------------------


@dataclass
class Told:
    prepared: list[tuple[int, str | None]] = field(default_factory=list)
    active: list[int] = field(default_factory=list)
    broken: list[tuple[int, str]] = field(default_factory=list)

    async def until(self, wanted: Callable[[], bool]) -> None:
        with anyio.fail_after(WAIT_S):
            while not wanted():
                await checkpoint()


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
async def cutover(tasks: TaskGroup, host: StageHost, told: Told) -> Cutover:
    async def prepare(plan: Plan) -> None:
        await host.prepare(plan, MANIFEST, [])

    return Cutover(
        tasks,
        host,
        prepare,
        lambda epoch, reason: told.prepared.append((epoch.number, reason)),
        lambda plan: told.active.append(plan.epoch.number),
        lambda epoch, reason: told.broken.append((epoch.number, reason)),
    )


async def test_prepare_then_activate(cutover: Cutover, told: Told, host: StageHost) -> None:
    cutover.start_prepare(plan(1))
    await told.until(lambda: told.prepared == [(1, None)])
    cutover.activate(plan(1), True)
    await told.until(lambda: told.active == [1])
    assert cutover.plan == plan(1)
    assert host.worker is not None


async def test_a_failure_is_told(cutover: Cutover, told: Told, bench: Bench) -> None:
    bench.error = DeviceError("no such device")
    cutover.start_prepare(plan(1))
    await told.until(lambda: told.prepared == [(1, "no such device")])


async def test_a_plan_whose_part_is_not_loaded_is_in_force_without_a_worker(
    cutover: Cutover, told: Told, host: StageHost
) -> None:
    cutover.start_prepare(plan(1))
    await told.until(lambda: bool(told.prepared))
    cutover.activate(plan(1), True)
    await told.until(lambda: told.active == [1])
    cutover.activate(plan(2, 0, 5), False)
    await told.until(lambda: told.active == [1, 2])
    assert host.worker is None


async def test_cancelled_while_it_compiles(cutover: Cutover, told: Told, bench: Bench, host: StageHost) -> None:
    bench.gate.clear()
    cutover.start_prepare(plan(1))
    await told.until(bench.building.is_set)
    cutover.cancel_prepare(Epoch(1, B))
    bench.gate.set()
    cutover.start_prepare(plan(2, 0, 5))
    await told.until(lambda: bool(told.prepared))
    assert told.prepared == [(2, None)]
    assert [(engine.stage.end, engine.closed) for engine in bench.built][-1] == (5, False)
    assert len(bench.alive) == 1, "the engine of the cancelled plan is still there"


async def test_cancelling_another_epoch_does_nothing(cutover: Cutover, told: Told) -> None:
    cutover.start_prepare(plan(2))
    cutover.cancel_prepare(Epoch(1, B))
    await told.until(lambda: told.prepared == [(2, None)])


async def test_a_plan_without_us_does_not_wait_for_a_compilation(cutover: Cutover, told: Told, bench: Bench) -> None:
    bench.gate.clear()
    cutover.start_prepare(plan(3))
    await told.until(bench.building.is_set)
    cutover.activate(without_us(2), True)
    await told.until(lambda: told.active == [2])
    bench.gate.set()
    await told.until(lambda: told.prepared == [(3, None)])


async def test_an_older_plan_does_not_undo_a_newer_one(cutover: Cutover, told: Told, host: StageHost) -> None:
    cutover.start_prepare(plan(5))
    await told.until(lambda: bool(told.prepared))
    cutover.activate(plan(5), True)
    await told.until(lambda: told.active == [5])
    cutover.activate(plan(4), True)
    cutover.activate(plan(6), True)
    await told.until(lambda: told.active == [5, 6])
    assert host.worker is not None
    assert host.worker.plan.epoch.number == 6


async def test_a_plan_that_stopped_what_a_newer_one_counted_on(cutover: Cutover, told: Told, host: StageHost) -> None:
    cutover.start_prepare(plan(1))
    await told.until(lambda: bool(told.prepared))
    cutover.activate(plan(1), True)
    await told.until(lambda: told.active == [1])
    cutover.start_prepare(plan(3))  # the engine that serves will do
    await told.until(lambda: told.prepared == [(1, None), (3, None)])
    cutover.activate(plan(2, 0, 5), False)
    await told.until(lambda: told.active == [1, 2])
    cutover.activate(plan(3), True)
    await told.until(lambda: bool(told.broken))
    assert told.active == [1, 2, 3]
    assert told.broken[0][0] == 3
    cutover.start_prepare(plan(4))
    await told.until(lambda: len(told.prepared) == 3)
    cutover.activate(plan(4), True)
    await told.until(lambda: told.active == [1, 2, 3, 4])
    assert host.worker is not None


async def test_a_manifest_of_an_absurd_size_is_not_fetched(host: StageHost, bench: Bench) -> None:
    """A member record says how large it is, and a member may say anything."""
    with pytest.raises(ModelError, match="manifest too large"):
        await host.manifest(MODEL, MAX_MANIFEST_BYTES + 1, [])
    assert not bench.fetched
