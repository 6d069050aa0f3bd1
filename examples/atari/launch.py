"""Train with model, buffer, actors, learner and games in separate processes on this machine.

    python launch.py --game ALE/Pong-v5 --games 4

Weights, metrics (TensorBoard) and logs are in ./atari/ppo-v0. The next start continues from there.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import numpy as np
from actor import AtariActor
from model import FRAMES, SIDE, AtariModel
from trainer import train_atari

import ludus


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--project", default="./atari")
    parser.add_argument("--trial", default="ppo-v0")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--game", default="ALE/Pong-v5")
    parser.add_argument("--games", type=int, default=4, help="game processes")
    parser.add_argument("--learners", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--steps", type=int, default=100_000, help="updates")
    options = parser.parse_args()

    ludus.init(project=options.project, trial=options.trial)
    ludus.RemoteModel(
        name="atari_model",
        model=AtariModel(),
        forward_args=(np.random.randn(SIDE, SIDE, FRAMES).astype(np.float32),),
        checkpoint_interval=100,
        keep=10,
    )
    ludus.RemoteBuffer(name="atari_buffer", size=4096)
    ludus.RemoteActor(port=options.port).serve(AtariActor, model="atari_model", buffer="atari_buffer")
    trainer = ludus.RemoteTrainer(use_gpu=False, num_workers=options.learners)
    trainer.train(
        train=train_atari, model="atari_model", buffer="atari_buffer", batch_size=options.batch_size,
        weights_publish_interval=1, num_steps=options.steps,
    )  # fmt: skip
    command = [sys.executable, str(Path(__file__).with_name("gamecore.py")), "--port", str(options.port), "--game", options.game]
    games = [subprocess.Popen([*command, "--max-steps", "2000"]) for _ in range(options.games)]  # noqa: S603
    try:
        while not trainer.wait(timeout_s=1):
            pass
        print(f"trained to version {ludus.RemoteModel(name='atari_model').version}")
    except KeyboardInterrupt:
        print("stopped; the trained weights are kept")
    finally:
        for game in games:
            game.terminate()
        for game in games:
            game.wait()


if __name__ == "__main__":
    main()
