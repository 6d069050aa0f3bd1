"""A player that speaks the client side of ML-Agents' protocol: small scenes with known results, and faults on request.

The player is an executable like a standalone build of Unity. It needs only the standard library, and shares no code with Ludus: it
encodes the messages by their field numbers itself. The package `mlagents-envs` drives it, too (`tests/envs/unity/test_official_client.py`).
"""
