"""Wait until a Ray cluster has so many nodes: `python -m bench.launches.ready HOST:PORT NODES`. What a careful script would do."""

from __future__ import annotations

import sys
import time

from ray._raylet import GcsClient

WITHIN_S = 300.0
EVERY_S = 0.1


def main(address: str, wanted: int) -> int:
    deadline = time.monotonic() + WITHIN_S
    client = None
    while time.monotonic() < deadline:
        try:
            client = client or GcsClient(address=address)
            if sum(bool(node.state == 0) for node in client.get_all_node_info(timeout=2).values()) >= wanted:
                return 0
        except Exception as error:
            print(f"not yet: {error}", file=sys.stderr)
            client = None
        time.sleep(EVERY_S)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
