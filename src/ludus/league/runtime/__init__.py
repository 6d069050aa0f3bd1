"""Running a league: its file, the learners of its players, and the coordinator that keeps its state."""
