"""Checks of `config.multiagent`: which policy plays which agent, and the configuration of each policy."""

from __future__ import annotations

import fnmatch
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from ludus.config.schema import AlgorithmConfig, MultiAgentConfig, SelfPlayConfig
from ludus.config.section import check_model_name
from ludus.config.translation import canonical_config, nested_schema
from ludus.config.validation import parse_algorithm_config
from ludus.core import trust
from ludus.core.plugins import did_you_mean, import_object
from ludus.core.types import DEFAULT_MODEL
from ludus.envs import pettingzoo
from ludus.envs.pettingzoo import AgentSpaces
from ludus.errors import ConfigError
from ludus.models.policy import PROBABILITIES

_SEED_STEP = 7919
"""Between the seeds of two policies: equal networks must not start with equal weights."""

_POLICY_KEYS = frozenset({"gamma", "model", "observation_filter", "seed"})
"""Keys of every algorithm in which policies may differ; those of one algorithm may all differ."""

_MAPPING = "config.multiagent.policy_mapping"


def resolve_agents(env: str, schema: type[AlgorithmConfig], config: AlgorithmConfig) -> AlgorithmConfig:
    """Return the configuration with every agent and policy named. Makes one environment. Raises ConfigError, EnvironmentFault."""
    section = config.multiagent or MultiAgentConfig()
    _refuse_unsupported(config, section)
    match = pettingzoo.make_match(env, config.env_config, None, config.wrappers, config.preprocess)
    try:
        agents = match.agents
    finally:
        match.close()
    mapping = map_agents(list(agents), section)
    policies = section.policies or list(dict.fromkeys(mapping.values()))
    named = section.model_copy(update={"policies": policies, "policy_mapping": mapping})
    resolved = config.model_copy(update={"multiagent": named})
    _check_spaces(agents, mapping)
    _check_self_play(list(agents), mapping, config.self_play)
    _check_fixed_opponent(config)
    for policy in named.names():
        policy_config(schema, resolved, policy)
    _check_policies_to_train(named)
    return resolved


def _refuse_unsupported(config: AlgorithmConfig, section: MultiAgentConfig) -> None:
    if section.centralized_value and config.learns != PROBABILITIES:
        raise ConfigError("config.multiagent.centralized_value is for policies with a value: PPO, APPO, IMPALA.", "Leave it out.")
    if section.centralized_value and config.model.custom_model is not None:
        raise ConfigError(
            "config.multiagent.centralized_value and model.custom_model exclude each other.",
            "A model of your own computes its value itself: leave one of them out.",
        )


def _check_fixed_opponent(config: AlgorithmConfig) -> None:
    if config.self_play.checkpoint is not None and config.workers:
        raise ConfigError(
            f"config.num_workers is {config.workers}, and config.self_play.opponents is fixed, which plays in this process.",
            "Leave num_workers at 0; raise num_envs_per_worker.",
        )


def _check_self_play(agents: Sequence[str], mapping: Mapping[str, str], self_play: SelfPlayConfig) -> None:
    """Self-play needs two sides, and one policy that plays both."""
    if self_play.opponents is None:
        if self_play != SelfPlayConfig():
            raise ConfigError(
                "config.self_play has no effect without opponents: all agents learn, with their newest policies.",
                "Set config.self_play.opponents to latest, past, mix or fixed, or leave self_play out.",
            )
        return
    sides = self_play.sides
    if sides is None and len(agents) != 2:
        raise ConfigError(
            f"config.self_play needs two sides, and there are {len(agents)} agents: {', '.join(agents)}.",
            "Name the agents of both: self_play: {sides: [[…], […]]}.",
        )
    if sides is not None:
        named = [agent for side in sides for agent in side]
        unknown = [agent for agent in named if agent not in agents]
        if unknown:
            raise ConfigError(
                f"config.self_play.sides names {unknown[0]!r}, which is no agent.", did_you_mean(unknown[0], agents)
            )
        if len(sides) != 2 or not all(sides) or sorted(named) != sorted(agents):
            raise ConfigError(
                f"config.self_play.sides is {sides}; both sides together are all agents, each once: {', '.join(agents)}.",
                "Give two lists of agents.",
            )
    if len(set(mapping.values())) > 1 and self_play.opponents != "fixed":
        raise ConfigError(
            f"config.self_play needs one policy for all agents; there are {', '.join(dict.fromkeys(mapping.values()))}.",
            "Leave multiagent.policies out, or leave self_play out.",
        )


