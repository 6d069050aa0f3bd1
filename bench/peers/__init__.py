"""Other RL libraries, each in its own environment, measured on the same tasks as Ludus."""
