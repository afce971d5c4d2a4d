"""The outside is reachable from one PC of three: all get the model, and it comes in once."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.netns.lan import Lan, lan, needs_netns
from tests.netns.pc import POLL_S, READY_S, ROOT, Pc, ended_at_last
from tests.netns.test_three_nodes import EQUAL_PC, SHORT, fetched, spread_over

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(900)]

NAME, PORT = "org/smol", 8080
QUESTION = "Write a short story about a lighthouse keeper and her cat."


@contextlib.contextmanager
def outside(net: Lan, log: Path, files: Sequence[Path], *, closed_to: Sequence[int]) -> Iterator[None]:
    """The hub on the last PC of the LAN, out of reach of the PCs `closed_to`."""
    *_, host = net.nodes
    for index in closed_to:
        net.nodes[index].ip("route", "add", "unreachable", f"{host.address}/32")
    words = ["-m", "tests.model.fake_hub", host.address, PORT, log, NAME, *files]
    process = host.run([sys.executable, *words], env={"PYTHONPATH": str(ROOT)})
    try:
        deadline = time.monotonic() + READY_S
        while not log.exists():
            assert process.poll() is None, process.communicate()[0].decode()
            assert time.monotonic() < deadline, "the hub does not start"
            time.sleep(POLL_S)
        yield
    finally:
        process.kill()
        process.communicate()


def bytes_sent(log: Path, file: str, size: int) -> list[int]:
    """The requests for a file, each in bytes."""
    spans = re.findall(rf"/{re.escape(file)} (?:bytes=(\d+)-(\d*))?$", log.read_text("utf-8"), re.MULTILINE)
    return [min(size, int(end or size - 1) + 1) - int(start or 0) for start, end in spans]


@needs_netns
def test_one_reaches_the_hub_and_three_serve(
    tmp_path: Path, smollm2_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The PC that names the model is not the one that reaches it."""
    log = tmp_path / "hub.log"
    with lan(4, subnet="10.78.0") as net, outside(net, log, [smollm2_gguf], closed_to=[1, 2]):
        for name in [name for name in os.environ if name.lower().endswith("_proxy") or name.startswith("HF_")]:
            monkeypatch.delenv(name)
        monkeypatch.setenv("HF_ENDPOINT", f"http://{net.nodes[3].address}:{PORT}")
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        one, two, three = pcs = [
            Pc(space, tmp_path / f"pc-{number}", f"PC-{number}", "--open", script=EQUAL_PC)
            for number, space in enumerate(net.nodes[:3], start=1)
        ]
        with ended_at_last(pcs):
            two.start("--model", NAME)
            one.start()
            three.start()
            spread_over(*pcs)
            assert one.ask(QUESTION, SHORT) == three.ask(QUESTION, SHORT)
            for pc in (two, three):
                assert fetched(pc.until(lambda found: bool(found["fetched"]), "what it fetched"))
    size = smollm2_gguf.stat().st_size
    sent = bytes_sent(log, smollm2_gguf.name, size)
    assert [span for span in sent if span > size // 2] == [size], "the model came in more than once, or not at all"
    assert sum(sent) < 1.2 * size
