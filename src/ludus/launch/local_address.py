"""Finds this machine in a hostfile, and its address for the other machines."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import threading
from collections.abc import Mapping
from dataclasses import dataclass

from ludus.errors import UsageError
from ludus.io.addresses import interface_addresses, local_address
from ludus.launch.hostfile import Hostfile, is_single_host

INTERFACE = "NET_CARD_NAME"
RESOLVE_S = 10.0

_TEST_ADDRESS = "192.0.2.1"  # unassigned (RFC 5737): finds the default route without sending anything


@dataclass(frozen=True)
class LocalAddress:
    """`node`: number of this machine in the hostfile; None if it is not listed. `address`: for the others. `head`: the head's address."""

    node: int | None
    address: str
    head: str


class HostNetwork:
    """Network configuration of this machine. Tests substitute it."""

    def resolve(self, host: str) -> tuple[str, ...]:
        """Return the IPv4 addresses of a name, else the IPv6 ones; none if it is unknown or the resolver takes too long."""
        found: list[str] = []

        def look_up() -> None:
            with contextlib.suppress(OSError, UnicodeError):
                answers = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
                answers.sort(key=lambda answer: answer[0] != socket.AF_INET)
                found.extend(dict.fromkeys(str(answer[4][0]) for answer in answers))

        thread = threading.Thread(target=look_up, name="resolve", daemon=True)  # getaddrinfo has no time-out
        thread.start()
        thread.join(RESOLVE_S)
        four = [address for address in found if ":" not in address]
        return tuple(four or found)

    def is_local(self, address: str) -> bool:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with contextlib.suppress(OSError), socket.socket(family) as probe:
            probe.bind((address, 0))
            return True
        return False

    def interfaces(self) -> dict[str, str]:
        """Return name → IPv4 address, "" for an interface without one."""
        return interface_addresses()

    def address_towards(self, address: str) -> str:
        """Return the local address of the route to an address; "" if there is no route."""
        with contextlib.suppress(OSError):
            return local_address(address)
        return ""


def find_local_address(
    hosts: Hostfile,
    environ: Mapping[str, str],
    node: int | None = None,
    *,
    network: HostNetwork | None = None,
    required: bool = True,
) -> LocalAddress:
    """`node`: number given by the user. `required`: fail if this machine is not listed. Raises UsageError."""
    network = network or HostNetwork()
    preferred = _interface_address(environ.get(INTERFACE, "").strip(), network)
    if node is not None and not 0 <= node < len(hosts.nodes):
        raise UsageError(f"--node {node}: {hosts.source} has {len(hosts.nodes)} machines, counted from 0.", _list_nodes(hosts))
    addresses = [_first_address(network, each.node_address) for each in hosts.nodes] if node is None else []
    if node is None:
        node = _find_node(hosts, addresses, preferred, network, required)
    head = addresses[0] if addresses else _first_address(network, hosts.head.node_address)
    if not head:
        raise UsageError(
            f"{hosts.source}, line {hosts.entries[0].line}: the name {hosts.head.node_address} cannot be resolved.",
            "Write the address, or add the name to DNS or /etc/hosts.",
        )
    if node is None:
        address = preferred or network.address_towards(head)
        if not address:
            raise UsageError(
                f"There is no route from this machine to the head, {head}.", f"Check the network, or set {INTERFACE}."
            )
        return LocalAddress(None, address, head)
    address = _own_address(hosts, node, preferred, network)
    return LocalAddress(node, address, address if node == 0 else head)


def _find_node(hosts: Hostfile, addresses: list[str], preferred: str, network: HostNetwork, required: bool) -> int | None:
    ours = [index for index, address in enumerate(addresses) if address and (address == preferred or network.is_local(address))]
    if len(ours) > 1:
        exact = [index for index in ours if addresses[index] == preferred]
        if len(exact) != 1:
            raise UsageError(
                f"Machines {', '.join(map(str, ours))} of {hosts.source} are all this one.",
                f"Choose one: --node N, or {INTERFACE}. {_list_nodes(hosts)}",
            )
        ours = exact
    if ours or not required:
        return ours[0] if ours else None
    have = ", ".join(address for address in network.interfaces().values() if address)
    raise UsageError(
        f"This machine is not in {hosts.source}; its addresses are {have or 'unknown'}.",
        f"Add a line for it, or choose one: --node N. {_list_nodes(hosts)}",
    )


def _own_address(hosts: Hostfile, node: int, preferred: str, network: HostNetwork) -> str:
    """Return the address of this machine for the others."""
    configured = hosts.nodes[node].node_address
    address = _first_address(network, configured)
    if preferred and not address.startswith("127."):  # a loopback address means that there is no other machine
        if _is_address(configured) and configured != preferred:
            raise UsageError(
                f"{INTERFACE} has the address {preferred}, and {hosts.source} names this machine by {configured}.",
                f"Write {preferred} into the list, on all machines, or unset {INTERFACE}.",
            )
        return preferred
    if preferred and not _is_address(configured):
        return preferred
    if not _is_address(configured) and (not address or address.startswith("127.")) and configured != "localhost":
        # Debian's installer maps the machine's own name to 127.0.1.1.
        return network.address_towards(_TEST_ADDRESS) or address or configured
    return address


def _interface_address(name: str, network: HostNetwork) -> str:
    if not name:
        return ""
    known = network.interfaces()
    if not known.get(name):
        have = ", ".join(f"{interface} ({address})" for interface, address in known.items() if address)
        why = "has no IPv4 address" if name in known else "is not an interface of this machine"
        raise UsageError(f"{INTERFACE}={name} {why}.", f"Interfaces: {have or 'none with an address'}.")
    return known[name]


def _first_address(network: HostNetwork, host: str) -> str:
    if _is_address(host):
        return host
    # Block lists map names to 0.0.0.0, which every machine takes for its own address.
    return next((address for address in network.resolve(host) if is_single_host(ipaddress.ip_address(address))), "")


def _is_address(host: str) -> bool:
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(host)
        return True
    return False


def _list_nodes(hosts: Hostfile) -> str:
    shown = [f"{index}: {each.host}" for index, each in enumerate(hosts.nodes[:10])]
    return f"The list: {', '.join(shown)}{', …' if len(hosts.nodes) > 10 else ''}."
