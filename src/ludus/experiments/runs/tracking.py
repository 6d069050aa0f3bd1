"""Tracking: the sinks of a run, and the services (Weights & Biases, MLflow) that are told about it from a thread of their own.

    MetricsReporter ──▶ metrics.jsonl, metrics.csv, TensorBoard        in line: these are the run's own record
              ──▶ Aside ──queue──▶ thread ──▶ service            never in the way: slow, failing and absent services cost nothing

A service that fails is tried again, and once again; what it has missed in the end is counted and said. A run that goes on
goes on in its service too: `meta.json` keeps the id that it has there.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import logging
import math
import netrc
import os
import queue
import re
import subprocess
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from ludus.config.schema import ExperimentConfig, MlflowConfig, TrackConfig, WandbConfig
from ludus.config.validation import parse_experiment
from ludus.core.backoff import Backoff
from ludus.core.metrics import CsvSink, JsonLinesSink, Numbers, Sink, TensorBoardSink, read_jsonl
from ludus.errors import ConfigError, LudusError, MissingExtra
from ludus.experiments.runs.remote_runs import EVALUATION_VIDEO
from ludus.experiments.runs.run_dir import Run
from ludus.io.atomic_file import temporary_path

log = logging.getLogger(__name__)

ID = "track_id"
"""In meta.json: by which the services know this run."""

PLOTS, VIDEOS = "plots", "videos"
_PICTURES = {".png", ".gif"}
_MOVING = {".mp4", ".gif", ".webm"}
_GIF_FPS, _GIF_FRAMES, _GIF_WIDTH = 10, 100, 320
_WAITING, _WAITING_VIDEOS = 10_000, 100
_GATHER_S = 1.0
_ANSWER_S = 15.0
_CLOSE_S = 2 * _ANSWER_S
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0


class Service(Protocol):
    """Somebody who keeps numbers and files of a run. Called from one thread only; may be slow, and may raise anything."""

    name: str

    def open(self) -> None:
        """Make the run known there, or find it again."""
        ...

    def write(self, reports: Sequence[Numbers]) -> None: ...
    def file(self, path: Path, timesteps: int, name: str = "") -> None:
        """A picture or video that belongs to the run as it was after so many timesteps. `name`: of a series; "" = by its path."""
        ...

    def close(self, status: str) -> None:
        """How the run has ended; `running`: it goes on, and only we leave."""
        ...


# -- which ones ----------------------------------------------------------------------------------------------------------


def check(track: TrackConfig) -> None:
    """Whether what the config asks for can be had, without importing any of it. Raises MissingExtra, ConfigError."""
    if track.wandb is not None:
        _installed("wandb", "track.wandb")
        if wandb_mode(track.wandb, os.environ) == "online" and not _wandb_key(os.environ):
            raise ConfigError(
                "track.wandb.mode is online, and there is no key of Weights & Biases here.",
                "Run `wandb login`, set WANDB_API_KEY, or choose mode: offline.",
            )
    if track.mlflow is not None:
        _installed("mlflow", "track.mlflow")
        if not (track.mlflow.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")):  # its small package comes without these
            for package in ("sqlalchemy", "alembic"):
                _installed(package, "track.mlflow without a server", "mlflow")


def notices(track: TrackConfig) -> Iterator[str]:
    """What whoever starts the run may not expect."""
    if track.wandb is not None and track.wandb.mode is None and "WANDB_MODE" not in os.environ and not _wandb_key(os.environ):
        yield "W&B: no key here, so the run is written offline; upload it later with `wandb sync RUN/wandb/offline-run-*`"


def wandb_mode(config: WandbConfig, environ: Mapping[str, str]) -> str:
    return config.mode or environ.get("WANDB_MODE") or ("online" if _wandb_key(environ) else "offline")


def _wandb_key(environ: Mapping[str, str]) -> bool:
    """Whether wandb would find a key without asking for one. It is not read."""
    if environ.get("WANDB_API_KEY") or environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlsplit(environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        found = netrc.netrc(environ.get("NETRC") or str(Path("~/.netrc").expanduser()))
    except (OSError, netrc.NetrcParseError):
        return False
    return host in found.hosts


def _installed(package: str, key: str, extra: str = "") -> None:
    if importlib.util.find_spec(package) is None:
        raise MissingExtra(f"{key} needs the package {package!r}.", f"pip install 'ludus[{extra or package}]'")


def sinks_of(run: Run, e: ExperimentConfig, incarnation: int) -> list[Sink]:
    """Where the numbers of a run go, its own record first. Every key of the experiment's `config` has its value."""
    track = e.track
    sinks: list[Sink] = [JsonLinesSink(run.metrics_path, incarnation)]
    if track.csv:
        sinks.append(CsvSink(run.directory / "metrics.csv", run.metrics_path, incarnation))
    services = services_of(run, e)
    if services:
        sinks.append(_Curve(run))
    sinks.append(
        Board(
            run.directory,
            settings=settings_of(e),
            pictures=lambda: _files(run.directory, PLOTS, _PICTURES),
            status=lambda: run.status,
        )
    )

    def files() -> list[Path]:
        """What is delivered at the end; videos of evaluations were before."""
        videos = [path for path in _files(run.directory, VIDEOS, _MOVING) if not path.name.startswith(EVALUATION_VIDEO)]
        return [*_files(run.directory, PLOTS, _PICTURES), *videos]

    sinks += [Aside(service, files, lambda: run.status) for service in services]
    return sinks


