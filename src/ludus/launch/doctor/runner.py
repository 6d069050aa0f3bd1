"""The whole of `ludus doctor`: this machine, and those that a run would have, each asked by its own way."""

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
from ludus.launch.doctor.checks.slurm import Wanted, allocated, judge_queue, look_queue, seconds_of, step_words
from ludus.launch.doctor.checks.token_file import judge_same
from ludus.launch.doctor.checks.versions import judge_agreement
from ludus.launch.doctor.finding import Finding, failed, skipped
from ludus.launch.doctor.local_checks import Examination, Request, examine, this_machine
from ludus.launch.doctor.remote_nodes import ANSWER_S, Answer, Explain, Node, ask, finding_of
from ludus.transport.message_stream import PASSWORD, split_password

if TYPE_CHECKING:
    from ludus.launch.cluster_file import ClusterConfig

MODULE = "ludus.launch.doctor"
ALL = "all nodes"
ALLOCATION = "SLURM_JOB_NODELIST"
INSIDE = "LUDUS_DOCTOR_ALLOCATED"
"""Set in an allocation that was made for the doctor: it makes no second one."""

_PENDING_S, _LOOK_MINUTES, _SPARE_S, _END_S = 120, 10, 60.0, 10.0
"""For an allocation that is made for us: how long we wait for it, how long it is at most; for what goes on around it, and for its end."""


