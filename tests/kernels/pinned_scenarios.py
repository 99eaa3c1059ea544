"""What the pinned allocator does in a process of its own; run by test_pinned.py.

    python pinned_scenarios.py STANDIN_LIBRARY

prints a JSON object: scenario -> null, or what went wrong. An allocator stays for the life of a
process, so each scenario is a child that this one forks before anything is installed.
"""

from __future__ import annotations

import ctypes
import json
import os
import queue
import random
import signal
import sys
import tempfile
import threading
import traceback

import torch
import torch.nn.functional as F

MIB = 1 << 20
SECONDS = 60


class StandIn:
    """The allocator on ordinary memory, and the switches of its driver."""

    def __init__(self, library):
        self._library = ctypes.CDLL(library)
        for name in ("standin_class", "standin_calls"):
            getattr(self._library, name).restype = ctypes.c_size_t
        self._library.standin_owns.restype = ctypes.c_bool
        self.passed = []

    def install(self, limit=256 * MIB):
        self._library.standin_install(ctypes.c_size_t(limit))

    def refuse(self, refuses):
        self._library.standin_refuse(ctypes.c_bool(refuses))

    def calls(self):
        return self._library.standin_calls()

    def size_class(self, size):
        return self._library.standin_class(ctypes.c_size_t(size))

    def owns(self, tensor):
        return self._library.standin_owns(ctypes.c_void_p(tensor.data_ptr()))

    def keep(self, tensor):
        """A flag to set once the stream has passed."""
        flag = ctypes.c_bool(False)
        self.passed.append(flag)
        self._library.standin_keep(ctypes.c_void_p(tensor.data_ptr()), ctypes.byref(flag))
        return flag

    def abandon(self, tensor):
        self._library.standin_abandon(ctypes.c_void_p(tensor.data_ptr()))

    def statistics(self):
        numbers = (ctypes.c_size_t * 6)()
        self._library.standin_statistics(numbers)
        names = ("held", "used", "peak", "limit", "pageable_bytes", "pageable_allocations")
        return dict(zip(names, numbers))


def tensor_of(size):
    return torch.empty(size, dtype=torch.uint8)


