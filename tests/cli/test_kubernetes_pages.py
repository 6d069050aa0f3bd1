"""The pages about Kubernetes: every `ludus submit`, `ludus train -dc` and `helm` command on them renders objects that are valid.

`# name.ext` as the first line of a yaml or ini block makes it a file. No cluster is needed: `ludus submit` gets `--dry-run`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from ludus.cli.training.distributed_kubernetes import kubernetes_fleet
from ludus.compat.coach.fleet_ini import read_fleet_file
from ludus.launch.kubernetes.client import KINDS
from tests.cli.calling import Call
from tests.launch.test_helm_chart import CHART, needs_helm, run_helm

DOCS = Path(__file__).parents[2] / "docs"
PAGES = [DOCS / "kubernetes.md", *sorted((DOCS / "kubernetes").glob("*.md"))]
SHAPES = {
    "one_pod": {"Job"},
    "ray_cluster": {"Job", "RayJob", "Service"},
    "fleet": {"Job", "Deployment", "StatefulSet", "HorizontalPodAutoscaler"},
    "gamecore": {"Job", "Deployment", "Service"},
    "serve": {"Deployment", "PodDisruptionBudget", "HorizontalPodAutoscaler", "NetworkPolicy"},
    "monitoring": {"PodMonitor", "PrometheusRule"},
}
"""Page → kinds of objects that its commands must render."""

VERSION = "1.37"
CUSTOM = ("RayJob", "PodMonitor", "PrometheusRule")
_BLOCK = re.compile(r"^```(?P<language>sh|yaml|ini)\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE)
_FILE = re.compile(r"# (\w+\.(?:yaml|yml|ini))\n")


def commands(page: Path, directory: Path) -> Iterator[list[str]]:
    """Write the files of a page as they come, and return its commands as words."""
    for block in _BLOCK.finditer(page.read_text(encoding="utf-8")):
        if block["language"] != "sh":
            if file := _FILE.match(block["text"]):
                (directory / file[1]).write_text(block["text"], encoding="utf-8")
            continue
        for line in block["text"].replace("\\\n", " ").splitlines():
            yield shlex.split(line, comments=True)


def check_objects(text: str) -> set[str]:
    """Validate a stream of documents against the schemas of Kubernetes, and return their kinds."""
    documents: list[dict[str, Any]] = [document for document in yaml.safe_load_all(text) if document]
    assert documents
    for document in documents:
        assert document["kind"] in KINDS
        if document["kind"] not in CUSTOM:
            kubernetes_validate.validate(document, VERSION, strict=True)
    return {document["kind"] for document in documents}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_that_submit_render_valid_objects(
    page: Path, call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    kinds: set[str] = set()
    for words in commands(page, tmp_path):
        if words[:2] != ["ludus", "submit"]:
            continue
        rest = words[1:]
        if "--render" in rest:
            at = rest.index("--render")
            rest = rest[:at] + rest[at + 2 :]
        done = call(*(word for word in (rest[0], "--dry-run", *rest[1:]) if word))
        assert done.code == 0, f"{shlex.join(words)}\n{done.err}"
        kinds |= check_objects(done.out)
    assert SHAPES.get(page.stem, set()) <= kinds


@needs_helm
def test_commands_of_helm_render_valid_objects(tmp_path: Path) -> None:
    rendered = 0
    for words in commands(DOCS / "kubernetes" / "helm.md", tmp_path):
        if words[:1] == ["helm"] and "-f" in words:
            assert words[3] == "deploy/helm/ludus" or words[2] == "deploy/helm/ludus"
            values = yaml.safe_load((tmp_path / words[words.index("-f") + 1]).read_text())
            settings = [word for at, word in enumerate(words) if "--set" in words[at - 1 : at + 1]]
            done = run_helm("template", "r", str(CHART), *settings, values=values, home=tmp_path)
            assert done.returncode == 0, f"{shlex.join(words)}\n{done.stderr}"
            check_objects(done.stdout)
            rendered += 1
    assert rendered >= 4


def test_the_fleet_of_the_ini_file_renders_valid_objects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "credentials").write_text("[default]\naws_access_key_id = a\naws_secret_access_key = b\n")
    found = [words for words in commands(DOCS / "kubernetes" / "from_coach.md", tmp_path) if "-dc" in words]
    (words,) = found
    file = read_fleet_file((tmp_path / words[words.index("-dcp") + 1]).read_text(), tmp_path)
    name, workers = words[words.index("-e") + 1], int(words[words.index("-n") + 1])
    job, orchestrator = kubernetes_fleet(file, name, ["-p", words[words.index("-p") + 1]], workers)
    files = orchestrator.render(job)
    kinds = check_objects("---\n".join(text for path, text in files.items() if path != "kustomization.yaml"))
    assert {"Job", "Deployment", "StatefulSet", "Secret"} <= kinds
    assert yaml.safe_load(files[f"deployment-{name}-worker.yaml"])["spec"]["replicas"] == workers
    assert job.place == "s3://games/cartpole"
