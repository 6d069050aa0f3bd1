"""`ludus export`: write a trained agent as an ONNX file, which games run without Ludus."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ludus.cli.common_options import run_argument
from ludus.cli.output import say
from ludus.cli.progress import ProgressBar
from ludus.cli.training import options as o
from ludus.errors import NotFound, UsageError

if TYPE_CHECKING:
    from ludus.experiments.export_run import ExportResult


def export(
    checkpoint: Annotated[
        str,
        run_argument(
            help="Run (its newest checkpoint), RUN/best, or a checkpoint directory; a run also as last, EXPERIMENT or the end of its name.",
        ),
    ],
    format_: Annotated[str, typer.Option("--format", help="Tensor names and shapes: onnx, or ml-agents for Unity.")] = "onnx",
    quantize: Annotated[str | None, typer.Option(help="Quantization: int8 is smaller, and faster for large networks.")] = None,
    opset: Annotated[
        int | None, typer.Option(help="ONNX opset version; older runtimes need an older one. [default: 18; ml-agents: 15]")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Directory or .onnx file to write. [default: RUN/exports]")] = None,
    model: Annotated[str | None, typer.Option(help="Model to export, if the run has several.")] = None,
    observations: Annotated[
        Path | None, typer.Option(help="steps.npz of a rollout, used to verify the export. [default: the run's newest]")
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print the report as JSON on the last line.")] = False,
    trust: o.Trust = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
) -> None:
    """Export a trained agent to ONNX, with a report that compares it with the original."""
    from ludus.experiments.export_run import LAYOUTS, export_checkpoint

    if format_ not in LAYOUTS:
        raise UsageError(f"--format {format_} is not known.", f"Use {' or '.join(LAYOUTS)}.")
    if quantize not in (None, "int8"):
        raise UsageError(f"--quantize {quantize} is not known.", "Use int8, or leave it out for float32.")
    try:
        with ProgressBar("exporting and verifying", quiet=json_):
            exported = export_checkpoint(
                checkpoint, layout=format_, model=model, int8=quantize == "int8", opset=opset, out=out, observations=observations
            )  # fmt: skip
    except NotFound as error:
        raise UsageError(error.message, error.hint) from error
    show_export(exported, json_)


def show_export(exported: ExportResult, json_: bool) -> None:
    """Print the report of an export; exit code 1 if nothing was written."""
    report = exported.report
    measured = f"{report.equal_actions:.3%} of {report.decisions} actions equal"
    if report.layout == "onnx":
        measured += f", logits within {report.max_logit_difference:.2g}"
    say(f"{report.model} version {report.version}, {report.precision}, opset {report.opset}: {measured}", to_stderr=json_)
    for note in report.notes:
        say(f"note: {note}", to_stderr=json_)
    if exported.file is not None:
        files = exported.to_json()
        say(f"model   {files['file']}", to_stderr=json_)
        say(f"report  {files['report_file']}", to_stderr=json_)
    if json_:
        print(json.dumps(exported.to_json()), flush=True)
    if exported.file is None:
        say(f"ludus: The export differs from the original, so nothing was written: {report.reason}", to_stderr=True)
        raise typer.Exit(1)
