"""Regenerate the tables of docs/config.md from the schemas. Run it after a key has changed; a test compares page and schemas."""

from __future__ import annotations

from pathlib import Path

from ludus.experiments.validation.explain import fill_tables

PAGE = Path(__file__).parents[1] / "docs" / "config.md"

if __name__ == "__main__":
    PAGE.write_text(fill_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
