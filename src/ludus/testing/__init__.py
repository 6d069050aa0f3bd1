"""For the tests of those who extend Ludus: contract suites of backends, and the check of a model."""

from ludus.testing.model_check import check_model as check_model
