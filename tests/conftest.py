from __future__ import annotations

from hypothesis import settings

from tests.s3 import s3_proxy as s3_proxy
from tests.s3 import s3_server as s3_server
from tests.s3 import s3_url as s3_url

settings.register_profile("ludus", deadline=None)  # a busy machine is not a bug
settings.load_profile("ludus")
