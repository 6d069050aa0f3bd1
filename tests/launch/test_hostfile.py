"""Hostfiles: valid lines and YAML, and the errors of invalid ones."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ludus.errors import ConfigError
from ludus.io.yaml_documents import dump_yaml
from ludus.launch.hostfile import MAX_NODES, HostEntry, is_single_host, load_hostfile, parse_hostfile
from ludus.launch.ssh.backend import SshNode


def one(line: str) -> SshNode:
    (node,) = parse_hostfile(line).nodes
    return node


@pytest.mark.parametrize(
    ("line", "node"),
    [
        ("127.0.0.1 root 36000 1", SshNode("127.0.0.1", "root", 36000, 1)),
        ("node2 root 36000 1", SshNode("node2", "root", 36000, 1)),
        ("10.0.0.2", SshNode("10.0.0.2", "", 22, 1)),
        ("10.0.0.2 games", SshNode("10.0.0.2", "games", 22, 1)),
        ("10.0.0.2 games 2222", SshNode("10.0.0.2", "games", 2222, 1)),
        ("10.0.0.2\tgames\t22\t8", SshNode("10.0.0.2", "games", 22, 8)),
        ("   gpu-01.cluster.example   a.b-c   22   4   # the big one", SshNode("gpu-01.cluster.example", "a.b-c", 22, 4)),
        ("fe80::1 root 22 1", SshNode("fe80::1", "root")),
        ("[2001:DB8::0:1] root 22 1", SshNode("2001:db8::1", "root")),
        ("my_host", SshNode("my_host")),
        ("host#1", None),
    ],
)
def test_a_line_is_parsed_into_a_machine(line: str, node: SshNode | None) -> None:
    if node is None:
        with pytest.raises(ConfigError, match="neither an address nor the name"):
            one(line)
    else:
        assert one(line) == node


def test_comments_bom_and_crlf_are_accepted(tmp_path: Path) -> None:
    path = tmp_path / "learner.iplist"
    path.write_bytes(b"\xef\xbb\xbf# learners\r\n\r\n10.0.0.2 root 36000 1\r\n  \r\n10.0.0.3 root 36000 2 # two\r\n")
    found = load_hostfile(path)
    assert found.nodes == (SshNode("10.0.0.2", "root", 36000, 1), SshNode("10.0.0.3", "root", 36000, 2))
    assert [entry.line for entry in found.entries] == [3, 5]
    assert {entry.role for entry in found.entries} == {"learner"}
    assert found.head.host == "10.0.0.2"
    assert found.actors == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "names no machine. A line is `address user port slots`"),
        ("# nothing\n\n", "names no machine"),
        ("a\nb root 22 1 x", "line 2: 5 words, 'b root 22 1 x'"),
        ("a root ssh", "line 1: the port is 'ssh', which is not a number"),
        ("a root -22", "the port is '-22'"),
        ("a root ２２", "the port is"),
        ("a root 0", "line 1: port is 0. Use a number from 1 to 65535"),
        ("a root 65536", "port is 65536"),
        ("a root 22 0", "slots is 0. Use a number from 1 to 4096"),
        ("a root 22 99999999999999999999", "the slots is '9999"),
        ("-oProxyCommand=x root 22 1", "line 1: the host '-oProxyCommand=x' is neither an address nor the name"),
        ("a -root 22 1", "line 1: the user is '-root'"),
        ("a;reboot", "neither an address"),
        ("10.0.0.256", "line 1: the host '10.0.0.256' is not a valid address"),
        ("10.0.0", "is not a valid address"),
        ("0.0.0.0 root", "line 1: the host 0.0.0.0 is not the address of one machine"),
        ("a\n255.255.255.255", "line 2: the host 255.255.255.255 is not the address of one machine"),
        ("224.0.0.1", "not the address of one machine"),
        ("::", "not the address of one machine"),
        ("ff02::1", "not the address of one machine"),
        ("fe80::g", "is not a valid address"),
        ("a:22", "is not a valid address"),
        ("# 1\nlearner_ip root 36000 1", "line 2: learner_ip is the placeholder of the example"),
        ("a\n\nb\nA root", "line 4: A is already in line 1"),
        ("[node1]", "neither an address"),
        ("\n".join(f"h{n}" for n in range(MAX_NODES + 1)), f"names {MAX_NODES + 1} machines"),
        ("a" * 300, "neither an address"),
        ("\0", "neither an address"),
    ],
)
def test_an_invalid_line_is_an_error_with_its_number(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_hostfile(text, "learner.iplist")
    assert message in str(caught.value)
    assert str(caught.value).startswith("learner.iplist")


def test_one_address_may_be_listed_with_several_ports() -> None:
    assert [node.port for node in parse_hostfile("10.0.0.2 root 36000\n10.0.0.2 root 36001").nodes] == [36000, 36001]


# -- YAML -----------------------------------------------------------------------------------------------------------------

YAML = """
# machines
nodes:
  - {host: node2, user: root, port: 36000, slots: 2}
  - host: node1
    role: actor
    actors: 6
    address: 10.0.0.1
    python: /opt/ludus/bin/python
  - host: node3
    role: actor
    slots: 4
  - host: node4
    actors: 3
