"""The thread team: numerics of its threads, busy neighbours, forks, CPUs."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from pelton._core import Team
from pelton.runtime.drivers.cpu.driver import CpuDriver
from pelton.runtime.drivers.cpu.threads import CpuClaims, cpu_list
from pelton.runtime.errors import DriverError

from .tiny import ROOT, TARGET, TinyEngine, make_step

FE_UPWARD = 0x800 if os.uname().machine == "x86_64" else 0x400000


def test_results_do_not_depend_on_the_callers_rounding_mode(load):
    engine, driver = load(["divide out"], threads=3)
    libm = ctypes.CDLL("libm.so.6")
    libm.fesetround(FE_UPWARD)
    try:
        driver.execute(make_step())
        mode_after = libm.fegetround()
    finally:
        libm.fesetround(0)
    assert mode_after == FE_UPWARD
    results = engine.read(driver, "out")[:3].view(np.float32)
    assert results.tolist() == [np.float32(1) / np.float32(3)] * 3


def team_tasks() -> dict[str, Path]:
    """Name -> /proc folder of this process's team threads that have begun to run."""
    found = {}
    for task in Path("/proc/self/task").iterdir():
        try:
            name = (task / "comm").read_text().strip()
        except OSError:
            continue  # ended meanwhile
        if name.startswith("pelton-"):
            found[name] = task
    return found


def wait_for(condition) -> bool:
    deadline = time.monotonic() + 10
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.001)
    return True


def test_threads_are_named_pinned_and_end_with_the_driver(code):
    before = os.sched_getaffinity(0)
    cpus = cpu_list()
    driver = CpuDriver(TinyEngine(code, ["touch cells"]), TARGET, threads=min(2, len(cpus)))
    driver.allocate((4, 4), 1)
    driver.execute(make_step())
    if len(cpus) > 1:
        assert os.sched_getaffinity(int(team_tasks()["pelton-1"].name)) == {cpus[1]}
    assert os.sched_getaffinity(0) == before  # the caller is never bound
    driver.close()
    assert wait_for(lambda: not team_tasks())


def test_a_team_larger_than_the_machine_is_not_pinned(code):
    driver = CpuDriver(TinyEngine(code, []), TARGET, threads=len(cpu_list()) + 1)
    assert wait_for(lambda: len(team_tasks()) == len(cpu_list()))
    assert all(os.sched_getaffinity(int(t.name)) == os.sched_getaffinity(0) for t in team_tasks().values())
    driver.close()


def test_teams_spread_over_cpus():
    claims = CpuClaims()
    assert claims.take(2, range(6)) == [1, 2]
    second = claims.take(3, range(6))
    assert second == [3, 4, 5]
    assert claims.take(1, range(6)) == [0]  # the caller's CPU comes last
    claims.give_back(second)
    assert claims.take(2, range(6)) == [3, 4]


def test_idle_workers_sleep(code):
    """After the spin limit a waiting team takes no processor time."""
    driver = CpuDriver(TinyEngine(code, ["touch cells"]), TARGET, threads=3)
    driver.allocate((4, 4), 1)
    driver.execute(make_step())
    time.sleep(0.05)
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.1
    driver.close()


def test_beside_busy_threads_on_the_same_cpus(load):
    """Barriers give the CPU away when a mate does not run: slower, but nothing like a time slice for each barrier."""
    engine, driver = load(["bump_and_check cells errors"] * 2, threads=2)
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in cpu_list()]
    try:
        start = time.monotonic()
        steps = 0
        while time.monotonic() - start < 1.0:
            driver.execute(make_step())
            steps += 1
    finally:
        for process in busy:
            process.kill()
            process.wait()
    assert not engine.read(driver, "errors").any()
    assert steps > 20


def test_signals_go_to_the_programs_own_threads():
    team = Team(3)
    assert wait_for(lambda: len(team_tasks()) == 2)
    for task in team_tasks().values():
        blocked = int((task / "status").read_text().split("SigBlk:")[1].split()[0], 16)
        assert blocked & (1 << 1)  # SIGINT
    del team


FORK = """
import os, sys
sys.path.insert(0, {root!r})
from pelton.runtime.drivers.cpu.driver import CpuDriver
from pelton.runtime.errors import DriverError
from tests.native.tiny import TARGET, TinyEngine, make_step
engine = TinyEngine(open({code!r}, "rb").read(), ["touch cells"])

def load():
    driver = CpuDriver(engine, TARGET, threads=2)
    driver.allocate((4, 4), 1)
    driver.execute(make_step())
    return driver

parent = load()
child = os.fork()
if child == 0:
    try:
        parent.execute(make_step())
        os._exit(1)
    except DriverError as error:
        if "fork" not in str(error):
            os._exit(2)
    parent.close()
    load().close()  # a driver of its own works
    os._exit(0)
_, status = os.waitpid(child, 0)
parent.execute(make_step())
parent.close()
sys.exit(os.waitstatus_to_exitcode(status))
"""


def test_a_forked_child_gets_an_error_and_may_load_its_own(code, tmp_path):
    path = tmp_path / "code.so"
    path.write_bytes(code)
    script = FORK.format(root=str(ROOT), code=str(path))
    assert subprocess.run([sys.executable, "-c", script], timeout=60, check=False).returncode == 0


def test_a_step_from_any_thread(load):
    engine, driver = load(["bump_and_check cells errors"], threads=2)
    for _ in range(20):
        worker = threading.Thread(target=lambda: driver.execute(make_step()))
        worker.start()
        worker.join()
    assert not engine.read(driver, "errors").any()
    assert (engine.read(driver, "cells") == 20).all()


def test_exit_without_close_is_clean(code, tmp_path):
    path = tmp_path / "code.so"
    path.write_bytes(code)
    script = FORK.format(root=str(ROOT), code=str(path)).split("child =")[0]
    done = subprocess.run([sys.executable, "-c", script], timeout=60, check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_no_cpu_beyond_the_kernels_set():
    with pytest.raises(RuntimeError, match="no CPU 99999"):
        Team(2, [99999])


def test_errors_leave_the_driver_usable(load):
    engine, driver = load(["touch cells"])
    with pytest.raises(DriverError):
        driver.execute(make_step((33,)))
    driver.execute(make_step())
    assert engine.read(driver, "cells")[0] == 1
