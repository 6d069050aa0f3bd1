"""python -P -m ludus.games.arena"""

import sys

from ludus.games.arena.main import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
