"""Stop strings over streaming text: what might become one is held back until it is certain."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Text goes in as it comes, text that may be shown comes out; after a stop string nothing does."""

    def __init__(self, stops: Sequence[str]) -> None:
        """`stops` are not empty strings."""
        self._stops = tuple(stops)
        self._held = ""
        self.found = False

    def push(self, text: str) -> str:
        """The text that cannot belong to a stop string any more; all before the first one where one is complete.

        The first is the one that begins earliest in the whole text. So a complete stop string waits while a longer one
        that began before it may still be completed.
        """
        if self.found:
            return ""
        self._held += text
        begins = [place for place in (self._held.find(stop) for stop in self._stops) if place >= 0]
        keep = self._first_possible(len(self._held))
        if begins and min(begins) <= keep:
            return self._cut(min(begins))
        shown, self._held = self._held[:keep], self._held[keep:]
        return shown

    def flush(self) -> str:
        """What is left at the end of the answer: nothing can complete a stop string now."""
        begins = [place for place in (self._held.find(stop) for stop in self._stops) if place >= 0]
        if begins:
            return self._cut(min(begins))
        shown, self._held = self._held, ""
        return shown

    def _cut(self, place: int) -> str:
        shown, self._held, self.found = self._held[:place], "", True
        return shown

    def _first_possible(self, length: int) -> int:
        """The first place from which the held text may still grow into a stop string; `length` where there is none."""
        longest = max((len(stop) for stop in self._stops), default=0)
        for place in range(max(0, length - longest + 1), length):
            tail = self._held[place:]
            if any(len(stop) > len(tail) and stop.startswith(tail) for stop in self._stops):
                return place
        return length
