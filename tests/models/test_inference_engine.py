"""Inference in this process: batches of many callers, memory of their own for each, weights that change between batches."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ludus.core.tree import Array
from ludus.errors import IncompatibleCheckpoint, UsageError
from ludus.models.inference.batched_policy import BatchedPolicy
from ludus.models.inference.engine import EnginePolicySource, Inference, InferenceEngine, stack_rows
from ludus.models.policy import Policy
from ludus.models.weights import module_spec

X = np.zeros(3, np.float32)
ONE = module_spec.inputs_of((X,), {})


class Double(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(2.0))
        self.sizes: list[int] = []
        self.saw: list[tuple[bool, bool]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.sizes.append(len(x))
        self.saw.append((self.training, torch.is_inference_mode_enabled()))
        return x * self.factor


class Versions:
    """A source of weights that counts how often it is asked."""

    def __init__(self, factor: float = 2.0) -> None:
        self.now = 1
        self.factor = factor
        self.looks = self.reads = 0

    @property
    def version(self) -> int:
        self.looks += 1
        return self.now

    def read(self) -> tuple[int, dict[str, Array]]:
        self.reads += 1
        return self.now, {"factor": np.array(self.factor, np.float32)}


def row(value: float) -> Array:
    return np.full(3, value, np.float32)


def test_rows_of_one_turn_become_one_batch_and_each_caller_gets_its_own() -> None:
    model = Double()
    inference = Inference(model, ONE)

    async def play() -> list[Array]:
        return list(await asyncio.gather(*(inference.forward(row(i)) for i in range(50))))

    outputs = asyncio.run(play())
    assert model.sizes == [50]
    for i, output in enumerate(outputs):
        assert type(output) is np.ndarray
        np.testing.assert_array_equal(output, row(2 * i))


def test_the_model_runs_in_eval_mode_without_gradients() -> None:
    model = Double().train()
    Inference(model, ONE).call(X)
    assert model.saw == [(False, True)]


def test_a_batch_is_never_larger_than_allowed() -> None:
    model = Double()
    inference = Inference(model, ONE, max_batch_size=8)

    async def play() -> list[Array]:
        return list(await asyncio.gather(*(inference.forward(row(i)) for i in range(20))))

    outputs = asyncio.run(play())
    assert max(model.sizes) == 8
    assert [float(o[0]) for o in outputs] == [2.0 * i for i in range(20)]


def test_a_lone_call_may_be_run_by_asyncio_itself_again_and_again() -> None:
    inference = Inference(Double(), ONE)
    for i in range(3):  # each in a loop of its own
        np.testing.assert_array_equal(asyncio.run(inference.forward(row(i))), row(2 * i))  # type: ignore[arg-type]


def test_several_event_loops_may_ask_at_once() -> None:
    inference = Inference(Double(), ONE)

    async def play(base: int) -> list[float]:
        found = []
        for i in range(100):
            outputs = await asyncio.gather(*(inference.forward(row(base + i + k)) for k in range(3)))
            found += [float(o[0]) for o in outputs]
        return found

    with ThreadPoolExecutor(4) as pool:
        runs = list(pool.map(lambda base: asyncio.run(play(base)), [0, 1000, 2000, 3000]))
    for base, found in zip([0, 1000, 2000, 3000], runs, strict=True):
        assert found == [2.0 * (base + i + k) for i in range(100) for k in range(3)]


class Reusing(nn.Module):
    """A model that answers out of memory which it uses again: the worst it can do to its callers."""

    def __init__(self) -> None:
        super().__init__()
        self.out = torch.zeros(64, 3)
        self.kept = nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        self.out[: len(x)] = x
        return {"mine": self.out[: len(x)], "yours": x, "weights": self.kept.expand(len(x), 3)}


@pytest.mark.parametrize("sync", [False, True])
def test_what_was_handed_out_is_never_written_again(sync: bool) -> None:
    inference = Inference(Reusing(), ONE)
    held: list[tuple[float, Any]] = []

    async def play() -> None:
        for turn in range(40):
            values = [turn * 7 + i for i in range(5)]
            inputs = [row(value) for value in values]
            if sync:
                outputs = [inference.call(x) for x in inputs]
            else:
                outputs = await asyncio.gather(*(inference.forward(x) for x in inputs))
            held.extend(zip(values, outputs, strict=True))
            for x in inputs:
                x[:] = -1  # the caller may use his own memory again, too

    asyncio.run(play())
    for value, output in held:
        np.testing.assert_array_equal(output["mine"], row(value))
        np.testing.assert_array_equal(output["yours"], row(value))
    first, second = held[0][1], held[1][1]
    first["yours"][:] = 99
    assert not (second["yours"] == 99).any(), "two callers share memory"
    first["weights"][:] = 99
    assert (inference.call(X)["weights"] == 0).all(), "a caller can write into the model"


def test_an_answer_does_not_keep_the_whole_batch_alive() -> None:
    output = Inference(Double(), ONE).call(X)
    assert output.base is None
    assert output.flags.writeable


class Structured(nn.Module):
    def forward(self, image: Any, *, state: Any, scale: Tensor) -> Any:
        return {"value": image["a"].sum(1) * scale, "state": (state[0] + 1, [state[1]])}


def test_trees_go_in_and_come_out_without_their_batch_dimension() -> None:
    example = {"a": np.zeros(2, np.float32)}
    state = (np.zeros((2, 2), np.float64), np.zeros((), np.int64))
    inference = Inference(Structured(), module_spec.inputs_of((example,), {"state": state, "scale": np.float32(0)}))

    async def play() -> list[Any]:
        calls = [
            inference.forward(
                {"a": np.full(2, i, np.float32)}, state=(np.full((2, 2), i, np.float64), np.int64(i)), scale=np.float32(3)
            )
            for i in range(4)
        ]
        return list(await asyncio.gather(*calls))

    for i, output in enumerate(asyncio.run(play())):
        assert isinstance(output["value"], np.ndarray)
        assert output["value"].shape == ()
        assert output["value"] == 6 * i
        np.testing.assert_array_equal(output["state"][0], np.full((2, 2), i + 1.0))
        assert output["state"][1][0] == i
    assert inference.engine.batches == 1


@pytest.mark.parametrize(
    "wrong",
    [
        lambda f: f(np.zeros(4, np.float32)),
        lambda f: f(np.zeros((1, 3), np.float32)),
        lambda f: f(np.zeros(3)),
        lambda f: f(np.zeros(3, np.int32)),
        lambda f: f(X, X),
        lambda f: f(x=X),
        lambda f: f(),
        lambda f: f("text"),
        lambda f: f([[1.0], [2.0, 3.0]]),
        lambda f: f({"a": X}),
    ],
)
def test_inputs_that_do_not_fit_fail_their_own_caller_alone(wrong: Callable[[Any], Any]) -> None:
    model = Double()
    inference = Inference(model, ONE)

    async def play() -> tuple[Any, Any, Any]:
        good, bad, also = inference.forward(row(1)), wrong(inference.forward), inference.forward(row(2))
        return tuple(await asyncio.gather(good, bad, also, return_exceptions=True))  # type: ignore[return-value]

    good, bad, also = asyncio.run(play())
    assert isinstance(bad, UsageError)
    np.testing.assert_array_equal(good, row(2))
    np.testing.assert_array_equal(also, row(4))
    assert model.sizes == [2]
    with pytest.raises(UsageError):
        wrong(inference.call)


def test_a_misfit_names_what_was_given_and_what_is_taken() -> None:
    with pytest.raises(UsageError, match=r"\(float64\[4\]\) was given, it takes \(float32\[3\]\)"):
        Inference(Double(), ONE).call(np.zeros(4))


def test_undeclared_inputs_of_one_shape_share_a_batch_and_a_bad_one_fails_alone() -> None:
    inference = Inference(nn.Linear(3, 2))

    async def play() -> list[Any]:
        calls = [inference.forward(np.zeros(n, np.float32)) for n in (3, 5, 3)]
        return list(await asyncio.gather(*calls, return_exceptions=True))

    first, bad, last = asyncio.run(play())
    assert isinstance(bad, RuntimeError)
    assert first.shape == last.shape == (2,)
    assert inference.engine.batches == 2


def test_ever_new_shapes_do_not_pile_up() -> None:
    inference = Inference(Double())

    async def play() -> None:
        for n in range(1, 300):
            assert (await inference.forward(np.ones(n, np.float32))).shape == (n,)

    asyncio.run(play())
    assert sum(len(lanes) for lanes in inference._batchers.values()) <= 64


class Failing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if (x == 13).any():
            raise ZeroDivisionError("thirteen")
        return x


def test_a_model_that_raises_fails_every_waiting_caller_with_that_error_and_goes_on() -> None:
    inference = Inference(Failing(), ONE)

    async def play() -> list[Any]:
        calls = (inference.forward(row(i)) for i in (1, 13, 2))
        return list(await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 10))

    assert [str(error) for error in asyncio.run(play())] == ["thirteen"] * 3
    with pytest.raises(ZeroDivisionError, match="thirteen"):
        inference.call(row(13))
    np.testing.assert_array_equal(inference.call(row(4)), row(4))


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda x: x.sum(), r"shape \[\] for a batch of 1"),
        (lambda x: (x, x.reshape(-1)), r"output.1 has shape \[3\]"),
        (lambda x: {"a": None}, r"output.a is a NoneType"),
    ],
)
def test_outputs_without_a_batch_dimension_are_explained(answer: Callable[[Tensor], Any], message: str) -> None:
    class Odd(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return answer(x)

    with pytest.raises(UsageError, match=message):
        Inference(Odd(), ONE).call(X)


def test_new_weights_arrive_with_the_next_batch_and_cost_one_look_when_there_are_none() -> None:
    versions = Versions()
    inference = Inference(Double(), ONE, versions)

    async def play() -> list[tuple[float, int]]:
        seen = []
        for factor in (2.0, 2.0, 5.0, 5.0):
            if factor != versions.factor:
                versions.factor, versions.now = factor, versions.now + 1
            outputs = await asyncio.gather(*(inference.forward_versioned(row(1)) for _ in range(8)))
            assert len({version for _, version in outputs}) == 1
            seen.append((float(outputs[0][0][0]), outputs[0][1]))
        return seen

    assert asyncio.run(play()) == [(2.0, 1), (2.0, 1), (5.0, 2), (5.0, 2)]
    assert versions.reads == 2
    assert versions.looks == 4


def test_weights_of_another_network_are_an_error_for_the_caller_and_the_old_ones_stay() -> None:
    class Other(Versions):
        def read(self) -> tuple[int, dict[str, Array]]:
            return self.now, {"factor": np.zeros(5, np.float32)}

    inference = Inference(Double(), ONE, Other())
    with pytest.raises(IncompatibleCheckpoint, match="factor"):
        inference.call(X)


def test_weights_never_change_in_the_middle_of_a_batch() -> None:
    """Several loops and threads ask while versions come as fast as they can: output and version always belong together."""

    class Slow(Double):
        def forward(self, x: Tensor) -> Tensor:
            first = x * self.factor
            for _ in range(20):
                first = first + 0 * x
            return torch.stack([first, x * self.factor], 1)

    class Counting(Versions):
        @property
        def version(self) -> int:
            return self.now

        def read(self) -> tuple[int, dict[str, Array]]:
            now = self.now
            return now, {"factor": np.array(float(now), np.float32)}

    versions = Counting()
    inference = Inference(Slow(), ONE, versions)
    stop = threading.Event()

    def publish() -> None:
        while not stop.wait(0.0002):
            versions.now += 1

    async def play() -> bool:
        for _ in range(60):
            for output, version in await asyncio.gather(*(inference.forward_versioned(row(1)) for _ in range(4))):
                if not (output == version).all():
                    return False
        return True

    publisher = threading.Thread(target=publish)
    publisher.start()
    try:
        with ThreadPoolExecutor(2) as pool:
            assert list(pool.map(lambda _: asyncio.run(play()), range(2))) == [True, True]
    finally:
        stop.set()
        publisher.join()


def test_plain_calls_of_many_threads_are_batched_while_one_runs() -> None:
    entered, go_on = threading.Event(), threading.Event()

    class Held(Double):
        def forward(self, x: Tensor) -> Tensor:
            if not self.sizes:
                entered.set()
                go_on.wait(10)
            return super().forward(x)

    model = Held()
    inference = Inference(model, ONE)
    with ThreadPoolExecutor(9) as pool:
        first = pool.submit(inference.call, row(0))
        assert entered.wait(10)
        others = [pool.submit(inference.call, row(i)) for i in range(1, 9)]
        while len(inference._pending) < 8:
            threading.Event().wait(0.001)
        go_on.set()
        outputs = [future.result(10) for future in (first, *others)]
    assert [float(o[0]) for o in outputs] == [2.0 * i for i in range(9)]
    assert model.sizes == [0 + 1, 8]


def test_a_plain_call_works_inside_a_running_loop() -> None:
    inference = Inference(Double(), ONE)

    async def play() -> Array:
        waiting = inference.forward(row(1))
        direct: Array = inference.call(row(5))
        np.testing.assert_array_equal(await waiting, row(2))
        return direct

    np.testing.assert_array_equal(asyncio.run(play()), row(10))


def test_a_cancelled_caller_leaves_the_others_unharmed() -> None:
    inference = Inference(Double(), ONE)

    async def play() -> Array:
        gone, stays = asyncio.ensure_future(inference.forward(row(1))), inference.forward(row(2))
        gone.cancel()
        found: Array = await stays
        return found

    np.testing.assert_array_equal(asyncio.run(play()), row(4))


def test_a_policy_is_asked_for_decisions_with_state_mask_and_noise_from_outside() -> None:
    policy = Policy(gym.spaces.Box(-1, 1, (3,), np.float32), gym.spaces.Discrete(4))
    inference = Inference(policy)
    mask = np.array([False, True, False, False])
    action, log_prob, value, state = inference.call(X, (), None, mask)
    assert int(action) == 1
    assert abs(float(log_prob)) < 1e-5
    assert value.shape == ()
    assert state == ()


def test_a_policy_on_a_board_follows_it() -> None:
    spaces = gym.spaces.Box(-1, 1, (3,), np.float32), gym.spaces.Discrete(2)
    learner = Policy(*spaces)

    class Follow(Versions):
        def read(self) -> tuple[int, dict[str, Array]]:
            return self.now, learner.weights()

    versions = Follow()
    deciding = BatchedPolicy(EnginePolicySource(InferenceEngine(Policy(*spaces), versions)), deterministic=True)

    async def value() -> tuple[float, int]:
        decision = await deciding.decide(row(0.5))
        return decision.value, decision.version

    async def play() -> None:
        x = torch.from_numpy(row(0.5))[None]
        for version in (1, 2):
            versions.now = version
            with torch.no_grad():
                expected = float(learner.value(x))
            found, stamped = await value()
            assert stamped == version
            assert found == pytest.approx(expected, abs=1e-5)
            learner.load_weights({name: w + 0.1 for name, w in learner.weights().items()})

    asyncio.run(play())
    with pytest.raises(UsageError, match="does not choose actions"):
        EnginePolicySource(InferenceEngine(Double()))


@pytest.mark.parametrize("shape", [(), (2,), (2, 3), (0,)])
def test_stacking_is_what_numpy_does(shape: tuple[int, ...]) -> None:
    rows = [np.random.default_rng(i).standard_normal(shape).astype(np.float32) for i in range(5)]
    np.testing.assert_array_equal(stack_rows(rows), np.stack(rows))


def test_a_batch_size_of_nothing_is_refused() -> None:
    with pytest.raises(UsageError, match="max_batch_size=0"):
        Inference(Double(), ONE, max_batch_size=0)
