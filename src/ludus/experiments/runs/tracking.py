"""Metric sinks of a run: local files, and tracking services (Weights & Biases, MLflow) behind a background thread.

    run controller ──▶ metrics.jsonl, metrics.csv, TensorBoard         synchronous: the run's own record
                   ──▶ ServiceSink ──queue──▶ thread ──▶ service       never blocks or fails the training

Failed deliveries are retried with back-off; lost reports are counted and logged. A resumed run continues in its service under the id
in `meta.json`.
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

TRACK_ID = "track_id"
"""Key in meta.json: the id of the run in the services."""

PLOTS, VIDEOS = "plots", "videos"
_IMAGE_SUFFIXES = {".png", ".gif"}
_VIDEO_SUFFIXES = {".mp4", ".gif", ".webm"}
_GIF_FPS, _GIF_FRAMES, _GIF_WIDTH = 10, 100, 320
_MAX_QUEUED, _MAX_QUEUED_VIDEOS = 10_000, 100
_BATCH_INTERVAL_S = 1.0
_SERVICE_TIMEOUT_S = 15.0
_CLOSE_TIMEOUT_S = 2 * _SERVICE_TIMEOUT_S
_MIN_BACKOFF_S, _MAX_BACKOFF_S = 1.0, 60.0


class TrackingService(Protocol):
    """A tracking service for one run. Called from one thread only; may be slow and may raise any exception."""

    name: str

    def open(self) -> None:
        """Create the run in the service, or find it again."""
        ...

    def write(self, reports: Sequence[Numbers]) -> None: ...
    def file(self, path: Path, timesteps: int, name: str = "") -> None:
        """Add an image or video of the run at that timestep. `name`: of a series; "": derived from the path."""
        ...

    def close(self, status: str) -> None:
        """Report the final status; `running`: the run continues in another process."""
        ...


# -- selection -----------------------------------------------------------------------------------------------------------


def check_tracking(track: TrackConfig) -> None:
    """Check that the configured services are usable, without importing them. Raises MissingExtra, ConfigError."""
    if track.wandb is not None:
        _check_installed("wandb", "track.wandb")
        if wandb_mode(track.wandb, os.environ) == "online" and not _wandb_key(os.environ):
            raise ConfigError(
                "track.wandb.mode is online, but no Weights & Biases key was found.",
                "Run `wandb login`, set WANDB_API_KEY, or choose mode: offline.",
            )
    if track.mlflow is not None:
        _check_installed("mlflow", "track.mlflow")
        if not (track.mlflow.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")):  # mlflow-skinny lacks these
            for package in ("sqlalchemy", "alembic"):
                _check_installed(package, "track.mlflow without a server", "mlflow")


def tracking_notices(track: TrackConfig) -> Iterator[str]:
    """Messages for the user at the start of a run."""
    if track.wandb is not None and track.wandb.mode is None and "WANDB_MODE" not in os.environ and not _wandb_key(os.environ):
        yield "W&B: no key found; logging offline. Upload later with `wandb sync RUN/wandb/offline-run-*`"


def wandb_mode(config: WandbConfig, environ: Mapping[str, str]) -> str:
    return config.mode or environ.get("WANDB_MODE") or ("online" if _wandb_key(environ) else "offline")


def _wandb_key(environ: Mapping[str, str]) -> bool:
    """Whether wandb would find a key without a prompt. The key itself is not read."""
    if environ.get("WANDB_API_KEY") or environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlsplit(environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        found = netrc.netrc(environ.get("NETRC") or str(Path("~/.netrc").expanduser()))
    except (OSError, netrc.NetrcParseError):
        return False
    return host in found.hosts


def _check_installed(package: str, key: str, extra: str = "") -> None:
    if importlib.util.find_spec(package) is None:
        raise MissingExtra(f"{key} needs the package {package!r}.", f"pip install 'ludus[{extra or package}]'")


def sinks_of(run: Run, e: ExperimentConfig, incarnation: int) -> list[Sink]:
    """The sinks of a run, its own record first. `e`: resolved, with a value for every key of `config`."""
    track = e.track
    sinks: list[Sink] = [JsonLinesSink(run.metrics_path, incarnation)]
    if track.csv:
        sinks.append(CsvSink(run.directory / "metrics.csv", run.metrics_path, incarnation))
    services = services_of(run, e)
    if services:
        sinks.append(_CurvePlot(run))
    sinks.append(
        VideoTensorBoard(
            run.directory,
            settings=settings_of(e),
            pictures=lambda: _files(run.directory, PLOTS, _IMAGE_SUFFIXES),
            status=lambda: run.status,
        )
    )

    def files() -> list[Path]:
        """Files that are delivered at the end; evaluation videos were delivered before."""
        videos = [path for path in _files(run.directory, VIDEOS, _VIDEO_SUFFIXES) if not path.name.startswith(EVALUATION_VIDEO)]
        return [*_files(run.directory, PLOTS, _IMAGE_SUFFIXES), *videos]

    sinks += [ServiceSink(service, files, lambda: run.status) for service in services]
    return sinks


def services_of(run: Run, e: ExperimentConfig) -> list[TrackingService]:
    if e.track.wandb is None and e.track.mlflow is None:
        return []
    track_id = run.meta().get(TRACK_ID)
    if track_id is None:
        track_id = uuid.uuid4().hex[:12]
        run.write_meta({TRACK_ID: track_id})
    settings = settings_of(e)
    services: list[TrackingService] = []
    if e.track.wandb is not None and (mode := wandb_mode(e.track.wandb, os.environ)) != "disabled":
        services.append(Wandb(run.directory, e.track.wandb, mode, e.name, str(track_id), settings))
    if e.track.mlflow is not None:
        services.append(Mlflow(run.directory, e.track.mlflow, e.name, str(track_id), settings))
    return services


def settings_of(e: ExperimentConfig) -> dict[str, Any]:
    """The hyper-parameters of an experiment: name, env, run, and every key of `config:` by its path."""
    return {"name": e.name, "env": e.env, "run": e.run, **flatten(e.config)}


def flatten(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested sections as paths: {model: {core: lstm}} → {model.core: lstm}."""
    out: dict[str, Any] = {}
    for key, value in data.items():
        out |= flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return out


