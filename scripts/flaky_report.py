"""Print the tests that failed in a first run and passed in a second one: `flaky_report.py first.xml second.xml` (JUnit files of pytest)."""

from __future__ import annotations

import sys
from pathlib import Path
from xml.etree import ElementTree

WIDTH = 100


def outcomes(report: Path) -> dict[str, tuple[str, float]]:
    """Each test of a JUnit file: the first line of its failure, empty when it passed or was skipped, and its seconds."""
    found: dict[str, tuple[str, float]] = {}
    for case in ElementTree.parse(report).iter("testcase"):  # noqa: S314  # written by the pytest run just before
        test = f"{case.get('classname', '')}::{case.get('name', '')}"
        failure = next((each for each in case if each.tag in ("failure", "error")), None)
        lines = ((failure.get("message") or failure.text or "failed") if failure is not None else "").strip().splitlines()
        if not found.get(test, ("", 0.0))[0]:  # a test has a second entry when its teardown failed too
            found[test] = (lines[0] if lines else "", float(case.get("time", 0)))
    return found


def flaky(first: Path, second: Path) -> list[tuple[str, str, float]]:
    """(test, reason, seconds) of each test that failed in `first` and passed in `second`."""
    again = outcomes(second)
    return [
        (test, reason, seconds)
        for test, (reason, seconds) in outcomes(first).items()
        if reason and test in again and not again[test][0]
    ]


def table(rows: list[tuple[str, str, float]]) -> str:
    lines = [f"Flaky tests, which failed in parallel with others and passed alone: {len(rows)}. Please repair them.", ""]
    for test, reason, seconds in rows:
        lines += [f"  {test}  ({seconds:.1f} s)", f"      {reason[:WIDTH]}"]
    return "\n".join(lines)


if __name__ == "__main__":
    files = [Path(word) for word in sys.argv[1:3]]
    if all(file.is_file() for file in files) and (rows := flaky(*files)):
        sys.stdout.write(f"\n{table(rows)}\n")
