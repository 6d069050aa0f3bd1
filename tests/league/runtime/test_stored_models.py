"""Copies of models stay in the directory of the league's players."""

from __future__ import annotations

from pathlib import Path

import pytest

from ludus.errors import UsageError
from ludus.league.runtime.stored_models import import_model
from tests.experiments import small


@pytest.mark.parametrize("name", ["../../precious", "..", "."])
def test_a_model_replaces_no_directory_outside_of_the_players(tmp_path: Path, name: str) -> None:
    run = small.train(tmp_path / "run").run_dir
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").touch()
    with pytest.raises(UsageError, match="is not a name for a player"):
        import_model(tmp_path / "league", name, str(run))
    assert (tmp_path / "precious" / "file").exists()
    assert import_model(tmp_path / "league", "old", str(run)).startswith("players/old@")
