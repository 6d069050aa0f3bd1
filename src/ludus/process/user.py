"""Name of the user of this process."""

from __future__ import annotations

import getpass
import os
import sys


def user_name() -> str:
    """Login name; the user id as a string if the user has no entry in the passwd database, as in containers that run as any user."""
    try:
        return getpass.getuser()
    except (ImportError, KeyError, OSError):
        if sys.platform == "win32":
            raise
        return str(os.getuid())
