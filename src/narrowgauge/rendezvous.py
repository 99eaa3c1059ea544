"""Where the processes that train one model on several machines meet: torchrun's own variables.

Each machine runs one lab, which forks the machine's processes; so to each other the machines are
what torchrun calls `--nnodes N --nproc-per-node 1`. Pure.
"""

from __future__ import annotations

import re
import zlib
from dataclasses import dataclass

from narrowgauge.errors import BadValueError

__all__ = ["DEFAULT_PORT", "Rendezvous", "parse_node", "port_of"]

#: torchrun's.
DEFAULT_PORT = 29400
#: Below the ports that Linux gives to outgoing connections (from 32768), above registered ones.
_FIRST_PORT, _PORTS = 20000, 12000
_NODE = re.compile(r"^(\d{1,5})/(\d{1,5})@(\[[0-9a-fA-F:]+\]|[^:@/\s]+)(?::(\d{1,5}))?$")


@dataclass(frozen=True)
class Rendezvous:
    """Machine `node` (from 0) of `nodes`, and where machine 0 waits for the others."""

    node: int
    nodes: int
    address: str
    port: int

    @property
    def records(self) -> bool:
        """Whether this machine's run is the one that is recorded."""
        return self.node == 0

    def environment(self) -> dict[str, str]:
        """What the lab is given; nothing where it is alone."""
        if self.nodes == 1:
            return {}
        return {
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(self.port),
            "WORLD_SIZE": str(self.nodes),
            "RANK": str(self.node),
            "GROUP_RANK": str(self.node),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
        }


def parse_node(text: str) -> Rendezvous:
    """`0/2@192.168.1.5[:29400]`: machine 0 of 2, which meet there. Raises BadValueError."""
    match = _NODE.match(text.strip())
    port = int(match.group(4) or DEFAULT_PORT) if match else 0
    if match is None or not 0 < port < 65536:
        raise BadValueError(
            f"'--node {text}' is not RANK/NODES@ADDRESS[:PORT]",
            why="ADDRESS is machine 0's, as the others reach it",
            next_step="on two machines: --node 0/2@192.168.1.5 on that one, --node 1/2@192.168.1.5"
            " on the other",
        )
    node, nodes = int(match.group(1)), int(match.group(2))
    if nodes < 2:
        raise BadValueError(
            f"'--node {text}': {nodes} machines have nobody to meet",
            next_step="leave --node out on one machine; on two: 0/2@ADDRESS and 1/2@ADDRESS",
        )
    if node >= nodes:
        raise BadValueError(f"'--node {text}': {nodes} machines are 0 to {nodes - 1}")
    return Rendezvous(node, nodes, match.group(3).strip("[]"), port)


def port_of(job: str) -> int:
    """A port for a scheduler's job: the same on all its nodes, another for most other jobs."""
    return _FIRST_PORT + zlib.crc32(job.encode("utf-8")) % _PORTS
