"""The Unreal plugin: compiled against stubs of the engine, and ticked by a console as the engine does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.clients.driving import CLIENTS
from tests.clients.frames import FrameLoopContract
from tests.clients.test_cpp import CLIENT, SANITIZED, compiled

PLUGIN = CLIENTS / "unreal" / "Ludus"
MODULE = PLUGIN / "Source" / "Ludus"
STUBS = Path(__file__).parent / "unreal"
_OF_ENGINE = ["-Wno-unused-parameter", "-Wno-conversion", "-Wno-pedantic"]  # as the engine's own headers need


def test_the_plugin_names_its_module_and_contains_the_client() -> None:
    about = json.loads((PLUGIN / "Ludus.uplugin").read_text())
    assert [module["Name"] for module in about["Modules"]] == [MODULE.name]
    assert f"class {MODULE.name} : ModuleRules" in (MODULE / "Ludus.Build.cs").read_text()
    for name in ("ludus.hpp", "ludus_agent.hpp"):
        assert (MODULE / "Private" / name).resolve() == CLIENT / name


class TestComponent(FrameLoopContract):
    @pytest.fixture(scope="class")
    @classmethod
    def game(cls, tmp_path_factory: pytest.TempPathFactory) -> list[str | Path]:
        """Without exceptions and type information, as the engine compiles."""
        made = tmp_path_factory.mktemp("unreal") / "game"
        sources = [STUBS / "game.cpp", *sorted((MODULE / "Private").glob("*.cpp"))]
        places = [f"-I{STUBS / 'engine'}", f"-I{MODULE / 'Public'}", f"-I{CLIENT / 'example'}"]
        dialect = ["-std=c++17", "-fno-exceptions", "-fno-rtti"]
        compiled(sources[0], *dialect, *_OF_ENGINE, *SANITIZED, *places, "-pthread", *sources[1:], "-o", made)
        return [made]
