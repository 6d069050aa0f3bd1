"""Several agents are sampled; what arrives at the learner is compared with the books that the games keep."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from ludus.core.tree import leaves
from ludus.core.types import Segments
from ludus.envs.pettingzoo import CentralState, MultiAgentMatch, central_space, make_match, match_of
from ludus.errors import EnvironmentFault
from ludus.models.centralized_critic import CentralNetwork, actor_policy
from ludus.models.distributions import EpsilonGreedy
from ludus.models.network_config import NetworkConfig
from ludus.models.policy import PROBABILITIES, VALUES, Policy
from ludus.sampling.episode_runner import EpisodePlan, Score
from ludus.sampling.multi_agent.batches import MatchBatches, MultiAgentSettings
from ludus.sampling.multi_agent.env_copies import EnvCopies
from ludus.sampling.multi_agent.play import CopyShare, Step, play_episode, play_matches
from ludus.sampling.multi_agent.sampler import MultiAgentSampler
from ludus.sampling.opponents import RANDOM, Opponent
from ludus.sampling.segment_recorder import session_spec
from ludus.sampling.trained_agent import TrainedAgent
from ludus.transport.local import LocalMemory
from tests.matches import ACTION, NAMES, OBSERVATION, Life, Roles, ScriptParallel, ScriptTurns, Simple
from tests.tools import network_of

CAST = {"red_0": "red", "red_1": "red", "blue_0": "blue"}
STEPS = 5


def made(seed: int, observation: Any = OBSERVATION, action: Any = ACTION, **network: Any) -> Policy:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Policy(observation, action, NetworkConfig(fcnet_hiddens=(8,), **network))


class Versions:
    """A policy whose version grows whenever it is told."""

    def __init__(self, policy: Policy) -> None:
        self.policy, self.version = policy, 1

    def newest(self) -> tuple[Policy, int]:
        return self.policy, self.version


class Kept(LocalMemory):
    """Remembers all that was committed."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.seen: list[Segments] = []

    def commit(self, segments: Segments) -> None:
        self.seen.append(copy.deepcopy(segments))
        super().commit(segments)


class Sampled:
    """A sampler of scripted matches, with everything that it recorded."""

    def __init__(
        self, envs: list[Any], *, batch: int = 40, seed: int = 0, cast: Mapping[str, str] = CAST, **network: Any
    ) -> None:
        self.envs = envs
        waiting = list(envs)
        self.sources = {name: Versions(made(number, **network)) for number, name in enumerate(dict.fromkeys(cast.values()))}
        self.memories = {name: Kept(session_spec(s.policy, STEPS, name), 1, 1000) for name, s in self.sources.items()}
        self.batches = MatchBatches(self.memories)
        copies = EnvCopies(lambda: match_of(waiting.pop(0), "script"), len(envs))
        self.sampler = MultiAgentSampler(copies, cast, self.sources, self.batches, MultiAgentSettings(batch), seed)
        self.taken: list[Segments] = []

    def run(self, updates: int) -> Sampled:
        while len(self.taken) < updates:
            self.sampler.step()
            while (batch := self.batches.take(0)) is not None:
                self.taken.append(batch)
                self.batches.release(batch)
                self.sources[batch.model].version += 1  # as if it had learned
        return self


def lives_of(env: Any, agent: str) -> list[Life]:
    return [life for books in env.history for life in books.lives if life.agent == agent and life.steps]


