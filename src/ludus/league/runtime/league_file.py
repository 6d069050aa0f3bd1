"""The file of a league (`league.yaml`): its schema, and reading it with all errors at once, each with its line."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, model_validator

from ludus.config.overrides import remove_spellings
from ludus.config.problem import ConfigErrors, ConfigProblem
from ludus.config.schema import EXTERNAL, GAMECORE, ExternalConfig, PreprocessConfig
from ludus.config.section import ConfigSection, ExperimentName
from ludus.config.validation import parse_section
from ludus.core import trust
from ludus.envs.vector_env import has_opponent_rows, script_names
from ludus.errors import ConfigError, EnvironmentFault, LudusError, UsageError
from ludus.experiments.resolve import ResolvedExperiment, resolve
from ludus.experiments.validation import validate
from ludus.game_theory.meta_solvers import META_SOLVERS
from ludus.io.yaml_documents import key_lines, parse_yaml, read_text
from ludus.league.matchmaking import PSRO, SCHEMES, WEIGHTINGS, MatchmakingSettings
from ludus.league.players import PlayerRole
from ludus.league.ratings import ELO_K
from ludus.league.runtime.arena_evaluation import is_arena
from ludus.league.runtime.gamecore_evaluation import is_arena_game
from ludus.league.runtime.player_models import check_fixed_model, check_player_name
from ludus.league.settings import LeagueSettings, SnapshotRule
from ludus.protocol.spec import read_token
from ludus.sampling.league_policies import ADDRESS, ModelKind, import_copies, kind_of_model, make_importable

LEAGUE_FILE: Final = "league.yaml"
PLAYERS: Final = "players"
_MAX_BYTES: Final = 1 << 20
_GENERATION_STEP: Final = 104_729
_SEEDS: Final = 1 << 30
_RESET: Final[Mapping[PlayerRole, float]] = {
    PlayerRole.MAIN: 0.0,
    PlayerRole.MAIN_EXPLOITER: 1.0,
    PlayerRole.LEAGUE_EXPLOITER: 0.25,
}
_KEPT_CHECKPOINTS: Final = 3
_ARENA: Final = "ludus/Arena-1v1-v0"
_FEW_ROWS: Final = 12
"""Of an environment that is made to find out whether it has opponents."""


def _one_of(names: Iterable[str]) -> AfterValidator:
    known = list(names)

    def check(name: str) -> str:
        if name not in known:
            raise ValueError(f"it is one of {', '.join(known)}")
        return name

    return AfterValidator(check)


Probability = Annotated[float, Field(ge=0, le=1)]


class PlayerSection(ConfigSection):
    """One player of the league."""

    role: Literal["main", "main_exploiter", "league_exploiter", "fixed"] = Field(
        "main",
        description="main trains against all others; main_exploiter against the main players; league_exploiter against all snapshots; "
        "fixed never changes.",
    )
    model: str | None = Field(
        None,
        min_length=1,
        description="Fixed player: rule:random, another script of the environment (in the Arena rule:easy, rule:medium, rule:hard …, "
        "in a gamecore game rule and rule:NAME), script:module:function, a run, RUN/best, RUN@VERSION, a checkpoint, or the address of a served agent (http://HOST:PORT). Training player: run or checkpoint whose weights it starts with, also after a reset; null = new weights.",
    )
    token_file: str | None = Field(None, min_length=1, description="File with the token of a served agent.")
    config: dict[str, Any] = Field(default_factory=dict, description="Keys of `config:` that differ for this player.")
    share: float = Field(
        1.0,
        gt=0,
        allow_inf_nan=False,
        description="Training of this player relative to that of the others: the player with the smallest steps / share has the next turn.",
    )
    rating: float | None = Field(
        None,
        allow_inf_nan=False,
        description="Fixed rating of a player to which the others are compared (Elo); null = rated by its results.",
    )

    @property
    def token_path(self) -> str:
        """The token file as the league stores it; empty: none."""
        return "" if self.token_file is None else str(Path(self.token_file).expanduser().absolute())

    @model_validator(mode="after")
    def _check_role(self) -> PlayerSection:
        if self.role == "fixed" and self.model is None:
            raise ValueError(
                "a fixed player needs a model: rule:random, script:module:function, a run, a checkpoint or an address"
            )
        unused = [key for key in ("config", "share") if key in self.model_fields_set]
        if self.role == "fixed" and unused:
            raise ValueError(f"a fixed player does not train: leave its {' and '.join(unused)} out")
        served = (self.model or "").startswith(ADDRESS)
        if served and self.role != "fixed":
            raise ValueError(
                "only a fixed player can be served; a training player starts with the weights of a run or a checkpoint"
            )
        if served and "@" in urlsplit(self.model or "").netloc:
            raise ValueError("an address has no user or password: write the token to a file and name it in token_file")
        if self.token_file is not None and not served:
            raise ValueError("token_file is for a model that is served: http://HOST:PORT")
        return self


class MatchmakingSection(ConfigSection):
    """How the opponents of training players are chosen."""

    scheme: Annotated[str, _one_of(SCHEMES)] = Field(
        "league",
        description="league = by role, as in AlphaStar; self_play; fictitious = all own snapshots equally; past_quality = itself and "
        "snapshots by quality score, as in OpenAI Five; round_robin; pfsp = all snapshots by PFSP; psro = the population by its "
        "meta-strategy.",
    )
    weighting: Annotated[str, _one_of(WEIGHTINGS)] = Field(
        "squared",
        description="PFSP weight by win rate x: squared (1−x)², variance x(1−x), linear 1−x, linear_capped min(½, 1−x).",
    )
    main_pfsp: Probability = Field(0.5, description="league: share of a main player's matches against all snapshots by PFSP.")
    main_verification: Probability = Field(
        0.15,
        description="league: share against exploiter snapshots that beat it and own snapshots that it no longer beats.",
    )
    main_fixed: Probability = Field(
        0.0, description="league: share of a main player's matches against the fixed players alone, by PFSP."
    )
    too_hard: Probability = Field(
        0.3, description="league: win rate against another main player below which its snapshots are played instead."
    )
    exploiter_too_hard: Probability = Field(0.1, description="league: the same threshold of a main exploiter.")
    forgotten: Probability = Field(0.7, description="league: win rate below which an own snapshot counts as no longer beaten.")
    latest: Probability = Field(0.8, description="past_quality: share of matches against itself.")
    meta_solver: Annotated[str, _one_of(META_SOLVERS)] = Field(
        "nash", description="psro: meta-strategy of the population: uniform, nash (linear programming), prd or alpha_rank."
    )

    @model_validator(mode="after")
    def _check_shares(self) -> MatchmakingSection:
        shares = self.main_pfsp + self.main_verification + self.main_fixed
        if shares > 1:
            raise ValueError(f"main_pfsp, main_verification and main_fixed add up to {shares:g}, more than 1")
        return self


class SnapshotSection(ConfigSection):
    """When a training player is copied to a historical one."""

    min_steps: int = Field(100_000, ge=1, description="Minimum environment steps since its last snapshot.")
    max_steps: int | None = Field(
        None, ge=1, description="Steps after which a snapshot is taken in any case; null = twice min_steps."
    )
    win_rate: Probability = Field(0.7, description="Before max_steps: minimum win rate against each opponent.")
    reset: Probability | None = Field(
        None,
        description="Probability that the player then starts again from its initial weights; null = 0 for main, 1 for main_exploiter, "
        "0.25 for league_exploiter.",
    )

    @model_validator(mode="after")
    def _check_steps(self) -> SnapshotSection:
        if self.max_steps is not None and self.max_steps < self.min_steps:
            raise ValueError(f"max_steps is {self.max_steps}, less than min_steps {self.min_steps}")
        return self

    def to_rule(self, role: PlayerRole) -> SnapshotRule:
        reset = _RESET[role] if self.reset is None else self.reset
        return SnapshotRule(self.min_steps, self.max_steps or 2 * self.min_steps, self.win_rate, reset)


class SnapshotsSection(ConfigSection):
    """Snapshot rules by role."""

    main: SnapshotSection = Field(default_factory=SnapshotSection, description="Of main players.")
    main_exploiter: SnapshotSection = Field(default_factory=SnapshotSection, description="Of main exploiters.")
    league_exploiter: SnapshotSection = Field(default_factory=SnapshotSection, description="Of league exploiters.")


class LeagueStopSection(ConfigSection):
    """When the league ends; the first condition that is reached."""

    timesteps: int | None = Field(None, ge=1, description="Environment steps of all players together.")
    time_s: float | None = Field(None, gt=0, description="Seconds since `ludus league run` started.")
    snapshots: int | None = Field(None, ge=1, description="Number of snapshots.")


class LeagueEvaluationSection(ConfigSection):
    """Matches between players that do not learn, to compare them."""

    matches: int = Field(100, ge=1, le=1_000_000, description="Minimum number of matches of every compared pair.")
    pairs: Literal["all", "fixed", "none"] | None = Field(
        None,
        description="all = all pairs of snapshots and fixed players; fixed = snapshots against fixed players; none; null = all with psro, "
        "which needs them, else none.",
    )


class LeagueConfig(ConfigSection):
    """A league."""

    name: ExperimentName = Field("league", description="Name of the league, the directory below leagues/.")
    env: str = Field(
        description="Environment with two sides: openspiel/leduc_poker, pettingzoo/…, ludus/Arena-1v1-v0, module:function; gamecore or "
        "external for games that are programs of their own."
    )
    env_config: dict[str, Any] = Field(default_factory=dict, description="Keyword arguments of the environment's constructor.")
    run: str = Field("PPO", description="Algorithm of the training players, or module:Class.")
    config: dict[str, Any] = Field(default_factory=dict, description="Settings of the algorithm, as in an experiment file.")
    players: dict[Annotated[str, AfterValidator(check_player_name)], PlayerSection] = Field(
        min_length=1, description="Name → player."
    )
    matchmaking: MatchmakingSection = Field(default_factory=MatchmakingSection, description="Choice of opponents.")
    snapshots: SnapshotsSection = Field(default_factory=SnapshotsSection, description="Snapshot rules by role.")
    evaluation: LeagueEvaluationSection = Field(
        default_factory=LeagueEvaluationSection, description="Matches between players that do not learn."
    )
    stop: LeagueStopSection = Field(default_factory=LeagueStopSection, description="When the league ends; empty = never.")
    turn_steps: int = Field(50_000, ge=1, description="Environment steps that a player trains before the next one has its turn.")
    parallel: int = Field(
        1, ge=0, description="Players that train at once on this machine; 0 = only `ludus league learner` trains."
    )
    checkpoint_time_s: float = Field(
        60.0, gt=0, description="Seconds between checkpoints of a player that trains; it also saves one at the end of its turn."
    )
    max_failures: int = Field(
        5, ge=0, description="Most failures of a player's learner without a new checkpoint; then the player is quarantined."
    )
    decay: float = Field(0.99, gt=0, le=1, description="Discount of older results of a pair per new result.")
    elo_k: float = Field(ELO_K, gt=0, description="K-factor of Elo ratings.")
    rating_window: int = Field(400, ge=1, description="Latest results of a training player that count for its rating.")
    seed: int = Field(0, ge=0, lt=_SEEDS, description="Random seed of players and league.")

    @model_validator(mode="after")
    def _check_learners(self) -> LeagueConfig:
        if not self.learners():
            raise ValueError("no player of the league trains: give one the role main")
        return self

    def learners(self) -> list[str]:
        return [name for name, player in self.players.items() if PlayerRole(player.role).learns]

    def shares(self) -> dict[str, float]:
        """Of the training players."""
        return {name: self.players[name].share for name in self.learners()}

    def settings(self) -> LeagueSettings:
        rules = {role: getattr(self.snapshots, role.value).to_rule(role) for role in _RESET}
        matchmaking = MatchmakingSettings(**self.matchmaking.model_dump())
        return LeagueSettings(matchmaking, rules, self.decay, self.elo_k, self.rating_window, seed=self.seed)

    @property
    def all_env_config(self) -> dict[str, Any]:
        """Keywords of the environments of all players."""
        return {**self.env_config, **(self.config.get("env_config") or {})}

    @property
    def one_script_per_match(self) -> bool:
        """Whether two scripts of the game cannot play against each other: a gamecore server runs one in a match."""
        return self.env == GAMECORE and not is_arena_game(self.all_env_config)

    @property
    def evaluated_pairs(self) -> Literal["all", "fixed", "none"]:
        return self.evaluation.pairs or ("all" if self.matchmaking.scheme == PSRO else "none")


def read_league(path: Path) -> LeagueConfig:
    """Read the file of a league. Raises ConfigError with all problems of the file, each with its line."""
    text = read_text(path, _MAX_BYTES)
    data = parse_yaml(text, str(path))
    if not isinstance(data, Mapping):
        raise ConfigError(f"{path} does not hold a league.", "The layout is  env: …, config: {…}, players: {main: {role: main}}")
    try:
        return parse_section(LeagueConfig, {key: value for key, value in data.items() if not str(key).startswith(".")})
    except ConfigErrors as error:
        raise locate_problems(error, path, text) from error


def allow_tokens(config: LeagueConfig) -> None:
    """Let the tokens that the user names in the file of a league be sent to their addresses."""
    for player in config.players.values():
        if player.model is not None and player.token_path:
            trust.allow_token(player.model, player.token_path)


def read_stored_league(league: Path) -> LeagueConfig:
    """Read the file in the directory of a league, which is stored data, and make the code that it names importable.

    That code is on the import path, or else, with the consent of the user, in the copies of the league. Raises ConfigError, Untrusted.
    """
    config = read_league(league / LEAGUE_FILE)
    if trust.is_allowed(trust.EVERYTHING):
        import_copies(league)
    for name in (config.env, config.run):
        if ":" in name:
            make_importable(league, name)
    return config


def locate_problems(error: ConfigErrors, path: Path, text: str | None = None) -> ConfigErrors:
    """Add file and line to every problem, in the order of the lines."""
    lines = key_lines(read_text(path, _MAX_BYTES) if text is None else text)

    def line_of(problem: ConfigProblem) -> int:
        keys = tuple(problem.path.split(".")) if problem.path else ()
        return next((lines[keys[:n]] for n in range(len(keys), 0, -1) if keys[:n] in lines), 0)

    located = sorted((line_of(problem), problem) for problem in error.problems)
    return ConfigErrors(
        [ConfigProblem(f"{path}:{line}: {one}" if line else f"{path}: {one}", one.path) for line, one in located], error.hint
    )


# -- experiments of players ------------------------------------------------------------------------------------------------------


def player_experiment(config: LeagueConfig, player: str, league: Path, generation: int = 0) -> dict[str, Any]:
    """The experiment that trains a player, without stop conditions."""
    own = config.players[player].config
    settings = _merge(config.config, own)
    if config.env_config:
        settings["env_config"] = {**config.env_config, **(settings.get("env_config") or {})}
    given = settings.get("self_play") or {}
    if isinstance(given, Mapping):  # else its validation reports it
        settings["self_play"] = {**given, "opponents": "league", "league": str(league.absolute()), "player": player}
    seed = settings.get("seed", config.seed)
    if isinstance(seed, int):
        of_player = 0 if "seed" in own else zlib.crc32(player.encode())  # independent of its position in the file
        settings["seed"] = (seed + of_player + _GENERATION_STEP * generation) % _SEEDS
    settings.setdefault("evaluation_duration", 0)
    checkpoints = {"checkpoint_time_s": config.checkpoint_time_s, "keep_checkpoints_num": _KEPT_CHECKPOINTS}
    return {"name": player, "env": config.env, "run": config.run, **checkpoints, "config": settings}


def _merge(shared: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """The shared keys, with own ones in their place; sections are merged key by key."""
    out = dict(shared)
    merged = {
        key: {**out[key], **value} if isinstance(value, Mapping) and isinstance(out.get(key), Mapping) else value
        for key, value in own.items()
    }
    remove_spellings(out, "config", own)
    return {**out, **merged}


def check_players(config: LeagueConfig, league: Path) -> dict[str, ResolvedExperiment]:
    """The resolved experiments of all training players. Raises ConfigErrors with all problems, by the keys of the league's file.

    Imports the scripts of fixed players. Stored models are checked when they are copied into the league.
    """
    resolved: dict[str, ResolvedExperiment] = {}
    problems: dict[ConfigProblem, None] = dict.fromkeys(_check_models(config, league))
    for name in config.learners():
        data = player_experiment(config, name, league)
        found = _check_env(config) or _check_ports(config, league) or validate.validate_experiment(data)
        if not found:
            try:
                resolved[name] = resolve(data)
            except ConfigErrors as error:
                found = error.problems
            except (UsageError, EnvironmentFault) as error:
                found = [ConfigProblem(str(error), "env")]
        problems |= dict.fromkeys(_of_league(one, name, config.players[name].config) for one in found)
    if problems:
        raise ConfigErrors(list(problems))
    return resolved


def _check_models(config: LeagueConfig, league: Path) -> list[ConfigProblem]:
    problems, rules = [], find_rules(config)
    for name, player in config.players.items():
        problems += _check_token_file(name, player)
        if player.model is None:
            continue
        try:
            if player.role == "fixed":
                check_fixed_model(player.model, league, rules, config.env)
            elif kind_of_model(player.model) is not ModelKind.STORED:
                raise UsageError("A player that trains starts with the weights of a run or checkpoint.")
        except UsageError as error:
            problems.append(model_problem(name, player.model, error))
    return problems


def model_problem(player: str, model: str, error: LudusError) -> ConfigProblem:
    """The problem with the model of a player in the file of the league."""
    path = f"{PLAYERS}.{player}.model"
    return ConfigProblem(f"{path} is {model}: {error}", path)


def find_rules(config: LeagueConfig) -> list[str] | None:
    """Scripts that the environment of the league has; None: not known, or it cannot be made, which its validation reports."""
    try:
        if config.one_script_per_match:
            return None
        arena = [*script_names(_ARENA), ""] if config.env == GAMECORE else []
        own = () if config.env == EXTERNAL or _has_several_agents(config) else script_names(config.env)
        return ["random", *own, *arena]
    except (UsageError, EnvironmentFault):
        return None


def _has_several_agents(config: LeagueConfig) -> bool:
    return validate.is_multi_agent(config.env, {**config.config, "env_config": config.env_config})


def _check_env(config: LeagueConfig) -> list[ConfigProblem]:
    """Problems of the environment: it needs two sides, and matches for the evaluation."""
    rows = config.config.get("num_envs_per_worker")
    num = rows if isinstance(rows, int) and rows > 0 else _FEW_ROWS
    try:
        two_sides = config.env == EXTERNAL or _has_several_agents(config)
        evaluates = two_sides and config.env != EXTERNAL
        if not two_sides:
            two_sides = has_opponent_rows(config.env, num, config.env_config, PreprocessConfig(), ())
            evaluates = config.env == GAMECORE or is_arena(config.env)
    except (UsageError, EnvironmentFault):  # validation of the experiment reports it
        return []
    if not two_sides:
        sentence = f"env is {config.env}, which has one agent. A league needs an environment with two sides."
        return [ConfigProblem(sentence, "env")]
    if config.evaluated_pairs != "none" and not evaluates:
        sentence = f"evaluation.pairs is {config.evaluated_pairs}; {config.env} has no matches between players that do not learn."
        return [ConfigProblem(sentence, "evaluation.pairs")]
    return []


def external_ports(config: LeagueConfig, league: Path) -> dict[str, Any]:
    """Training player → the port that games connect to while it trains; empty unless games call the learners."""
    if config.env != EXTERNAL:
        return {}
    default = ExternalConfig.model_fields["port"].default
    given = {name: player_experiment(config, name, league)["config"].get("env_config") or {} for name in config.learners()}
    return {name: env_config.get("port", default) for name, env_config in given.items()}


def _check_ports(config: LeagueConfig, league: Path) -> list[ConfigProblem]:
    """Games find their port in the file, and players that train at the same time need different ones."""
    player_of: dict[Any, str] = {}
    for name, port in external_ports(config, league).items():
        if port == 0:
            return [ConfigProblem("env_config.port is 0: games of a league need a port that stays the same.", "env_config.port")]
        if config.parallel > 1 and port in player_of:
            sentence = (
                f"parallel is {config.parallel}, and {player_of[port]} and {name} listen on the same port {port}. "
                f"Give each its own, {PLAYERS}.{name}.config: {{env_config: {{port: …}}}}, or set parallel to 1."
            )
            return [ConfigProblem(sentence, "parallel")]
        player_of[port] = name
    return []


def _check_token_file(name: str, player: PlayerSection) -> list[ConfigProblem]:
    path = f"{PLAYERS}.{name}.token_file"
    try:
        read_token(player.token_file)
    except UsageError as error:
        return [ConfigProblem(f"{path} is {player.token_file}: {error}", path)]
    return []


def _of_league(problem: ConfigProblem, player: str, own: Mapping[str, Any]) -> ConfigProblem:
    """Translate a problem of a player's experiment to the keys of the league's file."""
    section, _, key = problem.path.partition(".")
    if section != "config" or key.partition(".")[0] not in own:
        return problem
    path = f"{PLAYERS}.{player}.{problem.path}"
    return ConfigProblem(problem.replace(problem.path, path), path)
