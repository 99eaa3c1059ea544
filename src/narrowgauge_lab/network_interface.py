"""Which of this machine's network interfaces leads to another machine."""

from __future__ import annotations

import fcntl
import socket
import struct
from typing import Optional

__all__ = ["interface_towards"]

#: From Linux's sockios.h: the address of an interface, by its name.
_SIOCGIFADDR = 0x8915
#: Nothing is sent: connecting a datagram socket only asks the routing table.
_ANY_PORT = 9


def interface_towards(address: str) -> Optional[str]:
    """The interface that the kernel would send from, such as eth0; None where it is not IPv4, or
    has no interface of its own: then each library looks for itself."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((address, _ANY_PORT))
            mine = probe.getsockname()[0]
            for _, name in socket.if_nameindex():
                if _address_of(probe, name) == mine:
                    return name
    except OSError:
        return None
    return None


def _address_of(probe: socket.socket, name: str) -> Optional[str]:
    try:
        asked = struct.pack("256s", name.encode("utf-8")[:15])
        said = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, asked)
    except OSError:
        return None  # it has no IPv4 address
    return socket.inet_ntoa(said[20:24])
