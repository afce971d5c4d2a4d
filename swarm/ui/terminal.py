"""The live screen: dashboard above, chat below, one full-screen prompt_toolkit application."""

from __future__ import annotations

from collections.abc import Callable
from io import StringIO
from pathlib import Path

import anyio
from prompt_toolkit.application import Application
from prompt_toolkit.buffer import Buffer
from prompt_toolkit.data_structures import Size
from prompt_toolkit.formatted_text import ANSI, StyleAndTextTuples, to_formatted_text
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.layout import (
    BufferControl,
    Dimension,
    FormattedTextControl,
    HSplit,
    Layout,
    UIContent,
    UIControl,
    Window,
)
from prompt_toolkit.styles import Style
from rich.console import Console

from swarm.coordinator.requests import Generator
from swarm.protocol.snapshot import Snapshot
from swarm.ui.chat import Chat
from swarm.ui.dashboard import lines
from swarm.ui.transcript import Kind, Transcript

FRAME_S = 0.25
"""Between two looks at the swarm."""

TWICE_S = 2.0
"""A second Ctrl-C within this time leaves."""

_REDRAW_S = 0.04
"""Tokens that come faster are drawn together."""

_CHAT_ROWS = 18
"""The chat's share of a high window; of a low one it gets half."""

_INPUT_ROWS = 6

_WIDE_HINT = 50

_STYLE = Style.from_dict(
    {
        Kind.YOU.value: "bold ansicyan",
        Kind.ANSWER.value: "",
        Kind.NOTE.value: "ansibrightblack",
        Kind.ERROR.value: "ansired",
        "rule": "ansibrightblack",
        "hint": "ansibrightblack",
        "warning": "ansiyellow",
        "prompt": "bold ansicyan",
    }
)


async def run_terminal(snapshot: Callable[[], Snapshot], generator: Generator, home: Path) -> None:
    """Show the swarm and chat until the person leaves. The terminal is restored however this ends."""
    await Terminal(snapshot, generator, await anyio.to_thread.run_sync(_history, home)).run()


def _history(home: Path) -> History:
    """Earlier prompts in ``<home>/history``; in memory where that cannot be written."""
    path = home / "history"
    try:
        home.mkdir(parents=True, exist_ok=True)
        path.touch()
    except OSError:
        return InMemoryHistory()
    return FileHistory(str(path))


