"""The runner on real compiled kernels: order, barriers, row chunks, inputs, results."""

from __future__ import annotations

import sys
import threading
from contextlib import suppress
from dataclasses import replace
from types import FunctionType

import numpy as np
import pytest

from pelton.runtime.drivers.base import Driver
from pelton.runtime.drivers.cpu import driver as cpu_driver
from pelton.runtime.drivers.cpu.driver import CpuDriver
from pelton.runtime.drivers.cpu.nearby import memory_of
from pelton.runtime.errors import DriverError
from pelton.runtime.step import FinishedStep, StepHandle

from .tiny import TARGET, TinyEngine, make_sampling, make_step

TEAMS = pytest.mark.parametrize("threads", [1, 2, 3])


def entries(log: np.ndarray) -> list[tuple[int, int, int]]:
    return [tuple(map(int, log[1 + 3 * i : 4 + 3 * i])) for i in range(int(log[0]))]


@TEAMS
def test_launches_run_in_order_and_the_tail_once_a_chunk(load, threads):
    engine, driver = load(["log_a log", "log_b log"], ["log_c log", "log_a log"], threads)
    driver.execute(make_step((20,), rows=range(8)))
    chunks = [entry for start, count in ((0, 3), (3, 3), (6, 2)) for entry in ((3, start, count), (1, start, count))]
    assert entries(engine.read(driver, "log")) == [(1, 0, 0), (2, 0, 0), *chunks]


def test_a_step_without_rows_runs_no_tail(load):
    engine, driver = load(["log_a log"], ["log_b log"])
    outputs = driver.execute(make_step((4,), rows=[])).result()
    assert entries(engine.read(driver, "log")) == [(1, 0, 0)]
    assert outputs.tokens.shape == (0,)
    assert outputs.top_ids.shape == (0, 2)


@TEAMS
def test_barriers_between_launches_and_inside_kernels(load, threads):
    lines = ["bump cells", "check_equal cells errors", "bump_and_check cells errors nobarrier"] * 5
    engine, driver = load(lines, threads=threads)
    for _ in range(200):
        driver.execute(make_step())
    assert not engine.read(driver, "errors").any()
    assert (engine.read(driver, "cells") == 200 * 10).all()


def test_the_barrier_test_notices_a_missing_barrier(load):
    engine, driver = load(["bump cells nobarrier", "check_equal cells errors"] * 20, threads=2)
    for _ in range(2000):
        driver.execute(make_step())
        if engine.read(driver, "errors").any():
            return
    pytest.fail("no difference seen without barriers")


@TEAMS
def test_inputs_reach_kernels(load, threads):
    engine, driver = load(["show_inputs ids pos none out"], threads=threads)
    step = make_step((3, 1, 5))
    driver.execute(step)
    shown = engine.read(driver, "out")[:36].reshape(4, 9)
    np.testing.assert_array_equal(shown[0], step.token_ids)
    np.testing.assert_array_equal(shown[1], step.positions)
    np.testing.assert_array_equal(shown[2], [0, 0, 0, 1, 2, 2, 2, 2, 2])
    assert (shown[3] == 1).all()


@TEAMS
def test_results_come_back_in_row_order(load, threads):
    engine, driver = load([], ["tail w nobarrier"], threads)
    step = make_step((5, 7), rows=[4, 0, 11, 5], want_logits=True)
    handle = driver.execute(step)
    assert isinstance(handle, StepHandle)
    assert handle.done()
    outputs = handle.result()
    np.testing.assert_array_equal(outputs.tokens, step.token_ids[[4, 0, 11, 5]] + 1)
    np.testing.assert_array_equal(outputs.ranks, [0, 0, 1, 1])
    np.testing.assert_array_equal(outputs.logprobs, np.full(4, 0.25, np.float32))
    assert outputs.logits is not None
    np.testing.assert_array_equal(outputs.logits[:, 0], range(4))
    again = driver.execute(replace(step, want_logits=False)).result()
    assert again.logits is None
    assert again.tokens is not outputs.tokens


