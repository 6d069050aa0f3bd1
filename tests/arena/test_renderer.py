"""Rendered frames show the state and hide what a camp does not see."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from ludus.core.tree import Array
from ludus.core.types import Ints32
from ludus.errors import UsageError
from ludus.games.arena.bots.bots import BOTS
from ludus.games.arena.engine import layout
from ludus.games.arena.engine.layout import ALIVE, HP, SEEN, X, Y, structure_slot
from ludus.games.arena.engine.vector import Arena
from ludus.games.arena.render.bands import DirtyTiles
from ludus.games.arena.render.renderer import SMALL, Renderer, png, save_png
from ludus.games.arena.render.yuv import Yuv420
from tests.arena.random_recordings import play
from tests.arena.scenes import creep_slot

State = tuple[Ints32, Ints32]
THREE = 3


@pytest.fixture(scope="module")
def arena() -> Arena:
    """A match after half a minute, with creeps on the field."""
    arena = Arena(THREE, 1)
    arena.reset([11])
    play(arena, 60, [], seed=2)
    return arena


@pytest.fixture
def state(arena: Arena) -> State:
    return arena.units[0].copy(), arena.match[0].copy()


@pytest.fixture(scope="module")
def small() -> Renderer:
    return Renderer(THREE, SMALL)


def changed(before: Array, after: Array) -> Array:
    """Return [N, 2] (row, column) of the pixels that differ."""
    return np.argwhere((before != after).any(-1))


def test_a_frame_is_rgb_with_even_sides() -> None:
    for width, shape in ((1280, (720, 1280)), (SMALL, (272, 640)), (321, (136, 320))):
        renderer = Renderer(1, width)
        arena = Arena(1)
        arena.reset([0])
        frame = renderer.rgb(arena.units[0], arena.match[0])
        assert frame.shape == (*shape, 3) == (renderer.height, renderer.width, 3)
        assert frame.dtype == np.uint8


def test_the_same_state_gives_the_same_frame(state: State, small: Renderer) -> None:
    first = small.rgb(*state)
    other = state[0].copy()
    other[X, 0] += 9_000
    small.rgb(other, state[1])  # a frame in between leaves no trace
    assert np.array_equal(first, small.rgb(*state))
    assert np.array_equal(first, Renderer(THREE, SMALL).rgb(*state))


@pytest.mark.parametrize(("width", "camp"), [(1280, None), (SMALL, None), (960, 1)])
def test_a_partial_repaint_equals_a_full_repaint(width: int, camp: int | None) -> None:
    """Over many states of a match between bots."""
    arena = Arena(THREE, 1)
    arena.reset([5])
    renderer = Renderer(THREE, width, camp=camp)
    bots = np.full((1, 2 * THREE), BOTS.index("hard"), np.int8)
    for number in range(132):
        arena.step(arena.bot_actions(bots))
        boxes = renderer.update(arena.units[0], arena.match[0]) if number % 12 == 0 else None
        if number in (90, 131):
            before = renderer.frame.copy()
            boxes = renderer.update(arena.units[0], arena.match[0])
            fresh = Renderer(THREE, width, camp=camp).rgb(arena.units[0], arena.match[0])
            assert np.array_equal(renderer.frame, fresh)
            for left, top, right, bottom in boxes:
                before[top:bottom, left:right] = fresh[top:bottom, left:right]
            assert np.array_equal(before, fresh), "all that changed is in the boxes"


def test_yuv_planes_match_the_rgb_frame(state: State, small: Renderer) -> None:
    frame = small.rgb(*state)
    planes = Yuv420(small.height, small.width)
    planes.update(frame, [(0, 0, small.width, small.height)])
    expected = np.array(Image.fromarray(frame).convert("YCbCr")).astype(float)
    y = (planes.planes[: small.height] - 16.0) * 255 / 219
    assert np.abs(y - expected[..., 0]).max() < 2.5
    half = planes.planes[small.height :].reshape(2, small.height // 2, small.width // 2)
    for plane, channel in zip(half, (1, 2), strict=True):
        colour = expected[..., channel].reshape(small.height // 2, 2, small.width // 2, 2).mean((1, 3))
        assert np.abs((plane - 128.0) * 255 / 224 + 128 - colour).max() < 2.5
    patched = Yuv420(small.height, small.width)
    patched.update(frame, [(0, 0, 321, small.height), (321, 0, small.width, small.height)])
    assert np.array_equal(patched.planes, planes.planes)


def test_dirty_boxes_cover_exactly_the_marked_tiles() -> None:
    tiles = DirtyTiles((300, 200))
    assert list(tiles.boxes()) == []
    tiles.mark(70, 10, 130, 140)
    tiles.mark(290, -50, 900, 3)
    tiles.mark(-90, 10, -5, 20)
    assert sorted(tiles.boxes()) == [(64, 0, 192, 64), (64, 64, 192, 192), (256, 0, 300, 64)]


def test_long_names_do_not_overlap_the_score(state: State) -> None:
    long = "Blue · Arena_1v1_PPO-20261118-003131-a1b2c3d4-with-a-very-long-name-of-its-directory"
    for width, height in ((1280, 62), (SMALL, 29)):
        plain, named = (Renderer(THREE, width, names=names).rgb(*state)[:height] for names in (("a", "b"), (long, long)))
        columns = changed(plain, named)[:, 1] / width
        assert columns.size
        assert ((columns < 0.35) | (columns > 0.65)).all()


def test_rendering_does_not_change_the_state(state: State, small: Renderer) -> None:
    before = state[0].copy(), state[1].copy()
    small.rgb(*state)
    assert np.array_equal(state[0], before[0])
    assert np.array_equal(state[1], before[1])


def test_units_are_drawn_at_their_positions(state: State) -> None:
    units, match = state
    renderer = Renderer(THREE, 960)
    renderer.rgb(units, match)
    places = {
        "hero": 0,
        "creep": creep_slot(THREE, 1, 0),
        "tower": structure_slot(THREE, 0, 1),
        "base": structure_slot(THREE, 1, 2),
    }
    for slot in places.values():
        assert units[ALIVE, slot]
    whole = renderer.rgb(units, match)
    for name, slot in places.items():
        gone = units.copy()
        gone[ALIVE, slot] = 0
        gone[X, slot], gone[Y, slot] = (50_000, 34_000) if name in ("hero", "creep") else (gone[X, slot], gone[Y, slot])
        rows, columns = changed(whole, renderer.rgb(gone, match)).T
        scale = 960 / 103_200
        column = (units[X, slot] + 1_600) * scale
        row = (units[Y, slot] + 1_600) * scale + 62 * 960 / 1280
        near = np.hypot(rows - row, columns - column) < 20
        assert near.sum() > 20, name


def test_effects_are_visible(state: State, small: Renderer) -> None:
    units, match = state
    plain = small.rgb(units, match)
    fields = {
        "stunned": {layout.STUN: 9},
        "slowed": {layout.SLOW: 9, layout.SLOW_BY: 30},
        "shielded": {layout.SHIELD: 100, layout.SHIELD_LEFT: 9},
        "hurt": {HP: 100},
        "tired": {layout.MANA: 10},
        "grown": {layout.LEVEL: 12},
        "recalling": {layout.CAST: layout.RECALLING, layout.CAST_LEFT: 30},
        "aiming": {layout.CAST: 1, layout.CAST_LEFT: 2, layout.CAST_TARGET: 4},
        "lining up": {layout.CAST: 2, layout.CAST_LEFT: 2, layout.CAST_X: 1024, layout.CAST_Y: 0},
        "meteor": {layout.CAST: 3, layout.CAST_LEFT: 2, layout.CAST_X: 50_000, layout.CAST_Y: 9_000},
        "striking": {layout.TARGET: 4, layout.READY: int(units[layout.PERIOD, 0])},
        "mended": {layout.COOLDOWN_HEAL: 60 * 15 - 2},
        "dead": {ALIVE: 0, layout.RESPAWN: 99},
    }
    frames = {"plain": plain}
    for name, values in fields.items():
        other = units.copy()
        for field, value in values.items():
            other[field, 0] = value
        frames[name] = small.rgb(other, match)
    names = list(frames)
    for i, a in enumerate(names):
        for b in names[i + 1 :]:
            assert len(changed(frames[a], frames[b])) > 8, f"{a} and {b} look the same"


def test_the_result_is_shown(state: State, small: Renderer) -> None:
    ends = []
    for winner in (-1, 0, 1):
        match = state[1].copy()
        match[layout.OVER], match[layout.WINNER] = 1, winner
        ends.append(small.rgb(state[0], match))
    assert len(changed(ends[0], ends[1])) > 500
    assert len(changed(ends[1], ends[2])) > 500


@pytest.mark.parametrize("width", [SMALL, 960])
def test_the_view_of_a_camp_hides_invisible_units(width: int, state: State) -> None:
    """Changes of invisible enemies do not change a byte of the frame."""
    units, match = state
    size = THREE
    hidden = [3, 5, creep_slot(size, 1, 0), creep_slot(size, 1, 1)]
    units[SEEN, hidden] = 0
    units[SEEN, 4] = 1
    renderer = Renderer(size, width, camp=0)
    before = renderer.rgb(units, match)
    random = np.random.default_rng(0)
    for slot in hidden:
        units[X, slot], units[Y, slot] = units[X, 0] + random.integers(300), units[Y, 0]  # next to a visible one
        units[[HP, layout.MANA, layout.GOLD, layout.EARNED, layout.XP, layout.ITEMS], slot] = random.integers(0, 6, 6)
        units[[layout.LEVEL, layout.DAMAGE, layout.LAST_HITS], slot] = random.integers(2, 9, 3)
        units[layout.COOLDOWN_1 : layout.COOLDOWN_HEAL + 1, slot] = random.integers(0, 90, 4)
        units[[layout.STUN, layout.SLOW, layout.SHIELD], slot] = 9
        units[layout.TARGET, slot], units[layout.PERIOD, slot], units[layout.READY, slot] = 0, 15, 15
        units[[layout.CAST, layout.CAST_LEFT, layout.CAST_X, layout.CAST_Y], slot] = (3, 2, units[X, 0], units[Y, 0])
    units[[layout.GOLD, layout.EARNED, layout.XP], 4] += 77  # gold of a visible enemy is hidden too
    units[layout.COOLDOWN_1 : layout.COOLDOWN_HEAL + 1, 4] = 600
    assert np.array_equal(renderer.rgb(units, match), before)
    assert len(changed(Renderer(size, width).rgb(units, match), before)) > 500
    units[SEEN, 3] = 1
    assert len(changed(renderer.rgb(units, match), before)) > 100


def test_each_camp_has_its_own_fog(state: State) -> None:
    frames = [Renderer(THREE, SMALL, camp=camp).rgb(*state).astype(np.int64) for camp in (0, 1)]
    left, right = slice(0, 213), slice(427, 640)
    field = slice(60, 260)
    assert frames[0][field, left].sum() > 1.2 * frames[1][field, left].sum()
    assert frames[1][field, right].sum() > 1.2 * frames[0][field, right].sum()


@pytest.mark.parametrize("size", [1, 4, 10])
def test_all_team_sizes_have_panels(size: int) -> None:
    """Damage to a hero changes its own panel."""
    arena = Arena(size)
    arena.reset([1])
    renderer = Renderer(size, 960, names=("one", "other"))
    frame = renderer.rgb(arena.units[0], arena.match[0])
    arena.units[0, HP, : 2 * size] //= 2
    rows, columns = changed(frame, renderer.rgb(arena.units[0], arena.match[0])).T
    panels = np.unique(columns[rows > 420] * 2 * size // 960)
    assert panels.tolist() == list(range(2 * size))


def test_a_png_is_lossless(state: State, small: Renderer, tmp_path: Path) -> None:
    image = small.paint(*state)
    path = save_png(image, tmp_path / "pictures" / "one.png")
    with Image.open(path) as found:
        assert np.array_equal(np.array(found), small.rgb(*state))
    with Image.open(io.BytesIO(png(image))) as found:
        assert found.format == "PNG"


def test_invalid_arguments_of_the_renderer_are_rejected(arena: Arena) -> None:
    with pytest.raises(UsageError, match="no camp 2"):
        Renderer(1, camp=2)
    with pytest.raises(UsageError, match="10 pixels wide"):
        Renderer(1, 10)
    with pytest.raises(UsageError, match="not one match of 1 against 1"):
        Renderer(1, 160).rgb(arena.units[0], arena.match[0])
    with pytest.raises(UsageError, match="not one match of 3 against 3"):
        Renderer(3, 160).rgb(arena.units, arena.match)


def test_a_crafted_state_does_not_exhaust_the_memory(arena: Arena) -> None:
    """Values that `Arena.load` accepts but no match reaches."""
    units = arena.units[0].copy()
    tower = structure_slot(THREE, 1, 0)
    units[layout.TARGET, tower] = 0
    for field in (layout.RANGE, layout.RADIUS, layout.MAX_HP, layout.CAST_X, layout.CAST_LEFT, layout.SHIELD, layout.GOLD):
        units[field] = 100_000_000
    units[layout.CAST, : 2 * THREE] = (1, 2, 3, 4, 3, 2)
    units[layout.CAST_TARGET, : 2 * THREE] = 0
    other = Arena(THREE)
    other.load(0, arena.save(0))
    other.units[0] = units
    other.load(0, other.save(0))
    for camp in (None, 0):
        assert Renderer(THREE, 320, camp=camp).rgb(other.units[0], other.match[0]).shape == (136, 320, 3)
