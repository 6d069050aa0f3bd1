"""Test helpers for extensions of Ludus: contract suites for backends, and a check of custom models."""

from ludus.testing.model_check import check_model as check_model
