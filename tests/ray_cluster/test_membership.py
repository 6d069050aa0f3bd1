"""Parsing of the output of the membership process. (For its query: tests/long/test_roles.py.)"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ludus.errors import Unreachable
from ludus.ray_cluster.membership import NodeRecord, parse_output, query_nodes

HEAD = NodeRecord("10.0.0.2", "node2", 0, True, 100.0)
LOST = NodeRecord("10.0.0.3", "node3", 6, False, 101.0, 200.0, "health check failed")


def test_the_last_line_lists_the_nodes_oldest_first() -> None:
    output = "a warning of Ray\n" + json.dumps({"residents": [vars(LOST), vars(HEAD)]}) + "\n"
    assert parse_output(output, "node2:1") == [HEAD, LOST]
    assert (HEAD.alive, LOST.alive) == (True, False)


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("", "at node2:1 does not answer."),
        ('{"refused": "token"}\n', "at node2:1 does not answer: token"),
        ("{broken", "node2:1"),
    ],
)
def test_anything_else_is_no_answer(output: str, message: str) -> None:
    with pytest.raises(Unreachable, match=message):
        parse_output(output, "node2:1")


def test_a_process_that_takes_too_long_is_not_waited_for(tmp_path: Path) -> None:
    with pytest.raises(Unreachable, match=r"did not answer within 0\.01 s"):
        query_nodes("127.0.0.1:1", tmp_path / "token", within_s=0.01)
