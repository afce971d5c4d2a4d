"""Both sides against each other, and against whoever sits between, repeats, reflects or lies."""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import struct
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.protocol.errors import HandshakeError, LinkClosedError, ProtocolError
from swarm.protocol.ids import NodeId
from swarm.protocol.limits import MAX_REASON_CHARS
from swarm.protocol.messages import Challenge, Goodbye, Hello, Message, Ping, Proof, Welcome
from swarm.protocol.version import PROTOCOL_VERSION, SOFTWARE_VERSION
from swarm.ring.handshake import Credentials, Dialler, Listener, Peer, farewell, heard, printable
from swarm.ring.identity import Identity, fingerprint_of, load_or_create, verify
from swarm.ring.pairing import OPEN_SECRET

SECRET = b"s" * 32


@pytest.fixture(scope="session")
def identities(tmp_path_factory: pytest.TempPathFactory) -> list[Identity]:
    return [load_or_create(tmp_path_factory.mktemp("home")) for _ in range(3)]


@pytest.fixture
def alice(identities: list[Identity]) -> Credentials:
    return Credentials(identities[0], "alice", "office", SECRET)


@pytest.fixture
def bob(identities: list[Identity]) -> Credentials:
    return Credentials(identities[1], "bob", "office", SECRET)


@pytest.fixture
def mallory(identities: list[Identity]) -> Credentials:
    return Credentials(identities[2], "mallory", "office", b"m" * 32)


def dialler(own: Credentials, to: Credentials, *, expected: NodeId | None = None, nonce: bytes = b"d" * 32) -> Dialler:
    return Dialler(own, certificate=to.identity.certificate, expected=expected, nonce=nonce)


def listener(own: Credentials, *, nonce: bytes = b"l" * 32) -> Listener:
    return Listener(own, nonce=nonce)


def said(message: Message | None, kind: type[Any]) -> Any:
    assert type(message) is kind
    return message


def run(d: Dialler, side: Listener) -> tuple[Peer | None, Peer | None]:
    """(whom the listener found, whom the dialler found)"""
    challenge = said(side.handle(d.hello()).send, Challenge)
    proof = said(d.handle(challenge).send, Proof)
    welcomed = side.handle(proof)
    return welcomed.peer, d.handle(said(welcomed.send, Welcome)).peer


@pytest.mark.parametrize("secret", [SECRET, OPEN_SECRET])
def test_two_nodes_of_a_swarm_find_each_other(alice: Credentials, bob: Credentials, secret: bytes) -> None:
    alice, bob = dataclasses.replace(alice, secret=secret), dataclasses.replace(bob, secret=secret)
    found = run(dialler(alice, bob, expected=bob.node), listener(bob))
    assert found == (
        Peer(alice.node, "alice", fingerprint_of(alice.identity.certificate)),
        Peer(bob.node, "bob", fingerprint_of(bob.identity.certificate)),
    )


def test_versions_are_named_on_both_sides(alice: Credentials, bob: Credentials) -> None:
    old = dataclasses.replace(dialler(alice, bob).hello(), protocol=PROTOCOL_VERSION + 7, software="9.9\x1b[2J")
    with pytest.raises(HandshakeError) as caught:
        listener(bob).handle(old)
    for part in (str(PROTOCOL_VERSION), SOFTWARE_VERSION, str(PROTOCOL_VERSION + 7), "9.9?[2J", "alice", "bob"):
        assert part in str(caught.value)
    assert "\x1b" not in str(caught.value)
    challenge = said(listener(bob).handle(dialler(alice, bob).hello()).send, Challenge)
    with pytest.raises(HandshakeError, match=f"{PROTOCOL_VERSION + 7} "):
        dialler(alice, bob).handle(dataclasses.replace(challenge, protocol=PROTOCOL_VERSION + 7))


def test_another_swarm_is_named(alice: Credentials, bob: Credentials) -> None:
    with pytest.raises(HandshakeError, match=r'"office" as on "bob"; found "lab".*--swarm'):
        listener(bob).handle(dialler(dataclasses.replace(alice, swarm="lab"), bob).hello())