def dashboard_rows(rows: int) -> int:
    """How many of the window's rows the dashboard may take."""
    return max(0, min(max(rows // 2, rows - _CHAT_ROWS), rows - 6))


class Terminal:
    """Layout, keys and frames; what they mean is `Chat`'s business."""

    def __init__(self, snapshot: Callable[[], Snapshot], generator: Generator, history: History) -> None:
        self._look = snapshot
        self._snapshot = snapshot()
        self._transcript = Transcript()
        self._drawn: tuple[object, StyleAndTextTuples, int] = (None, [], 0)
        self._interrupted_at: float | None = None
        self._notice, self._notice_until = "", 0.0
        self._buffer = Buffer(multiline=True, history=history)
        self._app: Application[None] = Application(
            layout=self._layout(),
            key_bindings=self._keys(),
            style=_STYLE,
            full_screen=True,
            min_redraw_interval=_REDRAW_S,
        )
        self._chat = Chat(snapshot, generator, self._transcript, self._app.invalidate)

    async def run(self) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._chat.run)
            tasks.start_soon(self._frames)
            await self._app.run_async(set_exception_handler=False, handle_sigint=False)
            tasks.cancel_scope.cancel()

    async def _frames(self) -> None:
        while True:
            self._snapshot = self._look()
            self._chat.look(self._snapshot)
            if anyio.current_time() > self._notice_until:
                self._notice = ""
            self._app.invalidate()
            await anyio.sleep(FRAME_S)

    def _layout(self) -> Layout:
        dashboard = Window(
            FormattedTextControl(lambda: self._dashboard()[0]),
            height=lambda: Dimension(min=0, preferred=self._dashboard()[1], max=self._dashboard()[1]),
            always_hide_cursor=True,
        )
        prompt = Window(
            BufferControl(self._buffer),
            height=Dimension(min=1, max=_INPUT_ROWS),
            dont_extend_height=True,
            wrap_lines=True,
            get_line_prefix=lambda line, wrapped: [("class:prompt", "  " if line or wrapped else "> ")],
        )
        rule = Window(height=1, char="─", style="class:rule")
        said = Window(TranscriptControl(self._transcript), height=Dimension(min=1), always_hide_cursor=True)
        hint = Window(FormattedTextControl(self._hint), height=1, style="class:hint")
        return Layout(HSplit([dashboard, rule, said, prompt, hint]), focused_element=prompt)

    def _dashboard(self) -> tuple[StyleAndTextTuples, int]:
        """The dashboard at the terminal's size, and how many rows it takes."""
        size: Size = self._app.output.get_size()
        key = (self._snapshot, size)
        if self._drawn[0] != key:
            text = render(self._snapshot, size.columns, dashboard_rows(size.rows))
            self._drawn = (key, to_formatted_text(ANSI(text)), len(text.splitlines()))
        return self._drawn[1], self._drawn[2]

    def _hint(self) -> StyleAndTextTuples:
        if self._notice:
            return [("class:warning", f"  {self._notice}")]
        if self._transcript.scrolled:
            return [("", "  earlier text; PageDown goes on")]
        if self._chat.busy:
            return [("", "  Ctrl-C stops")]
        wide = self._app.output.get_size().columns >= _WIDE_HINT
        return [("", "  Enter sends   Alt+Enter new line   /help" if wide else "  Enter sends   /help")]

    def _keys(self) -> KeyBindings:
        keys = KeyBindings()
        keys.add("enter")(self._on_enter)
        # Ctrl-J is also what a pasted line end is in terminals that do not mark a paste.
        for newline in (("escape", "enter"), ("c-j",)):
            keys.add(*newline)(lambda event: event.current_buffer.insert_text("\n"))
        keys.add("c-c")(self._on_interrupt)
        keys.add("c-d")(self._on_end)
        keys.add("pageup")(lambda event: self._transcript.scroll(-1))
        keys.add("pagedown")(lambda event: self._transcript.scroll(1))
        return keys

    def _on_enter(self, event: KeyPressEvent) -> None:
        text = self._buffer.text
        if not text.strip():
            return
        if self._chat.busy and not text.lstrip().startswith("/"):
            self._tell("One answer at a time: Ctrl-C stops this one.")
            return
        self._buffer.append_to_history()
        self._buffer.reset()
        self._interrupted_at, self._notice = None, ""
        if not self._chat.submit(text):
            event.app.exit()

    def _on_interrupt(self, event: KeyPressEvent) -> None:
        now = anyio.current_time()
        if self._chat.cancel():
            self._interrupted_at, self._notice = None, ""
            return
        if self._interrupted_at is not None and now - self._interrupted_at <= TWICE_S:
            event.app.exit()
            return
        self._buffer.reset()
        self._interrupted_at = now
        self._tell("Ctrl-C again leaves the swarm.")

    def _tell(self, notice: str) -> None:
        self._notice, self._notice_until = notice, anyio.current_time() + TWICE_S

    def _on_end(self, event: KeyPressEvent) -> None:
        if self._buffer.text:
            self._buffer.delete()
        else:
            event.app.exit()


class TranscriptControl(UIControl):
    """Draws a transcript in whatever room its window has."""

    def __init__(self, transcript: Transcript) -> None:
        self._transcript = transcript

    def create_content(self, width: int, height: int) -> UIContent:
        shown = self._transcript.view(width, height)
        parts: list[StyleAndTextTuples] = [[(f"class:{style}" if style else "", text)] for style, text in shown]
        return UIContent(get_line=lambda index: parts[index], line_count=len(parts), show_cursor=False)


def render(snapshot: Snapshot, width: int, height: int) -> str:
    """The dashboard with ANSI colours, the sixteen that follow the terminal's theme."""
    out = StringIO()
    console = Console(
        file=out, width=width, force_terminal=True, color_system="standard", legacy_windows=False, highlight=False
    )
    for line in lines(snapshot, width, height):
        console.print(line, soft_wrap=True)
    return out.getvalue()
