"Intervals of a fit are those of the level that was asked for"
import numpy as np

from gpubench.curves import fit_step_time, fit_time_curve

BS = np.repeat([16, 64, 256, 1024, 4096], 3)
NOISE = np.exp(.02*np.random.default_rng(5).normal(size=len(BS)))

def test_a_higher_level_makes_wider_intervals():
    for fit, times in ((fit_step_time, np.maximum(3., 1.+.004*BS)), (fit_time_curve, 10+500/BS)):
        low, high = (fit(BS, times*NOISE, level=o).intervals for o in (.5, .99))
        for o in low:
            assert (low[o].level, high[o].level)==(.5, .99)
            assert 2*low[o].width<high[o].width
