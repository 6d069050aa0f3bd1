"""`ludus submit` with real trainings as local jobs; errors before anything is started."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ludus.cli.clusters.submit import salloc_command
from ludus.errors import WorkerFailed
from ludus.experiments.runs import checkpoint
from ludus.experiments.runs.run_dir import find_runs
from ludus.launch.job import JobStatus
from ludus.launch.local import LocalOrchestrator
from ludus.storage.local import LocalStore
from ludus.testing.orchestrator_contract import wait_until_ended
from tests.cli.calling import Call, CommandResult, one_line
from tests.cli.programs import REPOSITORY, program
from tests.waiting import wait_until

HEAVY = {"torch", "gymnasium", "numpy", "ray", "matplotlib", "tensorboard", "redis", "boto3"}
SECRET = "horse-battery-staple"


class Home:
    """A state directory and a working directory of this module's own."""

    def __init__(self, top: Path) -> None:
        self.work, self.state = top / "desk", top / "state"
        self.work.mkdir()
        self.orchestrator = LocalOrchestrator(self.state)

    def ludus(self, *words: str | Path) -> CommandResult:
        done = subprocess.run(
            [sys.executable, "-m", "ludus.cli.main", *map(str, words)],
            capture_output=True,
            text=True,
            timeout=120,
            cwd=self.work,
            env=os.environ | {"PYTHONPATH": _path(), "LUDUS_STATE_DIR": str(self.state), "COLUMNS": "300"},
        )
        return CommandResult(done.returncode, done.stdout, done.stderr)


def _path() -> str:
    return os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])])


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    home = Home(tmp_path_factory.mktemp("submit"))
    yield home
    for status in home.orchestrator.list():
        home.orchestrator.cancel(status.id, at_once=True)
        wait_until_ended(home.orchestrator, status.id)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """This process in a working directory of its own; jobs that it starts are ended."""
    (tmp_path / "desk").mkdir()
    monkeypatch.chdir(tmp_path / "desk")
    monkeypatch.setenv("LUDUS_STATE_DIR", str(tmp_path / "state"))
    yield tmp_path
    orchestrator = LocalOrchestrator(tmp_path / "state")
    for status in orchestrator.list():
        orchestrator.cancel(status.id, at_once=True)
        wait_until_ended(orchestrator, status.id)


def tree(top: Path) -> dict[str, tuple[int, bytes]]:
    return {
        str(path.relative_to(top)): (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else b"")
        for path in top.rglob("*")
    }


# -- real trainings -----------------------------------------------------------------------------------------------------


def test_a_training_is_submitted_and_awaited(home: Home) -> None:
    result = home.ludus("submit", "--on", "local", "--", "train", "CartPole-v1", "--stop", "timesteps_total=2000")
    assert result.code == 0, result.err
    (job_id,) = result.out.split()
    assert result.out == f"{job_id}\n", "ID=$(ludus submit …)"
    assert job_id.startswith("train-CartPole-v1-")
    assert f"ludus jobs logs -f {job_id}" in one_line(result)
    assert home.ludus("jobs", "wait", job_id).code == 0
    (run,) = find_runs(home.work / "runs")
    assert any(str(run.relative_to(home.work)) in line for line in home.orchestrator.logs(job_id))


