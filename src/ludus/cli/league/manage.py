"""Commands that use or change the players of a league: match, add, retire, export."""

from __future__ import annotations

import json
import math
import shutil
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ludus.cli.common_options import AsJson, trust_option
from ludus.cli.league.inspect import LeagueDirectory
from ludus.cli.output import say
from ludus.errors import UsageError

if TYPE_CHECKING:
    from ludus.experiments.resolve import ResolvedExperiment
    from ludus.league.events import LeagueEvent
    from ludus.league.players import Player
    from ludus.league.state import LeagueState
    from ludus.tournament.contestants import Contestant
    from ludus.tournament.gamecore_matches import GameLocation
    from ludus.tournament.settings import BattleSettings


def add_commands(app: typer.Typer) -> None:
    """Add the commands to the group `ludus league`."""
    for command in (match, add, retire, export):
        app.command()(command)


def match(
    directory: LeagueDirectory,
    a: Annotated[str, typer.Argument(metavar="A", help="Player of the league.")],
    b: Annotated[str, typer.Argument(metavar="B", help="Its opponent.")],
    games: Annotated[int, typer.Option(min=1, help="Number of matches.")] = 200,
    record: Annotated[bool, typer.Option("--record", help="Count the results in the league.")] = False,
    swap_sides: Annotated[bool, typer.Option("--swap-sides/--no-swap-sides", help="Let A play both sides in turn.")] = True,
    deterministic: Annotated[
        bool | None,
        typer.Option(
            "--deterministic/--explore",
            help="Play the most probable actions, or sample them; default: sample with --record, as in all matches of a league.",
        ),
    ] = None,
    mode: Annotated[str | None, typer.Option(metavar="NvN", help="Team sizes in the Arena; default: as in training.")] = None,
    env: Annotated[str | None, typer.Option(metavar="NAME", help="Environment; default: that of the training.")] = None,
    camps: Annotated[str | None, typer.Option(metavar="A,…/B,…", help="Agents of both sides, by name or pattern.")] = None,
    option: Annotated[
        list[str] | None, typer.Option("--option", "-o", metavar="KEY=VALUE", help="Option of the environment; repeatable.")
    ] = None,
    seconds: Annotated[int | None, typer.Option(min=1, help="Game time limit in the Arena; then it is a draw.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Random seed; the same seed gives the same matches.")] = 0,
    trust: Annotated[bool, trust_option()] = False,
    as_json: AsJson = False,
) -> None:
    """Play a battle between two players of the league; with --record it counts for their ratings."""
    from ludus.cli.evaluation.battle import BattleProgress, show_battle
    from ludus.cli.games.gamecore import read_options
    from ludus.core import trust as trusts
    from ludus.league.events import ResultsReported
    from ludus.league.journal import read_state
    from ludus.tournament.battle import battle

    state = read_state(directory)
    if record and a == b:
        raise UsageError(f"{a} against itself cannot be recorded.", "Leave --record out.")
    trusts.note_run(directory)
    league = _read_experiment(directory) if env is None else None
    load, game = _choose_game(directory, league)
    one, other = (load(_find_player(state, name)) for name in (a, b))
    settings = _battle_settings(league, games, seed)
    settings = replace(
        settings,
        swap_sides=swap_sides,
        mode=mode or settings.mode,
        seconds=seconds or settings.seconds,
        deterministic=not record if deterministic is None else deterministic,
    )
    location = replace(
        game,
        options={**game.options, **read_options(option or ())},
        env=env or _env_of(league),
        camps=camps or _camps_of(league),
    )
    with BattleProgress(games, quiet=as_json) as progress:
        result = battle(one, other, settings, None, location, progress.count)
    if as_json:
        print(json.dumps(result.to_json() | {"players": [a, b]}), flush=True)
    else:
        show_battle(replace(result, a={**result.a, "name": a}, b={**result.b, "name": b}))
    total = result.total
    if not total.games:
        raise typer.Exit(1)
    if record:
        source = f"match-{uuid.uuid4().hex}"
        event = ResultsReported(source, 1, a, b, total.won, total.drawn, total.lost, result.gain)
        _submit(directory, [event], f"{total.games} results of {a} against {b} are recorded", quiet=as_json)


def _read_experiment(directory: Path) -> ResolvedExperiment | None:
    """The experiment of a training player, for environment and sides; None: the league has no file. Raises UsageError.

    Its environment has been imported afterwards, if it may be: the file of a league is stored data.
    """
    from ludus.experiments.resolve import resolve
    from ludus.league.runtime.league_file import LEAGUE_FILE, player_experiment, read_stored_league

    if not (directory / LEAGUE_FILE).is_file():
        return None
    config = read_stored_league(directory)
    return resolve(player_experiment(config, config.learners()[0], directory))


