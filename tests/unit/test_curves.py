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

def test_intervals_of_a_step_hold_the_truth_where_few_sizes_show_a_part():
    rng = np.random.default_rng(11)
    cases = ((8*2**np.arange(7), (10., .2, .02)),    # only the largest size is off the plateau
             (16*2**np.arange(5), (5., 1., .25)))    # all sizes are on the rise, which starts at the smallest
    for sizes, (overhead, fixed, per_image) in cases:
        bs = np.repeat(sizes, 3)
        times = np.maximum(overhead, fixed+per_image*bs)*np.exp(.02*rng.normal(size=(24, len(bs))))
        fits = [fit_step_time(bs, o).intervals for o in times]
        truth = dict(overhead_ms=overhead, fixed_ms=fixed, per_image_ms=per_image)
        assert min(sum(o[name].holds(value) for o in fits) for name,value in truth.items())>=20
