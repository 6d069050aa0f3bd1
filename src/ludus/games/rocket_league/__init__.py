"""Rocket League physics, simulated by RocketSim: matches of one or two cars a side, all stepped by one call.

The collision meshes of the stadium are read from the package `rlgym-rocket-league`.
"""
