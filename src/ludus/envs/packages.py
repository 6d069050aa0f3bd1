"""Known packages with environments: their id patterns, how to install them, and the module that registers the ids."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Package:
    """A package outside Gymnasium with well-known environment ids."""

    pattern: str
    """Regular expression that matches the start of its ids."""
    install: str
    """Argument of pip install."""
    module: str
    """The module to import."""
    registers: bool = True
    """Whether importing the module registers ids with Gymnasium; if not, `advice` tells how to make an environment."""
    advice: str = ""


_OLD_GYM = "It registers its environments with the old gym package: write a function that returns a gymnasium.Env, and name it as env: module:function."

PACKAGES = (
    Package(r"(MiniGrid|BabyAI)-", "minigrid", "minigrid"),
    Package(r"(MiniWorld)-", "miniworld", "miniworld"),
    Package(
        r"(highway|merge|roundabout|parking|intersection|racetrack|exit|u-turn|two-way|lane-keeping)(-[\w-]+)?-v\d",
        "highway-env",
        "highway_env",
    ),
    Package(
        r"(Fetch(Reach|Push|Slide|PickAndPlace)|Hand(Reach|Manipulate)|AdroitHand|FrankaKitchen|(Point|Ant)Maze_)",
        "gymnasium-robotics",
        "gymnasium_robotics",
    ),
    Package(r"Panda(Reach|Push|Slide|PickAndPlace|Stack|Flip)", "panda-gym", "panda_gym"),
    Package(r"mo-[\w-]+-v\d", "mo-gymnasium", "mo_gymnasium"),
    Package(r"sumo-rl-", "sumo-rl", "sumo_rl"),
    Package(r"Safety(Point|Car|Doggo|Racecar|Ant|HalfCheetah|Hopper)", "safety-gymnasium", "safety_gymnasium"),
    Package(r"PyFlyt/", "PyFlyt", "PyFlyt.gym_envs"),
    Package(r"FlappyBird-", "flappy-bird-gymnasium", "flappy_bird_gymnasium"),
    Package(r"gym_pusht/", "gym-pusht", "gym_pusht"),
    Package(r"rware-", "rware", "rware"),
    Package(r"Foraging-", "lbforaging", "lbforaging"),
    Package(r"(stocks|forex)-v0", "gym-anytrading", "gym_anytrading"),
    Package(r"dm_control/", "'shimmy[dm-control]'", "shimmy"),
    Package(r"bsuite/", "'shimmy[bsuite]'", "shimmy"),
    Package(r"GymV(21|26)Environment-", "'shimmy[gym-v21]' or 'shimmy[gym-v26]'", "shimmy"),
    Package(r"MiniHack-", "minihack", "minihack"),
    Package(r"NetHack(Score|StaircasePet|Staircase|Oracle|Gold|Eat|Scout|Challenge)?-", "nle", "nle"),
    Package(r"Crafter(No)?Reward-", "crafter", "crafter", False, _OLD_GYM),
    Package(r"(procgen|Procgen)[-/]", "procgen", "procgen", False, _OLD_GYM),
    Package(r"SuperMarioBros", "gym-super-mario-bros", "gym_super_mario_bros", False, _OLD_GYM),
    Package(
        r"[\w-]+-(Genesis|Nes|Snes|Gameboy|GbColor|GbAdvance|Sms|GameGear|PCEngine|Saturn|32x|SCD|Atari2600)(-v\d+)?$",
        "stable-retro",
        "stable_retro",
        False,
        "Its games have no Gymnasium ids: write a function that returns stable_retro.make(game), and name it as env: module:function.",
    ),
)


def package_of_id(name: str) -> Package | None:
    """Return the known package of an id without a module."""
    return next((package for package in PACKAGES if re.match(package.pattern, name)), None)


def package_of_module(module: str) -> Package | None:
    """Return the known package that contains a module."""
    top = module.partition(".")[0]
    return next((package for package in PACKAGES if package.module.partition(".")[0] == top), None)
