from __future__ import annotations

import contextlib
import datetime
import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from hypothesis import given
from hypothesis import strategies as st

from swarm.protocol.errors import ProtocolError, StoreError, UsageError
from swarm.protocol.ids import is_node_id
from swarm.protocol.limits import MAX_CERTIFICATE_BYTES
from swarm.ring import identity

REPOSITORY = Path(__file__).parents[2]


def test_the_id_is_the_certificates_hash_and_stays(tmp_path: Path) -> None:
    first = identity.load_or_create(tmp_path / "home")
    again = identity.load_or_create(tmp_path / "home")
    assert is_node_id(first.node)
    assert first.node == hashlib.sha256(first.certificate).hexdigest()[:32]
    assert (again.node, again.certificate) == (first.node, first.certificate)
    assert identity.load_or_create(tmp_path / "other").node != first.node
    assert len(first.certificate) < MAX_CERTIFICATE_BYTES / 8


@pytest.mark.skipif(os.name == "nt", reason="Windows keeps access lists, which the folder inherits")
def test_nobody_else_may_read_the_key(tmp_path: Path) -> None:
    own = identity.load_or_create(tmp_path)
    assert own.key_path.stat().st_mode & 0o777 == 0o600
    assert own.key_path.parent.stat().st_mode & 0o777 == 0o700


def test_nothing_is_left_aside(tmp_path: Path) -> None:
    identity.load_or_create(tmp_path)
    identity.next_incarnation(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["identity"]
    assert sorted(p.name for p in (tmp_path / "identity").iterdir()) == ["cert.pem", "incarnation", "key.pem"]


@pytest.mark.parametrize("name", ["cert.pem", "key.pem"])
@pytest.mark.parametrize("content", [b"", b"\x00\xff garbage", None])
def test_damage_says_what_to_do(tmp_path: Path, name: str, content: bytes | None) -> None:
    identity.load_or_create(tmp_path)
    path = tmp_path / "identity" / name
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content)
    with pytest.raises(StoreError, match="Delete that folder"):
        identity.load_or_create(tmp_path)


def test_a_key_of_another_certificate_is_damage(tmp_path: Path) -> None:
    one, other = identity.load_or_create(tmp_path / "1"), identity.load_or_create(tmp_path / "2")
    one.key_path.write_bytes(other.key_path.read_bytes())
    with pytest.raises(StoreError, match="does not belong"):
        identity.load_or_create(tmp_path / "1")


def test_every_start_counts(tmp_path: Path) -> None:
    identity.load_or_create(tmp_path)
    assert [identity.next_incarnation(tmp_path) for _ in range(3)] == [1, 2, 3]


@pytest.mark.parametrize("content", [b"", b"-1", b"seven", b"\xff", "٣".encode(), b"9" * 30])
def test_a_damaged_count_says_what_to_do(tmp_path: Path, content: bytes) -> None:
    identity.load_or_create(tmp_path)
    (tmp_path / "identity" / "incarnation").write_bytes(content)
    with pytest.raises(StoreError, match="Delete that folder"):
        identity.next_incarnation(tmp_path)


def test_signatures(tmp_path: Path) -> None:
    own, other = identity.load_or_create(tmp_path / "1"), identity.load_or_create(tmp_path / "2")
    signature = own.sign(b"data")
    assert identity.verify(own.certificate, signature, b"data")
    assert not identity.verify(own.certificate, signature, b"date")
    assert not identity.verify(other.certificate, signature, b"data")
    assert not identity.verify(own.certificate, b"", b"data")


def test_certificates_of_another_kind_are_refused() -> None:
    key = ec.generate_private_key(ec.SECP384R1())
    name = x509.Name([])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(datetime.datetime(2000, 1, 1))
        .not_valid_after(datetime.datetime(2100, 1, 1))
        .sign(key, hashes.SHA256())
    )
    with pytest.raises(ProtocolError, match="P-256"):
        identity.verify(certificate.public_bytes(serialization.Encoding.DER), b"", b"")


@given(st.binary(max_size=400))
def test_any_bytes_for_a_certificate(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        identity.verify(data, b"", b"")


@given(st.data())
def test_a_mutated_certificate(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    certificate = bytearray(_some_certificate(tmp_path_factory))
    for _ in range(data.draw(st.integers(1, 4))):
        certificate[data.draw(st.integers(0, len(certificate) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(ProtocolError):  # the only other way out
        assert not identity.verify(bytes(certificate), b"0" * 70, b"data")


def test_an_oversized_certificate_is_not_parsed() -> None:
    with pytest.raises(ProtocolError, match="too large"):
        identity.verify(b"\x30" * (MAX_CERTIFICATE_BYTES + 1), b"", b"")


def test_a_home_is_held_by_one_node(tmp_path: Path) -> None:
    with identity.hold_home(tmp_path):
        with pytest.raises(UsageError, match=f"process {os.getpid()}.*--home"), identity.hold_home(tmp_path):
            pass
        assert (tmp_path / "running.pid").exists()
    with identity.hold_home(tmp_path):
        pass
    assert not (tmp_path / "running.pid").exists()


def test_a_crash_releases_the_home_and_a_running_process_is_named(tmp_path: Path) -> None:
    script = (
        "import sys, pathlib\n"
        "from swarm.ring.identity import hold_home\n"
        "with hold_home(pathlib.Path(sys.argv[1])):\n"
        "    print('held', flush=True)\n"
        "    sys.stdin.read()\n"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline().strip() == b"held"
        with pytest.raises(UsageError, match=f"process {holder.pid}"), identity.hold_home(tmp_path):
            pass
        holder.kill()
        holder.wait(30)
    assert (tmp_path / "running.pid").exists()
    with identity.hold_home(tmp_path):
        assert (tmp_path / "running.pid").read_text(encoding="utf-8") == str(os.getpid())


def test_a_home_that_cannot_be_one(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(UsageError, match="cannot use the folder"), identity.hold_home(tmp_path / "file"):
        pass
    (tmp_path / "running.lock").write_bytes(b"not a database" * 100)
    with pytest.raises(UsageError, match="cannot use the folder"), identity.hold_home(tmp_path):
        pass


_CERTIFICATES: list[bytes] = []


def _some_certificate(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    if not _CERTIFICATES:
        _CERTIFICATES.append(identity.load_or_create(tmp_path_factory.mktemp("home")).certificate)
    return _CERTIFICATES[0]
