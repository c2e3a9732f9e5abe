"""Python's threads beside the library's work, and the library's own."""

import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import megamoe
from test_layer import make_layer, random_input


def test_many_threads_call_one_layer():
    x, ids, weights = random_input(tokens=64)
    layer = make_layer()
    expected = layer(x, ids, weights).view(np.uint16)
    wrong = []

    def work():
        for _ in range(20):
            if not np.array_equal(layer(x, ids, weights).view(np.uint16), expected):
                wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert not wrong


def layer_call(model, folder):
    layer, operands = make_layer(backend="ref"), random_input(tokens=400)
    return lambda: layer(*operands)


def quantize_call(model, folder):
    x = np.ones((4096, 4096), np.float32)
    return lambda: megamoe.quantize(x)


def conversion_call(model, folder):
    return lambda: megamoe.quantize_checkpoint(model, folder / "out")


@pytest.mark.parametrize("make_call", [layer_call, quantize_call, conversion_call])
def test_lets_other_threads_run(make_call, model_path, tmp_path):
    call = make_call(model_path, tmp_path)
    span, ticks = [], []

    def work():
        started = time.perf_counter()
        call()
        span.extend((started, time.perf_counter()))

    worker = threading.Thread(target=work)
    worker.start()
    while worker.is_alive():
        ticks.append(time.perf_counter())
        time.sleep(0)
    quarter = (span[1] - span[0]) / 4
    assert any(span[0] + quarter < tick < span[1] - quarter for tick in ticks)


def test_threads_are_counted():
    before = megamoe.num_threads()
    try:
        megamoe.set_num_threads(1)
        assert megamoe.num_threads() == 1
        with pytest.raises(ValueError, match="-1"):
            megamoe.set_num_threads(-1)
    finally:
        megamoe.set_num_threads(0)
    assert megamoe.num_threads() == before


DAEMON = """
import sys, threading, time
import numpy as np, megamoe

x = np.ones((2000, 512), np.float32)
layer = megamoe.MoELayer.from_weights(*np.full((3, 4, 64, 64), 0.1, np.float32), top_k=2)
operands = x[:, :64], np.zeros((2000, 2), np.int32), np.ones((2000, 2), np.float32)
calls = {"layer": lambda: layer(*operands), "quantize": lambda: megamoe.quantize(x),
         "progress": lambda: megamoe.quantize_checkpoint(sys.argv[2], sys.argv[3], overwrite=True,
                                                         progress=lambda *state: time.sleep(0.001))}

def work():
    while True:
        calls[sys.argv[1]]()

threading.Thread(target=work, daemon=True).start()
time.sleep(0.1)
"""


@pytest.mark.parametrize("call", ["layer", "quantize", "progress"])
def test_interpreter_ends_while_a_daemon_works(call, model_path, tmp_path):
    subprocess.run([sys.executable, "-c", DAEMON, call, model_path, tmp_path / "out"], check=True, timeout=60)
