"""Runs: opened once, joined by other processes, recorded in their directory."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import ludus
from ludus.core.metrics import read_jsonl
from ludus.errors import StoreFull, UsageError, WorkerFailed
from ludus.remote import context as sessions
from ludus.remote.context import JoinTicket, RunContext, init
from tests.remote.parts import Scale, scaled

X = np.ones(3, np.float32)


def test_a_run_has_its_directory_and_records_its_start_once(tmp_path: Path) -> None:
    with ludus.init(project=tmp_path / "p", trial="v0") as session:
        assert session.directory == tmp_path / "p" / "v0"
        meta = (session.directory / "meta.json").read_bytes()
        assert json.loads(meta)["versions"]["ludus"] == ludus.__version__
    with ludus.init(project=tmp_path / "p", trial="v0"):
        assert (tmp_path / "p" / "v0" / "meta.json").read_bytes() == meta


def test_the_same_run_may_be_opened_twice_in_a_process_another_may_not(run: RunContext, tmp_path: Path) -> None:
    assert init(project=tmp_path, trial="t") is run
    assert init() is run
    with pytest.raises(UsageError, match="takes part in the run"):
        init(project=tmp_path, trial="other")


@pytest.mark.parametrize("trial", ["../x", "a/b", "", ".hidden"])
def test_a_trial_is_a_plain_name(tmp_path: Path, trial: str) -> None:
    with pytest.raises(UsageError, match="plain name"):
        init(project=tmp_path, trial=trial)


@pytest.mark.parametrize("project", ["s3://bucket/project", Path("s3://bucket/project")])
def test_the_project_of_a_script_is_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, project: str | Path) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="is not a directory"):
        init(project=project, trial="t")
    assert not list(tmp_path.iterdir())


def test_the_first_call_opens_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sessions, "_former", None)
    ludus.RemoteBuffer("b")
    session = init()
    try:
        assert session.directory.parent == tmp_path / "runs"
        assert session.directory.name.startswith("20")
    finally:
        session.close()


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreFull, match="Cannot make the run"):
        init(project=tmp_path / "file", trial="t")


@pytest.mark.parametrize("text", ["x", "0", "-1", "nan"])
def test_a_report_interval_is_a_positive_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("LUDUS_REPORT_S", text)
    with pytest.raises(UsageError, match="report interval"):
        init(project=tmp_path, trial="t")


def test_metrics_of_all_callers_are_averaged_by_name_and_labels(run: RunContext) -> None:
    for value in (1.0, 2.0, 6.0):
        ludus.metric("loss", value)
    ludus.metric("win", 1, map="ice", side="left")
    ludus.metric("timesteps", 70)
    ludus.metric("timesteps", 90)
    run.close()
    row = read_jsonl(run.directory / "metrics.jsonl")[-1]
    assert row["loss"] == 3.0
    assert row["win{map=ice,side=left}"] == 1
    assert row["timesteps"] == 90


def test_after_the_end_nothing_hangs(run: RunContext) -> None:
    model = ludus.RemoteModel("m", Scale())
    buffer = ludus.RemoteBuffer("b")
    run.close()
    for late in (
        lambda: run.client.call({"op": "hello"}),
        lambda: buffer.push(1.0),
        lambda: buffer.push(2.0),
        lambda: model.publish_weights(scaled(2)),
        lambda: ludus.metric("x", 1),
        lambda: ludus.RemoteBuffer("c"),
    ):
        with pytest.raises(WorkerFailed, match="left"):
            late()
    with pytest.raises(StopIteration):
        next(buffer)


def test_a_fork_uses_its_own_connection_and_does_not_disturb_the_run(run: RunContext) -> None:
    buffer = ludus.RemoteBuffer("b", batch_size=3)
    model = ludus.RemoteModel("m", Scale())
    buffer.push(1.0).wait(10)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            ludus.RemoteBuffer("b").push(2.0, drop=False).wait(10)
            buffer.push(3.0, drop=False).wait(10)  # a handle of the parent's works here too
            assert model.publish_weights(scaled(4)) == 2
            assert init().hub is None
            init().close()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert buffer.take(10).tolist() == [1.0, 2.0, 3.0]
    assert float(model(X)[0]) == 4
    assert run.client.call({"op": "hello"})["pid"] == os.getpid()


def test_a_child_gets_the_run_with_its_ticket(run: RunContext) -> None:
    ludus.RemoteModel("m", Scale())
    ticket = run.ticket(threads=1)
    assert isinstance(ticket, JoinTicket)
    assert ticket.classes == {"m": Scale}
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            sessions._inherited = None
            joined = sessions.adopt(ticket)
            assert joined.directory == run.directory
            assert float(ludus.RemoteModel("m")(X)[0]) == 1.0
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


# -- processes that are not ours


HOLDER = """
import signal, sys, threading, time
import numpy as np
import ludus
from tests.remote.parts import Scale
ludus.init(project=sys.argv[1], trial="t")
ludus.RemoteModel("m", Scale(), forward_args=(np.ones(3, np.float32),), checkpoint_interval=1)
ludus.RemoteBuffer("b", size=4)

def announce():  # a signal that comes before it is handled just ends the program
    while signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        time.sleep(0.001)
    print("open", flush=True)

threading.Thread(target=announce).start()
ludus.run_until_asked_to_stop()
print("closed", flush=True)
"""


class Holder:
    """Another program that has the run open."""

    def __init__(self, directory: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(directory)], stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "open\n"

    def end(self, number: signal.Signals) -> str:
        self.process.send_signal(number)
        return self.process.communicate(timeout=30)[0]


def test_another_program_joins_the_run_and_notices_when_the_hub_is_killed(tmp_path: Path) -> None:
    holder = Holder(tmp_path)
    session = init(project=tmp_path, trial="t")
    try:
        assert session.hub is None
        model = ludus.RemoteModel("m")
        assert model.publish_weights(scaled(5)) == 2
        assert float(model(X)[0]) == 5
        buffer = ludus.RemoteBuffer("b", batch_size=2)
        buffer.push(1.0, 2.0).wait(10)
        assert buffer.take(10).tolist() == [1.0, 2.0]
        full = buffer.push(*range(20), drop=False)
        buffer.take(10)
        time.sleep(0.3)  # the third version was kept by now; it is the disk of another process
        holder.end(signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(WorkerFailed, match="gone"):
            full.wait(20)
        with pytest.raises(WorkerFailed, match="gone"):
            session.client.call({"op": "hello"})
        with pytest.raises(WorkerFailed):
            list(buffer)
        with pytest.raises(WorkerFailed):
            model.publish_weights(scaled(6))
        assert float(model(X)[0]) == 5, "what is mapped stays readable"
        with pytest.raises(WorkerFailed, match="gone"):
            ludus.run_until_asked_to_stop()
        assert time.monotonic() - began < 20
    finally:
        session.close()
        holder.process.kill()
        holder.process.wait()
        assert holder.process.stdout is not None
        holder.process.stdout.close()
    with init(project=tmp_path, trial="t") as again:  # the killed run goes on from its newest durable weights
        assert again.hub is not None
        model = ludus.RemoteModel("m")
        assert model.version > 1000
        assert float(model(X)[0]) == 5


def test_a_program_that_is_asked_to_stop_closes_its_run_in_order(tmp_path: Path) -> None:
    holder = Holder(tmp_path)
    assert holder.end(signal.SIGTERM) == "closed\n"
    assert holder.process.returncode == 0
    assert not (tmp_path / "t" / "hub.json").exists()
    assert (tmp_path / "t" / "models" / "m" / "000001.safetensors").exists()