def _choose_game(directory: Path, league: ResolvedExperiment | None) -> tuple[Callable[[Player], Contestant], GameLocation]:
    """How players become contestants, and where they play: on a gamecore server if the league trains in a game of one.

    Raises UsageError.
    """
    from ludus.config.schema import EXTERNAL, GAMECORE
    from ludus.league.runtime.gamecore_evaluation import GamecorePlayers, game_location, is_arena_game
    from ludus.tournament.gamecore_matches import GameLocation

    env = None if league is None else league.experiment.env
    if env == EXTERNAL:
        raise UsageError(
            "The games of this league connect over HTTP: nothing here can start a match.",
            "Serve both players (`ludus serve DIR/players/NAME`), and let the game connect to them.",
        )
    if league is None or env != GAMECORE or is_arena_game(league.config.env_config):
        return lambda player: _contestant(directory, player, league), GameLocation()
    players = GamecorePlayers(directory, league.config.env_config)

    def load(player: Player) -> Contestant:
        return players.load(player.model, player.token_file, lambda reason, temporary=False: None)

    return load, game_location(league.config.env_config)


def _contestant(directory: Path, player: Player, league: ResolvedExperiment | None) -> Contestant:
    """A player as a contestant of a battle. Raises UsageError."""
    from ludus.sampling.league_policies import SCRIPT, load_script, read_player_token
    from ludus.tournament.contestants import FunctionContestant, contestant

    model = _model_of(directory, player)
    if not model.startswith(SCRIPT):
        return contestant(model, token=read_player_token(model, player.token_file))
    function = load_script(directory, model)
    if league is None:
        return FunctionContestant(model, function)
    return FunctionContestant(model, function, league.experiment.env, league.config.model_dump())


def _battle_settings(league: ResolvedExperiment | None, games: int, seed: int) -> BattleSettings:
    """In the Arena: as in the evaluation of the league."""
    from ludus.config.schema import GAMECORE
    from ludus.league.runtime.arena_evaluation import battle_settings, is_arena
    from ludus.league.runtime.gamecore_evaluation import is_arena_game
    from ludus.tournament.settings import BattleSettings

    if league is None or _env_of(league) is not None:
        return BattleSettings(games=games, seed=seed)
    env_config, on_server = league.config.env_config, league.experiment.env == GAMECORE
    if is_arena_game(env_config) if on_server else is_arena(league.experiment.env):
        return battle_settings(env_config, games, seed)
    return BattleSettings(games=games, mode=env_config.get("mode") if on_server else None, seed=seed)


def _env_of(league: ResolvedExperiment | None) -> str | None:
    """The environment of the league if it has several agents."""
    return None if league is None or league.config.multiagent is None else league.experiment.env


def _camps_of(league: ResolvedExperiment | None) -> str | None:
    sides = None if league is None else league.config.self_play.sides
    return None if sides is None else "/".join(",".join(side) for side in sides)


def add(
    directory: LeagueDirectory,
    name: Annotated[str, typer.Argument(metavar="PLAYER", help="Name of the new player.")],
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="Run, RUN/best, RUN@VERSION, checkpoint, rule:NAME, script:MODULE:FUNCTION or http://HOST:PORT."
        ),
    ],
    rating: Annotated[
        float | None,
        typer.Option(metavar="ELO", help="Fixed rating, which makes the player an anchor; default: rated by results."),
    ] = None,
    token_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File with the token of a served agent; only its path is stored.")
    ] = None,
    trust: Annotated[bool, trust_option()] = False,
) -> None:
    """Add a fixed player, which never changes: a script, a checkpoint or a served agent."""
    from ludus.core import trust as trusts
    from ludus.league.events import PlayerAdded
    from ludus.league.journal import read_state
    from ludus.league.players import Player, PlayerRole
    from ludus.league.runtime.code_files import store_code
    from ludus.league.runtime.player_models import check_fixed_model, check_player_name
    from ludus.league.runtime.stored_models import import_model
    from ludus.protocol.spec import read_token
    from ludus.sampling.league_policies import SCRIPT, ModelKind

    try:
        check_player_name(name)
    except ValueError as error:
        raise UsageError(f"{name!r} is not a name for a player: {error}.") from error
    if rating is not None and not math.isfinite(rating):
        raise UsageError(f"--rating {rating} is not a rating.", "Give a number, such as 1000.")
    if name in read_state(directory).players:
        raise UsageError(f"There is a player {name!r} already.", "`ludus league status` lists the players.")
    trusts.allow(model)
    env, rules = _rules_of(directory)
    kind = check_fixed_model(model, directory, rules, env)
    if kind is ModelKind.SCRIPT:
        store_code(directory, [model.removeprefix(SCRIPT)])
    elif kind is ModelKind.STORED:
        model = import_model(directory, name, model)
    if token_file is not None and kind is not ModelKind.SERVED:
        raise UsageError(f"{model} needs no token.", "Leave --token-file out; it is for http://HOST:PORT.")
    token = "" if token_file is None else str(token_file.expanduser().absolute())
    read_token(token or None)  # raises if it cannot be read
    if token:
        trusts.allow_token(model, token)
    event = PlayerAdded(Player(name, PlayerRole.FIXED, model, rating=rating, token_file=token))
    _submit(directory, [event], f"{name} is a player of the league")
    if token:
        say(
            "the token is sent by `ludus league run --trust`, or if the file of the league names this address with this token_file"
        )


