"""A trained agent with a reference to its run, and so to its environment."""

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
    from ludus.experiments.export_run import ExportResult
    from ludus.sampling.episode_runner import Score


class RunAgent(TrainedAgent):
    """What `ludus.train` and `ludus.load` return: `act`, `evaluate`, `export`."""

    def __init__(self, policy: Policy, seed: int = 0, version: int = 0, *, run_dir: Path, model: str = DEFAULT_MODEL) -> None:
        super().__init__(policy, seed, version)
        self.run_dir, self.model = run_dir, model

    def experiment(self) -> dict[str, Any]:
        """The experiment of its run from config.yaml. Raises NotFound if the run was deleted."""
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
        """Play complete episodes: `.mean` with its 95 % interval `.low`, `.high`, and `.returns`, `.lengths`.

        `env`: another environment with the same spaces; None: that of the run, with its wrappers and preprocessing.
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
        layout: str = "onnx",
        int8: bool = False,
        opset: int | None = None,
        observations: str | Path | None = None,
    ) -> ExportResult:
        """Write the policy as ONNX (`.file`) and the report of the comparison with this agent (`.report_file`).

        `out`: a directory or a file X.onnx; None: exports/ of the run. `layout`: onnx or ml-agents. `observations`: the steps.npz of a rollout to compare on.
        Raises LudusError if the exported policy acts differently; nothing is written then.
        """
        from ludus.experiments import export_run

        result = export_run.export_policy(
            self.policy, self.run_dir, self.experiment(), self.model, self.version,
            layout=layout, int8=int8, opset=opset, out=None if out is None else Path(out),
            observations=None if observations is None else Path(observations),
        )  # fmt: skip
        if result.file is None:
            raise LudusError(
                f"The exported policy does not act like the original: {result.report.reason}", "Nothing was written."
            )
        return result
