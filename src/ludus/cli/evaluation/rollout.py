"""`ludus rollout`: play episodes with a trained agent; save steps and videos."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ludus.cli.common_options import run_argument, trust_option
from ludus.cli.help import option_in
from ludus.cli.progress import ProgressBar
from ludus.cli.training import options as o
from ludus.errors import UsageError

if TYPE_CHECKING:
    from ludus.experiments.evaluation.rollout import EpisodeResult, RolloutResult

_files = option_in("Videos and steps")


def rollout(
    checkpoint: Annotated[
        str,
        run_argument(
            help="Run, RUN/best, or a checkpoint directory; a run also as last, EXPERIMENT or the end of its name.",
        ),
    ],
    episodes: Annotated[int, typer.Option(min=1, help="Number of episodes.")] = 10,
    steps: Annotated[int | None, typer.Option(min=1, help="Stop after N steps.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Random seed; episode i uses seed + i.")] = 0,
    deterministic: Annotated[
        bool, typer.Option("--deterministic/--stochastic", help="Take the most probable action, or sample.")
    ] = True,
    num_workers: Annotated[int, typer.Option(min=0, help="Number of processes; 0 plays in this process.")] = 0,
    env: Annotated[str | None, typer.Option(help="Another environment with the same spaces.")] = None,
    config: Annotated[str | None, typer.Option(metavar="JSON", help="Overrides as JSON, e.g. '{\"env_config\": {…}}'.")] = None,
    trust: Annotated[bool, trust_option()] = False,
    video: Annotated[bool, _files("--video", "--monitor", help="Write an mp4 video of the RGB frames.")] = False,
    video_grid: Annotated[bool, _files("--video-grid", help="Write one mp4 video with up to 16 episodes side by side.")] = False,
    depth: Annotated[bool, _files("--depth", help="Write depth frames in false colours to …-depth.mp4.")] = False,
    video_dir: Annotated[Path | None, _files(help="Directory for videos. [default: RUN/videos]")] = None,
    out: Annotated[Path | None, _files(help="File for all steps. [default: RUN/rollouts/…/steps.npz]")] = None,
    save_info: Annotated[bool, _files("--save-info", help="Save the info dict of each step.")] = False,
    track_progress: Annotated[bool, o.output_option("--track-progress", help="Print progress periodically.")] = False,
    json_: o.Json = False,
    debug: Annotated[bool, o.output_option("--debug", help="Show tracebacks.")] = False,
    run: Annotated[str | None, o.compatibility_option(help="Algorithm of the checkpoint; an error if it differs.")] = None,
    num_gpus: Annotated[float, o.compatibility_option(help="Number of GPUs; only 0 is supported.")] = 0,
    no_render: Annotated[bool, o.compatibility_option("--no-render", help="Ignored; nothing is shown on a screen.")] = False,
    use_shelve: Annotated[
        bool, o.compatibility_option("--use-shelve", help="Ignored; steps are always streamed to disk.")
    ] = False,
) -> None:
    """Play episodes with a trained agent; report returns, save steps and videos."""
    from ludus.cli.output import say
    from ludus.experiments.evaluation import rollout as rollouts

    if num_gpus:
        raise UsageError("Rollouts are played on the CPU.", "Leave out --num-gpus.")
    if use_shelve:
        say("--use-shelve changes nothing: steps are always streamed to disk, into one .npz", to_stderr=True)
    if no_render:
        say("--no-render changes nothing: nothing is shown on a screen; --video needs no screen", to_stderr=True)
    directory, name, stage = rollouts.rollout_spec(
        checkpoint,
        env=env,
        env_config=_settings(config),
        seed=seed,
        deterministic=deterministic,
        save_info=save_info,
        depth=depth,
    )
    _check_run(run, directory, name)
    label = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    steps_file = out or directory / "rollouts" / label / "steps.npz"
    if steps_file.suffix != ".npz":
        raise UsageError(f"--out {steps_file} does not end in .npz, the only supported format.")
    video_file = (
        (video_dir or directory / "videos") / f"{label}{'-grid' * video_grid}.mp4" if video or video_grid or depth else None
    )
    watch = _EpisodePrinter(episodes, track_progress, json_)
    with ProgressBar("writing the video", unit="frames", quiet=json_, deferred=True) as bar:
        files = rollouts.RolloutFiles(steps_file, video_file, video_grid, bar.update)
        played = rollouts.rollout(stage, episodes, max_steps=steps, workers=num_workers, on_episode=watch, files=files)
    result = played.to_json() | _upload_files(played)
    _show(played, result, steps, json_)
    if depth and played.video:
        say("the colours of the video show depth: dark is near", to_stderr=json_)
    if played.video and not depth:
        from ludus.experiments.runs import tracking
        from ludus.experiments.runs.remote_runs import fetch, upload

        fetch(directory)
        before = set(directory.glob("events.*"))
        if tracking.attach_files(directory, [played.video]):
            for written in set(directory.glob("events.*")) - before:
                upload(written)
    if json_:
        print(json.dumps(result), flush=True)


def _upload_files(played: RolloutResult) -> dict[str, str]:
    """Copy the files to the store of a remote run; returns their places."""
    from ludus.experiments.runs.remote_runs import upload

    files = {"steps_file": played.steps_file, "video": played.video}
    return {name: upload(path) for name, path in files.items() if path is not None}


class _EpisodePrinter:
    """Prints the return and length of each episode, in order."""

    def __init__(self, episodes: int, progress: bool, to_stderr: bool) -> None:
        self._episodes, self._progress, self._to_stderr = episodes, progress, to_stderr
        self._steps = 0

    def __call__(self, episode: int, told: EpisodeResult) -> None:
        from ludus.cli.output import say

        self._steps += told.length
        if told.over:
            by_agent = "".join(f"  {agent} {gained:.2f}" for agent, gained in told.agents.items())
            line = f"episode {episode:>3}  return {told.total_return:>10.2f}  length {told.length:>6}{by_agent}"
            say(line, to_stderr=self._to_stderr)
        if self._progress:
            say(f"{episode + 1} of {self._episodes} episodes, {self._steps:,} steps", to_stderr=True)


def _show(played: RolloutResult, r: dict[str, Any], steps: int | None, to_stderr: bool) -> None:
    from ludus.cli.output import say

    if played.cut:
        say(f"{played.cut} episodes were truncated after {max(played.lengths):,} steps", to_stderr=to_stderr)
    if played.returns:
        line = (
            f"return mean {r['return_mean']:.2f}  std {r['return_std']:.2f}  min {r['return_min']:.2f}  max {r['return_max']:.2f}"
        )
        if r["return_low"] is not None:
            line += f"  95 % [{r['return_low']:.2f}, {r['return_high']:.2f}]"
        say(f"{line}  ({len(played.returns)} episodes)", to_stderr=to_stderr)
        for agent, gained in played.agents.items():
            say(f"  {agent}  return mean {sum(gained) / len(gained):.2f}", to_stderr=to_stderr)
    else:
        say(f"no episode ended within {steps} steps", to_stderr=to_stderr)
    say(f"steps  {r['steps_file']}", to_stderr=to_stderr)
    if played.video:
        say(f"video  {r['video']}", to_stderr=to_stderr)


def _check_run(run: str | None, directory: Path, name: str) -> None:
    if run is None:
        return
    from ludus.experiments.runs.checkpoint import FOLDER
    from ludus.experiments.runs.remote_runs import store_of

    made_with = json.loads(store_of(directory).get_file(f"{FOLDER}/{name}", "state.json"))["config"]["run"]
    if run != made_with:
        raise UsageError(f"The checkpoint was trained with {made_with}, not with {run}.", "Leave out --run.")


def _settings(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        data = json.loads(text)
    except ValueError as error:
        raise UsageError(f"--config is not JSON: {error}.") from error
    if not isinstance(data, dict) or set(data) - {"env_config"} or not isinstance(data.get("env_config", {}), dict):
        raise UsageError(f"--config {text} is not supported.", 'Only {"env_config": {…}} applies to a rollout.')
    settings: dict[str, Any] = data.get("env_config", {})
    return settings
