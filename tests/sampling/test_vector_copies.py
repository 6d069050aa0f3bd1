"""A game that steps many matches with one call gives the segments of the same game stepped as single copies."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from ludus.config.schema import PreprocessConfig
from ludus.core.tree import leaves
from ludus.core.types import Bools, Ints, Segments
from ludus.envs.matches.vector_multi_agent import VectorMultiAgentStep
from ludus.envs.pettingzoo import network_spaces
from ludus.errors import EnvironmentFault
from ludus.models.network_config import NetworkConfig
from ludus.models.policy import Policy
from ludus.sampling.episode_runner import EpisodePlan
from ludus.sampling.multi_agent.batches import MatchBatches, MultiAgentSettings
from ludus.sampling.multi_agent.copies import MatchCopies
from ludus.sampling.multi_agent.env_copies import EnvCopies
from ludus.sampling.multi_agent.match_runner import MatchRunner
from ludus.sampling.multi_agent.play import play_matches
from ludus.sampling.multi_agent.policy_set import PolicySet
from ludus.sampling.multi_agent.sampler import MultiAgentSampler
from ludus.sampling.multi_agent.seating import SeatAgents, Seating
from ludus.sampling.multi_agent.vector_copies import VectorCopies, make_copies
from ludus.sampling.opponents import RANDOM, Opponent
from ludus.sampling.segment_recorder import session_spec
from tests.sampling.test_multi_agent import Kept, Versions
from tests.vector_matches import NAMES, VectorCount, VectorHunt

STEPS = 4
LSTM = {"core": "lstm", "cell_size": 4, "max_seq_len": 2}
HUNT = ("tests.vector_matches:VectorHunt", "tests.vector_matches:ParallelHunt")
COUNT = ("tests.vector_matches:VectorCount", "tests.vector_matches:TurnsCount")
CONNECT_FOUR = ("ludus/ConnectFour-v0", "openspiel/connect_four")


def alternating(matches: MatchRunner, policies: PolicySet) -> SeatAgents:
    """One agent learns, the next one in the next match; another plays at random."""
    numbers = itertools.count()
    agents = list(matches.policy_mapping)

    def seat(copy: int) -> Seating:
        number = next(numbers)
        learning, bored = agents[number % len(agents)], agents[(number + 1) % len(agents)]
        models = {agent: None if agent == bored else matches.policy_mapping[agent] for agent in agents}
        return Seating(models, frozenset([learning]), "latest")

    return seat


class Sampled:
    """Everything that is recorded of an environment until a few batches are complete."""

    def __init__(
        self,
        copies: MatchCopies,
        mapping: Mapping[str, str],
        *,
        central: bool = False,
        by_env_steps: bool = False,
        seating: Any = None,
        updates: int = 5,
        **network: Any,
    ) -> None:
        self.copies, sources = copies, {}
        for number, model in enumerate(dict.fromkeys(mapping.values())):
            agent = next(agent for agent, own in mapping.items() if own == model)
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(number)
                config = NetworkConfig(fcnet_hiddens=(8,), central=central, **network)
                sources[model] = Versions(Policy(*network_spaces(copies, agent, central=central), config))
        self.memories = {m: Kept(session_spec(source.policy, STEPS, m), 1, 2000) for m, source in sources.items()}
        self.batches = MatchBatches(self.memories)
        settings = MultiAgentSettings(45, central=central, by_env_steps=by_env_steps)
        self.sampler = MultiAgentSampler(copies, mapping, sources, self.batches, settings, 3, make_seating=seating, first_copy=2)
        self.taken: list[Segments] = []
        while len(self.taken) < updates:
            self.sampler.step()
            while (batch := self.batches.take(0)) is not None:
                self.taken.append(batch)
                self.batches.release(batch)
                sources[batch.model].version += 1  # as if it had learned
        copies.close()

    def segments(self, model: str) -> dict[int, list[Segments]]:
        by_row: dict[int, list[Segments]] = {}
        for segment in self.memories[model].seen:
            by_row.setdefault(int(segment.origin[0]), []).append(segment)
        return by_row


def assert_same_segment(one: Segments, other: Segments) -> None:
    """Bit for bit, up to the observation after the last step; behind a terminated step there is none.

    Not so the value of that observation: its last bit may depend on the order in which agents leave, which forms a batch.
    """
    used = one.used_steps
    ended = bool(one.terminated[used - 1, 0])
    for name in ("valid", "reward", "terminated", "truncated", "log_prob", "version", "first", "origin"):
        assert getattr(one, name).tobytes() == getattr(other, name).tobytes(), name
    assert one.value[:used].tobytes() == other.value[:used].tobytes()
    np.testing.assert_allclose(one.value[used:], other.value[used:], rtol=0, atol=1e-6)
    for name, after in (("action", 0), ("observation", not ended), ("action_mask", not ended)):
        for (path, mine), (_, theirs) in zip(leaves(getattr(one, name)), leaves(getattr(other, name)), strict=True):
            assert mine[: used + after].tobytes() == theirs[: used + after].tobytes(), (name, path)
    states = -(-used // one.spec.state_every) if one.spec.state_every else 0
    for mine, theirs in zip(one.state, other.state, strict=True):
        assert mine[:states].tobytes() == theirs[:states].tobytes()


def assert_same_batch(one: Segments, other: Segments) -> None:
    for (path, mine), (_, theirs) in zip(leaves(one.arrays()), leaves(other.arrays()), strict=True):
        assert mine.tobytes() == theirs.tobytes(), path


def sample_both(forms: Sequence[str], env_config: Mapping[str, Any], mapping: Any = None, **settings: Any) -> list[Sampled]:
    both = []
    for form in forms:
        copies = make_copies(form, 5, env_config)
        own = dict.fromkeys(copies.agents, "m") if mapping is None else mapping
        both.append(Sampled(copies, own, **settings))
    assert isinstance(both[0].copies, VectorCopies)
    assert isinstance(both[1].copies, EnvCopies)
    return both


TWO_POLICIES = {"ada": "m", "bob": "other", "cyd": "m"}


@pytest.mark.parametrize(
    ("env_config", "settings"),
    [
        ({}, {}),
        ({}, {"mapping": TWO_POLICIES}),
        ({"masked": False}, {"mapping": TWO_POLICIES, **LSTM}),
        ({}, {"by_env_steps": True, "seating": alternating}),
        ({}, {"central": True, "mapping": TWO_POLICIES}),
        ({"with_state": True}, {"central": True}),
    ],
)
def test_simultaneous_moves_give_the_batches_of_single_parallel_environments(env_config: Any, settings: Any) -> None:
    vector, single = sample_both(HUNT, env_config, **settings)
    assert len(vector.taken) == len(single.taken)
    for mine, theirs in zip(vector.taken, single.taken, strict=True):
        assert mine.truncated.any() or mine.terminated.any()
        assert_same_batch(mine, theirs)
    assert vector.sampler.metrics() == single.sampler.metrics()
    for model in vector.memories:
        for row, segments in vector.segments(model).items():
            for one, other in zip(segments, single.segments(model)[row], strict=True):
                assert_same_segment(one, other)


@pytest.mark.parametrize("settings", [{}, LSTM, {"central": True}, {"seating": alternating}])
def test_agents_that_return_give_the_segments_of_single_parallel_environments(settings: Any) -> None:
    vector, single = sample_both(HUNT, {"returning": True}, **settings)
    rows = vector.segments("m")
    assert rows.keys() == single.segments("m").keys()
    for row, segments in rows.items():
        for one, other in zip(segments, single.segments("m")[row], strict=True):
            assert_same_segment(one, other)
    assert vector.sampler.metrics() == single.sampler.metrics()


@pytest.mark.parametrize("settings", [{}, LSTM, {"central": True}, {"by_env_steps": True, "seating": alternating}])
def test_moves_in_turn_give_the_segments_of_single_turn_based_environments(settings: Any) -> None:
    vector, single = sample_both(COUNT, {}, **settings)
    rows = vector.segments("m")
    assert len(rows) == 5 * len(NAMES)
    for row, segments in rows.items():
        for one, other in zip(segments, single.segments("m")[row], strict=True):
            assert_same_segment(one, other)
    for mine, theirs in zip(vector.taken, single.taken, strict=True):
        assert mine.episode_return.tolist() == theirs.episode_return.tolist()
        assert sorted(mine.origin.tolist()) == sorted(theirs.origin.tolist())


@pytest.mark.parametrize("settings", [{}, {"by_env_steps": True}, {"central": True}, LSTM, {"seating": alternating}])
def test_connect_four_gives_the_batches_of_openspiel(settings: Any) -> None:
    pytest.importorskip("pyspiel")
    vector, single = sample_both(CONNECT_FOUR, {}, **settings)
    for mine, theirs in zip(vector.taken, single.taken, strict=True):
        assert_same_batch(mine, theirs)


def test_preprocessed_matches_are_stepped_one_by_one_with_the_same_result() -> None:
    preprocess = PreprocessConfig(stack=2, clip_reward=True)
    forms = [make_copies(form, 4, {}, preprocess=preprocess) for form in CONNECT_FOUR]
    assert isinstance(forms[0], EnvCopies)
    one, other = (Sampled(copies, dict.fromkeys(copies.agents, "m")) for copies in forms)
    for mine, theirs in zip(one.taken, other.taken, strict=True):
        assert_same_batch(mine, theirs)


# -- evaluation ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("forms", [HUNT, COUNT])
@pytest.mark.parametrize("against", ["policies", "random", "fixed"])
@pytest.mark.parametrize(
    "plan", [EpisodePlan(11), EpisodePlan(np.array([30, 0, 12, 25]), by_steps=True), EpisodePlan(9, max_steps=3)]
)
def test_evaluations_give_the_scores_of_single_copies(forms: Sequence[str], against: str, plan: EpisodePlan) -> None:
    scores = []
    for form in forms:
        copies = make_copies(form, 4)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            first, second = (
                Policy(*network_spaces(copies, "ada", central=False), NetworkConfig(fcnet_hiddens=(8,))) for _ in range(2)
            )
        other = None if against == "policies" else RANDOM if against == "random" else Opponent("b", dict.fromkeys(NAMES, second))
        mapping, sources = dict.fromkeys(NAMES, "m"), {"m": Versions(first)}
        scores.append(play_matches(copies, mapping, sources, plan, 5, deterministic=False, opponent=other))
        copies.close()
    assert len(scores[0].returns) > 3
    assert scores[0] == scores[1]


# -- faults -------------------------------------------------------------------------------------------------------------


class Failing(VectorCount):
    """Raises in a certain call of step or reset of every instance."""

    def __init__(self, num_envs: int, step: int = 0, reset: int = 0, empty: bool = False) -> None:
        super().__init__(num_envs)
        self._left = {"step": step, "reset": reset}
        self._empty = empty

    def _count_down(self, call: str) -> None:
        self._left[call] -= 1
        if self._left[call] == 0:
            raise RuntimeError(f"{call} broke")

    def reset(self, seeds: Ints, matches: Ints) -> VectorMultiAgentStep:
        self._count_down("reset")
        result = super().reset(seeds, matches)
        if self._empty:
            result.acting[:], result.terminated[:] = False, True
        return result

    def step(self, actions: Any, playing: Bools) -> VectorMultiAgentStep:
        self._count_down("step")
        return super().step(actions, playing)


FAILING = f"{__name__}:Failing"


@pytest.mark.parametrize(("call", "number"), [("step", 7), ("reset", 3)])
def test_a_failed_environment_is_recreated_only_if_configured(call: str, number: int) -> None:
    with pytest.raises(EnvironmentFault, match=f"raised RuntimeError in {call} .*{call} broke"):
        Sampled(make_copies(FAILING, 3, {call: number}), dict.fromkeys(NAMES, "m"), updates=2)
    copies = make_copies(FAILING, 3, {call: number}, forgiving=True)
    sampled = Sampled(copies, dict.fromkeys(NAMES, "m"), updates=2)
    assert copies.restarts > 1
    assert sampled.sampler.metrics()["discarded_steps"] > 0
    for batch in sampled.taken:
        assert set(batch.reward[batch.valid].tolist()) <= {0.0, 1.0, -2.0}
        assert batch.steps >= 45


def test_an_environment_that_fails_at_once_every_time_is_a_fault() -> None:
    with pytest.raises(EnvironmentFault, match="step broke"):
        Sampled(make_copies(FAILING, 3, {"step": 1}, forgiving=True), dict.fromkeys(NAMES, "m"))


def test_matches_that_are_over_at_once_are_a_fault() -> None:
    with pytest.raises(EnvironmentFault, match="ended before any agent acted, 100 times in a row"):
        Sampled(make_copies(FAILING, 3, {"empty": True}), dict.fromkeys(NAMES, "m"))


def test_an_interruption_discards_and_starts_anew() -> None:
    runner_policy = Policy(VectorHunt.single_observation_space, VectorHunt.single_action_space, NetworkConfig(fcnet_hiddens=(4,)))
    memory = Kept(session_spec(runner_policy, STEPS, "m"), 1, 500)
    copies = make_copies(HUNT[0], 3)
    policies = PolicySet({"m": Versions(runner_policy)}, torch.Generator(), explore=True)
    matches = MatchRunner(copies, dict.fromkeys(NAMES, "m"), policies, {"m": memory}, 0)
    with policies.acting():
        for _ in range(3):
            matches.tick()
        before = matches.stats.discarded
        matches.reset()
        assert matches.stats.discarded > before
        assert matches.models_in_use() == frozenset()
        matches.tick()
    assert matches.models_in_use() == {"m"}
    assert [matches.steps_of(number) for number in range(3)] == [1, 1, 1]
    assert sum(segment.steps for segment in memory.seen) <= 3 * 3 * len(NAMES)
    np.testing.assert_array_equal(np.isfinite([segment.reward.sum() for segment in memory.seen]), True)
