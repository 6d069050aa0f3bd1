"""Exact analysis of two-player games: game trees, best responses, exploitability, CFR, meta-solvers and PSRO."""