"""


@pytest.mark.parametrize("source", ["machines.yaml", "machines.yml", "learner.iplist"])
def test_yaml_has_roles_and_actors_too(source: str) -> None:
    found = parse_hostfile(YAML, source)
    assert found.entries == (
        HostEntry(SshNode("node2", "root", 36000, 2), "learner", 0, 4),
        HostEntry(SshNode("node1", address="10.0.0.1", python="/opt/ludus/bin/python"), "actor", 6, 5),
        HostEntry(SshNode("node3", slots=4), "actor", 4, 10),
        HostEntry(SshNode("node4"), "actor", 3, 13),
    )
    assert found.actors == 13
    assert found.nodes[1].node_address == "10.0.0.1"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nodes:", "line 1: there is no list `nodes`"),
        ("nodes: {}", "there is no list `nodes`"),
        ("nodes: []", "names no machine"),
        ("- a", "there is no list `nodes`"),
        ("nodes: [a]", "line 1: 'a' is not of the form {host: …}"),
        ("nodes:\n  - host: a\n  - hots: b", "line 3: unknown key 'hots'. Did you mean 'host'"),
        ("nodes:\n  - {user: a}", "line 2: the host is missing"),
        ("nodes:\n  - {host: a, port: '22'}", "line 2: port is 22. Use a number"),
        ("nodes:\n  - {host: a, slots: true}", "line 2: slots is True"),
        ("nodes:\n  - {host: a, user: 7}", "line 2: the user is '7'"),
        ("nodes:\n  - {host: 7}", "line 2: the host '7' is neither"),
        ("nodes:\n  - {host: a, role: boss}", "line 2: the role is 'boss'. Use one of: learner, actor"),
        ("nodes:\n  - {host: a, role: actor}", "line 2: the first machine is the head"),
        ("nodes:\n  - {host: a}\n  - {host: b, actors: -1}", "line 3: actors is -1"),
        ("nodes:\n  - {host: a, python: -c}", "line 2: the python is '-c'"),
        ("nodes:\n  - {host: a, address: '-x'}", "line 2: the address '-x'"),
        ("nodes: [{host: a}]\nhead: a", "unknown key 'head'"),
        ("nodes:\n  - {host: a, host: b}", "line 2: the key 'host' occurs twice"),
        ("nodes:\n  - {host: a\n", "is not valid YAML"),
    ],
)
def test_an_invalid_yaml_entry_is_an_error_with_its_line(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_hostfile(text, "machines.yaml")
    assert message in str(caught.value)
    assert str(caught.value).startswith("machines.yaml")


# -- files ----------------------------------------------------------------------------------------------------------------


def test_an_unreadable_file_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing cannot be read: No such file or directory\. A line is"):
        load_hostfile(tmp_path / "missing")
    with pytest.raises(ConfigError, match="Is a directory"):
        load_hostfile(tmp_path)
    large = tmp_path / "large"
    large.write_bytes(b"#" * 10_000_000)
    with pytest.raises(ConfigError, match="is larger than"):
        load_hostfile(large)
    picture = tmp_path / "picture"
    picture.write_bytes(b"\x89PNG\r\n\xff")
    with pytest.raises(ConfigError, match="is not text"):
        load_hostfile(picture)


hosts = st.one_of(
    st.ip_addresses(v=4).filter(is_single_host).map(str),
    st.ip_addresses(v=6).filter(is_single_host).map(str),
    st.from_regex(r"[a-z][a-z0-9]{0,8}(\.[a-z0-9]{1,8})?", fullmatch=True),
)
machines = st.builds(
    SshNode,
    host=hosts.filter(lambda host: host not in ("ip",)),
    user=st.from_regex(r"[a-z][a-z0-9_-]{0,10}", fullmatch=True),
    port=st.integers(1, 65535),
    slots=st.integers(1, 4096),
)


@given(
    nodes=st.lists(machines, min_size=1, max_size=8, unique_by=lambda node: node.host), end=st.sampled_from(["\n", "\r\n", "\r"])
)
def test_nodes_survive_a_round_trip_as_lines_and_as_yaml(nodes: list[SshNode], end: str) -> None:
    lines = end.join(f"{node.host} {node.user} {node.port} {node.slots}" for node in nodes)
    keys = ("host", "user", "port", "slots")
    document = dump_yaml({"nodes": [{key: getattr(node, key) for key in keys} for node in nodes]})
    assert parse_hostfile(lines).nodes == parse_hostfile(document, "x.yaml").nodes == tuple(nodes)


@given(st.text(max_size=200), st.sampled_from(["list", "list.yaml"]))
def test_any_text_is_a_hostfile_or_a_config_error(text: str, source: str) -> None:
    try:
        found = parse_hostfile(text, source)
    except ConfigError as error:
        message = error.message
    else:
        message = source
        assert all(node.host and not node.host.startswith("-") for node in found.nodes)
    assert source in message
