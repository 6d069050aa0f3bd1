"""Pictures of leagues of several sizes: their labels do not overlap and stay inside, and they show what the league has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ludus.league.events import PlayerAdded, PlayerRetired, SnapshotTaken
from ludus.league.history import rating_history
from ludus.league.pictures.canvas import spread_labels, to_png
from ludus.league.pictures.family_tree import draw_family_tree
from ludus.league.pictures.payoff_heat_map import draw_payoff
from ludus.league.pictures.rating_curves import draw_curves
from ludus.league.pictures.tensorboard import write_tensorboard
from ludus.league.players import Player, PlayerRole
from ludus.league.rating_table import fit_league, rate_players
from ludus.league.state import LeagueState
from tests.league.leagues import apply_all, league_events

SIZES = [(1, 0), (3, 5), (12, 16)]


def boxes(figure: Any, texts: Any) -> Any:
    """[texts, 4] left, bottom, right and top in pixels of the texts that are shown, without the lines that lead to them."""
    from matplotlib.text import Text

    renderer = figure.canvas.get_renderer()
    shown = [text for text in texts if text.get_text() and text.get_visible()]
    return np.array([Text.get_window_extent(text, renderer).extents for text in shown]).reshape(-1, 4)


def assert_readable(figure: Any, texts: Any) -> None:
    """All texts are inside the picture, and no two overlap by more than a pixel."""
    x0, y0, x1, y1 = boxes(figure, texts).T
    width, height = figure.canvas.get_width_height()
    assert min(x0.min(), y0.min()) >= -1
    assert x1.max() <= width + 1
    assert y1.max() <= height + 1
    wide = np.minimum(x1[:, None], x1) - np.maximum(x0[:, None], x0)
    high = np.minimum(y1[:, None], y1) - np.maximum(y0[:, None], y0)
    assert ((wide > 1) & (high > 1)).sum() == len(x0)  # each one with itself


def make_canvas(figure: Any) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    FigureCanvasAgg(figure).draw()
    return figure


@pytest.mark.parametrize(("families", "snapshots"), SIZES)
def test_the_heat_map_is_readable(families: int, snapshots: int) -> None:
    state = apply_all(LeagueState(), league_events(families, snapshots, np.random.default_rng(0)))
    figure = make_canvas(draw_payoff(state))
    axes = figure.axes[0]
    assert axes.images[0].get_array().shape == (len(state.players), len(state.players))
    for labels in (axes.get_xticklabels(), axes.get_yticklabels()):
        assert_readable(figure, labels)
        assert sorted(label.get_text() for label in labels) == sorted(state.players)
    assert [label.get_text() for label in axes.get_yticklabels()] == [one.name for one in rate_players(state)]


@pytest.mark.filterwarnings("error:constrained_layout")
def test_a_huge_heat_map_is_labelled_in_part() -> None:
    players = [Player(f"player{i}", PlayerRole.HISTORICAL) for i in range(800)]
    figure = make_canvas(draw_payoff(apply_all(LeagueState(), map(PlayerAdded, players))))
    labels = figure.axes[0].get_yticklabels()
    assert 150 < len(labels) <= 250
    assert_readable(figure, labels)
    assert max(figure.canvas.get_width_height()) < 4000


@pytest.mark.parametrize(("families", "snapshots"), SIZES)
@pytest.mark.parametrize("over", ["results", "steps"])
def test_curves_are_readable_and_end_at_the_ratings_of_now(families: int, snapshots: int, over: Any) -> None:
    events = league_events(families, snapshots, np.random.default_rng(0))
    state = apply_all(LeagueState(), events)
    history = rating_history(events, every=max(1, state.results // 6))
    figure = make_canvas(draw_curves(state, history, over))
    axes = figure.axes[0]
    assert_readable(figure, axes.texts)
    fitted = fit_league(state)
    shown = [f"{name}  {fitted[name].elo:.0f}" for name, player in state.players.items() if player.role != "historical"]
    assert sorted(text.get_text() for text in axes.texts) == sorted(shown)


def test_a_curve_has_a_gap_at_a_reset() -> None:
    events = league_events(1, 3, np.random.default_rng(0))
    events.append(SnapshotTaken("main_0", "main_0.reset", "", reset=True))
    state = apply_all(LeagueState(), events)
    events += league_events(1, 3, np.random.default_rng(1))[-1:]
    history = [
        *rating_history(events[:-2], every=20),
        *rating_history(events[:-1], every=10_000),
    ]
    line = draw_curves(state, history).axes[0].lines[0]
    assert np.isnan(line.get_ydata()).sum() == 1


@pytest.mark.parametrize(("families", "snapshots"), SIZES)
def test_the_family_tree_is_readable_and_has_every_snapshot(families: int, snapshots: int) -> None:
    state = apply_all(LeagueState(), league_events(families, snapshots, np.random.default_rng(0)))
    state = apply_all(state, [PlayerRetired("main_0")])
    figure = make_canvas(draw_family_tree(state))
    axes = figure.axes[0]
    assert_readable(figure, axes.texts)
    assert_readable(figure, axes.get_yticklabels())
    dots = sum(len(collection.get_offsets()) for collection in axes.collections)
    hollow = sum(line.get_marker() == "o" for line in axes.lines)
    assert dots + hollow == families * snapshots
    assert any("retired" in text.get_text() for text in axes.texts)


def test_an_empty_league_has_pictures() -> None:
    for figure in (draw_payoff(LeagueState()), draw_curves(LeagueState(), []), draw_family_tree(LeagueState())):
        assert to_png(figure).startswith(b"\x89PNG")


def test_labels_are_moved_apart_as_little_as_possible() -> None:
    assert spread_labels([5.0, 1.0], 2.0, 0.0, 10.0) == [5.0, 1.0]
    assert spread_labels([5.0, 5.0], 2.0, 0.0, 10.0) == [4.0, 6.0]
    assert spread_labels([0.0, 0.5], 2.0, 0.0, 10.0) == [0.0, 2.0]
    assert spread_labels([10.0, 9.0, 9.5], 2.0, 0.0, 10.0) == [10.0, 6.0, 8.0]
    assert spread_labels([5.0] * 6, 4.0, 0.0, 10.0) == pytest.approx([0, 2, 4, 6, 8, 10])
    assert spread_labels([], 1.0, 0.0, 1.0) == []


def test_tensorboard_has_ratings_and_pictures(tmp_path: Path) -> None:
    accumulator: Any = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = league_events(3, 2, np.random.default_rng(0))
    state = apply_all(LeagueState(), events)
    write_tensorboard(tmp_path, state, rating_history(events, every=20))
    read = accumulator.EventAccumulator(str(tmp_path))
    read.Reload()
    assert set(read.Tags()["images"]) == {"league/payoff", "league/ratings", "league/family_tree"}
    (rating,) = read.Scalars("rating/main_0")
    assert rating.step == state.results
    assert rating.value == pytest.approx(fit_league(state)["main_0"].elo, rel=1e-5)
    assert read.Scalars("league/players")[0].value == len(state.players)
