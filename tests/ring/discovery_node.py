"""A process that only discovers: ``python discovery_node.py NODE PORT RESCAN_S [ADDRESS/PREFIX…]``.

Prints one JSON object a line, when it hears itself and for every event; ends when its standard input does. Without
addresses it chooses the interfaces as a node does. Run by the tests of discovery.
"""

from __future__ import annotations

import json
import sys
from ipaddress import IPv4Interface

import anyio
import anyio.to_thread

from swarm.protocol.ids import NodeId
from swarm.ring.discovery import Announcement, Discovery, DiscoveryEvent, Found, Lost
from swarm.ring.interfaces import choose, chosen_addresses, gather


def show(event: DiscoveryEvent) -> None:
    if isinstance(event, Found):
        line = {"found": event.peer.node, "name": event.peer.name, "addresses": event.peer.addresses}
    elif isinstance(event, Lost):
        line = {"lost": event.node}
    else:
        line = {"trouble": event.text}
    print(json.dumps(line), flush=True)


async def main(node: str, port: str, rescan_s: str, *addresses: str) -> None:
    fixed = [IPv4Interface(address) for address in addresses]
    discovery = Discovery(
        Announcement(NodeId(node), f"node {node[:4]}", "test", "abcd", int(port)),
        lambda: fixed or chosen_addresses(choose(gather())),
        show,
        rescan_s=float(rescan_s),
    )
    async with anyio.create_task_group() as group:
        group.start_soon(discovery.run)
        while not discovery.heard_ourselves:  # noqa: ASYNC110 - nothing tells of it
            await anyio.sleep(0.05)
        print(json.dumps({"ready": [str(one) for one in discovery.addresses]}), flush=True)
        await anyio.to_thread.run_sync(sys.stdin.read, abandon_on_cancel=True)
        group.cancel_scope.cancel()


if __name__ == "__main__":
    anyio.run(main, *sys.argv[1:])