def map_agents(agents: Sequence[str], section: MultiAgentConfig) -> dict[str, str]:
    """Return agent → policy for all agents. Raises ConfigError."""
    listed, given = section.names(), section.policy_mapping
    if given is None:
        mapping = _map_by_name(agents, listed)
    elif isinstance(given, str) and ":" in given:
        function = import_object(given, "policy mapping", _is_project_function)
        mapping = {agent: str(function(agent)) for agent in agents}
    elif isinstance(given, str):
        mapping = dict.fromkeys(agents, given)
    else:
        mapping = _map_by_patterns(agents, given)
    for agent, policy in mapping.items():
        if listed and policy not in listed:
            raise ConfigError(f"{_MAPPING} gives {agent!r} to {policy!r}, which is no policy.", did_you_mean(policy, listed))
        check_model_name(policy, _MAPPING)
    idle = [policy for policy in listed if policy not in mapping.values()]
    if idle:
        played = ", ".join(f"{agent}: {policy}" for agent, policy in mapping.items())
        raise ConfigError(f"The policy {idle[0]!r} plays no agent ({played}).", "Give it one in policy_mapping, or leave it out.")
    return mapping


def _is_project_function(candidate: Any, project: bool) -> bool:
    return project and inspect.isfunction(candidate) and trust.is_in_project(candidate.__module__)


def _map_by_name(agents: Sequence[str], listed: Sequence[str]) -> dict[str, str]:
    """Without a mapping: one policy for all agents, or policies with the names of the agents."""
    if not listed:
        return dict.fromkeys(agents, DEFAULT_MODEL)
    if len(listed) == 1:
        return dict.fromkeys(agents, listed[0])
    missing = [agent for agent in agents if agent not in listed]
    if missing:
        raise ConfigError(
            f"config.multiagent has {len(listed)} policies, and none of them is assigned to {missing[0]!r}.",
            "Set policy_mapping: {agent or pattern: policy}.",
        )
    return {agent: agent for agent in agents}


def _map_by_patterns(agents: Sequence[str], given: Mapping[str, str]) -> dict[str, str]:
    mapping: dict[str, str] = {}
    used: set[str] = set()
    for agent in agents:
        matching = [key for key in given if key == agent] or [key for key in given if fnmatch.fnmatchcase(agent, key)]
        if not matching:
            raise ConfigError(
                f"{_MAPPING} has no policy for the agent {agent!r}; the agents are {', '.join(agents)}.",
                "Add it, or a pattern like red_* or *.",
            )
        if len({given[key] for key in matching}) > 1:
            keys = " and ".join(repr(key) for key in matching)
            raise ConfigError(f"{_MAPPING} gives {agent!r} to several policies, by {keys}.", "Keep one of them.")
        mapping[agent] = given[matching[0]]
        used.update(matching)
    unused = [key for key in given if key not in used and not any(fnmatch.fnmatchcase(agent, key) for agent in agents)]
    if unused:
        raise ConfigError(f"{_MAPPING} names {unused[0]!r}, which is no agent.", did_you_mean(unused[0], agents))
    return mapping


def _check_spaces(agents: Mapping[str, AgentSpaces], mapping: Mapping[str, str]) -> None:
    first: dict[str, str] = {}
    for agent, policy in mapping.items():
        other = first.setdefault(policy, agent)
        for what in ("observation", "action"):
            mine, theirs = getattr(agents[agent], what), getattr(agents[other], what)
            if mine != theirs:
                raise ConfigError(
                    f"The policy {policy!r} plays {other!r} and {agent!r}, whose {what} spaces differ: {theirs} and {mine}.",
                    "Give each kind of agent a policy of its own: config.multiagent.policy_mapping.",
                )


def _check_policies_to_train(section: MultiAgentConfig) -> None:
    trained, names = section.policies_to_train, section.names()
    for policy in trained or ():
        if policy not in names:
            raise ConfigError(f"config.multiagent.policies_to_train names {policy!r}.", did_you_mean(policy, names))
    if trained is not None and not trained:
        raise ConfigError("config.multiagent.policies_to_train is empty: nothing would be learned.", "Name a policy.")


def policy_config(schema: type[AlgorithmConfig], config: AlgorithmConfig, policy: str) -> AlgorithmConfig:
    """Return the configuration of one policy: that of the run, with the keys in which the policy differs. Raises ConfigError."""
    assert config.multiagent is not None
    where, own = f"config.multiagent.policies.{policy}", canonical_config(config.multiagent.own_keys(policy))
    common = sorted(AlgorithmConfig.model_fields.keys() - _POLICY_KEYS)
    for key in own:
        if key in common:
            raise ConfigError(f"{where}.{key}: all policies have this in common.", "Set it in config:.")
    seed = (config.seed + _SEED_STEP * config.multiagent.names().index(policy)) % (1 << 30)
    if not own:
        return config.model_copy(update={"seed": seed})
    base = config.model_dump(by_alias=True)
    for key, value in own.items():
        field = schema.model_fields.get(key)
        if isinstance(value, Mapping) and field is not None and nested_schema(field.annotation) and base[key] is not None:
            own[key] = {**base[key], **value}  # sections are merged key by key; any other value is replaced
    try:
        return parse_algorithm_config(schema, {**base, "seed": seed, **own}, collated=True)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error.message}", error.hint) from error