def test_a_wrong_code_says_which_screen_to_look_at(alice: Credentials, bob: Credentials) -> None:
    stranger = dataclasses.replace(alice, secret=b"w" * 32)
    d, side = dialler(stranger, bob), listener(bob)
    proof = d.handle(said(side.handle(d.hello()).send, Challenge)).send
    with pytest.raises(HandshakeError, match=r'Start "alice" with --code and the code shown on "bob"') as caught:
        side.handle(said(proof, Proof))
    told = farewell(caught.value)
    assert not told.retry
    with pytest.raises(HandshakeError, match='the code shown on "bob"'):
        d.handle(told)


def test_a_listener_without_the_code_is_not_believed(alice: Credentials, bob: Credentials) -> None:
    d, side = dialler(alice, bob), listener(bob)
    proof = said(d.handle(said(side.handle(d.hello()).send, Challenge)).send, Proof)
    # The impostor even sends back the one digest it was shown: the roles differ.
    for digest in (b"", b"0" * 32, proof.digest):
        again = dialler(alice, bob)
        again.handle(said(listener(bob).handle(again.hello()).send, Challenge))
        with pytest.raises(HandshakeError, match='"bob" does not know the code'):
            again.handle(Welcome(digest))


def test_open_and_paired_do_not_mix(alice: Credentials, bob: Credentials) -> None:
    open_alice, open_bob = (dataclasses.replace(c, secret=OPEN_SECRET) for c in (alice, bob))
    d = dialler(alice, open_bob)
    with pytest.raises(HandshakeError, match="is open"):
        d.handle(said(listener(open_bob).handle(d.hello()).send, Challenge))
    d = dialler(open_alice, bob)
    with pytest.raises(HandshakeError, match='the code shown on "bob"'):
        d.handle(said(listener(bob).handle(d.hello()).send, Challenge))


def test_a_listener_cannot_talk_a_paired_dialler_into_an_open_link(alice: Credentials, mallory: Credentials) -> None:
    d = dialler(alice, mallory)
    challenge = said(listener(mallory).handle(d.hello()).send, Challenge)
    with pytest.raises(HandshakeError):
        d.handle(dataclasses.replace(challenge, open=True))


def test_a_listener_that_hides_being_open_fails_at_the_digest(alice: Credentials, bob: Credentials) -> None:
    open_bob = dataclasses.replace(bob, secret=OPEN_SECRET)
    d, side = dialler(alice, open_bob), listener(open_bob)
    challenge = said(side.handle(d.hello()).send, Challenge)
    proof = said(d.handle(dataclasses.replace(challenge, open=False)).send, Proof)
    with pytest.raises((HandshakeError, ProtocolError)):
        side.handle(proof)


def test_a_node_does_not_link_to_itself(alice: Credentials) -> None:
    with pytest.raises(HandshakeError, match="dialled itself"):
        listener(alice).handle(dialler(alice, alice).hello())
    with pytest.raises(HandshakeError, match="dialled itself"):
        dialler(alice, alice).handle(_challenge_of(alice))


def test_another_node_at_the_address_is_named(alice: Credentials, bob: Credentials, mallory: Credentials) -> None:
    d = dialler(alice, bob, expected=mallory.node)
    with pytest.raises(HandshakeError, match=rf"expected {mallory.node}; found {bob.node} \(bob\)"):
        d.handle(said(listener(bob).handle(d.hello()).send, Challenge))


def test_the_listeners_id_must_be_that_of_the_tls_certificate(
    alice: Credentials, bob: Credentials, mallory: Credentials
) -> None:
    """Mallory in the middle shows a certificate of her own and passes bob's messages on."""
    d = dialler(alice, mallory)
    with pytest.raises(ProtocolError, match="TLS certificate"):
        d.handle(said(listener(bob).handle(d.hello()).send, Challenge))


