import pytest

pytest.register_assert_rewrite("tests.clients.contract", "tests.clients.driving")
