"""The Arena as a process of its own, which calls the actors that play its camps.

A gamecore server tells it everything by the environment (LUDUS_GAME_CONFIG, LUDUS_GAME_RESULT, LUDUS_GAME_STATES and _SHARE,
LUDUS_GAME_TOKEN_0 and _1). By hand:

    python -P -m ludus.games.arena --mode 1v1 --camp0 http://127.0.0.1:8000 --camp1 rule:hard --pace 15
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import logging
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, get_args

import numpy as np

from ludus.errors import ConfigError, LudusError, UsageError
from ludus.games.arena.bots.bots import SCRIPTS
from ludus.games.arena.engine.checksummed_file import write_whole
from ludus.games.arena.engine.layout import HEADS, OVER
from ludus.games.arena.engine.recording import Recorder
from ludus.games.arena.engine.settings import ArenaSettings
from ludus.games.arena.engine.vector import Arena
from ludus.games.arena.host.codec import FORMATS
from ludus.games.arena.host.match import CAMPS, Match, OnIllegal, OnLost, Plan, Rule, Sessions, read_plan
from ludus.games.arena.host.match_host import Host, set_up
from ludus.io.yaml_documents import read_text

if sys.platform == "win32":
    from asyncio import run
else:
    from uvloop import run  # a tenth less time for a decision over HTTP; imported here for those who are forked from us

log = logging.getLogger(__name__)

RECORDING: Final = "match.arena"
"""In the game's own directory."""
_UNFINISHED: Final = 3
_MAX_CONFIG = 1 << 20
_MAX_MATCHES = 4096


def prepare() -> None:
    """Load the kernels, or compile them: whoever is forked from here on has them."""
    arena = Arena()
    arena.reset([0])
    arena.observe()
    actions = np.zeros((1, arena.heroes, len(HEADS)), np.int32)
    for name in range(len(SCRIPTS)):
        actions = arena.script(np.full((1, arena.heroes), name, np.int8))
    arena.legal(actions)
    arena.step(actions)


