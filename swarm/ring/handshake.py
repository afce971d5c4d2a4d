"""The mutual handshake of a link, both sides, sans-I/O: ``handle(message) -> Step``.

::

    dialler                                       listener
      Hello      id, certificate, nonce    ──►      same version, same swarm, id is the certificate's hash
      id is the hash of the TLS certificate  ◄──    Challenge  id, nonce, open
      Proof      digest, signature         ──►      knows the secret, owns the certificate
      knows the secret too                 ◄──      Welcome    digest

A digest is HMAC-SHA256 keyed with the swarm's secret over the role and the transcript: both nonces and the hashes of
both whole certificates. Whoever sits between with a certificate of its own changes the transcript, and what was heard
on one link fits no other. The listener says nothing that depends on the secret before the dialler has proved itself.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass

from swarm.protocol.config import parse_name
from swarm.protocol.errors import HandshakeError, LinkClosedError, ProtocolError, SwarmError, UsageError
from swarm.protocol.ids import NodeId
from swarm.protocol.limits import MAX_NAME_CHARS, MAX_REASON_CHARS, NONCE_BYTES
from swarm.protocol.messages import Challenge, Goodbye, Hello, Message, Proof, Welcome
from swarm.protocol.version import PROTOCOL_VERSION, SOFTWARE_VERSION
from swarm.ring.identity import Identity, fingerprint_of, node_of, verify
from swarm.ring.pairing import framed, keyed


@dataclass(frozen=True, slots=True)
class Credentials:
    """What this node shows in every handshake."""

    identity: Identity
    name: str
    swarm: str
    secret: bytes
    """From `pairing.derive_secret`; `pairing.OPEN_SECRET` in an open swarm."""

    @property
    def node(self) -> NodeId:
        return self.identity.node


@dataclass(frozen=True, slots=True)
class Peer:
    """Who is at the other end, proved."""

    node: NodeId
    name: str
    fingerprint: bytes
    """SHA-256 of its whole certificate: pin HTTPS requests to it (``aiohttp.Fingerprint``)."""


@dataclass(frozen=True, slots=True)
class Step:
    """What to do after a message: send this; with `peer` the link is up."""

    send: Message | None
    peer: Peer | None = None


class Dialler:
    """The side that opened the connection. Send `hello` first, then what `handle` says.

    `handle` raises `HandshakeError` where dialling again cannot help, `LinkClosedError` where it may, and
    `ProtocolError`; tell the peer with `farewell`.
    """

    def __init__(self, own: Credentials, *, certificate: bytes, expected: NodeId | None, nonce: bytes) -> None:
        """`certificate`: the DER that TLS showed. `expected`: the node that must answer, where it is known."""
        self._own = own
        self._certificate = certificate
        self._expected = expected
        self._nonce = nonce
        self._awaiting: type[Message] | None = Challenge
        self._transcript = b""
        self._peer: Peer | None = None

    def hello(self) -> Hello:
        own = self._own
        return Hello(
            PROTOCOL_VERSION,
            SOFTWARE_VERSION,
            own.swarm,
            own.node,
            own.name,
            own.identity.certificate,
            self._nonce,
        )

    def handle(self, message: Message) -> Step:
        _check_turn(message, self._awaiting)
        if isinstance(message, Challenge):
            return self._prove(message)
        assert isinstance(message, Welcome)
        assert self._peer is not None
        if not hmac.compare_digest(message.digest, keyed(self._own.secret, b"listener", self._transcript)):
            raise _wrong_code(self._peer.name, self._own.swarm, self._own.name)
        self._awaiting = None
        return Step(None, self._peer)

    def _prove(self, challenge: Challenge) -> Step:
        own = self._own
        _check_same(own, challenge)
        if challenge.node != node_of(self._certificate):
            raise ProtocolError(
                "the id is not that of the TLS certificate", expected=node_of(self._certificate), found=challenge.node
            )
        if self._expected not in (None, challenge.node):
            raise HandshakeError(
                "another node answers at this address",
                expected=str(self._expected),
                found=f"{challenge.node} ({challenge.name})",
            )
        if challenge.open and own.secret:
            raise HandshakeError(
                f'swarm "{own.swarm}" on "{challenge.name}" is open, on "{own.name}" it has a pairing code',
                action="Start both with --open, or both with the same --code; or name another swarm with --swarm.",
            )
        if own.secret == b"" and not challenge.open:
            raise HandshakeError(
                f'swarm "{own.swarm}" on "{challenge.name}" has a pairing code, on "{own.name}" it is open',
                action=f'Start "{own.name}" with --code and the code shown on "{challenge.name}".',
            )
        self._peer = Peer(challenge.node, challenge.name, fingerprint_of(self._certificate))
        self._transcript = _transcript(own.swarm, own.identity.certificate, self._certificate, self._nonce, challenge)
        self._awaiting = Welcome
        digest = keyed(own.secret, b"dialler", self._transcript)
        return Step(Proof(digest, own.identity.sign(framed(b"signature", self._transcript))))


class Listener:
    """The side that accepted the connection. Errors as for `Dialler`."""

    def __init__(self, own: Credentials, *, nonce: bytes) -> None:
        self._own = own
        self._nonce = nonce
        self._awaiting: type[Message] | None = Hello
        self._hello: Hello | None = None
        self._challenge: Challenge | None = None

    def handle(self, message: Message) -> Step:
        _check_turn(message, self._awaiting)
        if isinstance(message, Hello):
            return self._ask(message)
        assert isinstance(message, Proof)
        return self._judge(message)

    def _ask(self, hello: Hello) -> Step:
        own = self._own
        _check_same(own, hello)
        if hello.node != node_of(hello.certificate):
            raise ProtocolError(
                "the id is not that of the certificate", expected=node_of(hello.certificate), found=hello.node
            )
        self._hello = hello
        self._challenge = Challenge(
            PROTOCOL_VERSION, SOFTWARE_VERSION, own.swarm, own.node, own.name, self._nonce, open=not own.secret
        )
        self._awaiting = Proof
        return Step(self._challenge)

    def _judge(self, proof: Proof) -> Step:
        own, hello, challenge = self._own, self._hello, self._challenge
        assert hello is not None
        assert challenge is not None
        transcript = _transcript(own.swarm, hello.certificate, own.identity.certificate, hello.nonce, challenge)
        if not verify(hello.certificate, proof.signature, framed(b"signature", transcript)):
            raise ProtocolError("the signature is not of the certificate's key")
        if not hmac.compare_digest(proof.digest, keyed(own.secret, b"dialler", transcript)):
            raise _wrong_code(hello.name, own.swarm, own.name)
        self._awaiting = None
        peer = Peer(hello.node, hello.name, fingerprint_of(hello.certificate))
        return Step(Welcome(keyed(own.secret, b"listener", transcript)), peer)


def farewell(error: SwarmError) -> Goodbye:
    """What to tell the peer about an error that ends the link."""
    return Goodbye(str(error)[:MAX_REASON_CHARS], retry=not isinstance(error, HandshakeError))


def heard(goodbye: Goodbye) -> SwarmError:
    """The error that a peer's goodbye means here."""
    reason = printable(goodbye.reason, MAX_REASON_CHARS)
    return LinkClosedError(reason) if goodbye.retry else HandshakeError(reason)


