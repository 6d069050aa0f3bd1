"""The older protocol of gamecore servers, for existing clients: POST /v2/newGame, stopGame, exists, task…"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ludus.errors import Refused
from ludus.gamecore.server.http.middleware import error_response, read_body
from ludus.gamecore.server.process_table import ProcessTable
from ludus.gamecore.server.request import ANY, parse_id, parse_json, parse_request, parse_task_id, quote
from ludus.gamecore.server.settings import ServerLimits

FRESH = ("remote", "", None)
RESUMING = ("repeat", "repeat_only", "remote_repeat")
Handler = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]


def routes(table: ProcessTable, limits: ServerLimits) -> list[Route]:
    handlers = RoutesV2(table)
    by_name: dict[str, Handler] = {
        "newGame": handlers.new_game,
        "stopGame": handlers.stop_game,
        "exists": handlers.exists,
        "taskList": handlers.task_list,
        "taskDetail": handlers.task_detail,
        "taskRemove": handlers.task_remove,
        "taskClear": handlers.task_clear,
    }
    return [Route(f"/v2/{name}", _page(handler, limits), methods=["POST"]) for name, handler in by_name.items()]


def _page(handler: Handler, limits: ServerLimits) -> Callable[[Request], Awaitable[Response]]:
    async def page(request: Request) -> Response:
        try:
            reply = await handler(parse_json(await read_body(request, limits)))
        except Refused as refused:
            return error_response(refused, code=refused.status, msg=str(refused))
        return JSONResponse({"code": 0, "msg": "", **reply})

    return page


class RoutesV2:
    def __init__(self, table: ProcessTable) -> None:
        self._table = table

    async def new_game(self, data: dict[str, Any]) -> dict[str, Any]:
        game_request = parse_request(to_game_request(data), self._table.catalogue)
        record, _ = await self._table.start(game_request)
        return {"data": record.to_json()}

    async def stop_game(self, data: dict[str, Any]) -> dict[str, Any]:
        """Stop a game; succeeds for unknown ids, because clients stop before they start."""
        runtime_id = parse_id(data.get("runtime_id"))
        return {"data": await self._table.stop(runtime_id) if self._table.exists(runtime_id) else {}}

    async def exists(self, data: dict[str, Any]) -> dict[str, Any]:
        return {"exists": self._table.exists(parse_id(data.get("runtime_id")))}

    async def task_list(self, data: dict[str, Any]) -> dict[str, Any]:
        return {"data": {"task_ids": self._table.tasks.ids()}}

    async def task_detail(self, data: dict[str, Any]) -> dict[str, Any]:
        games = await self._table.task_results(_task(data))
        return {"data": {"game_states": [{**game, "Camp": _scores(game.get("result"))} for game in games]}}

    async def task_remove(self, data: dict[str, Any]) -> dict[str, Any]:
        await self._table.remove_task(_task(data))
        return {"data": {}}

    async def task_clear(self, data: dict[str, Any]) -> dict[str, Any]:
        await self._table.remove_task(None)
        return {"data": {}}


def _task(data: dict[str, Any]) -> str:
    task_id = parse_task_id(data.get("task_id"))
    if task_id is None:
        raise Refused(400, "bad_request", "task_id is missing.")
    return task_id


def _scores(result: Any) -> list[dict[str, int]]:
    """Score 1 for the winning camp, 0 for the others."""
    winner = result.get("winner") if isinstance(result, dict) else None
    camps = max(2, winner + 1) if isinstance(winner, int) and 0 <= winner < 16 else 2
    return [{"Score": int(camp == winner and not isinstance(winner, bool))} for camp in range(camps)]


def to_game_request(data: dict[str, Any]) -> dict[str, Any]:
    """Translate a request into the form of /v1. Raises Refused."""
    kind, config = data.get("simulator_type"), data.get("simulator_config")
    if kind not in (*FRESH, *RESUMING):
        raise Refused(400, "bad_request", f"simulator_type is {quote(kind)}.", f"It is remote, {', '.join(RESUMING)}.")
    if not isinstance(config, dict):
        raise Refused(400, "bad_request", f"simulator_config is {quote(config)}: an object is expected.")
    heroes, camps = _camps(config.get("hero_conf"))
    frames = config.get("max_frame_num")
    unlimited = isinstance(frames, int) and not isinstance(frames, bool) and frames <= 0
    return {
        "runtime_id": data.get("runtime_id"),
        "mode": config.get("game_mode"),
        "heroes": heroes,
        "camps": camps,
        "eval_mode": data.get("eval_mode", False),
        "max_frames": None if unlimited else frames,
        "start_from": ANY if kind in RESUMING else None,
        "must_resume": kind == "repeat_only",
        "task_id": config.get("task_id"),
    }


def _camps(value: Any) -> tuple[list[list[dict[str, Any]]], list[dict[str, Any] | None]]:
    """Split the list of heroes into two camps of equal size.

    The first hero of a camp names its actor, and the others refer to that hero; a camp without an actor names none.
    """
    if not isinstance(value, list) or not value or len(value) % 2 or not all(isinstance(hero, dict) for hero in value):
        raise Refused(400, "bad_request", f"hero_conf is {quote(value)}: a list of the heroes of both camps is expected.")
    half = len(value) // 2
    heroes: list[list[dict[str, Any]]] = []
    camps: list[dict[str, Any] | None] = []
    for camp, camp_heroes in enumerate((value[:half], value[half:])):
        heroes.append(
            [{key: hero[key] for key in ("hero_id", "skill_id", "symbol") if hero.get(key) is not None} for hero in camp_heroes]
        )
        for index, hero in enumerate(camp_heroes):
            where = f"hero_conf[{camp * half + index}].request_info"
            actor = _actor(hero.get("request_info") or {}, where, camp * half)
            if index == 0:
                camps.append(actor)
            elif actor not in (None, camps[camp]):
                message = f"{where} names another actor than the first hero of its camp."
                raise Refused(400, "bad_request", message, "Use one actor per camp.")
    return heroes, camps


def _actor(info: Any, where: str, first: int) -> dict[str, Any] | None:
    if not isinstance(info, dict) or not info.keys() <= {"ip", "port", "timeout", "request_id"}:
        raise Refused(400, "bad_request", f"{where} is {quote(info)}.", "It is {}, {ip, port, timeout} or {request_id}.")
    if "request_id" in info:
        if info["request_id"] != first or isinstance(info["request_id"], bool):
            message = f"{where}.request_id is {quote(info['request_id'])}."
            raise Refused(400, "bad_request", message, f"It is {first} in this camp.")
        return None
    if not info.get("ip") or not info.get("port"):
        return None
    port, timeout = info["port"], info.get("timeout", 30_000)
    if not isinstance(info["ip"], str) or isinstance(port, bool) or not isinstance(port, int) or not 0 < port < 65_536:
        raise Refused(400, "bad_request", f"{where} is {quote(info)}: expected ip and port.")
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or timeout <= 0:
        raise Refused(400, "bad_request", f"{where}.timeout is {quote(timeout)}: expected milliseconds.")
    host = f"[{info['ip']}]" if ":" in info["ip"] else info["ip"]
    return {"address": f"{host}:{port}", "timeout_s": timeout / 1000}
