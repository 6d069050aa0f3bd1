"""Create the passwords and tokens of the stack on its first start, and give the volumes to the user of the images.

    python create_secrets.py SECRETS_DIRECTORY [VOLUME]...

Existing files are kept, so that the passwords stay valid for the data in the other volumes. Nothing is printed.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path

USER = 10001


def secret_files() -> dict[str, str]:
    """File name → content. Redis and SeaweedFS have their secrets in configuration files, so that no command line shows them."""
    redis, key_id, key = (secrets.token_urlsafe(24) for _ in range(3))
    identity = {
        "name": "ludus",
        "credentials": [{"accessKey": key_id, "secretKey": key}],
        "actions": ["Admin", "Read", "Write", "List"],
    }
    return {
        "gamecore-token": f"{secrets.token_urlsafe(24)}\n",
        "redis-password": f"{redis}\n",
        "redis.conf": f'requirepass {redis}\ndir /data\nappendonly yes\nsave ""\nmaxmemory-policy noeviction\n',
        "s3-credentials": f"[default]\naws_access_key_id = {key_id}\naws_secret_access_key = {key}\nregion = us-east-1\n",
        "s3.json": json.dumps({"identities": [identity]}),
    }


def main(argv: Sequence[str]) -> None:
    directory, *volumes = map(Path, argv)
    complete = directory / "complete"
    if not complete.exists():
        for name, content in {**secret_files(), complete.name: ""}.items():
            path = directory / name
            path.unlink(missing_ok=True)
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o400), "w", encoding="utf-8") as file:
                file.write(content)
    for path in [*directory.iterdir(), directory, *volumes]:
        os.chown(path, USER, USER)


if __name__ == "__main__":
    main(sys.argv[1:])