def _files(directory: Path, folder: str, kinds: set[str]) -> list[Path]:
    return sorted(path for path in (directory / folder).rglob("*") if path.suffix.lower() in kinds and path.is_file())


def attach_files(directory: Path, paths: Sequence[Path]) -> bool:
    """Add images and videos that were made after training (by a rollout) to TensorBoard and the services of the run.

    Returns False if no service tracks the run; then nothing is done. Failures are logged, not raised.
    """
    run = Run(directory)
    try:
        services = services_of(run, parse_experiment(run.config()))
        if not services:
            return False
        rows = read_jsonl(run.metrics_path)
        timesteps, status = int(rows[-1].get("timesteps") or 0) if rows else 0, str(run.meta().get("status", "running"))
        _add_to_tensorboard(directory, paths, timesteps)
    except LudusError as error:  # a config of another release, a full disk; the files themselves exist
        log.warning("%s could not be added to the record of %s: %s", ", ".join(map(str, paths)), directory, error)
        return False
    for service in services:
        aside = ServiceSink(service, lambda: paths, lambda: status)
        aside.timesteps = timesteps
        aside.close()
    return True


def _add_to_tensorboard(directory: Path, paths: Sequence[Path], timesteps: int) -> None:
    board = TensorBoardSink(directory)
    for path in paths:
        data = path.read_bytes() if path.suffix.lower() in _IMAGE_SUFFIXES else _to_gif(path)
        board.picture(data, f"{path.parent.name}/{path.stem}", timesteps)
    board.close()


