"""Every bound on what a peer, the LAN or a person can send us: unit, reason, and what it costs at worst.

A frame is checked against these before anything in it is used; breaking one is a `LimitError` and drops the link.
"""

MAX_HEADER_BYTES = 256 * 1024
"""A CBOR header. The largest honest one is a plan of 256 stages with their names (about 40 KB)."""

MAX_TENSOR_BYTES = 64 * 1024 * 1024
"""One tensor payload. 1,024 rows of f32 at hidden size 16,384. Worst memory: this times MAX_INFLIGHT_FRAMES a link."""

MAX_TENSORS = 8
"""Tensors in one message: models whose later layers share caches cross a boundary with several."""

MAX_TENSOR_RANK = 4
"""Axes of a tensor on the wire."""

MAX_INFLIGHT_FRAMES = 64
"""Frames queued to one link before its sender waits (back-pressure)."""

MAX_TEXT_CHARS = 4096
"""Any one string inside a header: names, reasons, addresses."""

MAX_NAME_CHARS = 64
"""A node's or a swarm's name, so a screen can show it."""

MAX_ITEMS = 4096
"""Any one list inside a header, token ids aside."""

MAX_DEPTH = 8
"""Nested lists inside a header; a plan needs 3."""

MAX_SEGMENT_ROWS = 1024
"""Rows (tokens) in one segment: a prefill chunk at most."""

MAX_MEMBERS = 256
"""Nodes of one swarm. Links are a full mesh, so this also bounds the links of a node."""

MAX_STAGES = 256
"""Stages of one plan; no more than members."""

MAX_LAYERS = 1024
"""Layers of one model; the largest known have about 130."""

MAX_VOCABULARY = 1_048_576
"""Token ids lie in [0, this); the largest known vocabularies have 262,144."""

MAX_CONTEXT_TOKENS = 1_048_576
"""Positions lie in [0, this)."""

MAX_SESSIONS_PER_STAGE = 256
"""Open sessions of a stage, over all coordinators. Each costs a block table and a history of ids."""

MAX_QUEUED_SEGMENTS = 512
"""Segments that wait at a stage. Beyond it the sender's link is not read (back-pressure)."""

MAX_BLOB_BYTES = 64 * 1024**3
"""One blob: a layer, the embedding or the head."""

MAX_MANIFEST_BYTES = 16 * 1024 * 1024
"""The manifest: about 200 bytes a tensor."""

MAX_PROMPT_CHARS = 1_000_000
"""A prompt given to the API, all turns together: about 250,000 tokens."""

MAX_API_BODY_BYTES = 8 * 1024 * 1024
"""A request to the HTTP API."""

MAX_API_ANSWERS = 32
"""Chat completions that one node's HTTP API runs at once; more get 429. Each is one session of the ring."""

MAX_API_MESSAGES = 4096
"""Turns in one request to the HTTP API."""

MAX_STOP_STRINGS = 16
"""Stop strings of one request; each is looked for in every piece of text."""

MAX_STOP_CHARS = 256
"""One stop string: that much text is held back while it may still become one."""

API_READ_TIMEOUT_S = 30.0
"""A request whose body takes longer is refused."""

API_WRITE_TIMEOUT_S = 60.0
"""A client that reads nothing for this long while its answer waits loses it."""

HANDSHAKE_TIMEOUT_S = 10.0
"""From the accepted socket to the last handshake message."""

HEARTBEAT_INTERVAL_S = 1.0
"""Between two pings on a link."""

SUSPECT_AFTER_S = 4.0
"""Silence after which a member is suspect: four missed heartbeats."""

DEAD_AFTER_S = 10.0
"""Silence after which a suspect member is dead and the ring is planned anew."""

LINK_SEND_TIMEOUT_S = 20.0
"""A frame that cannot be handed to the socket for this long closes the link."""

PREPARE_TIMEOUT_S = 1800.0
"""A node that fetches and compiles its shard, without reporting any progress, for this long is left out."""

DRAIN_TIMEOUT_S = 20.0
"""A leaving node waits this long for the ring to be planned without it."""

MAX_DISCOVERED_PEERS = 512
"""mDNS answers that are remembered; more are ignored. Worst memory: about 1 KB each."""

MAX_CERTIFICATE_BYTES = 4096
"""A peer's certificate, DER. Ours have about 300."""

NONCE_BYTES = 32
"""Each side's challenge in the handshake, exactly."""

MAX_HALF_OPEN_LINKS = 32
"""Links whose dialler has not proved itself yet; more are refused. Worst memory: one frame of MAX_TENSOR_BYTES each."""

MAX_HALF_OPEN_LINKS_PER_ADDRESS = 8
"""Of these, from one address, so that one PC cannot keep the others out."""

MAX_REASON_CHARS = 512
"""Of a peer's reason, what is shown."""
