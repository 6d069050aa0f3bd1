"""`ludus demo`: train CartPole, plot the learning curve and record a video, in about a minute."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Annotated

import typer


def demo(
    local_dir: Annotated[Path, typer.Option(help="Directory of the run.")] = Path("runs"),
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0,
) -> None:
    """Train CartPole to a return of 475, plot its learning curve and record a video."""
    from ludus.cli.output import runnable, say

    say("Training CartPole-v1 with PPO until the mean return of 100 episodes is 475 …")
    from ludus.config.experiment_file import load_experiments
    from ludus.config.overrides import apply_override
    from ludus.envs.vector_env import make_one
    from ludus.experiments import runner
    from ludus.experiments.control.training_display import TrainingDisplay
    from ludus.experiments.evaluation import rollout
    from ludus.experiments.runs.plot import plot

    with resources.as_file(resources.files("ludus.experiments.presets") / "cartpole-fast.yaml") as preset:
        ((name, data),) = load_experiments(preset).items()
    apply_override(data, f"config.seed={seed}")
    with TrainingDisplay() as display:
        result = runner.train({"name": name, **data}, local_dir=local_dir, sinks=[display])
    if result.stopped_by.startswith("interrupted"):
        say(f"interrupted; continue with {runnable('ludus')} train --resume {result.run_dir}")
        raise typer.Exit(130)
    curve = plot([result.run_dir], result.run_dir / "plots" / "learning-curve.png")
    env = make_one("CartPole-v1", render_mode="rgb_array")
    video = result.run_dir / "videos" / "agent.mp4"
    played = rollout.play(result.agent, env, "CartPole-v1", episodes=1, seed=seed, files=rollout.RolloutFiles(video=video))
    env.close()
    m = result.metrics
    say(
        f"\nLearned in {m['time_s']:.1f} s and {int(m['timesteps']):,} steps ({m['fps']:,.0f} steps/s); recorded episode: return {played.returns[0]:.0f}.\n"
    )
    for label, path in (("run", result.run_dir), ("learning curve", curve), ("video", video)):
        say(f"  {label:<16}{path}")
    say("\nTry next:")
    for command in (
        f"{runnable('ludus')} rollout {result.run_dir} --episodes 20",
        f"{runnable('ludus')} train Acrobot-v1 --stop time_s=60",
        f"{runnable('ludus')} train CartPole-v1 --set model.use_lstm=true --set normalize_reward=true",
        f"{runnable('ludus')} runs plot {local_dir}",
        f"{runnable('tensorboard')} --logdir {local_dir}",
    ):
        say(f"  {command}")
