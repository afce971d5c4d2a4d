"""The JSON of /status: what scripts rely on."""

from __future__ import annotations

import json
from typing import Any

from swarm.api.status import retry_after_s, status
from tests.ui.snapshots import CASES, GB, fetching, member, node_id, ring, snapshot, waiting


def plain(picture: Any) -> dict[str, Any]:
    decoded: dict[str, Any] = json.loads(json.dumps(status(picture), allow_nan=False))
    return decoded


def test_the_promised_fields() -> None:
    body = plain(CASES["three"])
    assert body["ready"] is True
    assert (body["swarm"], body["model"], body["epoch"]) == ("office", "Qwen2.5-Coder-1.5B-Instruct", 3)
    assert body["node"] == {"id": node_id(1), "name": "PC-1"}
    assert body["api"] == "http://127.0.0.1:7480"
    first, dead = body["members"][0], body["members"][-1]
    assert (first["id"], first["name"], first["state"], first["memory_bytes"]) == (node_id(1), "PC-1", "alive", 8 * GB)
    assert dead["state"] == "dead"
    assert [(s["node"], s["name"], s["start"], s["end"], s["device"]) for s in body["stages"]] == [
        (node_id(1), "PC-1", 0, 9, "CPU"),
        (node_id(2), "PC-2", 9, 19, "CPU"),
        (node_id(3), "PC-3", 19, 28, "CPU"),
    ]
    assert body["forming"] is None
    assert body["notices"] == list(CASES["three"].notices)


def test_speculation_is_counted() -> None:
    found = plain(CASES["three"])["speculation"]
    assert found["draft"] == "Qwen2.5-Coder-0.5B-Instruct"
    assert (found["drafted"], found["accepted"], found["rejected"]) == (420, 319, 55)
    assert found["ngram"] == {"drafted": 120, "accepted": 91}
    alone = plain(CASES["alone"])["speculation"]
    assert (alone["draft"], alone["no_draft"]) == ("", "no draft model is known for SmolLM2-135M-Instruct")


def test_stages_say_which_ring_they_are_in() -> None:
    body = plain(CASES["rings"])
    assert [stage["ring"] for stage in body["stages"]] == [0, 0, 0, 1, 2]
    assert len(body["ring_token_ms"]) == 3


def test_it_never_carries_the_pairing_code() -> None:
    assert "4821-7730" not in json.dumps(status(snapshot(code="4821-7730")))


def test_while_not_ready_it_says_why_and_how_far() -> None:
    body = plain(CASES["forming"])
    assert body["ready"] is False
    assert body["reason"] == "the ring is being formed: 1 of 3 stages prepared"
    assert body["epoch"] == 0
    assert body["forming"]["epoch"] == 1
    assert len(body["forming"]["stages"]) == 3
    fetch = body["progress"][1]
    assert (fetch["name"], fetch["phase"], fetch["done"], fetch["total"]) == ("PC-2", "fetch", 26_000_000, 61_000_000)
    assert round(fetch["seconds_left"], 1) == 2.9
    assert body["progress"][2]["seconds_left"] is None


def test_missing_memory_is_a_number() -> None:
    assert plain(CASES["missing"])["missing_bytes"] == 26_200_000_000
    assert plain(CASES["three"])["missing_bytes"] == 0


def test_every_made_up_swarm_is_json() -> None:
    for picture in CASES.values():
        plain(picture)


def test_retry_after_follows_the_slowest_progress_within_bounds() -> None:
    assert retry_after_s(CASES["forming"]) == 14
    assert retry_after_s(waiting(members=(fetching(1, rate=1.0),))) == 60
    assert retry_after_s(waiting(members=(fetching(1, done=61_000_000),))) == 1
    assert retry_after_s(waiting(members=(member(1),), forming=ring(1, 4))) == 5
