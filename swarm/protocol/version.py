"""The two version numbers: the software's, and the protocol's."""

SOFTWARE_VERSION = "0.1.0"

PROTOCOL_VERSION = 2
"""Compared for equality in the handshake. Raised when a peer that does not know of a change would misread a frame;
a message or field appended at the end does not raise it."""