def printable(text: str, limit: int) -> str:
    """A peer's text, safe to show: cut, and without the control characters that move a terminal's cursor."""
    return "".join(c if c.isprintable() else "?" for c in text[:limit])


def _transcript(swarm: str, dialler: bytes, listener: bytes, nonce: bytes, challenge: Challenge) -> bytes:
    return framed(
        b"transcript",
        str(PROTOCOL_VERSION).encode(),
        swarm.encode(),
        fingerprint_of(dialler),
        fingerprint_of(listener),
        nonce,
        challenge.nonce,
        b"open" if challenge.open else b"paired",
    )


def _check_turn(message: Message, awaiting: type[Message] | None) -> None:
    if isinstance(message, Goodbye):
        raise heard(message)
    if type(message) is not awaiting:
        expected = "none" if awaiting is None else awaiting.__name__
        raise ProtocolError("a handshake message out of turn", expected=expected, found=type(message).__name__)


def _check_same(own: Credentials, theirs: Hello | Challenge) -> None:
    if theirs.protocol != PROTOCOL_VERSION:
        software = printable(theirs.software, MAX_NAME_CHARS)
        raise HandshakeError(
            "two versions of the protocol",
            expected=f'{PROTOCOL_VERSION} (swarm {SOFTWARE_VERSION} on "{own.name}")',
            found=f'{theirs.protocol} (swarm {software} on "{printable(theirs.name, MAX_NAME_CHARS)}")',
            action="Install the same version of swarm on both PCs.",
        )
    if theirs.swarm != own.swarm:
        raise HandshakeError(
            "two different swarms",
            expected=f'"{own.swarm}" as on "{own.name}"',
            found=f'"{printable(theirs.swarm, MAX_NAME_CHARS)}"',
            action="Give both the same --swarm name to join them.",
        )
    if theirs.node == own.node:
        raise HandshakeError("a node dialled itself", found=own.node)
    if len(theirs.nonce) != NONCE_BYTES:
        raise ProtocolError("bad nonce", expected=f"{NONCE_BYTES} bytes", found=str(len(theirs.nonce)))
    try:
        named = parse_name(theirs.name) == theirs.name
    except UsageError:
        named = False
    if not named:
        raise ProtocolError("a name that cannot be shown", found=repr(theirs.name)[:80])


def _wrong_code(stranger: str, swarm: str, insider: str) -> HandshakeError:
    return HandshakeError(
        f'wrong pairing code: "{stranger}" does not know the code of swarm "{swarm}"',
        action=f'Start "{stranger}" with --code and the code shown on "{insider}".',
    )
