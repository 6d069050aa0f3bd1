"""The `env_config:` of `env: godot_rl`. Its keys are those of Godot RL Agents where that has them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from ludus.config.section import ConfigSection
from ludus.errors import ConfigError

EDITOR_PORT = 11008
"""Port to which a game connects that was started without `--port`, such as one of the editor."""

_SUFFIX = ".x86_64"
_RESERVED = ("port", "env_seed", "action_repeat", "speedup", "fixed-fps", "headless", "disable-render-loop")

ArgumentName = Annotated[str, Field(pattern=r"^[A-Za-z][\w.-]*$")]


class GodotSettings(ConfigSection):
    """Where the game is, and how it is started."""

    env_path: str | None = Field(None, description="Exported game; .x86_64 may be left out. null = wait for the editor.")
    port: int = Field(EDITOR_PORT, ge=1, le=65535, description="First port to try; in the editor mode the only one.")
    show_window: bool = Field(False, description="Start the game with its window.")
    seed: int = Field(0, ge=0, description="Seed of the first game; the others get the following numbers.")
    framerate: int | None = Field(None, ge=1, description="Frames per second of game time, whatever the time a frame takes.")
    action_repeat: int | None = Field(None, ge=1, description="Physics frames per action; null = as set in the game.")
    speedup: float | None = Field(None, gt=0, description="Factor of the speed of the physics; null = as set in the game.")
    timeout: float = Field(60.0, gt=0, description="Time limit in seconds of the connection, and of every reply.")
    arguments: dict[ArgumentName, str | int | float] = Field({}, description="Further arguments of the game: --name=value.")
    log_folder: str | None = Field(None, description="Directory for the output of the games; null = kept while they run.")
    done_agents: Literal["wait", "continue"] = Field(
        "wait",
        description="What an agent does whose episode is over: wait for the other agents, or continue with its next episode.",
    )

    @model_validator(mode="after")
    def _check_arguments(self) -> GodotSettings:
        taken = [name for name in self.arguments if name in _RESERVED]
        if taken:
            raise ValueError(f"arguments must not hold {', '.join(taken)}: there is a key for it")
        return self

    def program(self) -> Path | None:
        """The program to start; None in the editor mode. Raises ConfigError."""
        if self.env_path is None:
            return None
        given = Path(self.env_path).expanduser().absolute()
        for path in (given, given.with_name(given.name + _SUFFIX), given.with_suffix(_SUFFIX)):
            if path.is_file():
                if not os.access(path, os.X_OK):
                    raise ConfigError(f"config.env_config.env_path: {path} is not executable.", f"chmod +x {path}")
                return path
        found = shutil.which(self.env_path)
        if found is None:
            raise ConfigError(
                f"config.env_config.env_path: there is no game {given}.", "Name the program that the editor exports for Linux."
            )
        return Path(found)

    def command(self, program: Path, port: int, seed: int) -> list[str]:
        words = [str(program), f"--port={port}", f"--env_seed={seed}"]
        if not self.show_window:
            words += ["--disable-render-loop", "--headless"]
        if self.framerate is not None:
            words += ["--fixed-fps", str(self.framerate)]
        if self.action_repeat is not None:
            words.append(f"--action_repeat={self.action_repeat}")
        if self.speedup is not None:
            words.append(f"--speedup={self.speedup:g}")
        return words + [f"--{name}={value}" for name, value in self.arguments.items()]