@dataclass(frozen=True)
class Consultation:
    """`target`: where the run shall be; None: on this machine. `timeout_s`: for each other machine."""

    request: Request
    target: ClusterConfig | None = None
    timeout_s: float = ANSWER_S

    def findings(self, environ: Mapping[str, str]) -> list[Finding]:
        """Of this machine first. Raises UsageError for a target that makes no sense."""
        target = self.target
        if target is None or target.on == "local":
            return [finding.at(this_machine()) for finding in examine(self.request).findings]
        if target.on == "ssh":
            return self._of_ssh(target, environ)
        if target.on == "slurm":
            return self._of_slurm(target, environ)
        raise UsageError(f"There is no doctor for {target.on}.", "It knows local, ssh and slurm.")

    def _of_ssh(self, target: ClusterConfig, environ: Mapping[str, str]) -> list[Finding]:
        from ludus.launch.ssh.connection import check_settings, explain_failure, ssh_words

        settings = check_settings(target.ssh_settings())
        nodes = [
            Node(each.host, tuple(ssh_words(settings, at, MODULE)), "ssh", functools.partial(explain_failure, settings, at))
            for at, each in enumerate(settings.nodes)
        ]
        here, answers = self._asked(nodes, tuple(each.node_address for each in settings.nodes), target, environ, shared=False)
        found = [*here.findings, *_of_answers(answers, here)]
        told = {answer.node: answer.token for answer in answers if answer.token is not None}
        # Roles are started by lists, and share one token; a job that is submitted brings its own to each machine.
        return [*found, judge_same(told).at(ALL)] if target.iplist is not None and told else found

    def _of_slurm(self, target: ClusterConfig, environ: Mapping[str, str]) -> list[Finding]:
        wanted = Wanted(target.partition or "", target.time or "", target.size, target.cpus or 0, target.gpus)
        queue = judge_queue(look_queue(), wanted)
        nodes = [Node(name, self._step(name, cpus, target), "srun", _explained_step(name)) for name, cpus in _allocated(environ)]
        here, answers = self._asked(nodes, (), target, environ, shared=True)
        found = [*here.findings, *(finding.at(this_machine()) for finding in queue)]
        if not nodes:
            said = "not looked at: this is no allocation; what is said above is of this machine, where jobs are submitted"
            return [
                *found,
                skipped("nodes", said, "Add --time 5, for an allocation of so many minutes; or run it within `salloc`.").at(ALL),
            ]
        return [*found, *_of_answers(answers, here)]

    def _step(self, name: str, cpus: int, target: ClusterConfig) -> tuple[str, ...]:
        command = [target.python or sys.executable, "-P", "-m", MODULE]
        if target.setup:
            lines = "\n".join(target.setup)
            command = ["bash", "-c", f"{{\n{lines}\n}} </dev/null >&2\nexec {shlex.join(command)}"]
        return step_words(name, command, cpus)

    def _asked(
        self, nodes: list[Node], addresses: tuple[str, ...], target: ClusterConfig, environ: Mapping[str, str], *, shared: bool
    ) -> tuple[Examination, list[Answer]]:
        """This machine, which only starts the run, and the others, at the same time."""
        several = max(1, len(nodes) or target.size)
        each = None if self.request.workers is None else -(-self.request.workers // several)
        there = replace(self.request, workers=each, ray=several > 1, nodes=addresses, shared=shared, key=secrets.token_hex(16))
        answers = ask(nodes, there, _handed_on(target, environ), self.timeout_s) if nodes else []
        here = examine(replace(there, launcher=True, env="", game="", memory="", store=""))
        return replace(here, findings=tuple(finding.at(this_machine()) for finding in here.findings)), answers


def _of_answers(answers: list[Answer], here: Examination) -> list[Finding]:
    told = {answer.node: answer.versions for answer in answers if answer.versions}
    agreement = judge_agreement(told | {"this machine": {"ludus": here.versions["ludus"]}}) if told else []
    return [*(finding for answer in answers for finding in answer.findings), *(finding.at(ALL) for finding in agreement)]


def _handed_on(target: ClusterConfig, environ: Mapping[str, str]) -> dict[str, str]:
    """What the processes of the run would be given, there."""
    from ludus.launch.planner import SECRETS

    return {**target.environment, **{name: environ[name] for name in (*SECRETS, *target.secrets) if environ.get(name)}}


def _allocated(environ: Mapping[str, str]) -> list[tuple[str, int]]:
    """Nodes, and how many cores of each are ours; 0: nobody says."""
    from ludus.launch.slurm.backend import parse_counts

    if not environ.get(ALLOCATION):
        return []
    cpus = parse_counts(environ.get("SLURM_JOB_CPUS_PER_NODE", ""))
    try:
        return [(name, cpus[at] if at < len(cpus) else 0) for at, name in enumerate(allocated(environ[ALLOCATION]))]
    except (OSError, subprocess.SubprocessError) as error:
        raise WorkerFailed(f"Slurm does not say which nodes {environ[ALLOCATION]} are: {error}.", "`scontrol ping`") from error


def _explained_step(name: str) -> Explain:
    def explain(code: int | None, said: str) -> LudusError:
        last = next((line.strip() for line in reversed(said.splitlines()) if line.strip()), "")[:300]
        if "No module named" in said and "ludus" in said:
            return UsageError(f"The Python on {name} has no Ludus: {last}", "Set python, or setup, in cluster.yaml.")
        if code is None:
            return WorkerFailed(
                f"{name} does not answer{': ' if last else ''}{last}.", f"`scontrol show node {name}` says how it is."
            )
        return WorkerFailed(f"srun ended with {code}{': ' if last else ''}{last}", f"`scontrol show node {name}` says how it is.")

    return explain


# -- an allocation of our own ---------------------------------------------------------------------------------------------


def in_allocation(target: ClusterConfig, words: Sequence[str], environ: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """The same command within `salloc`: what is run, and with which environment. A password in the address of the memory goes into
    the latter. Pure. Raises UsageError for one in another address."""
    minutes = min(_LOOK_MINUTES, max(1, seconds_of(target.time or "infinite") // 60))
    options = [
        "salloc",
        "--quiet",
        f"--immediate={_PENDING_S}",
        f"--nodes={target.size}",
        f"--time={minutes}",
        "--job-name=ludus-doctor",
    ]
    named: dict[str, str | int | None] = {
        "partition": target.partition, "account": target.account, "qos": target.qos, "constraint": target.constraint,
        "reservation": target.reservation, "nodelist": target.nodelist, "exclude": target.exclude,
    }  # fmt: skip
    # As the run will ask: who asks for one core of a node, and for none of its accelerators, is shown no more of it.
    named |= {"ntasks-per-node": "1", "cpus-per-task": target.cpus, "mem": target.memory}
    named |= {"gres": f"gpu:{target.gpus}"} if target.gpus else {}
    options += [f"--{name}={value}" for name, value in named.items() if value]
    options += ["--exclusive"] if target.exclusive else []
    said, secret, before = [], {INSIDE: "1"}, ""
    for word in words:
        option, equals, value = word.partition("=") if word.startswith("--") else (before, "", word)
        url, password = split_password(value) if "://" in value else (value, None)
        said.append(f"{option}{equals}{url}" if word.startswith("--") else url)
        before = option
        if password is not None and option == "--memory":
            secret[PASSWORD] = password
        elif password is not None:
            raise UsageError(f"The address of {option} has a password in it.", "Leave it out: its variables are handed on.")
    inner = [sys.executable, "-P", "-m", "ludus.cli.main", "doctor", *(word for word in said if word != "--json"), "--json"]
    return [*options, *target.extra, *inner], {**environ, **secret}


def of_allocation(
    target: ClusterConfig,
    words: Sequence[str],
    environ: Mapping[str, str],
    timeout_s: float = ANSWER_S,
    around_s: float = _PENDING_S + _SPARE_S,
) -> list[Finding]:
    """What the same command finds in an allocation that is made for it and given back. Where there is none, that is a finding.

    `timeout_s`: for the look; `around_s`: for waiting before and after it.
    """
    command, variables = in_allocation(target, words, environ)
    within_s = timeout_s + around_s
    try:
        process = subprocess.Popen(  # noqa: S603
            command, env=variables, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
    except OSError as error:
        return [_no_nodes(f"salloc cannot be run: {error.strerror}")]
    with process:
        try:
            out, err = process.communicate(timeout=within_s)
        except subprocess.TimeoutExpired:
            return [_no_nodes(f"no answer within {within_s:.0f} s")]
        finally:
            _given_back(process)
    lines = out.strip().splitlines()
    try:
        found = [finding_of(said) for said in json.loads(lines[-1])]
    except (IndexError, ValueError, TypeError):
        last = next(
            (line.strip() for line in reversed(err.splitlines()) if line.strip()), f"salloc ended with {process.returncode}"
        )
        return [_no_nodes(last[:300])]
    return [finding for finding in found if finding is not None]


def _given_back(process: subprocess.Popen[str]) -> None:
    """End salloc so that its nodes are free: one that is killed leaves them allocated until their time is up.

    It hands SIGTERM on to what it runs, and ends after that; at SIGHUP it gives them back without waiting.
    """
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGKILL):
        if process.poll() is not None:
            return
        process.send_signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_S)


def _no_nodes(why: str) -> Finding:
    return failed(
        "nodes", f"there is no allocation to look at them in: {why}", "`sinfo` and `squeue` say why; or leave --time out."
    ).at(ALL)
