"""Create the bucket of the stack when its S3 server is up. SeaweedFS creates a bucket with its first object.

python create_bucket.py BUCKET ENDPOINT CREDENTIALS_FILE
"""

from __future__ import annotations

import configparser
import sys
import time

from obstore.exceptions import BaseError
from obstore.store import S3Store

_WAIT_S = 120.0


def main(bucket: str, endpoint: str, credentials_file: str) -> None:
    file = configparser.ConfigParser(interpolation=None)
    file.read(credentials_file, encoding="utf-8")
    given = file["default"]
    store = S3Store(
        bucket,
        endpoint=endpoint,
        region=given["region"],
        access_key_id=given["aws_access_key_id"],
        secret_access_key=given["aws_secret_access_key"],
        client_options={"allow_http": True, "timeout": "10s"},
        retry_config={"max_retries": 0},
    )
    deadline = time.monotonic() + _WAIT_S
    while True:
        try:
            store.put("created-by", b"docker/compose.yaml\n")
        except (BaseError, OSError) as error:
            if time.monotonic() > deadline:
                raise SystemExit(f"{endpoint} did not accept an object within {_WAIT_S:.0f} s: {error}") from error
            time.sleep(0.5)
        else:
            return


if __name__ == "__main__":
    main(*sys.argv[1:])
