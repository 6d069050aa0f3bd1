"""Programs as users write them: no main guard, names instead of objects, classes in the script itself."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ludus.core.metrics import read_jsonl
from ludus.protocol.client import Client

MODEL = """
import asyncio, signal, threading, time
import numpy as np
import torch
from torch import nn
import ludus as bray

class AtariModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(42 * 42 * 4, 6)
    def forward(self, images):
        return self.layer(images.flatten(1))

def announce(what):
    '''Say it as soon as signals are handled.'''
    def wait():
        while signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            time.sleep(0.001)
        print(what, flush=True)
    threading.Thread(target=wait).start()
"""

THE_MODEL = """
bray.init(project="./atari-me", trial="ppo-v0")
inputs = np.random.randn(42, 42, 4).astype(np.float32)
remote_model = bray.RemoteModel(
    name="atari_model",
    model=AtariModel(),
    forward_args=(np.random.randn(42, 42, 4).astype(np.float32),),
    )
outputs = asyncio.run(remote_model.forward(inputs))
model = remote_model.get_model()
weights = bray.get_torch_model_weights(model)
remote_model.publish_weights(weights)
with torch.no_grad():
    expected = model(torch.from_numpy(inputs)[None])[0].numpy()
print("same:", np.allclose(outputs, expected, atol=1e-5), "version:", remote_model.version)
"""

THE_ACTOR = """


class AtariActor(bray.Actor):
    def __init__(self, model, buffer):
        self.remote_model = bray.RemoteModel(name=model)
        self.remote_buffer = bray.RemoteBuffer(buffer)
    async def start(self, session, body):
        return b"hello " + session.encode()
    async def tick(self, body):
        image = np.full((42, 42, 4), len(body), np.float32)
        logits = await self.remote_model.forward(image)
        self.remote_buffer.push({"image": image, "action": int(logits.argmax())})
        return str(logits.argmax()).encode()

bray.init(project="./atari-me", trial="ppo-v0")
bray.RemoteModel(name="atari_model", model=AtariModel())
remote_actor = bray.RemoteActor(port=PORT)
remote_actor.serve(Actor=AtariActor, model="atari_model", buffer="atari_buffer")
announce("serving")
bray.run_until_asked_to_stop()
print("stopped", flush=True)
"""

THE_TRAINER = """
def train_atari(model, buffer, batch_size, weights_publish_interval, num_steps):
    remote_model = bray.RemoteModel(name=model)
    learner = bray.learner()
    network = learner.wrap(AtariModel())
    buffer = bray.RemoteBuffer(buffer, batch_size=batch_size)
    for step in range(num_steps):
        batch = next(buffer)
        assert batch["observation"].shape[0] == batch_size
        loss = network(torch.randn(batch_size, 42, 42, 4)).pow(2).mean()
        loss.backward()
        learner.metric("loss", loss.item())
        if learner.rank == 0 and step % weights_publish_interval == 0:
            remote_model.publish_weights(bray.get_torch_model_weights(network))

bray.init(project="./atari-me", trial="ppo-v0")
bray.RemoteModel(name="atari_model", model=AtariModel())
bray.fake.FakeBuffer(name="atari_buffer")
remote_trainer = bray.RemoteTrainer(use_gpu=False, num_workers=2)
remote_trainer.train(train=train_atari,
    model="atari_model", buffer="atari_buffer", batch_size=8,
    weights_publish_interval=1, num_steps=100000)
