"""`ludus check-env`: find out what is wrong with an environment before training, and recommend a configuration."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ludus.cli.check_report import finding_line, print_rows
from ludus.cli.help import option_in
from ludus.cli.output import Printer, make_console, make_facts
from ludus.cli.training import options as o
from ludus.core.formatting import pluralize
from ludus.errors import UsageError

if TYPE_CHECKING:
    from ludus.envs.env_check.findings import EnvFinding, EnvReport, Level
    from ludus.envs.env_check.session import CheckRequest
    from ludus.experiments.recommendation.settings import Recommendation, TrialCost

_NAMES: dict[Level, tuple[str, str]] = {
    "mistake": ("mistake", "mistakes"),
    "warning": ("warning", "warnings"),
    "advice": ("piece of advice", "pieces of advice"),
}
_check, _output = map(option_in, ("Check", "Output"))


def check_env(
    env: o.Env = None,
    file: Annotated[Path | None, _check("-f", "--file", help="YAML file of the experiment whose environment is checked.")] = None,
    experiment: o.OneExperiment = None,
    env_config: Annotated[
        str | None, _check(metavar="JSON|FILE", help="Arguments of the environment: JSON, or a YAML file.")
    ] = None,
    seconds: Annotated[float, _check(min=0.2, help="Duration of random play.")] = 4.0,
    timeout: Annotated[float, _check(min=0.5, help="Limit of one call of the environment, in seconds.")] = 30.0,
    seed: Annotated[int, _check(min=0, help="Random seed.")] = 0,
    strict: Annotated[bool, _check("--strict", help="Exit with code 1 on warnings too.")] = False,
    quick: Annotated[bool, _check("--quick", help="Skip the short training and the second process.")] = False,
    show_all: Annotated[bool, _output("--all", help="List the checks that passed, too.")] = False,
    out: Annotated[Path | None, _output("--out", "-o", help="File for the recommended configuration.")] = None,
    as_json: Annotated[bool, _output("--json", help="Print the report as JSON; findings go to stderr.")] = False,
) -> None:
    """Check an environment before training, and recommend a configuration; exit code 1 on mistakes."""
    from ludus.envs.env_check.runner import ALL_STAGES
    from ludus.envs.env_check.runner import check_env as run_check
    from ludus.envs.env_check.stages import SECOND_PROCESS

    if sys.platform == "win32":
        raise UsageError("`ludus check-env` supports Linux and macOS only.", "Use ludus.testing.check_env in a test.")
    request = _request(env, file, experiment, env_config, seconds, seed)
    printer = Printer(as_json=as_json)
    printer(f"checking {request.env} …")
    stages = [stage for stage in ALL_STAGES if not (quick and stage == SECOND_PROCESS)]

    def print_finding(finding: EnvFinding) -> None:
        printer(finding_line(finding.check.level, finding.check.rule, finding.seen, finding.check.remedy))

    report = run_check(request, stages=stages, timeout_s=timeout, on_finding=print_finding)
    advice, cost = _recommend(report, printer, quick)
    if out is not None and advice is not None:
        out.write_text(advice.to_yaml(), encoding="utf-8")
    if as_json:
        print(json.dumps(_to_json(report, advice, cost)), flush=True)
    else:
        _print(report, advice, cost, show_all)
    if report.count("mistake") or (strict and report.count("warning")):
        raise typer.Exit(1)


def _request(
    env: str | None, file: Path | None, experiment: str | None, env_config: str | None, seconds: float, seed: int
) -> CheckRequest:
    from ludus.core import trust
    from ludus.envs.env_check.session import CheckRequest
    from ludus.envs.legacy_names import current_name

    given: dict[str, Any] = _read_experiment(file, experiment, env) if file is not None else {"env": env}
    if not given["env"]:
        raise UsageError("Which environment?", "ludus check-env CartPole-v1   or   ludus check-env -f experiment.yaml")
    if given["env"] in ("external", "gamecore"):
        raise UsageError(f"env: {given['env']} means games that call Ludus.", "Check their client with `ludus check-game`.")
    config = _read_env_config(env_config)
    trust.allow(given["env"], config)
    settings = {**given, "env_config": {**given.get("env_config", {}), **config}, "env": current_name(given["env"]).name}
    return CheckRequest(**settings, seconds=seconds, seed=seed)


def _read_experiment(file: Path, name: str | None, env: str | None) -> dict[str, Any]:
    """What an experiment says about its environment."""
    from ludus.experiments.source.experiment_source import ExperimentOptions, experiments_from
    from ludus.experiments.validation.validate import ParsedExperiment

    found = experiments_from(file, ExperimentOptions(top={"env": env}), experiment=name)
    if len(found) > 1:
        raise UsageError(f"{file} holds {len(found)} experiments: {', '.join(found)}.", "Say which: --experiment NAME")
    ((called, data),) = found.items()
    parsed = ParsedExperiment({"name": called, **data})
    config = parsed.algorithm_config
    preprocess = config.preprocess.model_dump(exclude_unset=True, mode="json")
    return {
        "env": parsed.env,
        "env_config": dict(config.env_config),
        "preprocess": preprocess,
        "wrappers": tuple(config.wrappers),
        "display": config.display,
    }


def _read_env_config(given: str | None) -> dict[str, Any]:
    from ludus.cli.training.train import parse_mapping

    if given is not None and given.endswith((".yaml", ".yml", ".json")):
        try:
            given = Path(given).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"Cannot read {given}: {error}.") from error
    found = parse_mapping("--env-config", given)
    odd = next((key for key, value in found.items() if value is None and ":" in key), None)
    if odd is not None:
        raise UsageError(f"--env-config has the key {odd!r} without a value.", "YAML needs a space after the colon.")
    return found


def _recommend(report: EnvReport, printer: Printer, quick: bool) -> tuple[Recommendation | None, TrialCost | None]:
    """Nothing is recommended for an environment that cannot be played."""
    from ludus.envs.env_check.findings import CHECKS, EnvFinding
    from ludus.experiments.recommendation.settings import recommend
    from ludus.experiments.recommendation.trial import run_trial

    if "play" not in report.stages:
        return None, None
    advice = recommend(report)
    if quick or report.count("mistake"):
        return advice, None
    printer("training for a few seconds …")
    cost, failure = run_trial(advice.data)
    if failure:
        finding = EnvFinding(CHECKS["training"], failure)
        report.add(finding)
        printer(finding_line(finding.check.level, finding.check.rule, finding.seen, finding.check.remedy))
        return advice, None
    report.complete("training")
    return recommend(report, cost), cost


def _to_json(report: EnvReport, advice: Recommendation | None, cost: TrialCost | None) -> dict[str, Any]:
    from dataclasses import asdict

    recommendation = None if advice is None else {"name": advice.name, "experiment": advice.data, "reasons": advice.reasons}
    return {**report.to_json(), "trial": None if cost is None else asdict(cost), "recommendation": recommendation}


def _print(report: EnvReport, advice: Recommendation | None, cost: TrialCost | None, show_all: bool) -> None:
    from ludus.experiments.recommendation.verdict import describe_facts

    shown = [row for row in report.rows if row.count or show_all]
    if shown:
        print_rows([(row.state, row.count, row.check.rule, row.check.remedy) for row in shown])
    facts = describe_facts(report, cost)
    if any(facts.values()):
        print()
        make_console(highlight=False).print(make_facts(facts))
    if advice is not None:
        print("\nrecommended configuration:\n")
        print(advice.to_yaml(), end="")
    print(f"\n{report.env}: {_counts(report)}", flush=True)


def _counts(report: EnvReport) -> str:
    found = [pluralize(report.count(level), *names) for level, names in _NAMES.items() if report.count(level)]
    passed, skipped = (sum(row.state == state for row in report.rows) for state in ("ok", "not checked"))
    return f"{', '.join(found) or 'nothing found'}; {pluralize(passed, 'check')} passed" + f", {skipped} not made" * bool(skipped)
