"""Entry point of a server process started by `watchdog.py`: `python -m ludus.gamecore.server SETTINGS SOCKET READY`.

Users run `ludus gamecore serve` instead.
"""

from __future__ import annotations

import logging
import os
import socket
import sys

from ludus.errors import LudusError
from ludus.gamecore.server.http.app import Settings, serve


def main(words: list[str]) -> int:
    handler = logging.StreamHandler()  # records of lower levels go to the server's log file
    handler.setLevel(logging.WARNING)
    logging.basicConfig(handlers=[handler], format="%(asctime)s %(levelname)s %(message)s")
    ready = int(words[2])

    def announce(host: str, port: int) -> None:
        os.write(ready, b".")
        os.close(ready)

    try:
        serve(Settings.from_json(words[0]), listening=socket.socket(fileno=int(words[1])), announce=announce)
    except LudusError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