@pytest.mark.parametrize("secret", [SECRET, OPEN_SECRET])
def test_a_relay_that_rewrites_the_id_fails_at_the_proof(
    alice: Credentials, bob: Credentials, mallory: Credentials, secret: bytes
) -> None:
    """Mallory passes bob's challenge on under her own id; alice's proof is for mallory's certificate, not bob's."""
    alice, bob = dataclasses.replace(alice, secret=secret), dataclasses.replace(bob, secret=secret)
    d, side = dialler(alice, mallory), listener(bob)
    challenge = said(side.handle(d.hello()).send, Challenge)
    proof = said(d.handle(dataclasses.replace(challenge, node=mallory.node)).send, Proof)
    with pytest.raises((HandshakeError, ProtocolError)):
        side.handle(proof)


def test_an_insider_cannot_take_anothers_id(alice: Credentials, bob: Credentials, mallory: Credentials) -> None:
    """Knowing the secret is not enough: the signature is made with the certificate's key."""
    insider = dataclasses.replace(mallory, secret=SECRET)
    d = dialler(insider, bob)
    with pytest.raises(ProtocolError, match="not that of the certificate"):
        listener(bob).handle(dataclasses.replace(d.hello(), node=alice.node))
    posing = Credentials(dataclasses.replace(alice.identity, key=mallory.identity.key), "alice", "office", SECRET)
    d, side = dialler(posing, bob), listener(bob)
    proof = said(d.handle(said(side.handle(d.hello()).send, Challenge)).send, Proof)
    with pytest.raises(ProtocolError, match="signature"):
        side.handle(proof)


def test_a_recorded_proof_is_of_no_use_on_another_link(alice: Credentials, bob: Credentials) -> None:
    d, side = dialler(alice, bob), listener(bob)
    hello = d.hello()
    proof = said(d.handle(said(side.handle(hello).send, Challenge)).send, Proof)
    later = listener(bob, nonce=b"n" * 32)
    later.handle(hello)
    with pytest.raises(ProtocolError, match="signature"):
        later.handle(proof)


def test_a_recorded_listener_is_of_no_use_on_another_link(alice: Credentials, bob: Credentials) -> None:
    d, side = dialler(alice, bob), listener(bob)
    challenge = said(side.handle(d.hello()).send, Challenge)
    welcome = said(side.handle(said(d.handle(challenge).send, Proof)).send, Welcome)
    later = dialler(alice, bob, nonce=b"n" * 32)
    later.handle(challenge)
    with pytest.raises(HandshakeError):
        later.handle(welcome)


def test_reflection_gives_nothing(alice: Credentials, bob: Credentials) -> None:
    """Mallory dials alice while alice dials her, and sends alice's own messages back at her."""
    d, side = dialler(alice, bob), listener(alice, nonce=b"d" * 32)
    with pytest.raises(HandshakeError, match="itself"):
        side.handle(d.hello())
    honest = listener(bob)
    proof = said(d.handle(said(honest.handle(d.hello()).send, Challenge)).send, Proof)
    with pytest.raises(HandshakeError):
        d.handle(Welcome(proof.digest))


def test_nothing_depends_on_the_secret_before_the_proof(alice: Credentials, bob: Credentials) -> None:
    hello = dialler(alice, bob).hello()
    answers = {
        repr(listener(dataclasses.replace(bob, secret=secret)).handle(hello).send) for secret in (SECRET, b"o" * 32)
    }
    assert len(answers) == 1
    assert dialler(alice, bob).hello() == dialler(dataclasses.replace(alice, secret=b"o" * 32), bob).hello()


@pytest.mark.parametrize("name", ["", "a" * 65, "bell\a", "esc\x1b[31m", " padded", "new\nline"])
def test_a_name_that_cannot_be_shown_is_refused(alice: Credentials, bob: Credentials, name: str) -> None:
    with pytest.raises(ProtocolError, match="name"):
        listener(bob).handle(dataclasses.replace(dialler(alice, bob).hello(), name=name))


@pytest.mark.parametrize("nonce", [b"", b"n" * 31, b"n" * 33])
def test_a_nonce_has_its_length(alice: Credentials, bob: Credentials, nonce: bytes) -> None:
    with pytest.raises(ProtocolError, match="nonce"):
        listener(bob).handle(dialler(alice, bob, nonce=nonce).hello())