def size_classes_waste_at_most_a_third(pool):
    for size in (*range(4096, 4096 * 5, 7), MIB - 1, MIB, MIB + 1, 3 * MIB // 2 + 1, (1 << 40) + 1):
        given = pool.size_class(size)
        assert size <= given <= size * 1.5, (size, given)
        assert given % 2048 == 0
    assert pool.size_class(3 * MIB) == 3 * MIB


def a_block_is_used_again(pool):
    pool.install()
    first = tensor_of(MIB)
    address = first.data_ptr()
    assert pool.owns(first)
    assert address % 4096 == 0
    assert pool.statistics()["held"] == pool.statistics()["used"] == MIB
    del first
    assert pool.statistics()["used"] == 0
    second = tensor_of(MIB - 5)
    assert second.data_ptr() == address
    assert not pool.owns(tensor_of(4095))
    assert pool.calls() == 1


def every_number_is_that_of_a_model(pool):
    limit = 6 * MIB
    pool.install(limit)
    model = {"held": 0, "used": 0, "peak": 0, "limit": limit}
    model.update(pageable_bytes=0, pageable_allocations=0)
    choose, free, live = random.Random(0), {}, []
    for _ in range(1000):
        if live and choose.random() < 0.5:
            tensor, given = live.pop(choose.randrange(len(live)))
            del tensor
            if given:
                free[given] = free.get(given, 0) + 1
                model["used"] -= given
        else:
            size = choose.choice((100, 5000, 70000, 300000, MIB))
            given = pool.size_class(size) if size >= 4096 else 0
            if given and not free.get(given):
                if model["held"] + given <= limit:
                    model["held"] += given
                    free[given] = 1
                else:
                    larger = [g for g in sorted(free) if given < g < 5 * given and free[g]]
                    larger = [g for g in larger if g // 4 <= given]
                    given = larger[0] if larger else -1
            if given == -1:
                model["pageable_bytes"] += size
                model["pageable_allocations"] += 1
                given = 0
            elif given:
                free[given] -= 1
                model["used"] += given
                model["peak"] = max(model["peak"], model["used"])
            live.append((tensor_of(size), given))
            assert pool.owns(live[-1][0]) == bool(given)
        assert pool.statistics() == model
    assert model["pageable_allocations"] > 10


def beyond_the_limit_memory_is_ordinary(pool):
    pool.install(2 * MIB)
    kept = [tensor_of(MIB) for _ in range(5)]
    assert [pool.owns(each) for each in kept] == [True, True, False, False, False]
    numbers = pool.statistics()
    assert (numbers["pageable_bytes"], numbers["pageable_allocations"]) == (3 * MIB, 3)
    pool.install(3 * MIB)
    assert pool.owns(tensor_of(MIB))
    assert pool.statistics()["limit"] == 3 * MIB


def a_driver_that_refuses_is_not_asked_again(pool):
    pool.install()
    pool.refuse(True)
    kept = [tensor_of(MIB) for _ in range(4)]
    assert pool.calls() == 1
    numbers = pool.statistics()
    assert (numbers["held"], numbers["pageable_bytes"]) == (0, 4 * MIB)
    pool.refuse(False)
    pool.install()
    assert pool.owns(tensor_of(MIB))
    assert not pool.owns(kept[0])


def what_a_stream_still_uses_is_not_given_away(pool):
    pool.install()
    first = tensor_of(MIB)
    address, one, other = first.data_ptr(), pool.keep(first), pool.keep(first)
    del first
    assert pool.statistics()["used"] == MIB
    one.value = True
    second = tensor_of(MIB)
    assert second.data_ptr() != address
    other.value = True
    assert pool.statistics()["used"] == MIB
    third = tensor_of(MIB)
    assert third.data_ptr() == address
    del third
    assert tensor_of(MIB).data_ptr() == address
    pool.abandon(second)
    lost = second.data_ptr()
    del second
    kept = [tensor_of(MIB) for _ in range(3)]
    assert lost not in [each.data_ptr() for each in kept]


def _train(seed):
    """Losses of a few steps with convolutions, which oneDNN gives scratch memory of its own."""
    torch.manual_seed(seed)
    first = torch.randn(16, 3, 3, 3, requires_grad=True)
    last = torch.randn(10, 16 * 16 * 16, requires_grad=True)
    losses = []
    for _ in range(3):
        x = torch.randn(8, 3, 16, 16)
        y = F.relu(F.conv2d(x, first * 0.1, padding=1))
        loss = F.cross_entropy(F.linear(y.flatten(1), last * 0.01), torch.arange(8))
        grads = torch.autograd.grad(loss, (first, last))
        with torch.no_grad():
            first -= 0.1 * grads[0]
            last -= 0.1 * grads[1]
        losses.append(loss.item())
    return losses, first.detach().clone()


def training_is_the_same_and_memory_from_before_is_freed(pool):
    old = [tensor_of(size) for size in (10, 10_000, MIB)]
    wanted, weight = _train(0)
    pool.install()
    got, again = _train(0)
    assert got == wanted
    assert torch.equal(again, weight)
    assert pool.statistics()["peak"] > MIB
    del old, weight
    before = pool.statistics()["held"]
    _train(1)
    assert pool.statistics()["held"] == before
    resized = torch.empty(0)
    resized.resize_(MIB)
    assert pool.owns(resized)


def threads_share_it(pool):
    """Each fills what it allocates and passes it on; whoever gets it checks and frees it."""
    limit = 32 * MIB
    pool.install(limit)
    torch.set_num_threads(1)
    inbox, wrong = queue.Queue(maxsize=32), []

    def work(number):
        choose = random.Random(number)
        for step in range(120):
            mark = (number * 120 + step) % 251
            one = torch.full(
                (choose.choice((500, 5000, 60_000, 500_000)),), mark, dtype=torch.uint8
            )
            inbox.put((one, mark))
            del one
            other, wanted = inbox.get()
            if not bool((other == wanted).all()):
                wrong.append((number, step))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    numbers = pool.statistics()
    assert not wrong
    assert numbers["used"] == 0
    assert 0 < numbers["peak"] <= numbers["held"] <= limit


def a_forked_child_gets_ordinary_memory(pool):
    pool.install()
    torch.set_num_threads(
        1
    )  # OpenMP's threads do not survive a fork, and its next use waits for them
    inherited = torch.full((MIB,), 7, dtype=torch.uint8)
    waiting = tensor_of(2 * MIB)
    pool.keep(waiting)
    del waiting
    numbers = pool.statistics()
    calls = pool.calls()
    child = os.fork()
    if child == 0:
        signal.alarm(10)
        own = torch.full((MIB,), 1, dtype=torch.uint8)
        right = not pool.owns(own) and bool((inherited == 7).all())
        del inherited
        right = right and pool.calls() == calls and not pool.owns(tensor_of(2 * MIB))
        os._exit(0 if right else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert pool.statistics() == numbers
    assert pool.owns(tensor_of(MIB))


def forks_among_allocating_threads(pool):
    pool.install()
    torch.set_num_threads(1)
    done = threading.Event()

    def work():
        while not done.is_set():
            tensor_of(random.choice((5000, 50_000, MIB)))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for each in threads:
        each.start()
    try:
        for _ in range(10):
            child = os.fork()
            if child == 0:
                signal.alarm(10)
                for _ in range(50):
                    tensor_of(MIB)
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
    finally:
        done.set()
        for each in threads:
            each.join()


def tensors_that_outlive_the_interpreter(pool):
    """Freed by whatever runs last; the process ends in order."""
    pool.install()
    sys.modules[__name__].left_over = [tensor_of(MIB), torch.ones(MIB), tensor_of(10)]
    pool.keep(sys.modules[__name__].left_over[0])


SCENARIOS = (
    size_classes_waste_at_most_a_third,
    a_block_is_used_again,
    every_number_is_that_of_a_model,
    beyond_the_limit_memory_is_ordinary,
    a_driver_that_refuses_is_not_asked_again,
    what_a_stream_still_uses_is_not_given_away,
    training_is_the_same_and_memory_from_before_is_freed,
    threads_share_it,
    a_forked_child_gets_ordinary_memory,
    forks_among_allocating_threads,
    tensors_that_outlive_the_interpreter,
)


def main(library):
    said = {}
    for scenario in SCENARIOS:
        with tempfile.TemporaryFile("w+") as output:
            sys.stdout.flush()
            child = os.fork()
            if child == 0:
                signal.alarm(SECONDS)
                try:
                    scenario(StandIn(library))
                except BaseException:
                    traceback.print_exc(file=output)
                    output.flush()
                    os._exit(1)
                if scenario is not tensors_that_outlive_the_interpreter:
                    os._exit(0)  # which takes a second less
                sys.exit(0)
            status = os.waitpid(child, 0)[1]
            output.seek(0)
            said[scenario.__name__] = None if status == 0 else f"status {status}\n{output.read()}"
    print(json.dumps(said))


if __name__ == "__main__":
    main(sys.argv[1])
