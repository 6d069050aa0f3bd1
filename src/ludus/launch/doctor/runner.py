"""Runs `ludus doctor` on this machine and on the machines of a run: local, over SSH, or in a Slurm allocation."""

from __future__ import annotations

import contextlib
import functools
import json
import secrets
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ludus.errors import LudusError, UsageError, WorkerFailed
from ludus.launch.doctor.checks.slurm import SlurmRequest, check_slurm, query_slurm, time_limit_s
from ludus.launch.doctor.checks.token_file import check_equal_tokens
from ludus.launch.doctor.checks.versions import check_agreement
from ludus.launch.doctor.finding import DoctorFinding, failure, last_line, skip
from ludus.launch.doctor.local_checks import DoctorReport, DoctorRequest, run_local_checks, this_machine
from ludus.launch.doctor.remote_nodes import ANSWER_S, NodeReport, RemoteNode, check_nodes
from ludus.launch.slurm.sbatch import SlurmGroup, node_options
from ludus.transport.message_stream import PASSWORD, split_password

if TYPE_CHECKING:
    from ludus.launch.cluster_file import ClusterConfig

MODULE = "ludus.launch.doctor"
ALL = "all nodes"
ALLOCATION = "SLURM_JOB_NODELIST"
IN_ALLOCATION = "LUDUS_DOCTOR_ALLOCATED"
"""Set in an allocation that the doctor has requested, so that it requests no second one."""

_PENDING_S, _CHECK_MINUTES, _SPARE_S, _END_S = 120, 10, 60.0, 10.0
"""For a requested allocation: seconds to wait for it, its time limit in minutes, seconds for start and end around it, and for its release."""


