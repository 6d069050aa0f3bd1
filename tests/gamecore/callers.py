"""A caller of the server for tests, and a catalogue of small games."""

from __future__ import annotations

import http.client
import json
from pathlib import Path
from typing import Any, NamedTuple

CATALOGUE = r"""
games:
  sleep: {command: [sh, -c, "echo hello; exec sleep 1000"], modes: [1v1]}
  quick: {command: [sh, -c, 'cat "$LUDUS_GAME_CONFIG"; echo "{{\"winner\": 1, \"ticks\": 7}}" > "$LUDUS_GAME_RESULT"'], modes: [3v3]}
  crash: {command: [sh, -c, "echo oh no; exit 3"]}
  flaky: {command: [sh, -c, "echo life; test -e again && exit 0; touch again; exit 4"], restart: {times: 3, backoff_s: 0.05}}
  hopeless: {command: [sh, -c, "exit 5"], restart: {times: 2, backoff_s: 0.02}}
  slow-again: {command: [sh, -c, "exit 5"], restart: {times: 2, backoff_s: 100}}
  segfault: {command: [sh, -c, "kill -SEGV $$"]}
  stubborn: {command: [sh, -c, "trap '' TERM; echo ready; while :; do sleep 0.05; done"], grace_s: 0.1}
  forks: {command: [sh, -c, "setsid sleep 1001 & (sleep 1002 &) ; echo forked; exec sleep 1003"]}
  leaves: {command: [sh, -c, "setsid sleep 1004 & exit 0"]}
  flood: {command: ["{python}", -S, -c, "import sys\nwhile True: sys.stdout.write('the same line\\n' * 1000)"], limits: {log_mb: 0.1}}
  short: {command: [sleep, "1000"], limits: {seconds: 0.2}, grace_s: 0.1}
  mute: {command: [sleep, "1000"], limits: {start_s: 0.2}}
  speaks: {command: [sh, -c, "echo here; exec sleep 1000"], limits: {start_s: 20}}
  missing: {command: [no-such-program-anywhere]}
  two: {command: [sleep, "1000"], limits: {games: 2}}
  hungry: {command: ["{python}", -S, -c, "x = bytearray(80_000_000); import time; time.sleep(1000)"], limits: {memory_mb: 60}}
  threads: {command: ["{python}", -S, -c, "import threading, time\nfor _ in range(4): threading.Thread(target=time.sleep, args=(1000,)).start()"]}
  bad-result: {command: [sh, -c, 'echo NaN > "$LUDUS_GAME_RESULT"']}
  link-log: {command: [sh, -c, 'rm -f game.log; ln -s /etc/passwd game.log; echo done']}
  link-result: {command: [sh, -c, 'ln -s /etc/hostname "$LUDUS_GAME_RESULT"']}
  environment: {command: [env], environment: {COLOUR: "blue {options.hue}", PORT: "{port}"}, inherit: [LUDUS_TEST_SHARED],
    options: {hue: {type: string, default: dark}, speed: {type: number, minimum: 0, maximum: 10, default: 1}}}
  words: {command: [printf, "<%s>\n", "{runtime_id}", "{options.hue}", "{{}}"], options: {hue: {type: string, default: dark, pattern: ".*"}}}
  saver: {command: [sh, -c, 'test -n "$LUDUS_GAME_STATES" && cp "$LUDUS_GAME_CONFIG" "$LUDUS_GAME_STATES/$(basename "$PWD").state"; exit 0'],
    states: {save: true, keep: 2}}
"""


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Caller:
    def __init__(self, host: str, port: int, token: str | None = None) -> None:
        self.host, self.port, self.token = host, port, token

    def __call__(
        self, method: str, path: str, data: Any = None, *, headers: dict[str, str] | None = None, raw: bytes | None = None
    ) -> Answer:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=30)
        try:
            body = raw if raw is not None else None if data is None else json.dumps(data).encode()
            auth = {"Authorization": f"Bearer {self.token}"} if self.token is not None else {}
            connection.request(method, path, body, {**auth, **(headers or {})})
            answer = connection.getresponse()
            return Answer(answer.status, {key.lower(): value for key, value in answer.getheaders()}, answer.read())
        finally:
            connection.close()

    def start(self, runtime_id: str, game: str, **more: Any) -> Answer:
        return self("POST", "/v1/games", {"runtime_id": runtime_id, "game": game, **more})

    def wait(self, runtime_id: str) -> dict[str, Any]:
        found: dict[str, Any] = self("GET", f"/v1/games/{runtime_id}/wait?timeout_s=20").json
        return found

    def play(self, runtime_id: str, game: str, **more: Any) -> dict[str, Any]:
        """Wait for the end of the game."""
        answer = self.start(runtime_id, game, **more)
        assert answer.status == 201, answer.body
        return self.wait(runtime_id)

    def log(self, runtime_id: str) -> str:
        return self("GET", f"/v1/games/{runtime_id}/log").body.decode()


def catalogue_file(directory: Path) -> Path:
    path = directory / "games.yaml"
    path.write_text(CATALOGUE)
    return path