def test_of_a_training_that_fails_the_code_is_that_of_the_wait(call: Call, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", _path())
    result = call("submit", "--quiet", "--", "train", "tests.environments:make_crash")
    assert (result.code, result.err) == (0, "")
    waited = call("jobs", "wait", result.out.strip())
    assert waited.code == 1, waited.err
    assert "failed: main-0 ended with code 1" in waited.err
    assert "port 5005 is taken" in waited.err


def test_a_job_outlives_a_killed_wait_and_saves_a_checkpoint_when_cancelled(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LUDUS_STATE_DIR", str(home.state))
    monkeypatch.setenv("PYTHONPATH", _path())
    project = home.work / "long"
    words = ("--", "train", "CartPole-v1", "--stop", "time_s=600", "--project", project, "--trial", "one")
    with program("submit", "--name", "long", "--wait", *words, listens=False) as waiting:
        waiting.wait_for("steps/s")  # what the training says is shown
        (status,) = [status for status in home.orchestrator.list() if status.name == "long"]
        waiting.process.kill()
        waiting.finish()
    assert home.ludus("jobs", "wait", status.id, "--timeout", "0.1").code == 124, "it goes on"
    cancelled = home.ludus("jobs", "cancel", "long", "--wait")
    assert cancelled.code == 0, cancelled.err
    assert home.ludus("jobs", "wait", status.id).code == 130
    assert checkpoint.names(LocalStore(project / "one"))


# -- in the foreground --------------------------------------------------------------------------------------------------


def test_wait_prints_the_log_and_returns_the_exit_code(call: Call, here: Path) -> None:
    result = call("submit", "--wait", "--", "runs", "list", "nowhere")
    assert result.code == 1
    assert "No runs in nowhere" in result.out
    assert "failed: main-0 ended with code 1" in result.err
    result = call("submit", "--wait", "--json", "--", "presets", "list")
    assert result.code == 0
    assert (result.json["on"], result.json["state"], result.json["exit_code"]) == ("local", "succeeded", 0)
    assert len(result.out.splitlines()) == 1, "all other output goes to stderr"
    assert "cartpole" in result.err


def test_an_interrupt_leaves_the_job_running(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LUDUS_STATE_DIR", str(home.state))
    monkeypatch.setenv("PYTHONPATH", _path())
    with program(
        "submit", "--wait", "--name", "game", "--", "check-game", "--port", "0", "--seconds", "300", listens=False
    ) as waiting:
        waiting.wait_for("Ctrl-C leaves it running")
        wait_until(lambda: any(status.name == "game" and status.state == "running" for status in home.orchestrator.list()))
        waiting.wait_for("http://")
        waiting.process.terminate()
        code, _, err = waiting.finish()
    (status,) = [status for status in home.orchestrator.list() if status.name == "game"]
    assert code == 130
    assert f"{status.id} is still running" in err
    assert not status.over
    assert home.ludus("jobs", "cancel", status.id, "--now", "--wait").code == 0


# -- nothing is touched -------------------------------------------------------------------------------------------------


def test_a_dry_run_prints_the_job_and_changes_nothing(call: Call, here: Path) -> None:
    (here / "desk" / "cluster.yaml").write_text("on: local\nname: dry\nenvironment: {A: file, B: file}\n")
    before = tree(here)
    options = ("--dry-run", "-f", "cluster.yaml", "--env", "A=option", "--grace-s", "7")
    result = call("submit", *options, "--", "train", "CartPole-v1", "--stop", "time_s=1")
    assert result.code == 0
    assert result.out.startswith("==> job.json <==\n")
    whole = call("submit", *options, "--json", "--", "train", "CartPole-v1", "--stop", "time_s=1")
    text = whole.json["files"]["job.json"]
    assert text.strip() in result.out
    assert '"name": "dry"' in text
    assert '"grace_s": 7.0' in text
    assert '"A": "option"' in text, "what an option says counts more than the file"
    assert '"B": "file"' in text
    assert '"time_s=1"' in text
    assert tree(here) == before


def test_the_printed_files_are_the_written_ones(call: Call, here: Path) -> None:
    words = ("--", "presets", "list")
    shown = call("submit", "--dry-run", "--json", *words).json["files"]
    assert shown.pop("command").endswith(f" {here}/state/jobs/ID\n"), "what is run, and not written"
    job_id = call("submit", *words).out.strip()
    place = here / "state" / "jobs" / job_id
    assert {name: (place / name).read_text() for name in shown} == shown
    assert call("jobs", "wait", job_id).code == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "There is no command to run."),
        (["--", "trian", "CartPole-v1"], "has no command 'trian'. Did you mean 'train'?"),
        (["--", "fleet", "wroker"], "`ludus fleet` has no command 'wroker'. Did you mean 'worker'?"),
        (["--", "fleet"], "`ludus fleet` needs a command."),
        (["--on", "slrum", "--", "train", "x"], "Did you mean 'slurm'?"),
        (["--env", "COLOUR", "--", "train", "x"], "--secret COLOUR"),
        (["--secret", "NOT_SET", "--", "train", "x"], "needs the secret NOT_SET"),
        (["--interactive", "--", "train", "x"], "--interactive needs Slurm"),
        (["--nodes", "0", "--", "train", "x"], "nodes"),
        (["--identity=~no-such-user/id", "--", "train", "x"], "~no-such-user/id is in the home directory of a user unknown"),
        (["-f", "nowhere.yaml", "--", "train", "x"], "nowhere.yaml cannot be read"),
    ],
)
def test_invalid_jobs_are_reported_before_anything_is_started(call: Call, here: Path, words: list[str], message: str) -> None:
    answer = call("submit", *words)
    assert answer.code == 2
    assert message in one_line(answer)
    assert answer.out == ""
    assert LocalOrchestrator(here / "state").list() == []


def test_an_unknown_option_of_the_command_is_reported_at_once(call: Call, here: Path) -> None:
    for words in (("--", "train", "CartPole-v1", "--stpo", "time_s=1"), ("train", "CartPole-v1", "--on", "local")):
        answer = call("submit", *words)
        assert answer.code == 2
        assert "ludus train" in answer.err
        assert "No such option" in answer.err
        assert answer.out == ""
    assert list(here.iterdir()) == [here / "desk"]


def test_the_password_of_older_trainers_is_ignored_and_nowhere_to_be_seen(call: Call, here: Path) -> None:
    result = call("submit", "--redis-password", SECRET, "--dry-run", "--", "train", "CartPole-v1", f"--redis-password={SECRET}")
    assert result.code == 0
    assert result.err.count("--redis-password is ignored") == 2
    assert SECRET not in result.out + result.err
    assert "redis" not in result.out


