"Signals stop a run where nothing can be lost; they reach only the main thread, which no cell of a notebook's test has"
import os, signal, time

import pytest

from gpubench.run.process import Stopped, StopSignals


def press(name='SIGINT'): os.kill(os.getpid(), getattr(signal, name))

def test_what_is_pressed_before_waits_for_a_block_that_listens():
    done = []
    with pytest.raises(Stopped), StopSignals(anywhere=False) as signals:
        with signals.listening(): done.append('measured')
        press()
        done.append('saved')
        with signals.listening(): done.append('the next visit')
    assert done==['measured', 'saved']

def test_a_block_that_listens_is_stopped_at_once():
    start = time.monotonic()
    with pytest.raises(Stopped), StopSignals(anywhere=False) as signals, signals.listening():
        press()
        time.sleep(60)
    assert time.monotonic()-start<50

@pytest.mark.skipif(not hasattr(signal, 'SIGHUP'), reason='Windows has no SIGHUP')
def test_repeats_are_ignored_and_other_handlers_stay():
    now, done = [0.], []
    def send(name):
        try: press(name), time.sleep(.1)
        except Stopped as e: done.append(str(e))
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)            # as `nohup` leaves it
    try:
        with StopSignals(clock=lambda: now[0]):
            for now[0],name in [(0, 'SIGHUP'), (0, 'SIGTERM'), (9, 'SIGINT'), (11, 'SIGINT')]: send(name)
        assert [signal.getsignal(o) for o in (signal.SIGTERM, signal.SIGHUP)]==[signal.SIG_DFL, signal.SIG_IGN]
    finally: signal.signal(signal.SIGHUP, before)
    assert done==['SIGTERM', 'SIGINT']