def test_results_are_reused_only_when_nobody_has_them(load):
    _, driver = load([], ["tail w"])
    first = driver.execute(make_step((3,))).result()
    second = driver.execute(make_step((4,))).result()
    assert second is not first  # the caller has it
    tokens = second.tokens
    del second
    third = driver.execute(make_step((5,))).result()
    assert third.tokens is not tokens  # and here an array of it
    assert tokens.tolist() == [4]
    assert first.tokens.tolist() == [3]
    handle = driver.execute(make_step((1,)))  # and here the step
    assert driver.execute(make_step((2,))).result() is not handle.outputs
    assert handle.result().tokens.tolist() == [1]
    number = id(third := driver.execute(make_step((5,))).result())
    del third
    fourth = driver.execute(make_step((6,))).result()
    assert id(fourth) == number  # nobody had that one
    assert fourth.tokens.tolist() == [6]
    assert len(driver.execute(make_step((6,), rows=[0, 1])).result().tokens) == 2
    assert driver.execute(make_step((2,), want_logits=True)).result().logits is not None
    assert driver.execute(make_step((2,))).result().logits is None


def test_tokens_come_as_a_list_too(load):
    _, driver = load([], ["tail w"])
    handle = driver.execute(make_step((3, 1), rows=[0, 3]))
    assert handle.tokens == handle.outputs.tokens.tolist() == [1, 4]
    assert driver.execute(make_step((3,), rows=[])).tokens == []
    tokens = driver.execute(make_step((5,))).tokens
    assert driver.execute(make_step((6,))).tokens == [6]
    assert tokens == [5]  # a list that somebody has is never written again
    for spoil in (list.clear, list.pop, lambda tokens: tokens.append(7)):
        spoil(driver.execute(make_step((3, 1), rows=[0, 3])).tokens)  # by somebody who then lets go of it
        assert driver.execute(make_step((3, 1), rows=[0, 3])).tokens == [1, 4]
    with pytest.raises(AttributeError, match="immutable"):
        handle.tokens = [9, 9]
    wrong = FinishedStep(handle.outputs, [0])
    with pytest.raises(RuntimeError, match="expected a list of 2 integers"):
        driver._running.runner.execute(make_step((3, 1), rows=[0, 3]), wrong)


def test_what_is_held_near_changes_nothing(load, monkeypatch):
    engine, driver = load([], ["tail w"])
    monkeypatch.setattr(cpu_driver, "memory_of", lambda objects: told.extend(objects) or memory_of(objects))
    told: list[object] = []
    driver.hold_near([entries, np.zeros(3), None])
    step, seen = make_step((4,)), set()

    def watch(frame, event, _):
        if event == "call":
            seen.add(frame.f_code)

    driver.execute(step)
    sys.setprofile(watch)
    try:
        handle = driver.execute(step)
    finally:
        sys.setprofile(None)
    assert handle.tokens == [4]
    assert seen | {entries.__code__} == {item.__code__ for item in told if isinstance(item, FunctionType)}
    runner = driver._running.runner
    interpreter = runner.fetch_at_end([])
    assert interpreter > 500  # its evaluation loop alone has that many lines
    assert runner.fetch_at_end([(0, 4096), (2**64 - 64, 64), (8, 1 << 20)]) == interpreter + 64 + 1 + (1 << 14)
    # Not our memory: no harm.
    assert driver.execute(step).tokens == [4]


def test_memory_of_a_function_covers_its_code():
    ranges = memory_of([entries])
    for part in (entries, entries.__code__, entries.__code__.co_consts, entries.__code__.co_names):
        assert any(a <= id(part) and id(part) + part.__sizeof__() <= a + n for a, n in ranges)


