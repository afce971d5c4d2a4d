"""The conversation on the screen: prompts in, answers streamed into the transcript. No terminal in here."""

from __future__ import annotations

import logging
from collections.abc import Callable

import anyio

from swarm.coordinator.requests import ChatMessage, FinishReason, GenerateRequest, Generator, Usage, in_line
from swarm.protocol.errors import SwarmError
from swarm.protocol.snapshot import Snapshot
from swarm.ui import figures
from swarm.ui.dashboard import lines, missing
from swarm.ui.transcript import Kind, Transcript

log = logging.getLogger(__name__)

HELP = """\
Enter sends. Alt+Enter, Ctrl-J, or Esc and then Enter start a new line; pasted lines stay together.
Ctrl-C or /stop stops an answer. Ctrl-C twice, Ctrl-D on an empty line, or /quit leaves the swarm.
Up and Down go through earlier questions, PageUp and PageDown through the text.
/new starts a new conversation, /status shows the whole swarm, /help this."""

WELCOME = "Ask something. /help shows the keys."

_CLOSE_TIMEOUT_S = 5.0


class Chat:
    """One conversation; one answer at a time. `run` is its task, everything else returns at once."""

    def __init__(
        self,
        snapshot: Callable[[], Snapshot],
        generator: Generator,
        transcript: Transcript,
        changed: Callable[[], None],
    ) -> None:
        self._snapshot = snapshot
        self._generator = generator
        self._transcript = transcript
        self._changed = changed
        self._turns: list[ChatMessage] = []
        self._prompt: str | None = None
        self._asked = anyio.Event()
        self._ready = anyio.Event()
        self._answer: anyio.CancelScope | None = None
        transcript.add(Kind.NOTE, WELCOME)

    @property
    def busy(self) -> bool:
        """A prompt waits or is being answered."""
        return self._prompt is not None

    def submit(self, text: str) -> bool:
        """Ask, or carry out a command; False where the person wants to leave. Not while `busy`, commands aside."""
        word = text.strip()
        self._transcript.follow()
        if word == "/quit":
            return False
        if word == "/help":
            self._transcript.add(Kind.NOTE, HELP)
        elif word == "/status":
            self._transcript.add(Kind.NOTE, status_text(self._snapshot(), self._transcript.text_width))
        elif word == "/stop":
            if not self.cancel():
                self._transcript.add(Kind.NOTE, "Nothing to stop.")
        elif word == "/new":
            self.cancel()
            self._turns = []
            self._transcript.clear()
            self._transcript.add(Kind.NOTE, "A new conversation.")
        elif word.startswith("/") and "\n" not in word and " " not in word and word.count("/") == 1:
            self._transcript.add(Kind.ERROR, f"There is no command {word}. /help shows them.")
        elif word:
            assert not self.busy, "one answer at a time"
            self._transcript.add(Kind.YOU, word)
            self._prompt, self._answer = word, anyio.CancelScope()
            self._asked.set()
        self._changed()
        return True

    def cancel(self) -> bool:
        """Stop what waits or is being answered; False where nothing does."""
        if self._answer is not None:
            self._answer.cancel()
        return self.busy

    def look(self, snapshot: Snapshot) -> None:
        """Called with every new snapshot: a prompt waits for a ring that is ready."""
        if snapshot.ready:
            self._ready.set()
        elif self._ready.is_set():
            self._ready = anyio.Event()
        if self.busy and not snapshot.ready:
            reason = missing(snapshot) or snapshot.reason or "the ring is not formed yet"
            self._transcript.activity = f"waiting: {reason}"
        elif self.busy and self._transcript.activity.startswith("waiting:"):
            self._transcript.activity = "reading the question"

    async def run(self) -> None:
        """Answer one prompt after the other, until cancelled."""
        while True:
            await self._asked.wait()
            self._asked = anyio.Event()
            assert self._prompt is not None
            assert self._answer is not None
            with self._answer:
                await self._ask(self._prompt)
            self._answer, self._prompt = None, None
            self._transcript.activity = ""
            self._changed()

    async def _ask(self, prompt: str) -> None:
        turns = self._turns
        turns.append(ChatMessage("user", prompt))
        said: list[str] = []
        self.look(self._snapshot())
        try:
            await self._ready.wait()
            self._transcript.activity = "reading the question"
            await self._stream(tuple(turns), said)
        except anyio.get_cancelled_exc_class():
            if turns is self._turns:
                self._transcript.drop_empty()
                self._transcript.add(Kind.NOTE, "stopped")
            raise
        except SwarmError as error:
            self._transcript.drop_empty()
            self._transcript.add(Kind.ERROR, f"Error: {error}")
        except Exception as error:  # a fault of one answer must not end a node that serves others
            log.exception("an answer failed")
            self._transcript.drop_empty()
            self._transcript.add(Kind.ERROR, f"Error: {type(error).__name__}: {error}. The log says more.")
        finally:
            # What was said stays part of the conversation; a question without an answer does not.
            if "".join(said).strip():
                turns.append(ChatMessage("assistant", "".join(said)))
            elif turns:
                turns.pop()

    async def _stream(self, turns: tuple[ChatMessage, ...], said: list[str]) -> None:
        self._transcript.add(Kind.ANSWER)
        self._changed()
        deltas = self._generator.generate(GenerateRequest(turns))
        try:
            async for delta in deltas:
                if not (said or delta.text or delta.finish):
                    self._transcript.activity = in_line(delta.place) if delta.place else "reading the question"
                if delta.text:
                    self._transcript.activity = ""
                    self._transcript.extend(delta.text)
                    said.append(delta.text)
                if delta.finish is not None:
                    self._transcript.drop_empty()
                    self._transcript.add(Kind.NOTE, summary(delta.finish, delta.usage))
                self._changed()
        finally:
            with anyio.move_on_after(_CLOSE_TIMEOUT_S, shield=True):
                await deltas.aclose()


def summary(finish: FinishReason, usage: Usage | None) -> str:
    """``31 tokens, 8.2 tok/s, first after 0.4 s``, and why it ended where that is not plain."""
    facts = []
    if usage is not None:
        facts.append(figures.count(usage.completion_tokens, "token"))
        if usage.token_ms > 0:
            facts.append(figures.tokens_per_second(1000 / usage.token_ms))
        facts.append(f"first after {usage.first_token_ms / 1000:.1f} s")
    if finish is FinishReason.LENGTH:
        facts.append("ended by the limit of tokens")
    elif finish is FinishReason.CANCELLED:
        facts.append("stopped")
    return ", ".join(facts) or "done"


def status_text(snapshot: Snapshot, width: int) -> str:
    """The whole dashboard, nothing left out, and the ways to reach this node."""
    drawn = [line.plain.removeprefix(" ") for line in lines(snapshot, width)]
    links = ", ".join(snapshot.addresses) or "nothing yet"
    return "\n".join([*drawn, "", f"links listen on {links}", f"node {snapshot.node}"])
