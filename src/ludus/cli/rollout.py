"""`ludus rollout`: watch a trained agent play, and keep every step of it."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from ludus.errors import UsageError


def rollout(
    checkpoint: Annotated[str, typer.Argument(help="A run, RUN/best, or a checkpoint directory.")],
    run: Annotated[str | None, typer.Option(help="Algorithm; must be the checkpoint's.", show_default=False)] = None,
    env: Annotated[str | None, typer.Option(help="Another environment with the same spaces.", show_default=False)] = None,
    episodes: Annotated[int, typer.Option(min=1, help="Episodes to play.")] = 10,
    steps: Annotated[int | None, typer.Option(min=1, help="Stop after so many steps.", show_default=False)] = None,
    seed: Annotated[int, typer.Option(help="Episode i starts from seed + i.")] = 0,
    video: Annotated[bool, typer.Option("--video", "--monitor", help="Write an mp4 of RGB frames.")] = False,
    video_dir: Annotated[Path | None, typer.Option(help="Where the mp4 goes. [default: RUN/videos]", show_default=False)] = None,
    save_info: Annotated[bool, typer.Option("--save-info", help="Also keep the infos of each step.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="The .npz of all steps. [default: RUN/rollouts/…/steps.npz]", show_default=False)
    ] = None,
    num_workers: Annotated[int, typer.Option(help="Playing processes; 0 = this one.")] = 0,
    num_gpus: Annotated[float, typer.Option(help="Accelerators.")] = 0,
    config: Annotated[str | None, typer.Option(metavar="JSON", help="E.g. '{\"env_config\": {…}}'.", show_default=False)] = None,
    deterministic: Annotated[
        bool, typer.Option("--deterministic/--stochastic", help="The most probable action, or a sampled one.")
    ] = True,
    json_: Annotated[bool, typer.Option("--json", help="The last line of output is the result as JSON.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
) -> None:
    """Play a trained agent: returns, a file of all steps, a video."""
    from ludus.actor.trained import TrainedAgent
    from ludus.cli.display import say
    from ludus.config import EXTERNAL
    from ludus.experiment import checkpoint as checkpoints
    from ludus.experiment import rollout as rollouts
    from ludus.game.environment import make_one
    from ludus.types import DEFAULT_MODEL

    if num_workers or num_gpus:
        raise UsageError("This version plays in this process, on the CPU.", "Leave out --num-workers and --num-gpus.")
    run_dir, found = checkpoints.open_checkpoint(checkpoint)
    made_with = found.state["config"]
    if run is not None and run != made_with["run"]:
        raise UsageError(f"The checkpoint was trained with {made_with['run']}, not with {run}.", "Leave out --run.")
    name = env or made_with["env"]
    if name == EXTERNAL:
        raise UsageError("Games call this agent; there is no environment to play.", f"ludus serve {checkpoint}")
    settings = _settings(config)
    env_config = made_with["config"].get("env_config", {}) | settings.get("env_config", {})
    environment = make_one(name, env_config, "rgb_array" if video else None)
    agent = TrainedAgent(found.policy(DEFAULT_MODEL), seed)
    _check_spaces(agent, environment, name, made_with["env"])
    label = f"{found.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    steps_file = out or run_dir / "rollouts" / label / "steps.npz"
    if steps_file.suffix != ".npz":
        raise UsageError(f"--out {steps_file} does not end in .npz, the one format that is written.")
    played = rollouts.play(
        agent, environment, name, episodes=episodes, max_steps=steps, seed=seed, deterministic=deterministic,
        steps_file=steps_file, save_info=save_info, video=(video_dir or run_dir / "videos") / f"{label}.mp4" if video else None,
    )  # fmt: skip
    environment.close()
    for i, (gained, length) in enumerate(zip(played.returns, played.lengths, strict=True)):
        say(f"episode {i:>3}  return {gained:>10.2f}  length {length:>6}", to_stderr=json_)
    r = played.to_json()
    if played.returns:
        say(
            f"return mean {r['return_mean']:.2f}  std {r['return_std']:.2f}  min {r['return_min']:.2f}  max {r['return_max']:.2f}  ({len(played.returns)} episodes)",
            to_stderr=json_,
        )
    else:
        say(f"no episode ended within {steps} steps", to_stderr=json_)
    say(f"steps  {played.steps_file}", to_stderr=json_)
    if played.video:
        say(f"video  {played.video}", to_stderr=json_)
    if json_:
        print(json.dumps(r), flush=True)


def _settings(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        data = json.loads(text)
    except ValueError as error:
        raise UsageError(f"--config is not JSON: {error}.") from error
    if not isinstance(data, dict) or set(data) - {"env_config"} or not isinstance(data.get("env_config", {}), dict):
        raise UsageError(f"--config {text} is not understood.", 'Only {"env_config": {…}} changes how a finished agent plays.')
    return data


def _check_spaces(agent: Any, environment: Any, name: str, trained_on: str) -> None:
    from ludus import spaces
    from ludus.errors import IncompatibleCheckpoint

    seen, _ = spaces.split_mask(environment.observation_space)
    theirs = (spaces.array_spec(seen), spaces.to_json(environment.action_space))
    ours = (spaces.array_spec(agent.observation_space), spaces.to_json(agent.action_space))
    if ours != theirs:
        raise IncompatibleCheckpoint(
            f"The agent was trained on {trained_on}; the spaces of {name} are others ({environment.observation_space})."
        )
