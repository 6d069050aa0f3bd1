"""The `ludus` command. Heavy modules are imported inside the commands, so that --help is fast."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

import ludus
from ludus.cli.clusters import actor, cluster, doctor, fleet, jobs, learner, submit
from ludus.cli.evaluation import battle, exploit, rollout, runs, status, tensorboard
from ludus.cli.games import gamecore, games
from ludus.cli.help import HelpApp
from ludus.cli.league import inspect, manage, run
from ludus.cli.output import is_debug, notify, print_error
from ludus.cli.serving import check_game, export, fake, serve
from ludus.cli.training import check_env, config, demo, new, presets, train, tune
from ludus.core import trust
from ludus.errors import LudusError

app = HelpApp(
    name="ludus",
    help="Train game agents, watch them play, and put them into the live game.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
TRAIN, SERVE, CLUSTERS, GAMES, TOOLS = "Train and evaluate", "Serve and export", "Clusters", "Games", "Tools"

app.command("train", cls=train.TrainCommand, rich_help_panel=TRAIN)(train.train)
app.command("tune", rich_help_panel=TRAIN)(tune.tune)
app.command("rollout", rich_help_panel=TRAIN)(rollout.rollout)
app.command("battle", rich_help_panel=TRAIN)(battle.battle)
league = HelpApp(name="league", help="Leagues: players that train against each other and their past.", no_args_is_help=True)
run.add_commands(league)
inspect.add_commands(league)
manage.add_commands(league)
app.add_typer(league, name="league", rich_help_panel=TRAIN)
app.command("exploit", rich_help_panel=TRAIN)(exploit.exploit)
app.add_typer(runs.app, name="runs", rich_help_panel=TRAIN)
app.command("status", rich_help_panel=TRAIN)(status.status)
app.command("tensorboard", rich_help_panel=TRAIN)(tensorboard.tensorboard)
app.add_typer(presets.app, name="presets", rich_help_panel=TRAIN)
app.add_typer(config.app, name="config", rich_help_panel=TRAIN)
app.command("check-env", rich_help_panel=TRAIN)(check_env.check_env)
app.command("serve", rich_help_panel=SERVE)(serve.serve)
app.command("export", rich_help_panel=SERVE)(export.export)
app.command("submit", context_settings=submit.SETTINGS, rich_help_panel=CLUSTERS)(submit.submit)
app.add_typer(jobs.app, name="jobs", rich_help_panel=CLUSTERS)
app.add_typer(cluster.app, name="cluster", rich_help_panel=CLUSTERS)
app.add_typer(fleet.app, name="fleet", rich_help_panel=CLUSTERS)
app.add_typer(learner.app, name="learner", rich_help_panel=CLUSTERS)
app.add_typer(actor.app, name="actor", rich_help_panel=CLUSTERS)
app.command("doctor", rich_help_panel=CLUSTERS)(doctor.doctor)
app.add_typer(gamecore.app, name="gamecore", rich_help_panel=GAMES)
app.add_typer(games.app, name="games", rich_help_panel=GAMES)
app.command("check-game", rich_help_panel=GAMES)(check_game.check_game)
app.add_typer(fake.app, name="fake", rich_help_panel=GAMES)
app.command("new", rich_help_panel=TOOLS)(new.new)
app.command("demo", rich_help_panel=TOOLS)(demo.demo)


def _print_version(requested: bool) -> None:
    if requested:
        print(f"ludus {ludus.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


def _handle_signal(number: int, frame: FrameType | None) -> None:
    """Stop the command on SIGINT or SIGTERM. Training installs its own handlers while it runs."""
    os.write(2, f"ludus: Interrupted ({signal.Signals(number).name}).\n".encode())
    while frame is not None:
        if frame.f_globals.get("__name__") == "importlib._bootstrap":
            # NumPy and PyTorch swallow exceptions during their import and continue half initialised; nothing was started yet.
            os._exit(130)
        frame = frame.f_back
    raise KeyboardInterrupt


def _is_cwd_in_run() -> bool:
    """Whether the working directory is in a run directory, whose files may be untrusted and must not be imported."""
    try:
        return trust.is_in_run(Path.cwd())
    except OSError:  # the working directory was removed
        return False


def main() -> None:
    """Run the command line. Exit codes: 0 finished, 1 failed, 2 wrong usage or config, 130 interrupted."""
    # Idle OpenMP threads would spin on a core that environments and gradient threads need; torch reads this on import.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    with contextlib.suppress(AttributeError, ValueError, OSError, RuntimeError):  # without a real stderr
        # A native library of a game that crashes also ends this process; faulthandler prints the Python stack.
        faulthandler.enable()
    signal.signal(signal.SIGINT, _handle_signal)
    signal.signal(signal.SIGTERM, _handle_signal)
    if "" not in sys.path and not _is_cwd_in_run():
        sys.path.insert(0, "")  # `module:function` is imported from here too, as with `python -m`
    trust.allow([word.rpartition("=")[2] for word in sys.argv[1:] if "://" in word])  # URLs that the user typed
    try:
        app()
    except LudusError as error:
        print_error(error)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # the reader of our output exited, e.g. `head`
        sys.stderr.close()
        sys.exit(1)
    except Exception as error:  # last resort: a one-line error instead of a traceback
        if is_debug():
            raise
        notify(f"unexpected {type(error).__name__}: {error} (set LUDUS_DEBUG=1 for the traceback)")
        sys.exit(1)


if __name__ == "__main__":
    main()
