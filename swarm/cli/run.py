"""``run``: build the parts of a node and run them in one task group."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from ipaddress import IPv4Interface
from types import FrameType

import anyio
import anyio.to_thread

from swarm.api.server import ApiServer
from swarm.cli import founding, running
from swarm.coordinator.coordinator import Coordinator, CoordinatorLimits
from swarm.coordinator.draft_host import DraftHost, paged_draft
from swarm.coordinator.drafter import Drafter
from swarm.coordinator.language import LanguageModel
from swarm.coordinator.pace import Speculation
from swarm.engine.devices import choose_device
from swarm.model.sources import resolve
from swarm.model.store import Store
from swarm.protocol.config import DEFAULT_API_PORT, DEFAULT_PORT, DRAFT_AUTO, DRAFT_NONE, PAGED, Settings
from swarm.protocol.errors import StoreError, UsageError
from swarm.protocol.messages import Phase
from swarm.protocol.snapshot import Snapshot, SpeculationView
from swarm.ring.board import RingView
from swarm.ring.config import RingConfig
from swarm.ring.handshake import Credentials
from swarm.ring.identity import Identity, hold_home, load_or_create, next_incarnation
from swarm.ring.interfaces import choose, chosen_addresses, gather
from swarm.ring.machine import advertised_memory, default_name, measure_speed, memory
from swarm.ring.node import RingNode
from swarm.ring.pairing import OPEN_SECRET, derive_secret, load_code, new_code, parse_code, save_code
from swarm.ring.supply import Model, check_source
from swarm.ui.lines import run_lines
from swarm.ui.terminal import run_terminal

API_HOST = "127.0.0.1"

HISTORY_S = 60
"""Tokens per second are kept for the sparkline this long, one value a second."""


async def run(settings: Settings) -> None:
    """Run a node until the person leaves. Raises `UsageError` for what cannot be used."""
    await anyio.to_thread.run_sync(_check, settings)
    with hold_home(settings.home):
        identity = await anyio.to_thread.run_sync(load_or_create, settings.home)
        code, kept = await _pair(settings, identity)
        await _Node(settings, identity, code, kept).run()


def _check(settings: Settings) -> None:
    """Refuse at once what would only fail later; blocking."""
    store = Store(settings.home / "store")
    check_source(settings.model or "", store)
    if settings.draft not in (DRAFT_AUTO, DRAFT_NONE):
        check_source(settings.draft, store)
    choose_device(settings.device)
    choose(gather(), settings.interfaces)


def _draft_source(settings: Settings) -> str:
    """What the ring is told: a path in full, so that the same file has one name."""
    if not settings.speculation or settings.draft == DRAFT_NONE:
        return DRAFT_NONE
    return settings.draft if settings.draft == DRAFT_AUTO else resolve(settings.draft).spec


def _name(settings: Settings) -> str:
    return settings.name or default_name()


async def _pair(settings: Settings, identity: Identity) -> tuple[str, bool]:
    """The pairing code, empty in an open swarm; and whether it is kept on disk. Raises `UsageError` for a wrong one, or
    where nobody can be asked.

    A code that was given for a peer, and that no PC heard here could confirm, is kept once a link has proved it.
    """
    if settings.open:
        return "", True
    known = await anyio.to_thread.run_sync(load_code, settings.home, settings.swarm)
    given = None if settings.code is None else parse_code(settings.code)
    if known is not None and given in (None, known):
        return known, True

    def scan() -> Sequence[IPv4Interface]:
        return chosen_addresses(choose(gather(), settings.interfaces))

    whoami = identity.node, _name(settings), settings.swarm, settings.port or DEFAULT_PORT, scan
    if given is not None:
        code = given
        if not await founding.check_code(given, *whoami) and settings.peers:
            return code, False
    else:
        peer = await founding.find_swarm(*whoami)
        code = new_code() if peer is None else await founding.obtain_code(peer, settings.swarm, _asker(settings))
    await anyio.to_thread.run_sync(save_code, settings.home, settings.swarm, code)
    return code, True


def _asker(settings: Settings) -> founding.AskCode:
    async def ask(line: str) -> str:
        if settings.headless or not sys.stdin.isatty():
            raise UsageError(
                f'swarm "{settings.swarm}" is on this network already and has a pairing code',
                expected="--code with the code that its PCs show",
                found="none, and nobody to ask",
                action="Or start a swarm of your own: --swarm NAME.",
            )
        from prompt_toolkit import PromptSession

        session: PromptSession[str] = PromptSession()
        try:
            return await session.prompt_async(line)
        except (EOFError, KeyboardInterrupt):
            raise UsageError("no pairing code given", action="Start again when you have it.") from None

    return ask


class _Node:
    """The parts of a node, and the one task group that runs them."""

    def __init__(self, settings: Settings, identity: Identity, code: str, kept: bool) -> None:
        """`kept`: the code is on disk already."""
        self._settings = settings
        self._identity = identity
        self._code = code
        self._kept = kept
        self._began = time.monotonic()
        self._rates: deque[float] = deque(maxlen=HISTORY_S)
        self._leaving = anyio.Event()
        self._api = ""

    async def run(self) -> None:
        settings = self._settings
        store = Store(settings.home / "store", settings.disk_bytes)
        await anyio.to_thread.run_sync(store.open)
        config = await anyio.to_thread.run_sync(self._configure)
        drafts = DraftHost(paged_draft(store, config.device), self._install_drafter, self._notice)
        self._ring = RingNode(config, store, self._model_known, drafts.offer)
        speculation = Speculation(enabled=settings.speculation)
        self._coordinator = Coordinator(self._ring, CoordinatorLimits(speculation=speculation))
        self._drafts = drafts
        api = ApiServer(self.snapshot, self._coordinator)
        async with anyio.create_task_group() as group:
            with self._signals(group.cancel_scope):
                await group.start(self._ring.run, self._meter)
                await group.start(self._coordinator.run)
                group.start_soon(drafts.run)
                if not self._kept:
                    group.start_soon(self._keep_code)
                port = await api.start(API_HOST, settings.api_port or DEFAULT_API_PORT, settings.api_port is not None)
                self._api = f"http://{API_HOST}:{port}"
                running.announce(settings.home, self._api)
                group.start_soon(self._remember_rates)
                try:
                    await self._show()
                finally:
                    running.withdraw(settings.home)
                    self._say_goodbye()
                    with anyio.CancelScope(shield=True):
                        await api.close()
                        await self._coordinator.close()
                        await self._ring.leave()
            group.cancel_scope.cancel()

    async def _keep_code(self) -> None:
        """A code that was given is kept once another PC has shown that it has the same."""
        await self._ring.joined()
        try:
            await anyio.to_thread.run_sync(save_code, self._settings.home, self._settings.swarm, self._code)
        except StoreError as error:
            self._notice(str(error))

    def _say_goodbye(self) -> None:
        """What a person would wonder about: the node serves until the others have its layers."""
        others = len(self._ring.view().linked) - 1
        if others and self._ring.plan.stage_of(self._identity.node) is not None:
            print("leaving: the others take over this PC's layers (Ctrl-C leaves at once)", file=sys.stderr, flush=True)

    def _configure(self) -> RingConfig:
        """Measure this PC; blocking, about a second."""
        settings = self._settings
        secret = derive_secret(self._code, settings.swarm) if self._code else OPEN_SECRET
        found = memory()
        device = choose_device(settings.device)
        return RingConfig(
            home=settings.home,
            credentials=Credentials(self._identity, _name(settings), settings.swarm, secret),
            incarnation=next_incarnation(settings.home),
            memory_bytes=settings.memory_bytes or advertised_memory(found.total, found.available),
            device=device,
            speed=measure_speed(device),
            engine=settings.engine or PAGED,
            wanted="" if settings.model == "default" else settings.model or "",
            port=settings.port,
            peers=settings.peers,
            interfaces=settings.interfaces,
            code_given=settings.code is not None,
            draft=_draft_source(settings),
        )

    async def _show(self) -> None:
        """The screen, until the person leaves or the process is told to stop."""
        async with anyio.create_task_group() as group:

            async def until_told() -> None:
                await self._leaving.wait()
                group.cancel_scope.cancel()

            group.start_soon(until_told)
            if self._settings.headless or not (sys.stdin.isatty() and sys.stdout.isatty()):
                await run_lines(self.snapshot)
                await anyio.sleep_forever()  # nobody reads the lines any more; the node goes on
            await run_terminal(self.snapshot, self._coordinator, self._settings.home)
            group.cancel_scope.cancel()

    @contextlib.contextmanager
    def _signals(self, scope: anyio.CancelScope) -> Iterator[None]:
        """The first interrupt leaves cleanly, the second at once. `signal.signal` works on Windows too."""
        loop = asyncio.get_running_loop()

        def told() -> None:
            if self._leaving.is_set():
                scope.cancel()
            self._leaving.set()

        def handler(_number: int, _frame: FrameType | None) -> None:
            loop.call_soon_threadsafe(told)

        before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, old in before.items():
                signal.signal(number, old)

    def _model_known(self, model: Model) -> None:
        self._coordinator.set_model(LanguageModel(model.id, model.tokenizer, model.manifest.context_tokens))

    def _install_drafter(self, drafter: Drafter | None) -> None:
        self._coordinator.set_drafter(drafter)

    def _notice(self, text: str) -> None:
        self._ring.notice(text)

    def _meter(self) -> tuple[float, int, tuple[int, ...]]:
        stats = self._coordinator.stats()
        return stats.tokens_per_second, stats.running, stats.ring_sessions

    async def _remember_rates(self) -> None:
        while True:
            self._rates.append(self._coordinator.stats().tokens_per_second)
            await anyio.sleep(1.0)

    def _speculation(self, ring: RingView) -> SpeculationView:
        done = self._coordinator.stats().speculation
        return SpeculationView(
            enabled=self._settings.speculation,
            draft=self._drafts.name,
            no_draft=ring.no_draft,
            windows=done.windows,
            ngram_drafted=done.ngram_drafted,
            ngram_accepted=done.ngram_accepted,
            model_drafted=done.model_drafted,
            model_accepted=done.model_accepted,
            rejected=done.rejected,
            wasted_rows=done.wasted_rows,
            k=done.k,
            depth=done.depth,
            gain=done.gain,
        )

    def snapshot(self) -> Snapshot:
        """What every screen and ``/status`` show."""
        ring, settings, stats = self._ring.view(), self._settings, self._coordinator.stats()
        reason = _waiting_for(ring)
        return Snapshot(
            ready=not reason,
            reason=reason,
            swarm=settings.swarm,
            code=self._code,
            open=not self._code,
            model=ring.model,
            node=self._identity.node,
            name=_name(settings),
            api=self._api,
            addresses=ring.addresses,
            members=ring.members,
            plan=ring.plan,
            forming=ring.forming,
            notices=ring.notices,
            uptime_s=time.monotonic() - self._began,
            tokens_per_second=stats.tokens_per_second,
            queued=stats.queued,
            history=tuple(self._rates),
            fetched=tuple(ring.fetched.items()),
            speculation=self._speculation(ring),
        )


def _waiting_for(ring: RingView) -> str:
    """What a prompt would wait for now; empty where it would be answered."""
    if ring.plan.stages:
        if not ring.model_known:
            return "the model's tokenizer"
        lost = [stage.name for stage in ring.plan.stages if stage.node not in ring.linked]
        if lost:
            return f"a link to {', '.join(lost)}"
        return "" if ring.loaded else "this node's layers"
    if ring.plan.missing_bytes:
        return ring.plan.note
    busy = next((member for member in ring.members if member.phase is not Phase.IDLE), None)
    if busy is not None:
        return f"{busy.phase.name.lower().replace('_', ' ')} on {busy.name}"
    return ring.plan.note or "the other nodes of the swarm, and a plan"
