"""Who this node is: a certificate made once, a count of its starts, and a hold on its home folder.

The node's id is the first half of the SHA-256 of its certificate, so a node that shows a certificate and proves the key
cannot borrow another's id. A restart is the same node with a higher incarnation, never a ghost beside itself.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import os
import secrets
import shutil
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from swarm.protocol.errors import ProtocolError, StoreError, UsageError
from swarm.protocol.ids import NodeId
from swarm.protocol.limits import MAX_CERTIFICATE_BYTES

_SIGNATURE = ec.ECDSA(hashes.SHA256())


@dataclass(frozen=True, slots=True)
class Identity:
    """This node's certificate and key, and the files they are in (TLS wants files)."""

    node: NodeId
    certificate: bytes
    """DER."""
    key: ec.EllipticCurvePrivateKey
    certificate_path: Path
    key_path: Path

    def sign(self, data: bytes) -> bytes:
        """ECDSA with SHA-256, DER."""
        return self.key.sign(data, _SIGNATURE)


def fingerprint_of(certificate: bytes) -> bytes:
    """SHA-256 of a DER certificate, 32 bytes."""
    return hashlib.sha256(certificate).digest()


def node_of(certificate: bytes) -> NodeId:
    """The id that belongs to a DER certificate."""
    return NodeId(fingerprint_of(certificate).hex()[:32])


def verify(certificate: bytes, signature: bytes, data: bytes) -> bool:
    """Whether `signature` over `data` was made with the key of a peer's certificate.

    Raises `ProtocolError` for what is not an EC P-256 certificate.
    """
    if len(certificate) > MAX_CERTIFICATE_BYTES:
        raise ProtocolError(
            "certificate too large", expected=f"at most {MAX_CERTIFICATE_BYTES} bytes", found=str(len(certificate))
        )
    try:
        key = x509.load_der_x509_certificate(certificate).public_key()
    except Exception as error:
        # Beside ValueError the parser raises its own errors for versions and algorithms it does not know.
        raise ProtocolError("unreadable certificate", found=f"{type(error).__name__}: {error}"[:200]) from None
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise ProtocolError("certificate of another kind", expected="an EC P-256 key", found=type(key).__name__)
    try:
        key.verify(signature, data, _SIGNATURE)
    except InvalidSignature:
        return False
    return True


def load_or_create(home: Path) -> Identity:
    """The identity kept in ``<home>/identity``; made where there is none. Raises `StoreError` where it is damaged."""
    folder = home / "identity"
    try:
        if not folder.exists():
            _create(home, folder)
        return _load(folder)
    except OSError as error:
        raise StoreError(
            f"cannot read or write {folder}", found=str(error), action="Check the folder, or name another with --home."
        ) from error


def next_incarnation(home: Path) -> int:
    """Count this start, on disk, and return the count: 1 for the first. Raises `StoreError` where it is damaged."""
    path = home / "identity" / "incarnation"
    try:
        text = path.read_text(encoding="utf-8", errors="replace").strip()
        if not text.isascii() or not text.isdigit() or len(text) > 18:
            raise _damaged(path.parent, f"{path.name} holds {text[:20]!r}")
        count = int(text) + 1
        write_private(path, str(count).encode())
    except OSError as error:
        raise _damaged(path.parent, str(error)) from error
    return count


def keep_incarnation(home: Path, count: int) -> None:
    """Write a count that the swarm remembered better than we did; the next start counts on from it."""
    write_private(home / "identity" / "incarnation", str(count).encode())


def write_private(path: Path, data: bytes) -> None:
    """Replace a file in one step, readable by its owner alone where the system knows owners. Raises ``OSError``."""
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}.new")
    try:
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _create(home: Path, folder: Path) -> None:
    home.mkdir(parents=True, exist_ok=True)
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "swarm node")])
    # The dates say nothing: office PCs have wrong clocks, and peers know this certificate by its hash alone.
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(datetime.datetime(2000, 1, 1))
        .not_valid_after(datetime.datetime(9999, 12, 31))
        .sign(key, hashes.SHA256())
    )
    # A folder made aside and renamed is there whole or not at all.
    aside = home / f"identity.{secrets.token_hex(4)}.new"
    aside.mkdir(mode=0o700)
    try:
        pem = serialization.Encoding.PEM
        write_private(aside / "cert.pem", certificate.public_bytes(pem))
        plain = serialization.NoEncryption()
        write_private(aside / "key.pem", key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain))
        write_private(aside / "incarnation", b"0")
        aside.rename(folder)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def _load(folder: Path) -> Identity:
    certificate_path, key_path = folder / "cert.pem", folder / "key.pem"
    try:
        certificate = x509.load_pem_x509_certificate(certificate_path.read_bytes())
        key = serialization.load_pem_private_key(key_path.read_bytes(), password=None)
    except Exception as error:
        # Missing or unreadable files, and whatever the parser raises for damaged ones.
        raise _damaged(folder, str(error)) from error
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != certificate.public_key():
        raise _damaged(folder, "a key that does not belong to the certificate")
    der = certificate.public_bytes(serialization.Encoding.DER)
    return Identity(node_of(der), der, key, certificate_path, key_path)


def _damaged(folder: Path, found: str) -> StoreError:
    return StoreError(
        "this node's identity is damaged",
        expected=f"cert.pem, key.pem and incarnation in {folder}",
        found=found,
        action="Delete that folder; the PC then joins as a new node.",
    )


@contextlib.contextmanager
def hold_home(home: Path) -> Iterator[None]:
    """Hold the home folder while this node runs. Raises `UsageError`, naming the process, where another node has it.

    The hold is SQLite's lock on an empty database: the one lock in the standard library that Windows and Linux share
    and that a crash releases by itself.
    """
    pid_path = home / "running.pid"
    try:
        home.mkdir(parents=True, exist_ok=True)
        lock = sqlite3.connect(home / "running.lock", timeout=0, isolation_level=None, check_same_thread=False)
    except (OSError, sqlite3.Error) as error:
        raise _unusable(home, error) from error
    try:
        try:
            lock.execute("BEGIN EXCLUSIVE")
        except sqlite3.OperationalError as error:
            if "locked" not in str(error):
                raise _unusable(home, error) from error
            raise UsageError(
                f"the folder {home} is in use by a node that runs",
                found=f"process {_read_pid(pid_path)}",
                action="Stop that node, or start this one with another folder: --home DIR.",
            ) from None
        except sqlite3.DatabaseError as error:
            raise _unusable(home, error) from error
        pid_path.write_text(str(os.getpid()), encoding="utf-8")
        try:
            yield
        finally:
            pid_path.unlink(missing_ok=True)
    finally:
        lock.close()


def _read_pid(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return "unknown"
    return text if text.isascii() and text.isdigit() else "unknown"


def _unusable(home: Path, error: Exception) -> UsageError:
    return UsageError(
        f"cannot use the folder {home}", found=str(error), action="Check its permissions, or name another: --home DIR."
    )
