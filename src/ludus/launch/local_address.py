"""Which machine of a list this one is, and under which address the others reach it."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import threading
from collections.abc import Mapping
from dataclasses import dataclass

from ludus.errors import UsageError
from ludus.io.addresses import interface_addresses, local_address
from ludus.launch.hostfile import NodeList, is_of_one

CARD = "NET_CARD_NAME"
RESOLVE_S = 10.0

_ELSEWHERE = "192.0.2.1"  # of no machine (RFC 5737): which way leads out, and nothing is sent there


@dataclass(frozen=True)
class Here:
    """`node`: this machine's number in the list; None: it is not in it. `address`: as the others reach it. `head`: the head's."""

    node: int | None
    address: str
    head: str


class Network:
    """This machine's, as it answers questions; tests have one with other answers."""

    def resolve(self, host: str) -> tuple[str, ...]:
        """Its IPv4 addresses, else its IPv6 ones; none when there is no such name, or nobody says so in time."""
        found: list[str] = []

        def ask() -> None:
            with contextlib.suppress(OSError, UnicodeError):
                answers = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
                answers.sort(key=lambda answer: answer[0] != socket.AF_INET)
                found.extend(dict.fromkeys(str(answer[4][0]) for answer in answers))

        asking = threading.Thread(target=ask, name="resolve", daemon=True)  # a resolver has no deadline of its own
        asking.start()
        asking.join(RESOLVE_S)
        four = [address for address in found if ":" not in address]
        return tuple(four or found)

    def is_ours(self, address: str) -> bool:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with contextlib.suppress(OSError), socket.socket(family) as tried:
            tried.bind((address, 0))
            return True
        return False

    def interfaces(self) -> dict[str, str]:
        """Name → IPv4 address, or nothing for one that has none."""
        return interface_addresses()

    def towards(self, address: str) -> str:
        """The address that this machine would use to speak to that one; empty when there is no way there."""
        with contextlib.suppress(OSError):
            return local_address(address)
        return ""


def locate(
    listed: NodeList, environ: Mapping[str, str], node: int | None = None, *, network: Network | None = None, must: bool = True
) -> Here:
    """`node`: what the user says. `must`: a machine that is not in the list is an error. Raises UsageError."""
    network = network or Network()
    card = _of_card(environ.get(CARD, "").strip(), network)
    if node is not None and not 0 <= node < len(listed.nodes):
        raise UsageError(f"--node {node}: {listed.source} has {len(listed.nodes)} machines, counted from 0.", _numbered(listed))
    addresses = [_first(network, each.reached) for each in listed.nodes] if node is None else []
    if node is None:
        node = _recognised(listed, addresses, card, network, must)
    head = addresses[0] if addresses else _first(network, listed.head.reached)
    if not head:
        raise UsageError(
            f"{listed.source}, line {listed.entries[0].line}: nobody knows the address of {listed.head.reached}.",
            "Write the address itself, or have the name resolved (DNS, /etc/hosts).",
        )
    if node is None:
        address = card or network.towards(head)
        if not address:
            raise UsageError(f"There is no way from this machine to the head, {head}.", f"Check the network, or set {CARD}.")
        return Here(None, address, head)
    address = _own(listed, node, card, network)
    return Here(node, address, address if node == 0 else head)


def _recognised(listed: NodeList, addresses: list[str], card: str, network: Network, must: bool) -> int | None:
    ours = [index for index, address in enumerate(addresses) if address and (address == card or network.is_ours(address))]
    if len(ours) > 1:
        exact = [index for index in ours if addresses[index] == card]
        if len(exact) != 1:
            raise UsageError(
                f"Machines {', '.join(map(str, ours))} of {listed.source} are all this one.",
                f"Say which one is meant: --node N, or {CARD}. {_numbered(listed)}",
            )
        ours = exact
    if ours or not must:
        return ours[0] if ours else None
    have = ", ".join(address for address in network.interfaces().values() if address)
    raise UsageError(
        f"This machine is not in {listed.source}; its addresses are {have or 'unknown'}.",
        f"Add a line for it, or say which one it is: --node N. {_numbered(listed)}",
    )


def _own(listed: NodeList, node: int, card: str, network: Network) -> str:
    """Under which address the others know this machine."""
    named = listed.nodes[node].reached
    address = _first(network, named)
    if card and not address.startswith("127."):  # where the list says that there is no other machine, no card leads to one
        if _is_address(named) and named != card:
            raise UsageError(
                f"{CARD} has the address {card}, and {listed.source} names this machine by {named}.",
                f"Write {card} into the list, on all machines, or unset {CARD}.",
            )
        return card
    if card and not _is_address(named):
        return card
    if not _is_address(named) and (not address or address.startswith("127.")) and named != "localhost":
        # Debian's installer has the machine's own name stand for 127.0.1.1, where nobody else finds it.
        return network.towards(_ELSEWHERE) or address or named
    return address


def _of_card(name: str, network: Network) -> str:
    if not name:
        return ""
    known = network.interfaces()
    if not known.get(name):
        have = ", ".join(f"{interface} ({address})" for interface, address in known.items() if address)
        why = "has no IPv4 address" if name in known else "is none of this machine's interfaces"
        raise UsageError(f"{CARD}={name} {why}.", f"There are: {have or 'none with an address'}.")
    return known[name]


def _first(network: Network, host: str) -> str:
    if _is_address(host):
        return host
    # Lists of names that shall not be reached have 0.0.0.0 for them, which every machine takes for its own.
    return next((address for address in network.resolve(host) if is_of_one(ipaddress.ip_address(address))), "")


def _is_address(host: str) -> bool:
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(host)
        return True
    return False


def _numbered(listed: NodeList) -> str:
    shown = [f"{index}: {each.host}" for index, each in enumerate(listed.nodes[:10])]
    return f"The list: {', '.join(shown)}{', …' if len(listed.nodes) > 10 else ''}."
