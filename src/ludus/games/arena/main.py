"""Game process of the Arena, which calls the actors of its camps over HTTP.

A gamecore server configures it by environment variables (LUDUS_GAME_CONFIG, LUDUS_GAME_RESULT, LUDUS_GAME_STATES and _SHARE,
LUDUS_GAME_TOKEN_0 and _1). From a shell:

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
from ludus.games.arena.bots.bots import BOTS
from ludus.games.arena.engine.checksummed_file import write_file
from ludus.games.arena.engine.layout import HEADS, OVER
from ludus.games.arena.engine.recording import Recorder
from ludus.games.arena.engine.settings import ArenaSettings
from ludus.games.arena.engine.vector import Arena
from ludus.games.arena.host.codec import FORMATS
from ludus.games.arena.host.match import CAMPS, BotCamp, HostedMatch, MatchPlan, OnIllegal, OnLost, Sessions, read_plan
from ludus.games.arena.host.match_host import MatchHost, set_up_match
from ludus.io.yaml_documents import read_text

if sys.platform == "win32":
    from asyncio import run
else:
    from uvloop import run  # 10 % less time per decision over HTTP; imported before the fork server forks

log = logging.getLogger(__name__)

RECORDING: Final = "match.arena"
"""File name in the directory of the game."""
_UNFINISHED: Final = 3
_MAX_CONFIG = 1 << 20
_MAX_MATCHES = 4096


def prepare() -> None:
    """Load or compile the kernels, so that processes forked later have them."""
    arena = Arena()
    arena.reset([0])
    arena.observe()
    actions = np.zeros((1, arena.heroes, len(HEADS)), np.int32)
    for bot in range(len(BOTS)):
        actions = arena.bot_actions(np.full((1, arena.heroes), bot, np.int8))
    arena.legal(actions)
    arena.step(actions)


def main(argv: Sequence[str]) -> int:
    """Exit codes: 0, all matches completed; 2, none started; 3, an actor was lost; 128 + n, stopped by signal n."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", force=True)
    environ = os.environ
    result = Path(environ["LUDUS_GAME_RESULT"]) if environ.get("LUDUS_GAME_RESULT") else None
    try:
        plans, record = _read_plans(argv, environ)
        share = float(environ.get("LUDUS_GAME_STATES_SHARE") or 1.0)
        states = Path(environ["LUDUS_GAME_STATES"]) if environ.get("LUDUS_GAME_STATES") else None
        outcome = play(plans, states, record, share)
    except LudusError as error:
        log.error("%s", error)
        _write_result(result, {"winner": None, "reason": str(error)})
        return error.exit_code
    if result is None:
        for one in outcome.results:
            sys.stdout.write(f"{json.dumps(one)}\n")
    elif not plans[0].options.together:
        _write_result(result, outcome.results[0])
    else:
        _write_result(result, {"winner": None, "matches": outcome.matches, "completed": outcome.completed})
    if outcome.stopped:
        return 128 + outcome.stopped
    return 0 if outcome.completed == outcome.matches else _UNFINISHED


def _write_result(path: Path | None, result: Mapping[str, Any]) -> None:
    if path is not None:
        write_file(path, json.dumps(result).encode())


# -- arguments --------------------------------------------------------------------------------------------------------


def _read_plans(argv: Sequence[str], environ: Mapping[str, str]) -> tuple[list[MatchPlan], Path | None]:
    """Return the matches to play and the path of the recording."""
    tokens = [environ.get(f"LUDUS_GAME_TOKEN_{camp}") or None for camp in range(CAMPS)]
    path = environ.get("LUDUS_GAME_CONFIG")
    if argv or not path:
        return _plans_from_arguments(argv, tokens)
    try:
        config = json.loads(read_text(Path(path), _MAX_CONFIG))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON: {error}.", "A gamecore server writes it.") from error
    plan = read_plan(config, tokens, BOTS)
    return [plan], Path(path).with_name(RECORDING) if plan.options.record else None


