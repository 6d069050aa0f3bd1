"""The `track:` section: trackers that receive metrics in addition to metrics.jsonl. Credentials are never part of a config."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from ludus.config.section import ConfigSection
from ludus.errors import ConfigError


def _expand_switch(value: Any) -> Any:
    """Replace true by a section of defaults and false by None."""
    return ({} if value else None) if isinstance(value, bool) else value


_PASSWORD = re.compile(r"//[^/@]*:[^/@]*@")


def _reject_password(uri: str | None) -> str | None:
    if uri is not None and _PASSWORD.search(uri):  # not a ValueError: pydantic's message would show the value
        raise ConfigError(
            "track.mlflow.tracking_uri contains a password, and configs are saved with their runs.",
            "Give it as MLFLOW_TRACKING_URI, or MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, in the environment.",
        )
    return uri


class WandbConfig(ConfigSection):
    """The `track.wandb:` section. The API key comes from `wandb login` or WANDB_API_KEY."""

    project: str = Field("ludus", min_length=1, description="Project in Weights & Biases.")
    entity: str | None = Field(None, description="User or team; null = default of the API key.")
    mode: Literal["online", "offline", "disabled"] | None = Field(
        None, description="offline writes files for `wandb sync`; null = WANDB_MODE, else online with a key and offline without."
    )
    group: str | None = Field(None, description="Group of the run; null = the experiment's name.")
    tags: list[str] = Field(default_factory=list, description="Tags of the run.")

    @model_validator(mode="before")
    @classmethod
    def _reject_key(cls, data: Any) -> Any:
        for key in ("api_key", "key") if isinstance(data, Mapping) else ():
            if key in data:  # not a ValueError: pydantic's message would show the value
                raise ConfigError(
                    f"track.wandb.{key}: configs are saved with their runs and must not contain an API key.",
                    "Run `wandb login`, or set WANDB_API_KEY in the environment.",
                )
        return data


class MlflowConfig(ConfigSection):
    """The `track.mlflow:` section."""

    tracking_uri: Annotated[str | None, AfterValidator(_reject_password)] = Field(
        None, description="Tracking server; null = MLFLOW_TRACKING_URI, else mlflow.db next to the runs of the experiment."
    )
    experiment: str | None = Field(None, description="Experiment in MLflow; null = the name of the experiment.")
    tags: dict[str, str] = Field(default_factory=dict, description="Additional tags of the run.")


class TrackConfig(ConfigSection):
    """The `track:` section."""

    tensorboard: Literal[True] = Field(True, description="Always on: `tensorboard --logdir runs`.")
    csv: bool = Field(False, description="Also write metrics.csv.")
    wandb: Annotated[WandbConfig | None, BeforeValidator(_expand_switch)] = Field(
        None, description="Weights & Biases: true, or its settings."
    )
    mlflow: Annotated[MlflowConfig | None, BeforeValidator(_expand_switch)] = Field(
        None, description="MLflow: true, or its settings."
    )
