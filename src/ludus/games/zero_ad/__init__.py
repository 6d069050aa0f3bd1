"""Skirmishes in 0 A.D., a real-time strategy game that is started as a process of its own and commanded over its HTTP interface."""
