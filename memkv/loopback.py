"""Which names and addresses stand for this machine alone."""

from __future__ import annotations

import ipaddress


def is_loopback(host: str) -> bool:
    """Whether `host`, a name or an address without its port, is this machine's loopback."""
    name = host.strip("[]").partition("%")[0].rstrip(".").lower()
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name == "localhost" or name.endswith(".localhost")
