"""The live screen, with keys from a pipe and a made-up coordinator behind it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.application.current import AppSession
from prompt_toolkit.data_structures import Size
from prompt_toolkit.input import PipeInput, create_pipe_input
from prompt_toolkit.output import DummyOutput

from swarm.coordinator.requests import FinishReason, Generator
from swarm.protocol.errors import CapacityError
from swarm.protocol.snapshot import Snapshot
from swarm.ui import terminal as module
from swarm.ui.chat import summary
from swarm.ui.terminal import dashboard_rows, render, run_terminal
from tests.api.generators import USAGE, FakeGenerator
from tests.ui.snapshots import CASES, member, ring, snapshot, waiting

pytestmark = pytest.mark.anyio

READY = snapshot(plan=ring(1, 4), members=(member(1),))
DEADLINE_S = 20

ENTER, ESCAPE, UP = "\r", "\x1b", "\x1b[A"
CTRL_C, CTRL_D, CTRL_J = "\x03", "\x04", "\n"


class Output(DummyOutput):
    """A terminal whose size can be changed, that knows whether it was given back."""

    def __init__(self, columns: int = 80, rows: int = 24) -> None:
        self.size = Size(rows=rows, columns=columns)
        self.alternate = False
        self.flushed = anyio.Event()

    def get_size(self) -> Size:
        return self.size

    def flush(self) -> None:
        self.flushed.set()

    def enter_alternate_screen(self) -> None:
        self.alternate = True

    def quit_alternate_screen(self) -> None:
        self.alternate = False


class Screen:
    """A running terminal: what the swarm is like can be changed, keys pressed, and what is drawn read."""

    def __init__(self, keys: PipeInput, output: Output, picture: Snapshot, session: AppSession) -> None:
        self.keys = keys
        self.output = output
        self.picture = picture
        self.session = session
        self.left = anyio.Event()

    def press(self, text: str) -> None:
        self.keys.send_text(text)

    async def settle(self) -> None:
        await anyio.wait_all_tasks_blocked()

    def text(self) -> str:
        drawn = self.session.app.renderer.last_rendered_screen if self.session.app else None
        if drawn is None:
            return ""
        rows, columns = self.output.size.rows, self.output.size.columns
        cells = drawn.data_buffer
        return "\n".join("".join(cells[row][column].char for column in range(columns)) for row in range(rows))

    async def shows(self, text: str) -> None:
        """Wait until `text` is on the screen."""
        while text not in self.text():
            self.output.flushed = anyio.Event()
            await self.output.flushed.wait()


@asynccontextmanager
async def running(
    generator: Generator, home: Path, picture: Snapshot = READY, output: Output | None = None
) -> AsyncIterator[Screen]:
    """Ends it in any case; to prove that it ends by itself wait for `left`."""
    with create_pipe_input() as keys, create_app_session(input=keys, output=output or Output()) as session:
        assert isinstance(session.output, Output)
        screen = Screen(keys, session.output, picture, session)
        async with anyio.create_task_group() as tasks:

            async def run() -> None:
                await run_terminal(lambda: screen.picture, generator, home)
                screen.left.set()

            tasks.start_soon(run)
            with anyio.fail_after(DEADLINE_S):
                await screen.shows("/help shows the keys")
                yield screen
            tasks.cancel_scope.cancel()
    assert not screen.output.alternate, "the terminal was not given back"


async def test_a_prompt_is_answered_and_the_next_one_sends_the_whole_conversation(tmp_path: Path) -> None:
    generator = FakeGenerator()
    async with running(generator, tmp_path) as screen:
        screen.press("Hello" + ENTER)
        await screen.shows("3 tokens, 250 tok/s, first after 0.0 s")
        assert "> Hello " in screen.text()
        assert "  Hello you " in screen.text()
        await screen.settle()
        generator.closed = anyio.Event()
        screen.press("And now?" + ENTER)
        await generator.closed.wait()
    said = [(message.role, message.content) for message in generator.requests[1].messages]
    assert said == [("user", "Hello"), ("assistant", "Hello you"), ("user", "And now?")]


async def test_new_lines_by_key_and_by_paste(tmp_path: Path) -> None:
    generator = FakeGenerator()
    async with running(generator, tmp_path) as screen:
        screen.press("a" + ESCAPE + ENTER + "b" + CTRL_J + "c")
        screen.press("\x1b[200~d\ne\x1b[201~" + ENTER)
        await generator.started.wait()
    assert generator.requests[0].messages[0].content == "a\nb\ncd\ne"


async def test_ctrl_c_stops_an_answer_and_nothing_else(tmp_path: Path) -> None:
    generator = FakeGenerator(held=True)
    async with running(generator, tmp_path) as screen:
        screen.press("Hello" + ENTER)
        await generator.started.wait()
        screen.press(CTRL_C)
        await generator.closed.wait()
        await screen.shows("stopped")
        await screen.settle()
        generator.started = anyio.Event()
        generator.go.set()
        screen.press("again" + ENTER)
        await generator.started.wait()
        assert not screen.left.is_set()
    assert [message.content for message in generator.requests[1].messages] == ["again"]


async def test_what_was_said_before_a_stop_stays_in_the_conversation(tmp_path: Path) -> None:
    generator = FakeGenerator(texts=["tick "], endless=True)
    async with running(generator, tmp_path) as screen:
        screen.press("Hello" + ENTER)
        await screen.shows("tick tick")
        screen.press(CTRL_C)
        await generator.closed.wait()
        await screen.settle()
        generator.started, generator.endless = anyio.Event(), False
        screen.press("go on" + ENTER)
        await generator.started.wait()
    roles = [message.role for message in generator.requests[1].messages]
    assert roles == ["user", "assistant", "user"]
    assert generator.requests[1].messages[1].content.startswith("tick tick")


async def test_ctrl_c_twice_leaves(tmp_path: Path) -> None:
    async with running(FakeGenerator(), tmp_path) as screen:
        screen.press("half a question" + CTRL_C)
        await screen.shows("Ctrl-C again leaves")
        assert not screen.left.is_set()
        screen.press(CTRL_C)
        await screen.left.wait()


async def test_ctrl_c_twice_but_slowly_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TWICE_S", -1.0)
    generator = FakeGenerator()
    async with running(generator, tmp_path) as screen:
        screen.press(CTRL_C + CTRL_C + CTRL_C + "still here" + ENTER)
        await generator.started.wait()
        assert not screen.left.is_set()


async def test_ctrl_d_leaves_on_an_empty_line_only(tmp_path: Path) -> None:
    generator = FakeGenerator()
    async with running(generator, tmp_path) as screen:
        screen.press("x" + CTRL_D + ENTER)
        await screen.shows("3 tokens")
        assert not screen.left.is_set()
        screen.press(CTRL_D)
        await screen.left.wait()
    assert generator.requests[0].messages[0].content == "x"


async def test_quit_leaves_and_the_answer_is_stopped(tmp_path: Path) -> None:
    generator = FakeGenerator(held=True)
    async with running(generator, tmp_path) as screen:
        screen.press("Hello" + ENTER)
        await generator.started.wait()
        screen.press("/quit" + ENTER)
        await screen.left.wait()
        await generator.closed.wait()


async def test_history_is_kept_from_one_start_to_the_next(tmp_path: Path) -> None:
    home = tmp_path / "home"
    first = FakeGenerator()
    async with running(first, home) as screen:
        screen.press("two\nlines" + ENTER)
        await first.started.wait()
    second = FakeGenerator()
    async with running(second, home) as screen:
        await screen.settle()
        screen.press(UP + ENTER)
        await second.started.wait()
    assert second.requests[0].messages[0].content == "two\nlines"


async def test_a_home_that_cannot_be_written_still_chats(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    generator = FakeGenerator()
    async with running(generator, tmp_path / "file" / "home") as screen:
        screen.press("Hello" + ENTER)
        await generator.started.wait()


async def test_a_prompt_waits_visibly_for_the_ring(tmp_path: Path) -> None:
    generator = FakeGenerator()
    async with running(generator, tmp_path, waiting(reason="compiling layers")) as screen:
        screen.press("Hello" + ENTER)
        await screen.shows("> Hello")
        await screen.shows("waiting: compiling layers")
        await screen.settle()
        assert generator.requests == []
        screen.picture = READY
        await screen.shows("3 tokens")


async def test_a_waiting_prompt_can_be_taken_back(tmp_path: Path) -> None:
    generator = FakeGenerator()
    async with running(generator, tmp_path, waiting()) as screen:
        screen.press("Hello" + ENTER)
        await screen.shows("> Hello")
        screen.press(CTRL_C)
        await screen.shows("stopped")
        await screen.settle()
        screen.picture = READY
        screen.press("other" + ENTER)
        await generator.started.wait()
    assert [message.content for message in generator.requests[0].messages] == ["other"]


async def test_one_answer_at_a_time_keeps_what_is_typed(tmp_path: Path) -> None:
    generator = FakeGenerator(held=True)
    async with running(generator, tmp_path) as screen:
        screen.press("first" + ENTER)
        await generator.started.wait()
        screen.press("second" + ENTER)
        await screen.shows("One answer at a time")
        generator.go.set()
        await screen.shows("3 tokens")
        await screen.settle()
        screen.press(ENTER)
        while len(generator.requests) < 2:
            await anyio.lowlevel.checkpoint()
    assert generator.requests[1].messages[-1].content == "second"


async def test_errors_are_shown_with_what_to_do(tmp_path: Path) -> None:
    generator = FakeGenerator(error=CapacityError("the prompt does not fit", action="Start anew with /new."))
    async with running(generator, tmp_path) as screen:
        screen.press("Hello" + ENTER)
        await screen.shows("Error: the prompt does not fit. Start anew with /new.")
        generator.error = None
        await screen.settle()
        screen.press("again" + ENTER)
        await screen.shows("3 tokens")
    assert [message.content for message in generator.requests[1].messages] == ["again"]


async def test_a_fault_in_an_answer_does_not_end_the_node(tmp_path: Path) -> None:
    async with running(FakeGenerator(error=ValueError("a bug")), tmp_path) as screen:
        screen.press("Hello" + ENTER)
        await screen.shows("Error: ValueError: a bug")
        await screen.settle()
        assert not screen.left.is_set()


async def test_commands(tmp_path: Path) -> None:
    generator = FakeGenerator()
    async with running(generator, tmp_path, CASES["three"], Output(120, 60)) as screen:
        screen.press("/help" + ENTER)
        await screen.shows("starts a new conversation")
        screen.press("/status" + ENTER)
        await screen.shows("links listen on 192.168.1.10:7420")
        screen.press("/nothing" + ENTER)
        await screen.shows("There is no command /nothing")
        screen.press("Hello" + ENTER)
        await screen.shows("3 tokens")
        await screen.settle()
        screen.press("/new" + ENTER)
        await screen.shows("A new conversation.")
        generator.started = anyio.Event()
        screen.press("/etc/hosts is what?" + ENTER)
        await generator.started.wait()
    assert [message.content for message in generator.requests[1].messages] == ["/etc/hosts is what?"]


async def test_the_terminal_is_given_back_when_it_is_cancelled(tmp_path: Path) -> None:
    async with running(FakeGenerator(), tmp_path) as screen:
        assert screen.output.alternate


@pytest.mark.parametrize("size", [(120, 40), (80, 24), (40, 20), (20, 8), (10, 4)])
async def test_it_draws_at_every_size_and_follows_a_resize(tmp_path: Path, size: tuple[int, int]) -> None:
    output = Output()
    async with running(FakeGenerator(), tmp_path, CASES["twelve"], output) as screen:
        output.size = Size(rows=size[1], columns=size[0])
        screen.press("resized")
        await screen.shows("resized")
        assert not screen.left.is_set()


def test_the_chat_always_has_room() -> None:
    assert [dashboard_rows(rows) for rows in (60, 40, 24, 20, 8, 4)] == [42, 22, 12, 10, 2, 0]


def test_the_dashboard_is_coloured_and_fits() -> None:
    drawn = render(CASES["three"], 80, 12)
    assert "\x1b[32m● ready" in drawn
    assert len(drawn.splitlines()) == 12


def test_summaries_say_why_an_answer_ended() -> None:
    assert summary(FinishReason.STOP, USAGE) == "3 tokens, 250 tok/s, first after 0.0 s"
    assert summary(FinishReason.LENGTH, None) == "ended by the limit of tokens"
    assert summary(FinishReason.STOP, None) == "done"