def test_secrets_are_handed_on_by_name(call: Call, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LICENCE_KEY", SECRET)
    result = call("submit", "--secret", "LICENCE_KEY", "--dry-run", "--", "train", "CartPole-v1")
    assert "LICENCE_KEY" in result.out
    assert SECRET not in result.out + result.err
    for dry in ((), ("--dry-run",)):
        refused = call("submit", *dry, "--secret", "LICENCE_KEY", "--env", f"KEY={SECRET}", "--", "presets", "list")
        assert refused.code == 2
        assert "The value of LICENCE_KEY is in the environment of the role 'main'" in one_line(refused)
        assert SECRET not in refused.out + refused.err
        refused = call("submit", *dry, "--secret", "NOT_SET", "--", "presets", "list")
        assert (refused.code, refused.out) == (2, "")


def test_a_key_that_is_named_here_is_found_from_elsewhere(call: Call, here: Path) -> None:
    words = ("--on", "ssh", "--iplist", "nodes", "--identity", "keys/id", "--known-hosts", "known")
    (here / "desk" / "nodes").write_text("10.0.0.2 root 22 1\n")
    shown = call("submit", *words, "--dry-run", "--json", "--", "presets", "list").json["files"]["commands.txt"]
    assert f"-i {here}/desk/keys/id" in shown
    assert f"UserKnownHostsFile={here}/desk/known" in shown


# -- Slurm --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("password", [(f"--redis-password={SECRET}",), ("--redis_password", SECRET)])
def test_an_allocation_is_requested_and_this_command_runs_in_it(password: tuple[str, ...]) -> None:
    words = ["submit", "--redis-password", SECRET, "--interactive", "--dry-run", "--", "train", "x", *password]
    ludus = [sys.executable, "-P", "-m", "ludus.cli.main"]
    assert salloc_command(["salloc", "--nodes=2"], words) == [
        "salloc",
        "--nodes=2",
        *ludus,
        "submit",
        "--interactive",
        "--",
        "train",
        "x",
    ]


def test_without_slurm_an_error_names_what_is_missing(call: Call, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setenv("PATH", str(here))
    result = call("submit", "--on", "slurm", "--interactive", "--", "presets", "list")
    assert result.code == 2
    assert "salloc cannot be run" in one_line(result)
    shown = call(
        "submit", "--on", "slurm", "--interactive", "--nodes", "2", "--dry-run", "--json", "--", "train", "CartPole-v1"
    ).json
    assert shown["on"] == "slurm"
    assert shown["files"]["command"].startswith("salloc ")
    assert "#SBATCH --nodes=2" in shown["files"]["job.sbatch"]
    assert list(here.iterdir()) == [here / "desk"]


# -- orchestrators of one's own -----------------------------------------------------------------------------------------

MINE = """
import os
from pathlib import Path
from ludus.cli.clusters.submit import salloc_command
from ludus.launch.job import JobStatus
from ludus.launch.local import LocalOrchestrator

class Mine(LocalOrchestrator):
    def __init__(self) -> None:
        super().__init__(Path(os.environ["MINE"]))
"""


def test_jobs_of_a_user_orchestrator_are_found_again(call: Call, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "my_cluster.py").write_text(MINE)
    monkeypatch.syspath_prepend(str(here))
    monkeypatch.setenv("MINE", str(here / "mine"))
    result = call("submit", "--on", "my_cluster:Mine", "--", "presets", "list")
    assert result.code == 0, result.err
    job_id = result.out.strip()
    assert (here / "mine" / "jobs" / job_id).is_dir()
    assert call("jobs", "wait", job_id).code == 0
    assert [(job["id"], job["on"]) for job in call("jobs", "list", "--json").json] == [(job_id, "my_cluster:Mine")]
    assert "cartpole" in call("jobs", "logs", job_id).out


class Fresh(LocalOrchestrator):
    """Cannot be asked right after it has taken a job."""

    asked = 0

    def status(self, job_id: str) -> JobStatus:
        self.asked += 1
        if self.asked == 1:
            raise WorkerFailed("The network is away.")
        return super().status(job_id)


def test_the_id_of_a_job_is_printed_even_if_its_status_fails(call: Call, here: Path) -> None:
    result = call("submit", "--on", "tests.cli.test_submit:Fresh", "--json", "--", "presets", "list")
    assert result.code == 0, result.err
    assert (result.json["state"], result.json["reason"]) == ("pending", "The network is away.")
    assert call("jobs", "wait", result.json["id"]).code == 0
    assert call("submit", "--on", "tests.cli.test_submit:Fresh", "--wait", "--", "runs", "list", "nowhere").code == 1


# -- starting quickly ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [["submit", "--dry-run", "--", "train", "CartPole-v1"], ["jobs", "list"]])
def test_nothing_heavy_is_imported(here: Path, words: list[str]) -> None:
    program = (
        f"import sys\nfrom ludus.cli.main import main\nsys.argv = ['ludus', *{words!r}]\n"
        "try: main()\nexcept SystemExit as e: assert not e.code\nprint()\nprint(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    imported = {name.split(".")[0] for name in done.stdout.splitlines()[-1].split()}
    assert "typer" in imported
    assert not imported & HEAVY
