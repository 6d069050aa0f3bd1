"""A trained agent that knows the run it comes from, and so the environment it was trained on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ludus.core.types import DEFAULT_MODEL
from ludus.envs.registry import EnvLike, env_name
from ludus.errors import LudusError
from ludus.models.policy import Policy
from ludus.sampling.trained_agent import TrainedAgent

if TYPE_CHECKING:
    from ludus.experiments.export_run import Exported
    from ludus.sampling.episode_runner import Score


class RunAgent(TrainedAgent):
    """What `ludus.train` and `ludus.load` return: `act`, `evaluate`, `export`."""

    def __init__(self, policy: Policy, seed: int = 0, version: int = 0, *, run_dir: Path, model: str = DEFAULT_MODEL) -> None:
        super().__init__(policy, seed, version)
        self.run_dir, self.model = run_dir, model

    def experiment(self) -> dict[str, Any]:
        """The experiment of its run, as config.yaml holds it. Raises NotFound when the run is gone."""
        from ludus.experiments.runs.run_dir import Run

        return Run.open(self.run_dir).config()

    def evaluate(
        self,
        episodes: int = 100,
        *,
        env: EnvLike | None = None,
        env_config: Mapping[str, Any] | None = None,
        seed: int = 0,
        deterministic: bool = True,
        num_workers: int = 0,
    ) -> Score:
        """Play whole episodes: `.mean` with its 95 % interval `.low`, `.high`, and `.returns`, `.lengths`.

        `env`: another environment with the same spaces; without it the one of the run, with its wrappers and preprocessing.
        """
        from ludus.experiments.evaluation import rollout

        name = None if env is None else env_name(env)
        return rollout.evaluate(
            self, episodes, env=name, env_config=env_config, seed=seed, deterministic=deterministic, workers=num_workers
        )

    def export(
        self,
        out: str | Path | None = None,
        *,
        int8: bool = False,
        opset: int | None = None,
        observations: str | Path | None = None,
    ) -> Exported:
        """Write the policy as ONNX: `.file`, and the report of the comparison with this agent, `.report_file`.

        `out`: a directory or a file X.onnx; without it, exports/ of the run. `observations`: the steps.npz of a rollout to compare on.
        Raises LudusError when the exported policy does not act like this one: then nothing is written.
        """
        from ludus.experiments import export_run

        told = export_run.export_policy(
            self.policy, self.run_dir, self.experiment(), self.model, self.version,
            int8=int8, opset=opset, out=None if out is None else Path(out),
            observations=None if observations is None else Path(observations),
        )  # fmt: skip
        if told.file is None:
            raise LudusError(f"The exported policy does not act like the original: {told.report.reason}", "Nothing was written.")
        return told