def test_a_result_is_never_another_threads(load):
    """A driver belongs to one thread; two get an error at worst, never each other's outputs."""
    _, driver = load([], ["tail w"])
    wrong = []

    def work(token: int) -> None:
        step = make_step((token,))
        for _ in range(40_000):
            with suppress(DriverError):
                tokens = driver.execute(step).result().tokens.tolist()
                if tokens != [token]:
                    wrong.append((token, tokens))

    threads = [threading.Thread(target=work, args=(token,)) for token in (3, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_the_same_inputs_with_new_numbers(load):
    """A step loop changes numbers in place and hands the same object over again."""
    engine, driver = load(["show_inputs ids pos none out"], ["tail w"])
    step = make_step((2, 1))
    for start in (0, 5, 9):
        step.positions[:] = [start, start + 1, start]
        step.token_ids[:] = start % 7
        assert driver.execute(step).result().tokens.tolist() == [start % 7 + 1] * 2
        assert engine.read(driver, "out")[3:6].tolist() == [start, start + 1, start]
    step.positions[1] = 77  # still checked
    with pytest.raises(DriverError, match="positions"):
        driver.execute(step)
    step.positions[1] = 10
    driver.execute(step)


def test_the_driver_fulfils_the_protocol(load):
    _, driver = load([])
    assert isinstance(driver, Driver)
    assert driver.block_bytes(0) == 2 * (2 * 16 * 2 * 4)
    assert driver.block_bytes(1) == 2 * 3 * 16 * 4 * 2


def test_copy_blocks_in_every_layer_of_the_group(load):
    _, driver = load([])
    views = [
        region.bytes().reshape(16, -1)
        for region in (driver._running.states[0], driver._running.states[3], driver._running.states[1])
    ]
    for view in views:
        view[:] = np.arange(16, dtype=np.uint8)[:, None]
    driver.copy_blocks(0, [3, 5], [5, 6])
    for view in views[:2]:
        assert view[:, 0].tolist() == [0, 1, 2, 3, 4, 3, 3, *range(7, 16)]  # in list order
        assert (view == view[:, :1]).all()
    assert views[2][:, 0].tolist() == list(range(16))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((2, [0], [1]), "no KV group 2"),
        ((0, [0], [16]), "block 16 of 16"),
        ((0, [-1], [0]), "block -1"),
        ((0, [0], []), "1 sources"),
    ],
)
def test_copy_blocks_refuses_what_is_not_there(load, arguments, message):
    _, driver = load([])
    with pytest.raises(DriverError, match=message):
        driver.copy_blocks(*arguments)


def test_timings_of_every_launch(load):
    _, driver = load(["log_a log", "bump cells nobarrier"], ["log_b log"], threads=2)
    driver.execute(make_step())
    assert driver.take_timings().shape == (0, 5)
    driver.set_timing(True)
    driver.execute(make_step((20,), rows=range(5)))
    driver.execute(make_step())
    timings = driver.take_timings()
    assert timings[:, 0].tolist() == [0, 1, 2, 2, 0, 1, 2]
    assert timings[:, 1].tolist() == [0, 0, 0, 3, 0, 0, 0]
    flat = timings[:, 2:].reshape(-1)
    assert (np.diff(flat) >= 0).all()
    assert driver.take_timings().shape == (0, 5)


def test_many_small_steps(load):
    engine, driver = load(["touch cells"] * 4, ["touch cells"], threads=2)
    step = make_step()
    for _ in range(20_000):
        driver.execute(step)
    assert engine.read(driver, "cells")[[0, 16]].tolist() == [100_000, 100_000]


def test_two_drivers_in_two_threads(load):
    pairs = [load(["bump_and_check cells errors"] * 3, threads=2) for _ in range(2)]

    def run(driver: CpuDriver) -> None:
        for _ in range(300):
            driver.execute(make_step())

    workers = [threading.Thread(target=run, args=(driver,)) for _, driver in pairs]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for engine, driver in pairs:
        assert not engine.read(driver, "errors").any()
        assert (engine.read(driver, "cells") == 900).all()