def _plans_from_arguments(argv: Sequence[str], tokens: Sequence[str | None]) -> tuple[list[MatchPlan], Path | None]:
    parser = argparse.ArgumentParser(
        prog="python -P -m ludus.games.arena", description="Play matches of the Arena as a game process."
    )
    parser.add_argument("--mode", help="1v1, 3v3, …")
    parser.add_argument("--heroes", help="ids or names: 190,173,117/141,111,107")
    for camp in range(CAMPS):
        parser.add_argument(f"--camp{camp}", default="", help="http://HOST:PORT, or rule:NAME")
    parser.add_argument("--timeout-s", type=float, default=30.0, help="time limit of each reply of an actor")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--matches", type=int, default=1, help="number of simultaneous matches, with consecutive seeds")
    parser.add_argument("--max-frames", type=int)
    parser.add_argument("--start-from", help="saved state to start from")
    parser.add_argument("--record", type=Path, help="recording to write")
    parser.add_argument("--runtime-id", default="arena")
    parser.add_argument("--eval-mode", action="store_true")
    parser.add_argument("--rule", default="medium", choices=BOTS)
    parser.add_argument("--pace", type=float, default=0.0, help="ticks per second; 0: unlimited")
    parser.add_argument("--on-illegal", default="nothing", choices=get_args(OnIllegal))
    lost = "when an actor is lost: end with code 3, or let the rule play its camp"
    parser.add_argument("--on-lost", default="end", choices=get_args(OnLost), help=lost)
    parser.add_argument("--patience-s", type=float, default=10.0)
    parser.add_argument("--format", default="msgpack", choices=FORMATS)
    parser.add_argument("--sessions", choices=get_args(Sessions))
    parser.add_argument("--lenient", action="store_true")
    parser.add_argument("--sparse", action="store_true")
    parser.add_argument("--team-spirit", type=float, default=0.0)
    args = parser.parse_args(list(argv))
    if not 1 <= args.matches <= _MAX_MATCHES:
        raise UsageError(f"--matches is {args.matches}.", f"From 1 to {_MAX_MATCHES}.")
    if args.record is not None and args.matches > 1:
        raise UsageError("--record is for one match.", "Leave --matches out.")
    names = ("rule", "pace", "on_illegal", "on_lost", "patience_s", "format", "lenient", "sparse", "team_spirit")
    options = {name: getattr(args, name) for name in names} | ({"sessions": args.sessions} if args.sessions else {})
    addresses = [args.camp0, args.camp1]
    config = {
        "runtime_id": args.runtime_id,
        "mode": args.mode,
        "heroes": [camp.split(",") for camp in args.heroes.split("/")] if args.heroes else None,
        "camps": [{"url": url, "timeout_s": args.timeout_s} if "://" in url else None for url in addresses],
        "seed": args.seed,
        "max_frames": args.max_frames,
        "start_from": args.start_from,
        "eval_mode": args.eval_mode,
        "options": options,
    }
    plan = read_plan(config, tokens, BOTS)
    camps = [
        _parse_camp(address) if address and "://" not in address else camp
        for address, camp in zip(addresses, plan.camps, strict=True)
    ]
    plan = dataclasses.replace(plan, camps=(camps[0], camps[1]))
    if args.matches == 1:
        return [plan], args.record
    each = [(f"{plan.runtime_id}-{i}", plan.seed + i) for i in range(args.matches)]
    return [dataclasses.replace(plan, runtime_id=name, seed=seed) for name, seed in each], None


def _parse_camp(text: str) -> BotCamp:
    kind, _, name = text.partition(":")
    if kind != "rule" or name not in BOTS:
        raise UsageError(
            f"{text!r} is not a player of a camp.", f"Give http://HOST:PORT, or rule: with one of {', '.join(BOTS)}."
        )
    return BotCamp(name)


# -- play -------------------------------------------------------------------------------------------------------------


class HostOutcome(NamedTuple):
    """Signal that stopped the matches (or 0), result of the last match of each slot, number of matches and of completed ones."""

    stopped: int
    results: list[dict[str, Any]]
    matches: int
    completed: int


def play(plans: Sequence[MatchPlan], states: Path | None = None, record: Path | None = None, share: float = 1.0) -> HostOutcome:
    """Play these matches and those that actors add. `share`: share of matches of which a state is written to `states`."""
    prepare()  # actors would wait for a compilation during a match
    arena = create_arena(plans)
    matches = [HostedMatch(plan, BOTS) for plan in plans]
    recorders = [] if record is None else [Recorder(arena, 0, matches[0].names)]
    host = MatchHost(arena, matches, states=states, share=share, recorders=recorders)
    stopped = run(_run_until_signal(host))
    if record is not None:
        host.results[0]["recording"] = recorders[0].write(record).name
    return HostOutcome(stopped, [host.results[m] for m in sorted(host.results)], host.played, host.completed)


async def _run_until_signal(host: MatchHost) -> int:
    loop, received = asyncio.get_running_loop(), [0]
    playing = asyncio.ensure_future(host.run())

    def stop(number: int) -> None:
        received[0] = number
        playing.cancel()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop, number)
    await playing
    return received[0] if host.stopped else 0


def create_arena(plans: Sequence[MatchPlan]) -> Arena:
    """Return an Arena with these matches at their start and free slots up to the option `together`."""
    options = plans[0].options
    settings = ArenaSettings(every=options.every, rewards=options.rewards)
    arena = Arena(plans[0].size, max(len(plans), options.together), settings, lenient=options.lenient)
    arena.reset([0] * arena.matches)  # free slots need valid states for `observe`
    arena.match[:, OVER] = 1
    for m, plan in enumerate(plans):
        set_up_match(arena, m, plan)
    return arena