def test_the_proofs_are_those_of_the_protocol_page(alice: Credentials, bob: Credentials) -> None:
    def framed(*parts: bytes) -> bytes:
        return b"".join(struct.pack(">I", len(part)) + part for part in (b"swarm-inference 1", *parts))

    d, side = dialler(alice, bob), listener(bob)
    proof = said(d.handle(said(side.handle(d.hello()).send, Challenge)).send, Proof)
    welcome = said(side.handle(proof).send, Welcome)
    prints = [hashlib.sha256(who.identity.certificate).digest() for who in (alice, bob)]
    transcript = framed(
        b"transcript", str(PROTOCOL_VERSION).encode(), b"office", *prints, b"d" * 32, b"l" * 32, b"paired"
    )
    assert proof.digest == hmac.new(SECRET, framed(b"dialler", transcript), hashlib.sha256).digest()
    assert welcome.digest == hmac.new(SECRET, framed(b"listener", transcript), hashlib.sha256).digest()
    assert verify(alice.identity.certificate, proof.signature, framed(b"signature", transcript))


def test_out_of_turn(alice: Credentials, bob: Credentials) -> None:
    hello, challenge = dialler(alice, bob).hello(), _challenge_of(bob)
    for message in (challenge, Proof(b"", b""), Welcome(b""), Ping(1)):
        with pytest.raises(ProtocolError, match="out of turn; expected Hello"):
            listener(bob).handle(message)
    for message in (hello, Proof(b"", b""), Welcome(b""), Ping(1)):
        with pytest.raises(ProtocolError, match="out of turn; expected Challenge"):
            dialler(alice, bob).handle(message)
    d, side = dialler(alice, bob), listener(bob)
    run(d, side)
    for machine in (d, side):
        with pytest.raises(ProtocolError, match="out of turn; expected none"):
            machine.handle(Welcome(b""))


def test_goodbyes_mean_what_they_say() -> None:
    assert isinstance(heard(Goodbye("busy", True)), LinkClosedError)
    assert isinstance(heard(Goodbye("no", False)), HandshakeError)
    rude = str(heard(Goodbye("\x1b]0;title\a" + "x" * 5000)))
    assert rude.startswith("?]0;title?x")
    assert len(rude) == MAX_REASON_CHARS
    assert farewell(ProtocolError("p")).retry
    assert printable("a\u202eb\n", 9) == "a?b?"


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_single_lie_ends_the_handshake(identities: list[Identity], data: st.DataObject) -> None:
    """Change one field of one message on its way: nobody ends up with a link to somebody else."""
    alice = Credentials(identities[0], "alice", "office", SECRET)
    bob = Credentials(identities[1], "bob", "office", SECRET)
    victim = data.draw(st.sampled_from([Hello, Challenge, Proof, Welcome]))
    lie = data.draw(st.sampled_from([f.name for f in dataclasses.fields(victim)]))

    def passes(message: Any) -> Any:
        if type(message) is not victim:
            return message
        value = getattr(message, lie)
        if isinstance(value, bool):
            value = not value
        elif isinstance(value, int):
            value += data.draw(st.integers(1, 9))
        elif isinstance(value, bytes):
            at = data.draw(st.integers(0, 1000)) % len(value)  # a signature's length differs from run to run
            value = value[:at] + bytes([value[at] ^ data.draw(st.integers(1, 255))]) + value[at + 1 :]
        elif lie == "node":
            value = identities[2].node
        else:
            value += "x"
        return dataclasses.replace(message, **{lie: value})

    d, side = dialler(alice, bob), listener(bob)

    def meet() -> tuple[Peer | None, Peer | None]:
        proof = d.handle(passes(side.handle(passes(d.hello())).send)).send
        welcomed = side.handle(passes(proof))
        return welcomed.peer, d.handle(passes(welcomed.send)).peer

    if lie not in {"software", "name"}:  # shown, not relied on
        with pytest.raises((HandshakeError, ProtocolError)):
            meet()
        return
    ends = meet()
    assert [end and end.node for end in ends] == [alice.node, bob.node]


def _challenge_of(own: Credentials) -> Challenge:
    return Challenge(PROTOCOL_VERSION, SOFTWARE_VERSION, own.swarm, own.node, own.name, b"l" * 32, not own.secret)
