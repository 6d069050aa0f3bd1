"""Assembly of a run: which function assembles which training mode, and how components are run and closed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ludus.config.aliases import rllib_keys
from ludus.config.section_translation import translate_section
from ludus.errors import LudusError
from ludus.experiments import runner
from ludus.experiments.assembly.components import ComponentStack
from ludus.experiments.resolve import resolve
from ludus.experiments.training import assemble_of, assemble_run, prepare_new_run
from tests.experiments import small


class _Component:
    def __init__(self, name: str, events: list[str], fails: bool = False) -> None:
        self._name, self._events, self._fails = name, events, fails

    def close(self) -> None:
        self._events.append(f"close {self._name}")
        if self._fails:
            raise ValueError("cannot be closed")


def test_components_are_closed_in_reverse_order_also_when_a_later_one_fails_to_start() -> None:
    events: list[str] = []

    def assemble() -> None:
        with ComponentStack() as stack:
            stack.own(_Component("a", events))
            stack.own(_Component("b", events))
            stack.own(object())  # nothing to close
            raise LudusError("no")

    with pytest.raises(LudusError, match="no"):
        assemble()
    assert events == ["close b", "close a"]


def test_a_component_that_fails_to_close_does_not_keep_the_others_open(caplog: pytest.LogCaptureFixture) -> None:
    events: list[str] = []
    with ComponentStack() as stack:
        stack.own(_Component("a", events))
        stack.own(_Component("b", events, fails=True))
    assert events == ["close b", "close a"]
    assert "closing _Component failed" in caplog.text


EXTERNAL = {
    "observation_space": {"type": "Box", "shape": [2]},
    "action_space": {"type": "Discrete", "n": 2},
}


@pytest.mark.parametrize(
    ("data", "function"),
    [
        (small.data(1), "assemble_local"),
        (small.data(1, num_workers=1), "assemble_workers"),
        ({**small.data(1), "memory": "redis://127.0.0.1:1"}, "assemble_fleet"),
        ({"env": "external", "config": {"env_config": EXTERNAL}}, "assemble_http"),
        ({"env": "pettingzoo/tictactoe_v3"}, "assemble_multi_agent"),
    ],
)
def test_every_training_mode_has_a_function_that_assembles_it(data: dict[str, Any], function: str) -> None:
    assert assemble_of(resolve(data)).__name__ == function


def test_a_run_whose_components_have_nothing_to_do_fails_instead_of_hanging(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with assemble_run(prepare_new_run(resolve(small.data(1)), tmp_path / "run")) as parts:
        monkeypatch.setattr(parts.source, "step", lambda: False)
        with pytest.raises(LudusError, match="wait forever"):
            parts.controller.run()


def test_the_config_is_translated_once_between_start_and_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sections: list[str] = []
    translate = translate_section

    def count(section: str, *args: Any) -> Any:
        sections.append(section)
        return translate(section, *args)

    monkeypatch.setattr("ludus.config.translation.translate_section", count)
    runner.train(small.data(1), local_dir=tmp_path)
    assert (sections.count(rllib_keys.EXPERIMENT), sections.count(rllib_keys.CONFIG)) == (1, 1)
