"""Figures against exact oracles: small games whose exploitability, equilibria or perfect play are known."""
