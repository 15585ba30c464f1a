"Intervals of a fit hold the truth as often as they claim"
import numpy as np

from gpubench.ground.curves import fit_step_time

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


def test_intervals_hold_the_truth_where_rounds_share_a_disturbance():
    rng, sizes = np.random.default_rng(2), np.array([16, 64, 256, 1024])
    truth = dict(overhead_ms=4., per_image_ms=.02)
    def sweep(): return np.concatenate([np.exp(r)*np.maximum(4., 1+.02*sizes)*np.exp(.01*rng.normal(size=4))
                                        for r in .03*rng.normal(size=3)])
    sweeps = [sweep() for _ in range(60)]
    found = [fit_step_time(np.tile(sizes, 3), o).intervals for o in sweeps]
    assert min(sum(o[name].holds(value) for o in found) for name,value in truth.items())>=54