def main(argv: Sequence[str]) -> int:
    """0: all matches came to their end. 2: they were never begun. 3: an actor was gone. 128 + n: stopped by signal n."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", force=True)
    environ = os.environ
    result = Path(environ["LUDUS_GAME_RESULT"]) if environ.get("LUDUS_GAME_RESULT") else None
    try:
        plans, record = _asked(argv, environ)
        share = float(environ.get("LUDUS_GAME_STATES_SHARE") or 1.0)
        played = play(plans, _directory(environ.get("LUDUS_GAME_STATES")), record, share)
    except LudusError as error:
        log.error("%s", error)
        _tell(result, {"winner": None, "reason": str(error)})
        return error.exit_code
    if result is None:
        for one in played.results:
            sys.stdout.write(f"{json.dumps(one)}\n")
    elif not plans[0].options.together:
        _tell(result, played.results[0])
    else:
        _tell(result, {"winner": None, "matches": played.matches, "completed": played.completed})
    if played.stopped:
        return 128 + played.stopped
    return 0 if played.completed == played.matches else _UNFINISHED


def _directory(name: str | None) -> Path | None:
    return Path(name) if name else None


def _tell(path: Path | None, result: Mapping[str, Any]) -> None:
    if path is not None:
        write_whole(path, json.dumps(result).encode())


# -- what is asked for ------------------------------------------------------------------------------------------------


def _asked(argv: Sequence[str], environ: Mapping[str, str]) -> tuple[list[Plan], Path | None]:
    """The matches, and where they are recorded."""
    tokens = [environ.get(f"LUDUS_GAME_TOKEN_{camp}") or None for camp in range(CAMPS)]
    path = environ.get("LUDUS_GAME_CONFIG")
    if argv or not path:
        return _by_hand(argv, tokens)
    try:
        config = json.loads(read_text(Path(path), _MAX_CONFIG))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON: {error}.", "A gamecore server writes it.") from error
    plan = read_plan(config, tokens, SCRIPTS)
    return [plan], Path(path).with_name(RECORDING) if plan.options.record else None


def _by_hand(argv: Sequence[str], tokens: Sequence[str | None]) -> tuple[list[Plan], Path | None]:
    parser = argparse.ArgumentParser(
        prog="python -P -m ludus.games.arena", description="Matches of the Arena, as a game process."
    )
    parser.add_argument("--mode", help="1v1, 3v3, …")
    parser.add_argument("--heroes", help="ids or names: 190,173,117/141,111,107")
    for camp in range(CAMPS):
        parser.add_argument(f"--camp{camp}", default="", help="http://HOST:PORT, or rule:NAME")
    parser.add_argument("--timeout-s", type=float, default=30.0, help="for each answer of an actor")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--matches", type=int, default=1, help="side by side, with seeds one after the other")
    parser.add_argument("--max-frames", type=int)
    parser.add_argument("--start-from", help="a saved state")
    parser.add_argument("--record", type=Path, help="the file of the recording")
    parser.add_argument("--runtime-id", default="arena")
    parser.add_argument("--eval-mode", action="store_true")
    parser.add_argument("--rule", default="medium", choices=SCRIPTS)
    parser.add_argument("--pace", type=float, default=0.0, help="ticks a second; 0: as fast as it goes")
    parser.add_argument("--on-illegal", default="nothing", choices=get_args(OnIllegal))
    lost = "when an actor cannot be reached: end with code 3, or let the rule play its camp"
    parser.add_argument("--on-lost", default="end", choices=get_args(OnLost), help=lost)
    parser.add_argument("--patience-s", type=float, default=10.0)
    parser.add_argument("--format", default="msgpack", choices=FORMATS)
    parser.add_argument("--sessions", choices=get_args(Sessions))
    parser.add_argument("--lenient", action="store_true")
    parser.add_argument("--sparse", action="store_true")
    parser.add_argument("--team-spirit", type=float, default=0.0)
    said = parser.parse_args(list(argv))
    if not 1 <= said.matches <= _MAX_MATCHES:
        raise UsageError(f"--matches is {said.matches}.", f"From 1 to {_MAX_MATCHES}.")
    if said.record is not None and said.matches > 1:
        raise UsageError("--record is for one match.", "Leave --matches out.")
    names = ("rule", "pace", "on_illegal", "on_lost", "patience_s", "format", "lenient", "sparse", "team_spirit")
    options = {name: getattr(said, name) for name in names} | ({"sessions": said.sessions} if said.sessions else {})
    addresses = [said.camp0, said.camp1]
    config = {
        "runtime_id": said.runtime_id,
        "mode": said.mode,
        "heroes": [camp.split(",") for camp in said.heroes.split("/")] if said.heroes else None,
        "camps": [{"url": url, "timeout_s": said.timeout_s} if "://" in url else None for url in addresses],
        "seed": said.seed,
        "max_frames": said.max_frames,
        "start_from": said.start_from,
        "eval_mode": said.eval_mode,
        "options": options,
    }
    plan = read_plan(config, tokens, SCRIPTS)
    camps = [
        _rule(said_of) if said_of and "://" not in said_of else camp for said_of, camp in zip(addresses, plan.camps, strict=True)
    ]
    plan = dataclasses.replace(plan, camps=(camps[0], camps[1]))
    if said.matches == 1:
        return [plan], said.record
    each = [(f"{plan.runtime_id}-{i}", plan.seed + i) for i in range(said.matches)]
    return [dataclasses.replace(plan, runtime_id=name, seed=seed) for name, seed in each], None


def _rule(said: str) -> Rule:
    kind, _, name = said.partition(":")
    if kind != "rule" or name not in SCRIPTS:
        raise UsageError(f"A camp is played by {said!r}.", f"http://HOST:PORT, or rule: with one of {', '.join(SCRIPTS)}.")
    return Rule(name)


# -- playing it -------------------------------------------------------------------------------------------------------


class Played(NamedTuple):
    """The signal that stopped the matches, or 0; results of the last one of each place; how many there were, and came to their own end."""

    stopped: int
    results: list[dict[str, Any]]
    matches: int
    completed: int


def play(plans: Sequence[Plan], states: Path | None = None, record: Path | None = None, share: float = 1.0) -> Played:
    """These matches, and those that their actors hand over. `share`: of those of which a state is kept."""
    prepare()  # what compiles in the middle of a match keeps its actors waiting
    arena = arena_for(plans)
    matches = [Match(plan, SCRIPTS) for plan in plans]
    recorders = [] if record is None else [Recorder(arena, 0, matches[0].names)]
    host = Host(arena, matches, states=states, share=share, recorders=recorders)
    stopped = run(_stoppable(host))
    if record is not None:
        host.results[0]["recording"] = recorders[0].write(record).name
    return Played(stopped, [host.results[m] for m in sorted(host.results)], host.played, host.completed)


async def _stoppable(host: Host) -> int:
    loop, heard = asyncio.get_running_loop(), [0]
    playing = asyncio.ensure_future(host.run())

    def stop(number: int) -> None:
        heard[0] = number
        playing.cancel()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop, number)
    await playing
    return heard[0] if host.stopped else 0


def arena_for(plans: Sequence[Plan]) -> Arena:
    """With these matches begun, and room for as many as they ask for."""
    options = plans[0].options
    settings = ArenaSettings(every=options.every, rewards=options.rewards)
    arena = Arena(plans[0].size, max(len(plans), options.together), settings, lenient=options.lenient)
    arena.reset([0] * arena.matches)  # those that nobody plays yet can be looked at as well
    arena.match[:, OVER] = 1
    for m, plan in enumerate(plans):
        set_up(arena, m, plan)
    return arena
