"""Selection of a model from a checkpoint with several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ludus.errors import UsageError
from ludus.experiments.runs.checkpoint import Checkpoint


def agents_of(settings: Mapping[str, Any]) -> Mapping[str, str]:
    """Agent → model, from the `config:` of a multi-agent run; empty for a single-agent run."""
    mapping = (settings.get("multiagent") or {}).get("policy_mapping")
    return mapping if isinstance(mapping, Mapping) else {}


def choose_model(stored: Checkpoint, model: str | None) -> str:
    """The named model, or the only one. Raises UsageError, which lists the models and their agents."""
    names = list(stored.weights)
    if model is None and len(names) > 1:
        shown = [_with_agents(name, agents_playing(stored.state["config"], name)) for name in names]
        raise UsageError(
            f"The checkpoint has {len(names)} models: {', '.join(shown)}.", "Choose one with --model, in Python model=…."
        )
    if model is not None and model not in names:
        played_by = agents_of(stored.state["config"]["config"]).get(model)
        what = (
            f"{model!r} is an agent, played by the model {played_by}" if played_by else f"The checkpoint has no model {model!r}"
        )
        raise UsageError(f"{what}.", f"Choose the model {played_by}." if played_by else f"It has {', '.join(names)}.")
    return model or names[0]


def agents_playing(experiment: Mapping[str, Any], model: str) -> list[str]:
    """The agents that a model plays; empty for a single-agent run."""
    return [agent for agent, plays in agents_of(experiment["config"]).items() if plays == model]


def _with_agents(model: str, agents: Sequence[str]) -> str:
    """`model (agent, agent)` with at most three agents."""
    return f"{model} ({', '.join((*agents[:3], *(['…'] if len(agents) > 3 else [])))})" if agents else model