announce("training")
bray.run_until_asked_to_stop()
print("stopped", flush=True)
"""


class Script:
    """A separate program in its own directory."""

    def __init__(self, directory: Path, text: str, name: str = "launch.py") -> None:
        (directory / name).write_text(text)
        self.process = subprocess.Popen(
            [sys.executable, name],
            cwd=directory,
            env=os.environ | {"LUDUS_REPORT_S": "0.2"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def ask_to_stop(self) -> str:
        self.process.send_signal(signal.SIGTERM)
        return self.rest()

    def rest(self) -> str:
        try:
            return self.process.communicate(timeout=60)[0]
        finally:
            self.process.kill()


def test_the_model_snippet_runs(tmp_path: Path) -> None:
    script = Script(tmp_path, MODEL + THE_MODEL)
    assert script.rest() == "same: True version: 2\n"
    assert (tmp_path / "atari-me/ppo-v0/models/atari_model/000002.safetensors").exists()


def test_the_actor_snippet_runs_and_stops_when_asked(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script = Script(tmp_path, MODEL + THE_ACTOR.replace("PORT", str(port)))
    assert script.line() == "serving\n"
    with Client(f"http://127.0.0.1:{port}") as client:
        assert client.start("game") == b"hello game"
        assert client.tick("game", b"xyz") in b"012345"
        client.end("game")
    assert script.ask_to_stop() == "stopped\n"
    assert script.process.returncode == 0


def test_the_trainer_snippet_trains_and_stops_when_asked(tmp_path: Path) -> None:
    script = Script(tmp_path, MODEL + THE_TRAINER)
    lines = [script.line(), script.line()]
    assert any("declares no inputs" in line for line in lines)  # the snippet gives none
    assert "training\n" in lines
    run = tmp_path / "atari-me" / "ppo-v0"
    deadline = time.monotonic() + 60
    while not any(row.get("model/atari_model/version", 0) > 20 and "loss" in row for row in read_jsonl(run / "metrics.jsonl")):
        assert time.monotonic() < deadline, script.ask_to_stop()
        time.sleep(0.02)
    output = script.ask_to_stop()
    assert output.endswith("stopped\n"), output
    assert script.process.returncode == 0
    assert list(run.glob("events.out.tfevents.*"))
    assert len(list(run.glob("models/atari_model/*.safetensors"))) == 2


@pytest.mark.long
def test_a_failing_trainer_ends_the_program_with_its_traceback(tmp_path: Path) -> None:
    text = MODEL + THE_TRAINER.replace("for step in range(num_steps):", "raise RuntimeError('no idea')")
    text = re.sub(r"(?s)        batch = next.*?\n\nbray\.init", "\nbray.init", text)
    script = Script(tmp_path, text)
    output = script.rest()
    assert "RuntimeError: no idea" in output
    assert "WorkerFailed" in output
    assert script.process.returncode == 1


@pytest.mark.long
def test_a_model_of_a_script_is_found_again_by_its_file(tmp_path: Path) -> None:
    """A second program, after the first has ended: only the file of the class is left."""
    guarded = THE_MODEL.replace("\n", "\n    ")
    script = Script(tmp_path, MODEL + 'if __name__ == "__main__":' + guarded)
    assert "same: True" in script.rest()
    text = "import ludus, numpy as np\nludus.init(project='./atari-me', trial='ppo-v0')\n"
    text += "model = ludus.RemoteModel('atari_model')\nprint(model(np.zeros((42, 42, 4), np.float32)).shape, model.version)"
    assert Script(tmp_path, text, "deploy.py").rest() == "(6,) 3\n"


def test_a_script_that_launches_on_import_gets_an_error_with_the_remedy(tmp_path: Path) -> None:
    text = "from ludus.models.weights.module_spec import find_class\n"
    for number, launching in enumerate(["bray.init(project='.', trial='t')", "bray.RemoteModel('x', AtariModel())"]):
        (tmp_path / f"launch{number}.py").write_text(f"{MODEL}\n{launching}\n")
        text += f"try: find_class('{tmp_path}/launch{number}.py:AtariModel')\nexcept Exception as e: print(repr(e))\n"
    first, second = Script(tmp_path, text, "other.py").rest().splitlines()
    for line, what in ((first, "ludus.init"), (second, "RemoteModel")):
        assert line.startswith(f"UsageError('{what} was called while")
        assert 'if __name__ == "__main__":' in line