def test_one_driver_in_two_threads_is_refused(load):
    _, driver = load(["bump_and_check cells errors"] * 50, threads=2)
    refused = threading.Event()

    def run() -> None:
        for _ in range(20_000):
            try:
                driver.execute(make_step())
            except DriverError as error:
                if "two threads" in str(error):
                    refused.set()
            if refused.is_set():
                return

    workers = [threading.Thread(target=run) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert refused.is_set()


def test_close_twice_and_use_after_close(load):
    _, driver = load(["log_a log"], threads=2)
    driver.close()
    driver.close()
    for use in (lambda: driver.execute(make_step()), lambda: driver.allocate((1, 1), 1), lambda: driver.threads):
        with pytest.raises(DriverError, match="closed"):
            use()


def test_allocate_is_checked(code):
    driver = CpuDriver(TinyEngine(code, ["log_a log"]), TARGET, threads=1)
    with pytest.raises(DriverError, match="call allocate"):
        driver.execute(make_step())
    for blocks, slots in (((1,), 1), ((1, 0), 1), ((1, 1), 0)):
        with pytest.raises(DriverError, match="2 KV groups"):
            driver.allocate(blocks, slots)
    driver.allocate((1, 1), 1)
    with pytest.raises(DriverError, match="twice"):
        driver.allocate((1, 1), 1)
    driver.close()


@pytest.mark.parametrize("weights", ["map", "copy"])
def test_weights_mapped_or_copied(code, weights):
    engine = TinyEngine(code, [], ["tail w"])
    driver = CpuDriver(engine, TARGET, threads=1, weights=weights)
    driver.allocate((4, 4), 1)
    assert all(address % 64 == 0 for address in driver._bound.weights.addresses)
    engine.weight = None  # the driver holds what it needs
    assert driver.execute(make_step()).result().logprobs.tolist() == [0.25]
    driver.close()


def test_a_weight_of_the_wrong_size_is_refused(code):
    engine = TinyEngine(code, [])
    engine.weight = np.zeros(3, np.float32)
    with pytest.raises(DriverError, match="tensor w has 12 bytes, the plan wants 4"):
        CpuDriver(engine, TARGET, threads=1)


@pytest.mark.parametrize("threads", [0, -1, 65])
def test_team_size_is_checked(code, threads):
    with pytest.raises(DriverError, match="1 to 64 workers"):
        CpuDriver(TinyEngine(code, []), TARGET, threads=threads)


def test_sampling_of_a_row_is_passed(load):
    _, driver = load([], ["tail w"])
    sampling = make_sampling(1, bias_start=np.array([0, 2], np.int32), bias_ids=np.array([1, 9], np.int32))
    sampling = replace(sampling, bias_values=np.array([1.0, -np.inf], np.float32), mask=np.zeros((1, 1), np.uint32))
    assert driver.execute(make_step(sampling=sampling)).result().tokens.tolist() == [3]


def test_more_memory_than_there_is(code):
    driver = CpuDriver(TinyEngine(code, []), TARGET, threads=1)
    with pytest.raises(DriverError, match="allocate: cannot map .* lower the number of KV blocks"):
        driver.allocate((2**30, 2**30), 2**31 - 1)
    driver.allocate((1, 1), 1)
    driver.close()


def test_close_during_a_step_frees_nothing_in_use(code):
    messages: list[str] = []

    def run(driver: CpuDriver, started: threading.Event) -> None:
        try:
            while True:
                driver.execute(make_step())
                started.set()
        except DriverError as error:
            messages.append(str(error))

    for _ in range(20):
        driver = CpuDriver(TinyEngine(code, ["bump_and_check cells errors"] * 200), TARGET, threads=2)
        driver.allocate((4, 4), 1)
        started = threading.Event()
        worker = threading.Thread(target=run, args=(driver, started))
        worker.start()
        assert started.wait(30)
        driver.close()
        worker.join()
    assert messages == ["the driver is closed; load the engine again"] * 20
