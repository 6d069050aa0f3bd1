from __future__ import annotations

from hypothesis import settings

settings.register_profile("ludus", deadline=None)  # a busy machine is not a bug
settings.load_profile("ludus")