def check_seat(lives: list[Life], segments: list[Segments], source: Versions) -> int:
    """Every step of the books arrives once, in order, with what belongs to it; the last life may still be under way."""
    rest, counted = list(segments), 0
    for life in lives:
        at = 0
        state = source.policy.initial_state(1)
        while at < len(life.steps) and rest:
            segment = rest.pop(0)
            n = segment.steps
            assert n > 0
            assert segment.valid[:, 0].tolist() == [True] * n + [False] * (STEPS - n), "a gap"
            for t in range(n):
                did = life.steps[at]
                assert segment.first[t, 0] == (at == 0)
                np.testing.assert_array_equal(segment.observation[t, 0], did.seen)
                assert int(segment.action[t, 0]) == did.action
                assert segment.reward[t, 0] == pytest.approx(did.reward, abs=1e-5)
                assert segment.action_mask[t, 0].tolist() == ([True] * 4 if did.mask is None else did.mask.astype(bool).tolist())
                if segment.spec.state_every and t % segment.spec.state_every == 0:
                    for kept, own in zip(segment.state, state, strict=True):
                        np.testing.assert_allclose(kept[t // segment.spec.state_every, 0], own[0], atol=1e-5)
                mask = None if did.mask is None else torch.from_numpy(did.mask.astype(bool)[None])
                seen = torch.from_numpy(did.seen[None])
                with torch.no_grad():
                    outputs, value, state = source.policy._outputs(seen, state, None)
                    log_prob, _ = source.policy.distribution.evaluate(outputs, torch.tensor([did.action]), mask)
                assert segment.value[t, 0] == pytest.approx(float(value), abs=1e-4)
                assert segment.log_prob[t, 0] == pytest.approx(float(log_prob), abs=1e-4)
                at += 1
            counted += n
            last = at == len(life.steps)
            assert segment.terminated[n - 1, 0] == (last and life.end == "terminated")
            assert segment.truncated[n - 1, 0] == (last and life.end == "truncated")
            assert not segment.terminated[: n - 1].any()
            assert not segment.truncated[: n - 1].any()
            after = life.last_seen if last and life.end == "truncated" else None if last else life.steps[at].seen
            if after is not None:
                np.testing.assert_array_equal(segment.observation[n, 0], after)
                with torch.no_grad():
                    value = source.policy._outputs(torch.from_numpy(after[None]), state, None)[1]
                assert segment.value[n, 0] == pytest.approx(float(value), abs=1e-4)
    assert not rest, "more arrived than was played"
    return counted


@pytest.mark.parametrize("kind", [ScriptParallel, ScriptTurns])
@pytest.mark.parametrize("masked", ["", "observation", "info"])
@pytest.mark.parametrize("network", [{}, {"core": "lstm", "cell_size": 4, "max_seq_len": 2}])
def test_what_the_learner_gets_is_what_every_agent_did(kind: Any, masked: str, network: dict[str, Any]) -> None:
    sampled = Sampled([kind(masked=masked) for _ in range(2)], batch=12, **network).run(6)
    for model, memory in sampled.memories.items():
        counted = 0
        for number, env in enumerate(sampled.envs):
            for index, agent in enumerate(NAMES):
                if CAST[agent] == model:
                    own = [s for s in memory.seen if s.origin[0] == number * len(NAMES) + index]
                    counted += check_seat(lives_of(env, agent), own, sampled.sources[model])
        assert counted >= sum(batch.steps for batch in sampled.taken if batch.model == model)
        assert any(batch.model == model for batch in sampled.taken)


def test_agents_that_act_at_once_are_learned_from_by_the_version_that_acted() -> None:
    class Shown(ScriptParallel):
        def step(self, actions: dict[str, Any]) -> Any:
            before = set(self.agents)
            seen, *others = super().step(actions)
            for agent in before & set(self.agents) - set(seen):  # nobody waits
                seen[agent], others[3][agent] = self._view(agent)
            return seen, *others

    sampled = Sampled([Shown() for _ in range(4)]).run(6)
    versions = {"red": 0, "blue": 0}
    for batch in sampled.taken:
        versions[batch.model] += 1
        assert set(batch.version[batch.valid]) == {versions[batch.model]}
        assert 40 <= batch.steps < 40 + 4 * len(NAMES)


def test_a_pending_turn_at_a_complete_batch_joins_the_next_batch() -> None:
    sampled = Sampled([ScriptTurns() for _ in range(4)]).run(6)
    late = 0
    versions = {"red": 0, "blue": 0}
    for batch in sampled.taken:
        versions[batch.model] += 1
        lag = versions[batch.model] - batch.version[batch.valid]
        assert lag.min() == 0
        assert lag.max() <= 1
        late += int(lag.sum())
    assert 0 < late <= 6 * 4 * 2  # at most the last step of every seat, each time


def test_matches_are_reported_by_the_sum_of_what_all_agents_earned() -> None:
    sampled = Sampled([ScriptParallel() for _ in range(3)]).run(6)
    told = np.concatenate([batch.episode_return for batch in sampled.taken])
    over = [books.paid for env in sampled.envs for books in env.history if not books.open]
    assert len(told) > 5
    assert set(np.round(told, 3)) <= set(np.round(np.array(over, np.float32), 3))
    assert sampled.sampler.metrics()["late_rewards"] == sum(books.late for env in sampled.envs for books in env.history)


def test_the_same_seed_gives_the_same_batches_to_the_last_bit() -> None:
    one, two = (Sampled([ScriptParallel() for _ in range(3)], seed=7).run(3) for _ in range(2))
    other = Sampled([ScriptParallel() for _ in range(3)], seed=8).run(1)
    for mine, theirs in zip(one.taken, two.taken, strict=True):
        assert mine.model == theirs.model
        for (path, left), (_, right) in zip(leaves(mine.arrays()), leaves(theirs.arrays()), strict=True):
            assert left.tobytes() == right.tobytes(), path
    assert one.taken[0].reward.tobytes() != other.taken[0].reward.tobytes()


def test_a_policy_that_is_not_trained_plays_and_is_not_recorded() -> None:
    sources = {"red": Versions(made(0)), "blue": Versions(made(1))}
    batches = MatchBatches({"red": LocalMemory(session_spec(sources["red"].policy, STEPS, "red"), 1, 500)})
    env = ScriptParallel()
    sampler = MultiAgentSampler(EnvCopies(lambda: match_of(env, "script"), 1), CAST, sources, batches, MultiAgentSettings(30), 0)
    while not batches.ready():
        sampler.step()
    batch = batches.take(0)
    assert batch is not None
    assert batch.model == "red"
    assert any(life.agent == "blue_0" and life.steps for books in env.history for life in books.lives)


# -- faults -------------------------------------------------------------------------------------------------------------


def simple(
    fault: str, *, forgiving: bool = False, batch: int = 40, at: int = 3, length: int = 5, copies: int = 2
) -> tuple[MultiAgentSampler, MatchBatches]:
    names = list(Simple(fault).possible_agents)
    source = Versions(made(0, Simple().observation_space("a"), gym.spaces.Discrete(2)))
    batches = MatchBatches({"m": LocalMemory(session_spec(source.policy, STEPS, "m"), 1, 2000)})
    matches = EnvCopies(lambda: match_of(Simple(fault, at=at, length=length), "simple"), copies, forgiving=forgiving)
    return MultiAgentSampler(matches, dict.fromkeys(names, "m"), {"m": source}, batches, MultiAgentSettings(batch), 0), batches


def filled(sampler: MultiAgentSampler, batches: MatchBatches) -> Segments:
    while not batches.ready():
        sampler.step()
    batch = batches.take(0)
    assert batch is not None
    return batch


def test_steps_with_unknown_outcome_are_left_out() -> None:
    sampler, batches = simple("vanish")
    batch = filled(sampler, batches)
    assert batch.steps >= 40
    assert sampler.metrics()["discarded_steps"] > 0
    assert batch.valid.sum(axis=0).max() == 2  # of three steps of a match the last one has no outcome
    assert batch.truncated[batch.valid].any()


def test_an_agent_that_comes_at_step_500_is_recorded_from_then_on() -> None:
    sampler, batches = simple("late", batch=1050, at=500, length=520, copies=1)
    batch = filled(sampler, batches)
    seen = batch.observation[:-1][batch.valid]
    late = seen[seen[:, 1] == 0.5]
    assert len(late) > 0
    assert late[:, 0].min() == pytest.approx(500 / 520)


def test_a_game_that_is_over_at_once_for_ever_is_a_fault() -> None:
    sampler, batches = simple("at once")
    with pytest.raises(EnvironmentFault, match="ended before any agent acted"):
        filled(sampler, batches)


def test_a_failed_match_is_recreated_only_if_configured() -> None:
    sampler, batches = simple("raises")
    with pytest.raises(EnvironmentFault, match="the game fell over"):
        filled(sampler, batches)
    sampler, batches = simple("raises", forgiving=True)
    batch = filled(sampler, batches)
    assert batch.valid.sum(axis=0).max() == 2
    assert sampler.metrics()["env_restarts"] > 2


def test_a_game_that_cannot_be_made_again_is_a_fault_in_the_end() -> None:
    sampler, batches = simple("raises", forgiving=True, at=1)
    with pytest.raises(EnvironmentFault, match="the game fell over"):
        filled(sampler, batches)


# -- a centralised value ------------------------------------------------------------------------------------------------


def central_policy(match: MultiAgentMatch, agent: str, **network: Any) -> Policy:
    own = match.agents[agent]
    whole = CentralState(match.agents, match.state_space).space
    return made(3, central_space(own.observation, whole), own.action, central=True, **network)


def central_of(policy: Policy) -> CentralNetwork:
    assert isinstance(policy.network, CentralNetwork)
    return policy.network


@pytest.mark.parametrize("network", [{}, {"core": "gru", "cell_size": 4}, {"fcnet_activation": "elu"}])
def test_the_policy_does_not_see_the_state_and_the_value_does(network: dict[str, Any]) -> None:
    policy = central_policy(match_of(Roles(), "roles"), "listener", **network)
    random = np.random.default_rng(0)

    def seen(state: Any) -> Any:
        return {
            "observation": np.ones((6, 1), np.float32),
            "state": {"agent": np.eye(2, dtype=np.float32)[[0] * 6], "seen": state},
        }

    one, two = (seen(random.normal(size=(6, 2)).astype(np.float32)) for _ in range(2))
    state = tuple(part.numpy() for part in policy.initial_state(6))
    for frozen in (False, True):
        if frozen:
            policy.network.freeze()
        a, b = policy.act(one, state), policy.act(two, state)
        assert a.log_prob.tobytes() == b.log_prob.tobytes()
        assert (np.abs(a.value - b.value) > 1e-6).all()
    policy.network.thaw()
    outputs = policy.evaluate(
        {"observation": torch.ones(1, 6, 1), "state": {"agent": torch.zeros(1, 6, 2), "seen": torch.randn(1, 6, 2)}},
        torch.zeros(1, 6, dtype=torch.int64),
        None,
        policy.initial_state(6),
        torch.zeros(1, 6, dtype=torch.bool),
    )
    outputs[2].sum().backward()
    assert all(p.grad is None or not p.grad.any() for p in central_of(policy).actor.parameters()), "the value trains the policy"


def test_the_actor_of_a_policy_with_a_centralised_value_is_the_same_without_the_state() -> None:
    policy = central_policy(match_of(Roles(), "roles"), "listener")
    actor = actor_policy(policy)
    assert actor.observation_space == gym.spaces.Box(0, 3, (1,), np.float32)
    own = np.array([[0.5], [2.0]], np.float32)
    whole = {"agent": np.zeros((2, 2), np.float32), "seen": np.ones((2, 2), np.float32)}
    np.testing.assert_allclose(actor.act(own).log_prob, policy.act({"observation": own, "state": whole}).log_prob, rtol=1e-6)
    assert actor.act(own).value.tolist() == [0.0, 0.0]
    with torch.no_grad():
        central_of(policy).actor.head.bias.add_(1.0)
    np.testing.assert_allclose(actor.act(own).log_prob, policy.act({"observation": own, "state": whole}).log_prob, rtol=1e-6)
    assert actor_policy(actor) is actor


def test_what_is_recorded_for_a_centralised_value_is_the_state_of_that_moment() -> None:
    class Observations(Roles):
        def __init__(self) -> None:
            super().__init__()
            self.shown: list[tuple[int, int, int]] = []

        def _seen(self) -> dict[str, Any]:
            self.shown.append((self.number, self.t, self.said))
            return super()._seen()

    env = Observations()
    match = match_of(env, "roles")
    cast = {"speaker": "s", "listener": "l"}
    sources = {model: Versions(central_policy(match, agent)) for agent, model in cast.items()}
    batches = MatchBatches({m: LocalMemory(session_spec(s.policy, STEPS, m), 1, 500) for m, s in sources.items()})
    sampler = MultiAgentSampler(EnvCopies(lambda: match, 1), cast, sources, batches, MultiAgentSettings(23, central=True), 0)
    for _ in range(4):
        batch = filled(sampler, batches)
        agent = [0.0, 1.0] if batch.model == "l" else [1.0, 0.0]
        for b in range(batch.rows):
            n = int(batch.valid[:, b].sum())
            numbers = batch.observation["state"]["seen"][: n + 1, b]
            assert (numbers[:, 0] == numbers[0, 0]).all()  # also that after the last step: truncated, or cut
            np.testing.assert_array_equal(numbers[:, 1], numbers[0, 1] + np.arange(n + 1))
            assert (batch.observation["state"]["agent"][: n + 1, b] == agent).all()
            if batch.model == "s":
                np.testing.assert_array_equal(batch.observation["observation"][: n + 1, b], numbers[:, 0])


# -- playing ------------------------------------------------------------------------------------------------------------


def test_evaluations_play_as_many_matches_as_were_asked_for_and_repeat_themselves() -> None:
    def score(seed: int, deterministic: bool = True) -> Any:
        policy = made(0, Simple().observation_space("a"), gym.spaces.Discrete(2))
        copies = EnvCopies(lambda: match_of(Simple(), "simple"), 3)
        return play_matches(copies, {"a": "m", "b": "m"}, {"m": Versions(policy)}, 7, seed, deterministic=deterministic)

    assert len(score(0).returns) == 7
    assert score(0).lengths == (5,) * 7
    assert len(set(score(0).returns)) == 1  # nothing is drawn
    assert score(1, deterministic=False) == score(1, deterministic=False)
    assert score(1, deterministic=False) != score(2, deterministic=False)


def test_against_random_opponents_every_agent_has_its_turn_and_only_it_is_scored() -> None:
    policy = made(0, Simple().observation_space("a"), gym.spaces.Discrete(2))
    with torch.no_grad():
        network_of(policy).head.bias.copy_(torch.tensor([-100.0, 100.0]))
    copies = EnvCopies(lambda: match_of(Simple(length=50), "simple"), 2)
    score = play_matches(copies, {"a": "m", "b": "m"}, {"m": Versions(policy)}, 6, 0, opponent=RANDOM)
    assert len(score.returns) == 6
    assert all(50 < found < 100 for found in score.returns)  # 1 of its own each step, and half of them of the other
    assert len(set(score.returns)) > 1


class Noted(Simple):
    """Writes down what is done, by agent, in whatever space."""

    def __init__(self, space: gym.Space[Any]) -> None:
        super().__init__(length=100)
        self.space = space
        self.done: dict[str, list[Any]] = {"a": [], "b": []}

    def action_space(self, agent: str) -> gym.Space[Any]:
        return self.space

    def step(self, actions: dict[str, Any]) -> Any:
        for agent, action in actions.items():
            self.done[agent].append(action)
        return super().step(dict.fromkeys(actions, 0))


@pytest.mark.parametrize("kind", [PROBABILITIES, VALUES])
def test_random_opponents_choose_evenly_whatever_the_policy_is(kind: str) -> None:
    """A policy of values that explores no more would always choose the same."""
    policy = Policy(Simple().observation_space("a"), gym.spaces.Discrete(4), NetworkConfig(fcnet_hiddens=(8,)), kind=kind)
    if isinstance(policy.distribution, EpsilonGreedy):
        policy.distribution.epsilon.zero_()
    env = Noted(gym.spaces.Discrete(4))
    copies = EnvCopies(lambda: match_of(env, "noted"), 1)
    play_matches(copies, {"a": "m", "b": "m"}, {"m": Versions(policy)}, 1, 0, opponent=RANDOM)
    counts = np.bincount(env.done["b"], minlength=4)  # in the first match it is a that plays
    assert counts.sum() == 100
    assert (np.abs(counts - 25) <= 5 * np.sqrt(25 * 0.75)).all()


def test_random_opponents_choose_evenly_in_a_box() -> None:
    space = gym.spaces.Box(-2.0, 2.0, (1,))
    env = Noted(space)
    policy = made(0, Simple().observation_space("a"), space)
    copies = EnvCopies(lambda: match_of(env, "noted"), 1)
    play_matches(copies, {"a": "m", "b": "m"}, {"m": Versions(policy)}, 1, 0, opponent=RANDOM)
    found = np.array(env.done["b"])[:, 0]
    assert np.abs(found).max() < 2.0  # a normal number that is clipped would lie on the bounds for a third of the time
    assert (np.abs(np.histogram(found, 4, (-2, 2))[0] - 25) <= 5 * np.sqrt(25 * 0.75)).all()


def test_a_match_that_never_ends_is_cut_and_counted_as_such() -> None:
    lengths = [10**9, 5]
    copies = EnvCopies(lambda: match_of(Simple(length=lengths.pop(0)), "simple"), 2)
    policy = made(0, Simple().observation_space("a"), gym.spaces.Discrete(2))
    with torch.no_grad():
        network_of(policy).head.bias.copy_(torch.tensor([-100.0, 100.0]))
    score = play_matches(copies, {"a": "m", "b": "m"}, {"m": Versions(policy)}, EpisodePlan(6, max_steps=20), 0)
    assert score.complete
    assert score.cut == 1
    assert sorted(score.lengths) == [5, 5, 5, 20]  # the one that was cut plays no more
    assert sorted(score.returns) == [20.0, 20.0, 20.0, 80.0]
    copies[0], copies[1] = (match_of(Simple(length=20), "simple") for _ in range(2))
    whole = play_matches(copies, {"a": "m", "b": "m"}, {"m": Versions(policy)}, EpisodePlan(4, max_steps=20), 0)
    assert (whole.cut, whole.lengths) == (0, (20,) * 4)  # over in its last moment is over


def test_a_batch_may_be_so_many_steps_of_the_environments() -> None:
    source = Versions(made(0, Simple().observation_space("a"), gym.spaces.Discrete(2)))
    batches = MatchBatches({"m": LocalMemory(session_spec(source.policy, STEPS, "m"), 1, 2000)})
    copies = EnvCopies(lambda: match_of(Simple(), "simple"), 4)
    sampler = MultiAgentSampler(
        copies, {"a": "m", "b": "m"}, {"m": source}, batches, MultiAgentSettings(40, by_env_steps=True), 0
    )
    batch = filled(sampler, batches)
    assert (batch.env_steps, batch.steps) == (40, 80)
    again = filled(sampler, batches)
    assert (again.env_steps, again.steps) == (40, 80)
    numbers = sampler.metrics()
    assert (numbers["env_steps"], numbers["agent_steps"]) == (80, 160)


def test_environment_steps_are_counted_once_for_any_number_of_models() -> None:
    env = ScriptTurns()
    sources = {"red": Versions(made(0)), "blue": Versions(made(1))}
    memories = {name: LocalMemory(session_spec(s.policy, STEPS, name), 1, 500) for name, s in sources.items()}
    batches = MatchBatches(memories)
    sampler = MultiAgentSampler(
        EnvCopies(lambda: match_of(env, "script"), 1), CAST, sources, batches, MultiAgentSettings(60, by_env_steps=True), 0
    )
    taken = [filled(sampler, batches) for _ in range(6)]
    assert {batch.model for batch in taken} == {"red", "blue"}
    assert sum(batch.env_steps or 0 for batch in taken) == sampler.metrics()["env_steps"] == 180
    assert 180 - 3 <= sum(batch.steps for batch in taken) <= 180  # in turns each step is one decision; three may be waiting


def test_a_model_whose_agents_are_away_has_its_share_of_the_next_batch() -> None:
    names = ["a", "b", "late"]
    source, other = (Versions(made(n, Simple().observation_space("a"), gym.spaces.Discrete(2))) for n in range(2))
    batches = MatchBatches({n: LocalMemory(session_spec(source.policy, STEPS, n), 1, 2000) for n in ("m", "l")})
    copies = EnvCopies(lambda: match_of(Simple("late", at=25, length=100), "simple"), 1)
    cast = dict(zip(names, ("m", "m", "l"), strict=True))
    sampler = MultiAgentSampler(copies, cast, {"m": source, "l": other}, batches, MultiAgentSettings(20, by_env_steps=True), 0)
    taken = [filled(sampler, batches) for _ in range(3)]
    assert [(batch.model, batch.env_steps, batch.steps) for batch in taken] == [("m", 20, 40), ("m", 20, 40), ("l", 0, 15)]


def test_an_episode_of_trained_agents_is_reported_step_by_step() -> None:
    match = match_of(Simple(render_mode="rgb_array"), "simple")
    agent = TrainedAgent(made(0, Simple().observation_space("a"), gym.spaces.Discrete(2)))
    frames: list[Any] = []
    steps: list[Step] = []
    finished = play_episode(
        match, {"a": agent, "b": agent}, 3, before_step=lambda: frames.append(match.render()), on_step=steps.append
    )
    assert finished is not None
    assert finished.steps == len(steps) == len(frames) == 5
    assert [frame.max() for frame in frames] == [0, 10, 20, 30, 40]
    assert finished.total == sum(sum(step.rewards.values()) for step in steps)
    assert [step.over for step in steps] == [False] * 4 + [True]
    assert steps[-1].truncated == {"a", "b"}
    assert play_episode(match, {"a": agent, "b": agent}, 3, max_steps=2) is None


def test_trained_agents_play_in_turns_with_masks() -> None:
    match = make_match("pettingzoo/tictactoe_v3")
    own = match.agents["player_1"]
    agent = TrainedAgent(made(0, own.observation, own.action))
    finished = play_episode(match, dict.fromkeys(match.agents, agent), 0, deterministic=False)
    assert finished is not None
    assert 5 <= finished.steps <= 9
    assert finished.total == 0


@pytest.mark.parametrize("opponent", [None, RANDOM], ids=["policies", "random"])
def test_the_matches_of_a_copy_do_not_depend_on_the_other_copies(opponent: Opponent | None) -> None:
    """So an evaluation may be divided among processes."""
    policy = made(0, ScriptTurns().observation_space("red_0"), gym.spaces.Discrete(4))

    def score(copies: int, plan: EpisodePlan, share: CopyShare) -> Score:
        mapping = dict.fromkeys(ScriptTurns().possible_agents, "m")
        matches = EnvCopies(lambda: match_of(ScriptTurns(masked="info"), "turns"), copies)
        return play_matches(
            matches, mapping, {"m": Versions(policy)}, plan, 5, deterministic=False, opponent=opponent, share=share
        )

    whole = score(5, EpisodePlan(11), CopyShare())
    first = score(2, EpisodePlan(np.array([3, 2])), CopyShare(0, 5))
    rest = score(3, EpisodePlan(np.array([2, 2, 2])), CopyShare(2, 5))
    assert whole.returns == (*first.returns, *rest.returns)
    assert whole.lengths == (*first.lengths, *rest.lengths)
    assert len(set(whole.returns)) > 5
