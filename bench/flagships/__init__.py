"""Flagship games: train the preset of a game, and compare the trained policy with random play and a script on the same seeds."""