def _to_gif(video: Path) -> bytes:
    """Convert to GIF, the only animated format of TensorBoard, with few small frames. Empty if the file is not a video."""
    get_ffmpeg_exe = importlib.import_module("imageio_ffmpeg").get_ffmpeg_exe  # untyped
    filters = f"fps={_GIF_FPS},scale='min({_GIF_WIDTH},iw)':-2"
    options = ["-v", "error", "-i", str(video), "-vf", filters, "-frames:v", str(_GIF_FRAMES), "-loop", "0", "-f", "gif", "-"]
    try:
        done = subprocess.run([get_ffmpeg_exe(), *options], capture_output=True, timeout=60, check=True)  # noqa: S603 - its own program
    except (OSError, subprocess.SubprocessError, RuntimeError) as error:
        log.warning("%s is not shown in TensorBoard: %s", video, _short(error))
        return b""
    return done.stdout


class VideoTensorBoard(TensorBoardSink):
    """TensorBoard events with videos."""

    def show_video(self, path: Path, name: str, timesteps: int) -> None:
        self.picture(_to_gif(path), name, timesteps)


class _CurvePlot:
    """Plots the learning curve when the run ends; the service sinks that close after it upload the file."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def write(self, numbers: Numbers) -> None:
        pass

    def close(self) -> None:
        from ludus.experiments.runs.plot import METRIC, plot

        try:
            plot([self._run.directory], self._run.directory / PLOTS / f"{METRIC}.png")
        except (LudusError, ImportError, OSError, ValueError, RuntimeError) as error:  # no episode, no matplotlib, a full disk …
            log.info("the learning curve was not plotted: %s", error)


# -- delivery ------------------------------------------------------------------------------------------------------------


class ServiceSink:
    """A sink that delivers to a service on a background thread, in batches. `write` never blocks and never raises."""

    def __init__(
        self,
        service: TrackingService,
        files: Callable[[], Sequence[Path]] = tuple,
        status: Callable[[], str] = lambda: "finished",
        *,
        waiting: int = _MAX_QUEUED,
        batch_interval_s: float = _BATCH_INTERVAL_S,
        close_s: float = _CLOSE_TIMEOUT_S,
        min_backoff_s: float = _MIN_BACKOFF_S,
    ) -> None:
        self._service, self._files, self._status = service, files, status
        self._batch_interval_s, self._close_s, self._min_backoff_s = batch_interval_s, close_s, min_backoff_s
        self._queue: queue.Queue[Numbers] = queue.Queue(waiting)
        self._videos: deque[tuple[Path, int, str]] = deque(maxlen=_MAX_QUEUED_VIDEOS)
        self._closing = threading.Event()
        self._is_open = False
        self.timesteps = 0
        """Timestep of the last delivered report."""
        self.failures = 0
        self.lost = 0
        """Reports that were not delivered."""
        self._in_delivery = 0
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
        """Queue a video. If too many are queued, the oldest are skipped; the files stay in the run."""
        self._videos.append((path, timesteps, name))

    def close(self) -> None:
        """Wait a bounded time for the pending deliveries."""
        self._closing.set()
        self._thread.join(self._close_s)
        late = self._thread.is_alive()
        lost = self.lost + self._in_delivery + self._queue.qsize()
        if late or lost or self.failures:
            log.warning(
                "%s: %d failures, %d reports were not delivered%s",
                self._service.name,
                self.failures,
                lost,
                f"; it did not finish within {self._close_s:g} s" if late else "",
            )

    def _drop_oldest(self) -> None:
        try:
            self._queue.get_nowait()
        except queue.Empty:  # delivered meanwhile
            return
        self.lost += 1

    def _deliver(self) -> None:
        batch: list[Numbers] = []
        backoff = Backoff(self._min_backoff_s, _MAX_BACKOFF_S)
        while True:
            closing = self._closing.is_set()
            batch += self._take_queued(len(batch))
            self._in_delivery = len(batch)
            if self._try_deliver(batch):
                batch, self._in_delivery = [], 0
                backoff.reset()
                while self._videos:
                    self._call_service(functools.partial(self._service.file, *self._videos.popleft()))
                if closing and self._queue.empty():
                    break
                self._closing.wait(self._batch_interval_s)
            elif closing:  # the last attempt failed
                self.lost, self._in_delivery = self.lost + len(batch), 0
                return
            else:
                self._closing.wait(backoff.next_delay())
        for path in self._files():
            self._call_service(functools.partial(self._service.file, path, self.timesteps))
        self._call_service(lambda: self._service.close(self._status()))

    def _take_queued(self, have: int) -> list[Numbers]:
        taken: list[Numbers] = []
        while have + len(taken) < _MAX_QUEUED:
            try:
                taken.append(self._queue.get_nowait())
            except queue.Empty:
                break
        return taken

    def _try_deliver(self, batch: Sequence[Numbers]) -> bool:
        def attempt() -> None:
            if not self._is_open:
                self._service.open()
                self._is_open = True
            if batch:
                self._service.write(batch)
                self.timesteps = int(batch[-1].get("timesteps", self.timesteps))

        return self._call_service(attempt)

    def _call_service(self, work: Callable[[], object]) -> bool:
        try:
            work()
        except Exception as error:  # any error of a third-party library: tracking must not fail the training
            self.failures += 1
            level = logging.WARNING if self.failures == 1 else logging.DEBUG
            log.log(level, "%s failed; training continues: %s", self._service.name, _short(error))
            return False
        return True


def _short(error: Exception) -> str:
    """The first line of an error, without credentials in URLs."""
    line = f"{type(error).__name__}: {error}".strip().splitlines()[0][:300]
    return re.sub(r"//[^/@\s]*@", "//…@", line)


# -- Weights & Biases ----------------------------------------------------------------------------------------------------


class Wandb:
    """A run of Weights & Biases. Its x-axis is `timesteps`, so that a resumed run may go back to its checkpoint."""

    name = "W&B"

    def __init__(
        self, directory: Path, config: WandbConfig, mode: str, experiment: str, track_id: str, settings: Mapping[str, Any]
    ) -> None:
        self._directory, self._config, self._mode = directory, config, mode
        self._experiment, self._track_id, self._settings = experiment, track_id, dict(settings)
        self._run: Any = None

    def open(self) -> None:
        try:
            self._run = self._start_run(self._mode)
        except Exception as error:  # any error of wandb or the network
            if self._mode == "offline":
                raise
            log.warning("cannot reach W&B; logging offline: %s", _short(error))
            self._mode = "offline"
            import wandb

            if wandb.run is None:  # else teardown would end another run of this process
                wandb.teardown()  # releases the id of the failed attempt
            self._run = self._start_run(self._mode)
        self._run.define_metric("timesteps")
        self._run.define_metric("*", step_metric="timesteps")
        log.info("W&B: %s", self._run.url if self._mode == "online" else self._run.dir)

    def write(self, reports: Sequence[Numbers]) -> None:
        for numbers in reports:
            self._run.log({name: value for name, value in numbers.items() if math.isfinite(value)})

    def file(self, path: Path, timesteps: int, name: str = "") -> None:
        import wandb

        shown = wandb.Video(str(path), format=path.suffix[1:]) if path.suffix in _VIDEO_SUFFIXES else wandb.Image(str(path))
        self._run.log({name or f"{path.parent.name}/{path.stem}": shown, "timesteps": timesteps})

    def close(self, status: str) -> None:
        self._run.finish(exit_code=1 if status == "failed" else 0)

    def _start_run(self, mode: str) -> Any:
        for name, value in (("WANDB_ERROR_REPORTING", "false"), ("WANDB_SILENT", "true")):
            os.environ.setdefault(name, value)
        import wandb

        begin: Any = wandb.init  # untyped: mode may be any value of WANDB_MODE
        return begin(
            project=self._config.project,
            entity=self._config.entity,
            group=self._config.group or self._experiment,
            tags=self._config.tags,
            name=self._directory.name,
            id=self._track_id,
            resume=None if mode == "offline" else "allow",
            mode=mode,
            dir=str(self._directory),
            config=self._settings,
            settings=wandb.Settings(
                console="off",
                silent=True,
                reinit="create_new",
                init_timeout=_SERVICE_TIMEOUT_S,
                finish_timeout=_SERVICE_TIMEOUT_S,
            ),
        )


# -- MLflow --------------------------------------------------------------------------------------------------------------

_TAG = "ludus.track_id"
_METRICS_PER_REQUEST, _PARAMS_PER_REQUEST, _MAX_PARAM_CHARS = 1_000, 100, 500


class Mlflow:
    """An MLflow run, identified by a tag. Without a server it is stored in a database next to the runs."""

    name = "MLflow"

    def __init__(
        self, directory: Path, config: MlflowConfig, experiment: str, track_id: str, settings: Mapping[str, Any]
    ) -> None:
        self._directory, self._config = directory.absolute(), config
        self._experiment, self._track_id, self._settings = config.experiment or experiment, track_id, dict(settings)
        self._group = experiment
        self._client: Any = None
        self._run_id = ""

    def open(self) -> None:
        # The default retries take minutes; ServiceSink retries anyway.
        for name, value in (("HTTP_REQUEST_TIMEOUT", "10"), ("HTTP_REQUEST_MAX_RETRIES", "1"), ("DISABLE_TELEMETRY", "true")):
            os.environ.setdefault(f"MLFLOW_{name}", value)
        uri = self._config.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or self._default_uri()
        if "://" not in uri or uri.startswith("file:"):
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # the user configured a directory
        from mlflow import MlflowClient

        for logger in ("mlflow", "alembic"):
            logging.getLogger(logger).setLevel(logging.WARNING)
        if uri == self._default_uri():
            _make_database(self._directory.parent / "mlflow.db")
        self._client = MlflowClient(tracking_uri=uri)
        experiment = self._experiment_id(uri)
        before = self._client.search_runs([experiment], f"tags.`{_TAG}` = '{self._track_id}'", max_results=1)
        if before:
            self._run_id = before[0].info.run_id
            self._client.update_run(self._run_id, status="RUNNING")
            self._log_settings(before[0].data.params)
            return
        tags = {_TAG: self._track_id, "ludus.group": self._group, "ludus.run": str(self._directory), **self._config.tags}
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
        for i in range(0, len(metrics), _METRICS_PER_REQUEST):
            self._client.log_batch(self._run_id, metrics=metrics[i : i + _METRICS_PER_REQUEST])

    def file(self, path: Path, timesteps: int, name: str = "") -> None:
        self._client.log_artifact(self._run_id, str(path), path.parent.name)

    def close(self, status: str) -> None:
        if status != "running":
            self._client.set_terminated(self._run_id, {"finished": "FINISHED", "interrupted": "KILLED"}.get(status, "FAILED"))

    def _default_uri(self) -> str:
        return f"sqlite:///{self._directory.parent / 'mlflow.db'}"

    def _experiment_id(self, uri: str) -> str:
        found = self._client.get_experiment_by_name(self._experiment)
        if found is None:
            here = (self._directory.parent / "mlartifacts").as_uri() if uri == self._default_uri() else None
            from mlflow.exceptions import MlflowException

            try:
                return str(self._client.create_experiment(self._experiment, artifact_location=here))
            except MlflowException:
                found = self._client.get_experiment_by_name(self._experiment)  # another trial created it meanwhile
                if found is None:
                    raise
        return str(found.experiment_id)

    def _log_settings(self, track_id: Mapping[str, str]) -> None:
        """Log the parameters that are missing; MLflow does not allow changes."""
        from mlflow.entities import Param

        params = [Param(k, str(v)[:_MAX_PARAM_CHARS]) for k, v in self._settings.items() if k not in track_id]
        for i in range(0, len(params), _PARAMS_PER_REQUEST):
            self._client.log_batch(self._run_id, params=params[i : i + _PARAMS_PER_REQUEST])


def _make_database(path: Path) -> None:
    """Create the database of MLflow atomically: its migrations take dozens of steps, which concurrent or killed trials would corrupt.

    The first process links its completed temporary file to `path`.
    """
    if path.exists():
        return
    from mlflow import MlflowClient

    temporary = temporary_path(path, ".db")
    try:
        MlflowClient(tracking_uri=f"sqlite:///{temporary}").search_experiments(max_results=1)
        with contextlib.suppress(FileExistsError):
            os.link(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