def _rules_of(directory: Path) -> tuple[str, list[str] | None]:
    """The environment of the league and its scripts; None: unknown."""
    from ludus.league.runtime.league_file import LEAGUE_FILE, find_rules, read_league

    if not (directory / LEAGUE_FILE).is_file():
        return "", None
    config = read_league(directory / LEAGUE_FILE)
    return config.env, find_rules(config)


def retire(
    directory: LeagueDirectory,
    player: Annotated[str, typer.Argument(metavar="PLAYER", help="Player that gets no new matches; its results stay.")],
) -> None:
    """Retire a player: it gets no new matches, its results and rating stay."""
    from ludus.league.events import PlayerRetired
    from ludus.league.journal import read_state

    found = _find_player(read_state(directory), player)
    if found.retired:
        say(f"{player} is retired already")
        return
    _submit(directory, [PlayerRetired(player)], f"{player} is retired")


def export(
    directory: LeagueDirectory,
    player: Annotated[str, typer.Argument(metavar="PLAYER", help="Player to export.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Directory or .onnx file to write.")],
    quantize: Annotated[str | None, typer.Option(help="Quantization: int8 is smaller, and faster for large networks.")] = None,
    trust: Annotated[bool, trust_option()] = False,
    as_json: AsJson = False,
) -> None:
    """Export the policy of a player to ONNX, with a report that compares it with the original."""
    from ludus.cli.serving.export import show_export
    from ludus.experiments.export_run import export_policy
    from ludus.experiments.runs.remote_runs import directory_of
    from ludus.league.journal import read_state
    from ludus.models.policy import Policy
    from ludus.tournament.contestants import TrainedContestant, contestant

    if quantize not in (None, "int8"):
        raise UsageError(f"--quantize {quantize} is not known.", "Use int8, or leave it out for float32.")
    model = _model_of(directory, _find_player(read_state(directory), player))
    file = out if out.suffix == ".onnx" and not out.is_dir() else out / f"{player}.onnx"
    if model.endswith(".onnx"):
        _copy_export(Path(model), file)
        return
    found = contestant(model)
    if not isinstance(found, TrainedContestant) or not isinstance(found.policy, Policy):
        raise UsageError(f"{player} is {model}, which has no policy to export.", "Choose a player with a checkpoint.")
    where = directory_of(found.where)
    run = where.parents[2] if where.suffix == ".safetensors" else where.parents[1]
    name = where.parent.name if where.suffix == ".safetensors" else player
    experiment = {"env": found.env, "config": found.settings}
    exported = export_policy(found.policy, run, experiment, name, found.version, int8=quantize == "int8", out=file)
    show_export(exported, as_json)


def _copy_export(source: Path, file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, file)
    report = source.with_suffix(".report.json")
    if report.is_file():
        shutil.copyfile(report, file.with_suffix(".report.json"))
    say(f"model   {file}")


def _find_player(state: LeagueState, name: str) -> Player:
    from ludus.core.plugins import did_you_mean

    if name not in state.players:
        raise UsageError(f"The league has no player {name!r}.", did_you_mean(name, list(state.players)))
    return state.players[name]


def _model_of(directory: Path, player: Player) -> str:
    """The player's model as a contestant of a battle; paths in a league are relative to its directory. Raises UsageError."""
    model = player.model
    if not model:
        raise UsageError(f"The player {player.name!r} has no model yet.", "It gets one with its first checkpoint.")
    return str(directory / model) if (directory / model.partition("@")[0]).exists() else model


def _submit(directory: Path, events: Sequence[LeagueEvent], done: str, *, quiet: bool = False) -> None:
    """Change the league, or leave the change to its coordinator. Raises UsageError if the league refuses it."""
    from ludus.league.spool import submit_events

    refused = submit_events(directory, events)
    if refused:
        raise UsageError(refused[0].reason, "`ludus league status` lists the players.")
    pending = "" if refused is not None else " as soon as the running coordinator has read the change"
    say(f"{done}{pending}", to_stderr=quiet)
