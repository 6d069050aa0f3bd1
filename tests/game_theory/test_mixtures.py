"""Networks and mixtures of networks as strategies: exact values against OpenSpiel's and against matches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from ludus.envs.pettingzoo import Departure, Turn, make_match
from ludus.errors import ConfigError
from ludus.game_theory.exploitability import best_response, exploitability, nash_conv
from ludus.game_theory.game_tree import Doubles
from ludus.game_theory.meta_solvers import nash
from ludus.game_theory.mixtures import TreePayoffs, mix_strategies
from ludus.game_theory.observed_game import ObservedGame, observe_game
from ludus.models.network_config import NetworkConfig
from ludus.models.policy import VALUES, Policy

pyspiel = pytest.importorskip("pyspiel")


@pytest.fixture(scope="module")
def leduc() -> ObservedGame:
    return observe_game("openspiel/leduc_poker")


def network(game: str, seed: int, **keywords: Any) -> Policy:
    """A random policy with pronounced preferences: its logits are multiplied."""
    spaces = make_match(f"openspiel/{game}").agents["player_0"]
    torch.manual_seed(seed)
    policy = Policy(spaces.observation, spaces.action, NetworkConfig(fcnet_hiddens=(16,)), **keywords)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(16.0)
    return policy


def openspiel_policy(game: Any, policy: Policy) -> Any:
    """The same network as OpenSpiel sees it: one call per state."""
    from open_spiel.python import policy as openspiel

    def probabilities(state: Any) -> dict[int, float]:
        player = state.current_player()
        observation = np.asarray(state.information_state_tensor(player), np.float32)[None]
        mask = np.asarray(state.legal_actions_mask(player), np.bool_)[None]
        found = policy.action_probabilities(observation, mask)[0]
        return {action: float(found[action]) for action in state.legal_actions()}

    return openspiel.tabular_policy_from_callable(game, probabilities)


@pytest.mark.parametrize("name", ["kuhn_poker", "leduc_poker"])
def test_networks_are_as_exploitable_as_openspiel_says(name: str) -> None:
    from open_spiel.python.algorithms import exploitability as openspiel

    observed, game = observe_game(f"openspiel/{name}"), pyspiel.load_game(name)
    for seed in (0, 1):
        policy = network(name, seed)
        theirs = openspiel.nash_conv(game, openspiel_policy(game, policy))
        assert nash_conv(observed.tree, observed.strategy_of(policy)) == pytest.approx(theirs, abs=1e-6)


def test_a_mixture_of_networks_is_as_exploitable_as_openspiel_says(leduc: ObservedGame) -> None:
    from open_spiel.python.algorithms import exploitability as openspiel
    from open_spiel.python.algorithms import policy_aggregator

    game, weights = pyspiel.load_game("leduc_poker"), [0.5, 0.2, 0.3]
    policies = [network("leduc_poker", seed) for seed in range(3)]
    theirs = [openspiel_policy(game, policy) for policy in policies]
    mixed = policy_aggregator.PolicyAggregator(game).aggregate([0, 1], [theirs, theirs], [weights, weights])
    ours = mix_strategies(leduc.tree, [leduc.strategy_of(policy) for policy in policies], weights)
    assert nash_conv(leduc.tree, ours) == pytest.approx(openspiel.nash_conv(game, mixed), abs=1e-6)
    naive = sum(w * leduc.strategy_of(policy) for w, policy in zip(weights, policies, strict=True))
    assert nash_conv(leduc.tree, np.asarray(naive)) != pytest.approx(nash_conv(leduc.tree, ours), abs=1e-3)


def random_strategies(game: ObservedGame, count: int) -> Sequence[Doubles]:
    random = np.random.default_rng(2)
    return [game.tree.normalise(random.random(game.tree.slots) ** 4) for _ in range(count)]


def test_a_mixture_earns_the_weighted_mean_of_its_players(leduc: ObservedGame) -> None:
    first, second, other = random_strategies(leduc, 3)
    mixed = mix_strategies(leduc.tree, [first, second], [0.25, 0.75])
    for weight_in_front, against in ((True, other), (False, other)):
        pairs = [
            leduc.combine(one, against) if weight_in_front else leduc.combine(against, one) for one in (first, second, mixed)
        ]
        a, b, both = (leduc.tree.value(pair) for pair in pairs)
        assert both == pytest.approx(0.25 * a + 0.75 * b)


def test_the_payoff_table_equals_the_value_of_every_pair(leduc: ObservedGame) -> None:
    strategies, table = random_strategies(leduc, 3), TreePayoffs(leduc.tree)
    for one in strategies:
        table.add(one)
    expected = [[leduc.tree.value(leduc.combine(row, column)) for column in strategies] for row in strategies]
    assert table.payoffs() == pytest.approx(np.array(expected))
    symmetric = table.symmetric()
    assert symmetric == pytest.approx(-symmetric.T)
    assert symmetric[0, 1] == pytest.approx((expected[0][1] - expected[1][0]) / 2)


def test_deterministic_play_takes_the_most_probable_action(leduc: ObservedGame) -> None:
    policy = network("leduc_poker", 5)
    sampled, greedy = leduc.strategy_of(policy), leduc.strategy_of(policy, deterministic=True)
    starts = leduc.tree.starts
    assert set(np.unique(greedy)) == {0.0, 1.0}
    for start, size in zip(starts, leduc.tree.sizes, strict=True):
        assert sampled[start : start + size].argmax() == greedy[start : start + size].argmax()


def test_a_value_network_plays_its_best_action(leduc: ObservedGame) -> None:
    policy = network("leduc_poker", 6, kind=VALUES)
    assert set(np.unique(leduc.strategy_of(policy))) == {0.0, 1.0}


def test_exploitability_is_what_the_best_response_earns_in_matches() -> None:
    """An independent path: the environment itself, with the best response as a table by observation."""
    game = observe_game("openspiel/kuhn_poker")
    policy = network("kuhn_poker", 3)
    strategy = game.strategy_of(policy)
    value, response = best_response(game.tree, strategy, 1)
    table = {
        game.observations[i].tobytes(): response[one.first_slot : one.first_slot + len(one.actions)]
        for i, one in enumerate(game.tree.information_sets)
    }
    match, random, earned = make_match("openspiel/kuhn_poker"), np.random.default_rng(0), []
    for seed in range(4000):
        step, total = match.reset(seed), 0.0
        while not step.over:
            (turn,) = step.turns
            assert turn.mask is not None
            if turn.agent == "player_1":
                probabilities = table[turn.observation.tobytes()]
            else:
                probabilities = policy.action_probabilities(np.stack([turn.observation]), np.stack([turn.mask]))[0]
            step = match.step({turn.agent: int(random.choice(2, p=probabilities))})
            rows: list[Turn | Departure] = [*step.turns, *step.departures]
            total += sum(row.reward for row in rows if row.agent == "player_1")
        earned.append(total)
    assert np.mean(earned) == pytest.approx(value, abs=5 * np.std(earned) / len(earned) ** 0.5)


def test_the_equilibrium_of_weighted_rock_paper_scissors_is_found() -> None:
    stakes = (1.0, 2.0, 3.0)
    game = observe_game("ludus/RockPaperScissors-v0", {"stakes": stakes})
    equilibrium = np.array([2, 3, 1]) / 6
    assert exploitability(game.tree, np.tile(equilibrium, 2)) == pytest.approx(0.0, abs=1e-12)
    pure = [np.tile(row, 2) for row in np.eye(3)]
    table = TreePayoffs(game.tree)
    for one in pure:
        table.add(one)
    assert nash(table.symmetric())[0] == pytest.approx(equilibrium, abs=1e-9)
    match = make_match("ludus/RockPaperScissors-v0", {"stakes": stakes})
    for own in range(3):
        for other in range(3):
            match.reset(0)
            step = match.step({"player_0": own, "player_1": other})
            earned = {left.agent: left.reward for left in step.departures}
            assert step.over
            assert earned == {"player_0": table.payoffs()[own, other], "player_1": -table.payoffs()[own, other]}


@pytest.mark.parametrize("stakes", [[1, 2], [1, 2, -3], [0, 1, 1]])
def test_stakes_that_are_not_positive_are_refused(stakes: list[float]) -> None:
    with pytest.raises(ConfigError, match="three positive numbers"):
        observe_game("ludus/RockPaperScissors-v0", {"stakes": stakes})


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ("openspiel/matrix_rps", "act at the same time"),
        ("pettingzoo/tictactoe_v3", "is not known"),
        ("openspiel/connect_four", "more than 1,000"),
    ],
)
def test_games_without_a_small_tree_are_refused(env: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        observe_game(env, max_nodes=1000)


def test_recurrent_policies_have_no_table(leduc: ObservedGame) -> None:
    observation, action = gym.spaces.Box(-1, 1, leduc.observations.shape[1:]), gym.spaces.Discrete(3)
    policy = Policy(observation, action, NetworkConfig(core="lstm", cell_size=8))
    with pytest.raises(ConfigError, match="is recurrent"):
        leduc.strategy_of(policy)