def services_of(run: Run, e: ExperimentConfig) -> list[Service]:
    if e.track.wandb is None and e.track.mlflow is None:
        return []
    known = run.meta().get(ID)
    if known is None:
        known = uuid.uuid4().hex[:12]
        run.write_meta({ID: known})
    settings = settings_of(e)
    services: list[Service] = []
    if e.track.wandb is not None and (mode := wandb_mode(e.track.wandb, os.environ)) != "disabled":
        services.append(Wandb(run.directory, e.track.wandb, mode, e.name, str(known), settings))
    if e.track.mlflow is not None:
        services.append(Mlflow(run.directory, e.track.mlflow, e.name, str(known), settings))
    return services


def settings_of(e: ExperimentConfig) -> dict[str, Any]:
    """The hyper-parameters of an experiment: name, env, run, and every key of `config:` by its path."""
    return {"name": e.name, "env": e.env, "run": e.run, **flat(e.config)}


def flat(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested sections as paths: {model: {core: lstm}} → {model.core: lstm}."""
    out: dict[str, Any] = {}
    for key, value in data.items():
        out |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return out


def _files(directory: Path, folder: str, kinds: set[str]) -> list[Path]:
    return sorted(path for path in (directory / folder).rglob("*") if path.suffix.lower() in kinds and path.is_file())


def attach(directory: Path, paths: Sequence[Path]) -> bool:
    """Show pictures and videos that were made after the training (by a rollout) wherever the run is tracked.

    False: it is tracked by no service, and nothing was done. What fails is logged, as during the training, and not raised.
    """
    run = Run(directory)
    try:
        services = services_of(run, parse_experiment(run.config()))
        if not services:
            return False
        rows = read_jsonl(run.metrics_path)
        timesteps, status = int(rows[-1].get("timesteps") or 0) if rows else 0, str(run.meta().get("status", "running"))
        _show_in_tensorboard(directory, paths, timesteps)
    except LudusError as error:  # a config of another version, a full disk: the files themselves are there
        log.warning("%s could not be added to the record of %s: %s", ", ".join(map(str, paths)), directory, error)
        return False
    for service in services:
        aside = Aside(service, lambda: paths, lambda: status)
        aside.timesteps = timesteps
        aside.close()
    return True


def _show_in_tensorboard(directory: Path, paths: Sequence[Path], timesteps: int) -> None:
    board = TensorBoardSink(directory)
    for path in paths:
        data = path.read_bytes() if path.suffix.lower() in _PICTURES else _as_gif(path)
        board.picture(data, f"{path.parent.name}/{path.stem}", timesteps)
    board.close()


def _as_gif(video: Path) -> bytes:
    """The only moving pictures that TensorBoard shows. Few and small: they are for a glance. Empty: it is no video."""
    get_ffmpeg_exe = importlib.import_module("imageio_ffmpeg").get_ffmpeg_exe  # which has no types
    form = f"fps={_GIF_FPS},scale='min({_GIF_WIDTH},iw)':-2"
    words = ["-v", "error", "-i", str(video), "-vf", form, "-frames:v", str(_GIF_FRAMES), "-loop", "0", "-f", "gif", "-"]
    try:
        done = subprocess.run([get_ffmpeg_exe(), *words], capture_output=True, timeout=60, check=True)  # noqa: S603 - its own program
    except (OSError, subprocess.SubprocessError, RuntimeError) as error:
        log.warning("%s is not shown in TensorBoard: %s", video, _short(error))
        return b""
    return done.stdout


class Board(TensorBoardSink):
    """TensorBoard events that show videos, too."""

    def show_video(self, path: Path, name: str, timesteps: int) -> None:
        self.picture(_as_gif(path), name, timesteps)


class _Curve:
    """Leaves a picture of the learning curve with a run that is tracked, for those who come after it."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def write(self, numbers: Numbers) -> None:
        pass

    def close(self) -> None:
        from ludus.experiments.runs.plot import METRIC, plot

        try:
            plot([self._run.directory], self._run.directory / PLOTS / f"{METRIC}.png")
        except Exception as error:  # no episode has ended, no disk, no font: a picture is not worth the end of a run
            log.info("no picture of the learning curve: %s", error)


# -- beside the run ------------------------------------------------------------------------------------------------------


class Aside:
    """A sink in front of a service. `write` never waits and never raises; a thread delivers, in bundles."""

    def __init__(
        self,
        service: Service,
        files: Callable[[], Sequence[Path]] = tuple,
        status: Callable[[], str] = lambda: "finished",
        *,
        waiting: int = _WAITING,
        gather_s: float = _GATHER_S,
        close_s: float = _CLOSE_S,
        first_pause_s: float = _FIRST_PAUSE_S,
    ) -> None:
        self._service, self._files, self._status = service, files, status
        self._gather_s, self._close_s, self._pause_s = gather_s, close_s, first_pause_s
        self._queue: queue.Queue[Numbers] = queue.Queue(waiting)
        self._videos: deque[tuple[Path, int, str]] = deque(maxlen=_WAITING_VIDEOS)
        self._closing = threading.Event()
        self._opened = False
        self.timesteps = 0
        """Of the last report that was delivered."""
        self.failures = 0
        self.lost = 0
        """Reports that the service has never got."""
        self._held = 0
        self._thread = threading.Thread(target=self._deliver, name=f"track-{service.name}", daemon=True)
        self._thread.start()

    def write(self, numbers: Numbers) -> None:
        report = dict(numbers)
        while True:
            try:
                self._queue.put_nowait(report)
                return
            except queue.Full:
                self._drop_oldest()

    def show_video(self, path: Path, name: str, timesteps: int) -> None:
        """Delivered by the thread. Of too many that wait the oldest are left out; the files stay in the run."""
        self._videos.append((path, timesteps, name))

    def close(self) -> None:
        """Gives the rest a moment to be delivered, then leaves: nobody's training waits for a server."""
        self._closing.set()
        self._thread.join(self._close_s)
        late = self._thread.is_alive()
        lost = self.lost + self._held + self._queue.qsize()
        if late or lost or self.failures:
            log.warning(
                "%s: %d failures, %d reports were not delivered%s",
                self._service.name,
                self.failures,
                lost,
                f"; it has not finished within {self._close_s:g} s and is left alone" if late else "",
            )

    def _drop_oldest(self) -> None:
        try:
            self._queue.get_nowait()
        except queue.Empty:  # delivered in this very moment
            return
        self.lost += 1

    def _deliver(self) -> None:
        bundle: list[Numbers] = []
        backoff = Backoff(self._pause_s, _LONGEST_PAUSE_S)
        while True:
            closing = self._closing.is_set()
            bundle += self._taken(len(bundle))
            self._held = len(bundle)
            if self._tried(bundle):
                bundle, self._held = [], 0
                backoff.reset()
                while self._videos:
                    self._guarded(functools.partial(self._service.file, *self._videos.popleft()))
                if closing and self._queue.empty():
                    break
                self._closing.wait(self._gather_s)
            elif closing:  # one more try was made after the end
                self.lost, self._held = self.lost + len(bundle), 0
                return
            else:
                self._closing.wait(backoff.next_delay())
        for path in self._files():
            self._guarded(functools.partial(self._service.file, path, self.timesteps))
        self._guarded(lambda: self._service.close(self._status()))

    def _taken(self, have: int) -> list[Numbers]:
        taken: list[Numbers] = []
        while have + len(taken) < _WAITING:
            try:
                taken.append(self._queue.get_nowait())
            except queue.Empty:
                break
        return taken

    def _tried(self, bundle: Sequence[Numbers]) -> bool:
        def attempt() -> None:
            if not self._opened:
                self._service.open()
                self._opened = True
            if bundle:
                self._service.write(bundle)
                self.timesteps = int(bundle[-1].get("timesteps", self.timesteps))

        return self._guarded(attempt)

    def _guarded(self, work: Callable[[], object]) -> bool:
        try:
            work()
        except Exception as error:  # whatever a foreign library raises: tracking is not worth a training
            self.failures += 1
            say = log.warning if self.failures == 1 else log.debug
            say("%s failed; training continues: %s", self._service.name, _short(error))
            return False
        return True


def _short(error: Exception) -> str:
    """One line of it, without anything that looks like a password in an address."""
    line = f"{type(error).__name__}: {error}".strip().splitlines()[0][:300]
    return re.sub(r"//[^/@\s]*@", "//…@", line)


# -- Weights & Biases ----------------------------------------------------------------------------------------------------


class Wandb:
    """One run there for one run here. Its x-axis is `timesteps`, so that a resumed run may go back a little."""

    name = "W&B"

    def __init__(
        self, directory: Path, config: WandbConfig, mode: str, experiment: str, known: str, settings: Mapping[str, Any]
    ) -> None:
        self._directory, self._config, self._mode = directory, config, mode
        self._experiment, self._known, self._settings = experiment, known, dict(settings)
        self._run: Any = None

    def open(self) -> None:
        try:
            self._run = self._begin(self._mode)
        except Exception as error:
            if self._mode == "offline":
                raise
            log.warning("cannot reach W&B; logging offline: %s", _short(error))
            self._mode = "offline"
            import wandb

            if wandb.run is None:  # else somebody in this process has a run of his own, which this would end
                wandb.teardown()  # it would still hold the id of the attempt
            self._run = self._begin(self._mode)
        self._run.define_metric("timesteps")
        self._run.define_metric("*", step_metric="timesteps")
        log.info("W&B: %s", self._run.url if self._mode == "online" else self._run.dir)

    def write(self, reports: Sequence[Numbers]) -> None:
        for numbers in reports:
            self._run.log({name: value for name, value in numbers.items() if math.isfinite(value)})

    def file(self, path: Path, timesteps: int, name: str = "") -> None:
        import wandb

        shown = wandb.Video(str(path), format=path.suffix[1:]) if path.suffix in _MOVING else wandb.Image(str(path))
        self._run.log({name or f"{path.parent.name}/{path.stem}": shown, "timesteps": timesteps})

    def close(self, status: str) -> None:
        self._run.finish(exit_code=1 if status == "failed" else 0)

    def _begin(self, mode: str) -> Any:
        for name, value in (("WANDB_ERROR_REPORTING", "false"), ("WANDB_SILENT", "true")):
            os.environ.setdefault(name, value)
        import wandb

        begin: Any = wandb.init  # mode may be any word that WANDB_MODE knows
        return begin(
            project=self._config.project,
            entity=self._config.entity,
            group=self._config.group or self._experiment,
            tags=self._config.tags,
            name=self._directory.name,
            id=self._known,
            resume=None if mode == "offline" else "allow",
            mode=mode,
            dir=str(self._directory),
            config=self._settings,
            settings=wandb.Settings(
                console="off", silent=True, reinit="create_new", init_timeout=_ANSWER_S, finish_timeout=_ANSWER_S
            ),
        )


# -- MLflow --------------------------------------------------------------------------------------------------------------

_TAG = "ludus.track_id"
_METRICS_AT_ONCE, _PARAMS_AT_ONCE, _LONGEST_PARAM = 1_000, 100, 500


class Mlflow:
    """One run there for one run here, found again by a tag. Without a server, in a database beside the runs."""

    name = "MLflow"

    def __init__(self, directory: Path, config: MlflowConfig, experiment: str, known: str, settings: Mapping[str, Any]) -> None:
        self._directory, self._config = directory.absolute(), config
        self._experiment, self._known, self._settings = config.experiment or experiment, known, dict(settings)
        self._group = experiment
        self._client: Any = None
        self._run_id = ""

    def open(self) -> None:
        # Its own ideas of how long to try are minutes; whoever calls it tries again anyway.
        for name, value in (("HTTP_REQUEST_TIMEOUT", "10"), ("HTTP_REQUEST_MAX_RETRIES", "1"), ("DISABLE_TELEMETRY", "true")):
            os.environ.setdefault(f"MLFLOW_{name}", value)
        uri = self._config.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or self._beside()
        if "://" not in uri or uri.startswith("file:"):
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # a folder was asked for by name
        from mlflow import MlflowClient

        for talkative in ("mlflow", "alembic"):
            logging.getLogger(talkative).setLevel(logging.WARNING)
        if uri == self._beside():
            _make_database(self._directory.parent / "mlflow.db")
        self._client = MlflowClient(tracking_uri=uri)
        experiment = self._experiment_id(uri)
        before = self._client.search_runs([experiment], f"tags.`{_TAG}` = '{self._known}'", max_results=1)
        if before:
            self._run_id = before[0].info.run_id
            self._client.update_run(self._run_id, status="RUNNING")
            self._log_settings(before[0].data.params)
            return
        tags = {_TAG: self._known, "ludus.group": self._group, "ludus.run": str(self._directory), **self._config.tags}
        self._run_id = self._client.create_run(experiment, run_name=self._directory.name, tags=tags).info.run_id
        self._log_settings({})

    def write(self, reports: Sequence[Numbers]) -> None:
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        metrics = [
            Metric(re.sub(r"[^\w\-. :/]", "_", name), float(value), now, int(numbers.get("timesteps", 0)))
            for numbers in reports
            for name, value in numbers.items()
            if math.isfinite(value)
        ]
        for i in range(0, len(metrics), _METRICS_AT_ONCE):
            self._client.log_batch(self._run_id, metrics=metrics[i : i + _METRICS_AT_ONCE])

    def file(self, path: Path, timesteps: int, name: str = "") -> None:
        self._client.log_artifact(self._run_id, str(path), path.parent.name)

    def close(self, status: str) -> None:
        if status != "running":
            self._client.set_terminated(self._run_id, {"finished": "FINISHED", "interrupted": "KILLED"}.get(status, "FAILED"))

    def _beside(self) -> str:
        return f"sqlite:///{self._directory.parent / 'mlflow.db'}"

    def _experiment_id(self, uri: str) -> str:
        found = self._client.get_experiment_by_name(self._experiment)
        if found is None:
            here = (self._directory.parent / "mlartifacts").as_uri() if uri == self._beside() else None
            try:
                return str(self._client.create_experiment(self._experiment, artifact_location=here))
            except Exception:
                found = self._client.get_experiment_by_name(self._experiment)  # another trial was quicker
                if found is None:
                    raise
        return str(found.experiment_id)

    def _log_settings(self, known: Mapping[str, str]) -> None:
        """Those that are not there yet: what was logged once cannot be changed there."""
        from mlflow.entities import Param

        params = [Param(k, str(v)[:_LONGEST_PARAM]) for k, v in self._settings.items() if k not in known]
        for i in range(0, len(params), _PARAMS_AT_ONCE):
            self._client.log_batch(self._run_id, params=params[i : i + _PARAMS_AT_ONCE])


def _make_database(path: Path) -> None:
    """MLflow makes its tables in dozens of steps: two trials at once, or one that is killed, would leave half of them for ever.

    So it makes them aside, and whoever is first gives them their name.
    """
    if path.exists():
        return
    from mlflow import MlflowClient

    aside = temporary_path(path, ".db")
    try:
        MlflowClient(tracking_uri=f"sqlite:///{aside}").search_experiments(max_results=1)
        with contextlib.suppress(FileExistsError):
            os.link(aside, path)
    finally:
        aside.unlink(missing_ok=True)
