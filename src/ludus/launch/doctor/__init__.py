"""`ludus doctor`: checks whether a machine can run what a run needs. One module per subject inspects it; pure functions evaluate it."""