@dataclass(frozen=True)
class DoctorRun:
    """`config`: where the run will be; None: on this machine. `timeout_s`: for each other machine."""

    request: DoctorRequest
    config: ClusterConfig | None = None
    timeout_s: float = ANSWER_S

    def findings(self, environ: Mapping[str, str]) -> list[DoctorFinding]:
        """Return the findings, those of this machine first. Raises UsageError if the config is invalid."""
        config = self.config
        if config is None or config.on == "local":
            return [finding.on_node(this_machine()) for finding in run_local_checks(self.request).findings]
        if config.on == "ssh":
            return self._check_ssh(config, environ)
        if config.on == "slurm":
            return self._check_slurm_nodes(config, environ)
        if config.on == "kubernetes":
            return self._check_kubernetes(config)
        raise UsageError(f"ludus doctor does not support {config.on}.", "It supports local, ssh, slurm and kubernetes.")

    def _check_kubernetes(self, config: ClusterConfig) -> list[DoctorFinding]:
        """Check the cluster as this machine sees it, which only submits the run: pods have their own Python."""
        from ludus.launch.doctor.kubernetes_checks import check_kubernetes
        from ludus.launch.kubernetes.client import KubernetesClient

        settings = config.kubernetes_settings()
        client = KubernetesClient(settings.context, settings.namespace)
        return [finding.on_node("kubernetes") for finding in check_kubernetes(client, settings, config.name or "")]

    def _check_ssh(self, config: ClusterConfig, environ: Mapping[str, str]) -> list[DoctorFinding]:
        from ludus.launch.ssh.connection import check_settings, explain_failure, ssh_words

        settings = check_settings(config.ssh_settings())
        nodes = [
            RemoteNode(each.host, tuple(ssh_words(settings, at, MODULE)), "ssh", functools.partial(explain_failure, settings, at))
            for at, each in enumerate(settings.nodes)
        ]
        here, reports = self._check_all(nodes, tuple(each.node_address for each in settings.nodes), config, environ, shared=False)
        found = [*here.findings, *_combine_reports(reports, here)]
        tokens = {report.node: report.token for report in reports if report.token is not None}
        # Learners and actors of a hostfile share one token; a submitted job has its own.
        return [*found, check_equal_tokens(tokens).on_node(ALL)] if config.iplist is not None and tokens else found

    def _check_slurm_nodes(self, config: ClusterConfig, environ: Mapping[str, str]) -> list[DoctorFinding]:
        from ludus.launch.slurm.backend import list_allocation

        wanted = SlurmRequest(config.partition or "", config.time or "", config.size, config.cpus or 0, config.gpus)
        queue = check_slurm(query_slurm(), wanted)
        command = [config.python or sys.executable, "-P", "-m", MODULE]
        if config.setup:
            lines = "\n".join(config.setup)
            command = ["bash", "-c", f"{{\n{lines}\n}} </dev/null >&2\nexec {shlex.join(command)}"]
        nodes = [
            RemoteNode(name, _srun_words(name, command, cpus), "srun", functools.partial(_explain_srun, name))
            for _, name, cpus in (list_allocation(environ) if environ.get(ALLOCATION) else ())
        ]
        here, reports = self._check_all(nodes, (), config, environ, shared=True)
        found = [*here.findings, *(finding.on_node(this_machine()) for finding in queue)]
        if not nodes:
            text = "not checked: this is not an allocation; the findings above are about this machine, where jobs are submitted"
            fix = "Add --time 5, for an allocation of so many minutes; or run it within `salloc`."
            return [*found, skip("nodes", text, fix).on_node(ALL)]
        return [*found, *_combine_reports(reports, here)]

    def _check_all(
        self,
        nodes: list[RemoteNode],
        addresses: tuple[str, ...],
        config: ClusterConfig,
        environ: Mapping[str, str],
        *,
        shared: bool,
    ) -> tuple[DoctorReport, list[NodeReport]]:
        """Check the nodes, and this machine, which only submits the run."""
        several = max(1, len(nodes) or config.size)
        each = None if self.request.workers is None else -(-self.request.workers // several)
        remote = replace(self.request, workers=each, ray=several > 1, nodes=addresses, shared=shared, key=secrets.token_hex(16))
        reports = check_nodes(nodes, remote, _remote_environment(config, environ), self.timeout_s) if nodes else []
        here = run_local_checks(replace(remote, launcher=True, env="", game="", memory="", store=""))
        return replace(here, findings=tuple(finding.on_node(this_machine()) for finding in here.findings)), reports


def _combine_reports(reports: list[NodeReport], here: DoctorReport) -> list[DoctorFinding]:
    versions = {report.node: report.versions for report in reports if report.versions}
    agreement = check_agreement(versions | {"this machine": {"ludus": here.versions["ludus"]}}) if versions else []
    return [*(finding for report in reports for finding in report.findings), *(finding.on_node(ALL) for finding in agreement)]


def _remote_environment(config: ClusterConfig, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that the processes of the run would get."""
    from ludus.launch.planner import SECRETS

    return {**config.environment, **{name: environ[name] for name in (*SECRETS, *config.secrets) if environ.get(name)}}


def _srun_words(node: str, command: Sequence[str], cpus: int) -> tuple[str, ...]:
    """Return the srun command of a step that overlaps with others in the allocation. `cpus`: 0: Slurm's default, mostly one."""
    bound = (f"--cpus-per-task={cpus}",) if cpus else ()
    return ("srun", "--overlap", "--quiet", "--nodes=1", "--ntasks=1", *bound, f"--nodelist={node}", "--input=all", *command)


def _explain_srun(node: str, code: int | None, output: str) -> LudusError:
    last = last_line(output)
    if "No module named" in output and "ludus" in output:
        return UsageError(f"The Python on {node} has no Ludus: {last}", "Set python, or setup, in cluster.yaml.")
    problem = f"{node} does not answer" if code is None else f"srun ended with {code}"
    return WorkerFailed(f"{problem}{': ' if last else ''}{last}.", f"`scontrol show node {node}` shows its state.")


# -- requested allocations --------------------------------------------------------------------------------------------------


def allocation_command(
    config: ClusterConfig, words: Sequence[str], environ: Mapping[str, str]
) -> tuple[list[str], dict[str, str]]:
    """Return the salloc command that runs the same doctor command, and its environment. A password in the URL of --memory is moved to
    the environment. Raises UsageError for a password in another URL."""
    minutes = int(min(_CHECK_MINUTES, max(1, time_limit_s(config.time or "infinite") // 60)))
    options = ["salloc", "--quiet", f"--immediate={_PENDING_S}", "--job-name=ludus-doctor"]
    # Request what the run will request: Slurm shows a job only the cores and GPUs that it has.
    for option in node_options(replace(config.slurm_settings(), time=str(minutes)), SlurmGroup(config.size)):
        options += shlex.split(option)
    arguments, secret, before = [], {IN_ALLOCATION: "1"}, ""
    for word in words:
        option, equals, value = word.partition("=") if word.startswith("--") else (before, "", word)
        url, password = split_password(value) if "://" in value else (value, None)
        arguments.append(f"{option}{equals}{url}" if word.startswith("--") else url)
        before = option
        if password is not None and option == "--memory":
            secret[PASSWORD] = password
        elif password is not None:
            hint = "Leave it out: its environment variables are passed on."
            raise UsageError(f"The URL of {option} contains a password.", hint)
    inner = [sys.executable, "-P", "-m", "ludus.cli.main", "doctor", *(word for word in arguments if word != "--json"), "--json"]
    return [*options, *inner], {**environ, **secret}


def run_in_allocation(
    config: ClusterConfig,
    words: Sequence[str],
    environ: Mapping[str, str],
    timeout_s: float = ANSWER_S,
    around_s: float = _PENDING_S + _SPARE_S,
) -> list[DoctorFinding]:
    """Run the same command in a requested allocation and return its findings. If there is no allocation, that is a finding.

    `timeout_s`: for the checks; `around_s`: for the time before and after them.
    """
    command, variables = allocation_command(config, words, environ)
    within_s = timeout_s + around_s
    try:
        process = subprocess.Popen(  # noqa: S603
            command, env=variables, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
    except OSError as error:
        return [_no_allocation(f"salloc cannot be run: {error.strerror}")]
    with process:
        try:
            out, err = process.communicate(timeout=within_s)
        except subprocess.TimeoutExpired:
            return [_no_allocation(f"no answer within {within_s:.0f} s")]
        finally:
            _release_allocation(process)
    lines = out.strip().splitlines()
    try:
        return [DoctorFinding.from_json(data) for data in json.loads(lines[-1])]
    except (IndexError, ValueError, TypeError, AttributeError):
        return [_no_allocation(last_line(err) or f"salloc ended with {process.returncode}")]


def _release_allocation(process: subprocess.Popen[str]) -> None:
    """Stop salloc gracefully: if it is killed, its nodes stay allocated until their time limit.

    On SIGTERM it stops its command first; on SIGHUP it releases the nodes without waiting.
    """
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGKILL):
        if process.poll() is not None:
            return
        process.send_signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_S)


def _no_allocation(why: str) -> DoctorFinding:
    remedy = "`sinfo` and `squeue` show the reason; or leave --time out."
    return failure("nodes", f"not checked, without an allocation: {why}", remedy).on_node(ALL)
