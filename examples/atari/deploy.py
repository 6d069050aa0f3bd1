"""Serve the trained model with the same actor; games connect to the port as in training.

    python deploy.py --port 8000

Without a buffer the actor records nothing and chooses the most probable action.
"""

from __future__ import annotations

import argparse

from actor import AtariActor

import ludus


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--project", default="./atari")
    parser.add_argument("--trial", default="ppo-v0")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--workers", type=int, default=1)
    options = parser.parse_args()

    ludus.init(project=options.project, trial=options.trial)
    model = ludus.RemoteModel(name="atari_model")
    ludus.RemoteActor(port=options.port, num_workers=options.workers).serve(AtariActor, model="atari_model")
    print(f"serving version {model.version} on port {options.port}", flush=True)
    ludus.run_until_asked_to_stop()


if __name__ == "__main__":
    main()
