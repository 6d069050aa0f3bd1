"""The `env_config:` of `env: unity`. Keys and defaults are those of ML-Agents, where it has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from ludus.config.section import ConfigSection
from ludus.config.validation import parse_section

BASE_PORT, EDITOR_PORT = 5005, 5004
_LARGEST_FLOAT32 = 3.4028234e38
_LARGEST_INT32 = (1 << 31) - 1

Float32 = Annotated[float, Field(ge=-_LARGEST_FLOAT32, le=_LARGEST_FLOAT32, allow_inf_nan=False)]
ParameterName = Annotated[str, Field(pattern=r"^[\x00-\x7f]+$")]
"""Side channels encode names as ASCII."""


class UniformParameters(ConfigSection):
    min_value: Float32
    max_value: Float32


class GaussianParameters(ConfigSection):
    mean: Float32
    st_dev: Float32 = Field(ge=0.0)


class MultirangeParameters(ConfigSection):
    intervals: list[tuple[Float32, Float32]] = Field(min_length=1)


class UniformSampler(ConfigSection):
    sampler_type: Literal["uniform"]
    sampler_parameters: UniformParameters


class GaussianSampler(ConfigSection):
    sampler_type: Literal["gaussian"]
    sampler_parameters: GaussianParameters


class MultirangeSampler(ConfigSection):
    sampler_type: Literal["multirangeuniform"]
    sampler_parameters: MultirangeParameters


Sampler = Annotated[UniformSampler | GaussianSampler | MultirangeSampler, Field(discriminator="sampler_type")]


class UnityConfig(ConfigSection):
    """`env_config:` of `env: unity`."""

    file_name: str | None = Field(
        None, min_length=1, description="Player: its path, also without .x86_64; null = press Play in the Unity editor."
    )
    worker_id: int = Field(0, ge=0, description="Offset from base_port; the next free port is used if that one is taken.")
    base_port: int | None = Field(None, ge=1, le=65535, description="First port; null = 5005 for a player, 5004 for the editor.")
    no_graphics: bool = Field(
        False, description="Start the player with -nographics -batchmode; false = it gets a screen, see display."
    )
    log_folder: str | None = Field(None, description="Folder for the logs of players, Player-N.log; null = a temporary file.")
    seed: int = Field(
        0, ge=-(1 << 30), lt=1 << 30, description="Seed of the first player; that of another port is higher by the offset."
    )
    timeout_wait: float = Field(60.0, gt=0.0, description="Longest wait for a message of the player, in seconds.")
    additional_args: list[str] = Field(default_factory=list, description="Further arguments of the player.")
    num_areas: int = Field(1, ge=1, le=_LARGEST_INT32, description="Training areas that the scene shall make of itself.")
    time_scale: Float32 = Field(20.0, gt=0.0, description="Speed of the game's time.")
    capture_frame_rate: int = Field(
        60, ge=0, le=_LARGEST_INT32, description="Frames per second of the game's time; 0 = real time."
    )
    target_frame_rate: int = Field(
        -1, ge=-1, le=_LARGEST_INT32, description="Frames per second that the game aims at; -1 = as many as possible."
    )
    quality_level: int = Field(5, ge=0, le=_LARGEST_INT32, description="Quality level of the project.")
    width: int = Field(84, ge=1, le=_LARGEST_INT32, description="Width of the window in pixels.")
    height: int = Field(84, ge=1, le=_LARGEST_INT32, description="Height of the window in pixels.")
    environment_parameters: dict[ParameterName, Float32 | Sampler] = Field(
        default_factory=dict, description="Parameter of the scene → number, or sampler_type with sampler_parameters."
    )
    side_channels: list[str | dict[str, dict[str, Any]]] = Field(
        default_factory=list, description="Classes of your own side channels, module:Class or {module:Class: {arguments}}."
    )
    teams: list[str] = Field(default_factory=list, description="Names of team 0, 1, … in the names of agents.")
    max_agents: int | dict[str, int] | None = Field(
        None,
        description="Most agents of a behaviour that are present at the same time, for all or by behaviour; null = those at the start.",
    )

    @model_validator(mode="after")
    def _check(self) -> UnityConfig:
        if self.file_name is None and self.worker_id:
            raise ValueError(f"worker_id is {self.worker_id}, and file_name null: there is one editor. Leave worker_id out")
        if len(set(self.teams)) < len(self.teams):
            raise ValueError(f"teams gives two teams the same name: {self.teams}")
        given = 1 if self.max_agents is None else self.max_agents
        sizes = given.values() if isinstance(given, dict) else [given]
        if any(size < 1 for size in sizes):
            raise ValueError(f"max_agents is {self.max_agents}; it takes numbers from 1 on")
        return self

    @property
    def first_port(self) -> int:
        base = self.base_port or (BASE_PORT if self.file_name else EDITOR_PORT)
        return base + self.worker_id


def parse_unity_config(data: Mapping[str, Any]) -> UnityConfig:
    """Raises ConfigErrors with all problems."""
    return parse_section(UnityConfig, data, "config.env_config")
