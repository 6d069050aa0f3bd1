"""Test helpers for extensions of Ludus: contract suites for backends, and checks of environments, custom models and games of arrays."""

from ludus.testing.env_check import check_env as check_env
from ludus.testing.model_check import check_model as check_model
from ludus.testing.vector_env_check import check_vector_multi_agent_env as check_vector_multi_agent_env
