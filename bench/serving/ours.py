"""Ludus as a server: `python -m bench.serving.ours --workload echo|mlp|counter --port P [--workers N]`."""

from __future__ import annotations

import argparse
import tempfile

import numpy as np

import ludus
from bench.serving import actors
from bench.serving.network import SIZES


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workload", choices=["echo", "mlp", "counter"], required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--workers", type=int, default=1)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as project:
        ludus.init(project=project, trial="bench")
        door = ludus.RemoteActor(port=args.port, num_workers=args.workers)
        if args.workload == "mlp":
            from bench.serving.module import Net  # an echo needs no torch

            ludus.RemoteModel(name="mlp", model=Net(), forward_args=(np.zeros(SIZES[0], np.float32),), max_batch_size=512)
            door.serve(actors.Mlp, model="mlp")
        else:
            door.serve(actors.Echo if args.workload == "echo" else actors.Counter)
        ludus.run_until_asked_to_stop()


if __name__ == "__main__":
    main()
