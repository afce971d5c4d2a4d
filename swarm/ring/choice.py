"""Which model the swarm runs, who leads, who gets the model from outside: pure functions of the member records.

Every node computes them for itself; the same view gives the same answer, so nobody has to be asked.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from swarm.protocol.ids import BlobId, NodeId
from swarm.protocol.messages import Member, MemberState
from swarm.protocol.plan import Plan

STANDING = frozenset({MemberState.ALIVE, MemberState.SUSPECT})
"""States of a member that may lead and may be given layers. A leaving one goes on serving what it has."""

_LIVING = STANDING | {MemberState.LEAVING}


_REVISION = re.compile(r"@(?:refs/pr/\d+|[^/@]+)")


@dataclass(frozen=True, slots=True)
class Choice:
    manifest: BlobId | None
    """The model to run; None while nobody has it."""
    name: str
    holders: tuple[NodeId, ...] = ()
    """Living members that hand it out, lowest id first."""
    acquirer: NodeId | None = None
    """Where there is no manifest: who has to get the model from outside, or is at it."""
    wanted: str = ""
    """What the acquirer has to get; empty: the embedded default."""


@dataclass(frozen=True, slots=True)
class DraftChoice:
    source: str
    """What to draft with, as `--model` takes it; empty: no model."""
    manifest: BlobId | None = None
    """The draft itself, where a living member has it."""
    manifest_bytes: int = 0
    acquirer: NodeId | None = None
    """Where nobody has it: who gets it from outside, of those that want it."""


def choose_draft(members: Iterable[Member], fallback: str) -> DraftChoice:
    """What the swarm drafts with: what somebody named with ``--draft``, lowest id first; else `fallback`."""
    living = sorted((m for m in members if m.state in _LIVING), key=lambda member: member.node)
    offers = [(member, member.draft) for member in living if member.draft is not None]
    source = next((offer.source for _, offer in offers if offer.named), fallback)
    wanting = [(member, offer) for member, offer in offers if offer.source == source]
    for _, offer in wanting:
        if offer.manifest is not None:
            return DraftChoice(source, offer.manifest, offer.manifest_bytes)
    able = [(not offer.named, member.node) for member, offer in wanting if member.state in STANDING]
    return DraftChoice(source, acquirer=min(able)[1] if able else None)


def leader(members: Iterable[Member]) -> NodeId | None:
    """The one that proposes plans: the lowest id that stands."""
    return min((member.node for member in members if member.state in STANDING), default=None)


def choose_model(members: Iterable[Member], plan: Plan) -> Choice:
    """The model that runs stays; else what somebody named with ``--model``, lowest id first; else any that is there;
    else what somebody named who died: a crash is no change of mind."""
    everybody = sorted(members, key=lambda member: member.node)
    living = [member for member in everybody if member.state in _LIVING]
    held = {member.model: member for member in reversed(living) if member.model is not None}
    if plan.stages and plan.model in held:
        return _hold(held[plan.model], living)
    for asking in living:
        if asking.wanted:
            having = [asking, *living]
            found = next((m for m in having if m.model is not None and same_model(asking.wanted, m.model_name)), None)
            return _hold(found, living) if found else _acquire(living, asking.node, asking.wanted)
    if held:
        return _hold(held[plan.model] if plan.model in held else min(held.values(), key=lambda m: m.node), living)
    died = next((m for m in everybody if m.wanted and m.state is MemberState.DEAD), None)
    return _acquire(living, None, died.wanted if died else "")


def same_model(wanted: str, name: str) -> bool:
    """Whether a ``--model`` means the model of this name: the last part of a path or id, without ending or revision."""
    return _stem(wanted) == _stem(name)


def _stem(text: str) -> str:
    text = _REVISION.sub("", text)
    last = text.replace("\\", "/").rstrip("/").rpartition("/")[2].casefold()
    return last.removesuffix(".gguf")


def _hold(holder: Member, living: list[Member]) -> Choice:
    holders = tuple(member.node for member in living if member.model == holder.model)
    return Choice(holder.model, holder.model_name, holders)


def _acquire(living: list[Member], asking: NodeId | None, wanted: str) -> Choice:
    """Whoever is at it already goes on: a newcomer with a lower id must not start a second time.

    Else who failed least often: so another tries where one cannot reach the source, or died. Of these first the one
    that named the model, then the lowest id.
    """
    busy = next((member for member in living if member.model is None and member.model_name), None)
    able = [member for member in living if member.state in STANDING]
    turn = busy or min(able, key=lambda m: (m.failures, m.node != asking, m.node), default=None)
    return Choice(None, "", acquirer=turn.node if turn else None, wanted=wanted)
