"""Create the passwords and tokens of the stack on its first start, and give the volumes to the user of the images.

    python create_secrets.py DATA_SECRETS_DIRECTORY GAMES_SECRETS_DIRECTORY [VOLUME]...

Redis and S3 need the secrets of the first directory, games those of the second. Existing files are kept, so that the passwords stay valid
for the data in the other volumes. Nothing is printed.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

USER = 10001


def data_secrets() -> dict[str, str]:
    """File name → content. Redis and SeaweedFS have their secrets in configuration files, so that no command line shows them."""
    redis, key_id, key = (secrets.token_urlsafe(24) for _ in range(3))
    identity = {
        "name": "ludus",
        "credentials": [{"accessKey": key_id, "secretKey": key}],
        "actions": ["Admin", "Read", "Write", "List"],
    }
    return {
        "redis-password": f"{redis}\n",
        "redis.conf": f"requirepass {redis}\n",
        "s3-credentials": f"[default]\naws_access_key_id = {key_id}\naws_secret_access_key = {key}\nregion = us-east-1\n",
        "s3.json": json.dumps({"identities": [identity]}),
    }


def games_secrets() -> dict[str, str]:
    return {"gamecore-token": f"{secrets.token_urlsafe(24)}\n"}


def write_files(directory: Path, files: Mapping[str, str]) -> None:
    """Write files that only their owner can read. The last one, `complete`, says that all of them are there."""
    complete = directory / "complete"
    if not complete.exists():
        for name, content in {**files, complete.name: ""}.items():
            path = directory / name
            path.unlink(missing_ok=True)
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o400), "w", encoding="utf-8") as file:
                file.write(content)
    for path in [*directory.iterdir(), directory]:
        os.chown(path, USER, USER)


def main(argv: Sequence[str]) -> None:
    data, games, *volumes = map(Path, argv)
    write_files(data, data_secrets())
    write_files(games, games_secrets())
    for volume in volumes:
        os.chown(volume, USER, USER)


if __name__ == "__main__":
    main(sys.argv[1:])
