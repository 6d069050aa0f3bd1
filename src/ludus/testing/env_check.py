"""Check of an environment for your tests; `ludus check-env` makes the same checks in a process of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ludus.core import trust
from ludus.core.formatting import pluralize
from ludus.envs.env_check.findings import EnvReport
from ludus.envs.env_check.session import CheckRequest
from ludus.envs.env_check.stages import check_in_process
from ludus.envs.registry import EnvLike, env_name
from ludus.errors import EnvironmentFault


def check_env(
    env: EnvLike,
    env_config: Mapping[str, Any] | None = None,
    *,
    strict: bool = False,
    steps: int = 2_000,
    seconds: float = 10.0,
    **settings: Any,
) -> EnvReport:
    """Play an environment at random and return what was found. Raises EnvironmentFault with all mistakes; `strict`: with warnings too.

    `env`: a name, a class, or a function that makes it. `steps`, `seconds`: limits of random play. `settings`: `preprocess`,
    `wrappers` and `display` as in `config:`, `seed`.

    def test_the_environment_can_be_trained():
        check_env("my_game:make", {"level": 3})
    """
    name = env_name(env)
    trust.allow(name)
    report = check_in_process(CheckRequest(name, dict(env_config or {}), steps=steps, seconds=seconds, **settings))
    levels = ("mistake", "warning") if strict else ("mistake",)
    wrong = [finding for finding in report.findings if finding.check.level in levels]
    if wrong:
        found = "\n".join(f"{finding.check.rule}: {finding.seen}. {finding.check.remedy}" for finding in wrong)
        raise EnvironmentFault(f"{name} has {pluralize(len(wrong), 'fault')}:\n{found}")
    return report
