"""Sections about the environment: preprocessing, self-play, several agents, evaluation, and games that connect over HTTP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from ludus.config.section import ConfigSection, ModelName, PositiveInt

_OTHER_SETTINGS = {
    **dict.fromkeys(
        ("normalize", "normalise", "normalize_observation", "observation_filter", "mean_std"),
        "running mean and deviation of observations are config.observation_filter: MeanStdFilter",
    ),
    **dict.fromkeys(("normalize_reward", "normalise_reward"), "it is config.normalize_reward"),
    **dict.fromkeys(("float32", "dtype"), "observations of floating-point numbers always become float32"),
    **dict.fromkeys(
        ("repeat_action_probability", "full_action_space", "fire_reset"), "it is a keyword of the game: config.env_config"
    ),
}


class SelfPlayConfig(ConfigSection):
    """The `self_play:` section: who plays the other side of a game with two sides. Only the steps of the learning side train."""

    opponents: Literal["latest", "past", "mix", "league", "fixed"] | None = Field(
        None,
        description="latest = the newest version plays the other side; past = snapshots do; mix = both, by `latest`; league = the players "
        "of `league`; fixed = the run or checkpoint in `checkpoint` does, unchanged. null = all agents or sessions learn; in the Arena and gamecore games `env_config.opponent` decides.",
    )
    league: str | None = Field(None, description="With league: directory of the league; `ludus league run` sets it.")
    player: str | None = Field(None, description="With league: name of the player that this run trains.")
    checkpoint: str | None = Field(None, description="With fixed: the run or checkpoint that plays the other side.")
    latest: float = Field(0.8, ge=0, le=1, description="With mix: share of matches against the newest version.")
    every: int = Field(
        20, ge=1, alias="snapshot_every", description="Snapshot the policy as an opponent every N versions (`snapshot_every`)."
    )
    keep: int = Field(
        50, ge=1, alias="window", description="Number of newest snapshots to keep; all are equally likely opponents (`window`)."
    )
    period: int = Field(2_000, ge=1, description="Environment steps after which a worker loads another snapshot for new matches.")
    swap_sides: bool = Field(True, description="Draw the side that learns for every match; false = the first side learns.")
    sides: list[list[str]] | None = Field(
        None,
        description="The two sides as lists of agents, or of seats or sides of an external game; null = two agents, or seats, play "
        "against each other.",
    )

    @model_validator(mode="after")
    def _check_league(self) -> SelfPlayConfig:
        if self.opponents == "league" and not (self.league and self.player):
            raise ValueError("opponents: league needs the directory of the league and the name of the player")
        if self.opponents != "league" and (self.league or self.player):
            raise ValueError("league and player are for opponents: league")
        return self

    @model_validator(mode="after")
    def _check_checkpoint(self) -> SelfPlayConfig:
        if (self.opponents == "fixed") != (self.checkpoint is not None):
            raise ValueError(
                "opponents: fixed needs checkpoint, the run or checkpoint that plays the other side, and nothing else does"
            )
        return self


class PreprocessConfig(ConfigSection):
    """The `preprocess:` section: wrappers around the environment; null = none, or the standard ones of Atari and ViZDoom.

    Evaluations do not clip rewards, and play complete games.
    """

    standard: bool | None = Field(
        None,
        description="Use the standard preprocessing of the environment family, which other keys override. Atari: 84×84, grey, 4 stacked, every 4th frame, up to 30 no-ops, clipped rewards; ViZDoom: 72×128, every 4th frame. null = if there is one; false = none.",
    )
    frame_skip: int | None = Field(None, ge=1, description="Number of times to repeat each action; rewards are summed.")
    grey: bool | None = Field(None, alias="grayscale", description="Convert images to greyscale.")
    resize: tuple[PositiveInt, PositiveInt] | None = Field(None, description="Image size: [height, width].")
    stack: PositiveInt | None = Field(None, alias="framestack", description="Number of last observations to stack.")
    clip_reward: Literal["sign"] | bool | tuple[float, float] | None = Field(
        None, alias="clip_rewards", description="Clip rewards: sign (or true) = −1, 0 or 1; [lowest, highest]; false = no."
    )
    episodic_life: bool | None = Field(
        None,
        alias="terminal_on_life_loss",
        description="End an episode when a life is lost; the game continues with the next life.",
    )
    noop_max: int | None = Field(None, ge=0, description="Maximum number of no-op actions at the start of an episode.")
    max_episode_steps: int | None = Field(None, ge=1, alias="horizon", description="Truncate episodes after N steps.")
    scale: Annotated[float, Field(gt=0)] | bool | None = Field(
        None,
        description="Divisor of uint8 observations: null = 255 for images, the largest value for grids of small integers (printed at "
        "the start); false = no division; true = as null, and other bounded numbers are scaled to 0 … 1.",
    )
    flatten: bool | None = Field(None, description="Flatten the observation into one vector.")
    drop: list[Annotated[str, Field(min_length=1)]] | None = Field(
        None, description="Parts of a Dict observation to remove, such as [mission]; a nested part is written outer.inner."
    )
    agent_indicator: bool | None = Field(
        None,
        description="With several agents: add a one-hot mark of the agent to its observation, for one policy that plays agents with equal "
        "observations. A vector of floats gets one more number per agent; another observation gets the part `agent`.",
    )

    @model_validator(mode="before")
    @classmethod
    def _reject_other_settings(cls, data: Any) -> Any:
        for key in data if isinstance(data, Mapping) else ():
            if key in _OTHER_SETTINGS:
                raise ValueError(f"{key} does not belong here; {_OTHER_SETTINGS[key]}")
        return data

    @property
    def changes_environment(self) -> bool:
        """Whether the environment is wrapped; the divisor of uint8 observations is part of the network instead."""
        return self != PreprocessConfig(scale=None if self.scale is True else self.scale)

    @model_validator(mode="after")
    def _check_bounds(self) -> PreprocessConfig:
        if isinstance(self.clip_reward, tuple) and not self.clip_reward[0] < self.clip_reward[1]:
            raise ValueError(f"clip_reward is {list(self.clip_reward)}; the lowest comes first")
        return self


class MultiAgentConfig(ConfigSection):
    """The `multiagent:` section: which policy controls which agent."""

    policies: list[ModelName] | dict[ModelName, dict[str, Any] | None] | None = Field(
        None, description="Policy names, or name → keys of `config:` that differ for it; null = one policy for all agents."
    )
    policy_mapping: dict[str, str] | str | None = Field(
        None,
        description="Agent (or pattern such as red_*) → policy; one name for all; or module:function(agent) → policy. Evaluated once per agent before the run starts; exact names take precedence over patterns.",
    )
    policies_to_train: list[str] | None = Field(None, description="Policies that learn; the others only play. null = all.")
    centralized_value: bool = Field(
        False,
        description="Centralised value function: it sees the global state (state() of the environment, or all observations); the policy does not (MAPPO).",
    )
    count_steps_by: Literal["env_steps", "agent_steps"] = Field(
        "env_steps",
        description="What `timesteps` and `train_batch_size` count: environment steps (all agents together), or agent steps per policy.",
    )
    evaluation_opponents: str | None = Field(
        None,
        min_length=1,
        description="Opponents in evaluations. policies: the score is the sum over all agents; random: one agent plays against random "
        "opponents, and the score is its return, with its win rate; a run or checkpoint: its policies play the other agents; "
        "null = policies, but random in zero-sum environments.",
    )

    def names(self) -> list[str]:
        """Return the names of the listed policies."""
        return list(self.policies or ())

    def own_keys(self, policy: str) -> dict[str, Any]:
        """Return the keys of `config:` that differ for a policy."""
        return dict(self.policies.get(policy) or {}) if isinstance(self.policies, dict) else {}


class EvaluationConfig(ConfigSection):
    """The `evaluation_config:` section: how evaluations differ from training."""

    explore: bool = Field(False, description="Sample actions as in training; false = take the most probable one.")
    env_config: dict[str, Any] | None = Field(
        None, description="Environment keyword arguments that differ from training; null = none."
    )


EXTERNAL = "external"
"""Value of `env` for games that connect over HTTP."""


GAMECORE = "gamecore"
"""Value of `env` for matches that a gamecore server starts."""


class SeatConfig(ConfigSection):
    """One seat of a game that connects over HTTP. Spaces have the form of `GET /spec`."""

    observation_space: dict[str, Any] = Field(description="Observation space of the seat: {type: Box, shape: [4]} …")
    action_space: dict[str, Any] = Field(description="Action space of the seat: {type: Discrete, n: 2} …")
    model: ModelName = Field("model", description="Model that plays the seat; seats of one model have the same spaces.")


class ExternalConfig(ConfigSection):
    """The `env_config:` of `env: external`: the address to listen on, the spaces of each seat, and limits."""

    host: str = Field("127.0.0.1", description="Address to listen on; one beyond this machine requires a token.")
    port: int = Field(8000, ge=0, le=65535, description="Port to listen on; 0 = any free port.")
    token_file: str | None = Field(None, description="File with the token that games must send.")
    observation_space: dict[str, Any] | None = Field(None, description="Observation space of a game with one seat.")
    action_space: dict[str, Any] | None = Field(None, description="Action space of a game with one seat.")
    seats: dict[str, SeatConfig] | None = Field(None, description="For a game with several seats: name → spaces and model.")
    max_sessions: int = Field(20_000, ge=1, description="Maximum number of open sessions of one worker.")
    max_body_bytes: int = Field(8 << 20, ge=1, description="Maximum body size of a request.")
    tick_timeout_s: float = Field(30.0, gt=0, description="Time limit of a reply, in seconds.")
    silent_s: float = Field(60.0, gt=0, description="Seconds without a request after which a session is truncated.")
    game_command: list[str] | None = Field(
        None,
        min_length=1,
        description="Program and arguments of a game to start on this machine, and again when it ends; {url}, {port}, {number} and {seed} are "
        "replaced. null = games are started elsewhere.",
    )
    games: int = Field(1, ge=1, le=1000, description="How many of them run at once.")

    @model_validator(mode="after")
    def _check_seats(self) -> ExternalConfig:
        single = self.observation_space is not None and self.action_space is not None
        if bool(self.seats) == single or (self.seats and (self.observation_space or self.action_space)):
            raise ValueError("give observation_space and action_space, or seats with their own")
        return self

    def all_seats(self) -> dict[str, SeatConfig]:
        """Return the seats by name; a single seat has the name ''."""
        if self.seats:
            return dict(self.seats)
        return {"": SeatConfig(observation_space=self.observation_space or {}, action_space=self.action_space or {})}
