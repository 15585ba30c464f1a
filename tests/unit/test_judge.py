"""Planted cheats: is each found, and named in its sentence?"""
import json
import pickle
from importlib import import_module
from pathlib import Path

import pytest
import pandas as pd
from click.testing import CliRunner

import judged
from gpubench import judge
from gpubench.cli import cli
from gpubench.ground.core import InputError, StateError
from gpubench.show.judge import STATUS, Judgement, check_step, compare_facts, compare_learning, decide

FILE = Path(judged.__file__)
def side(name): return f'{FILE}:{name}'
def judge_(after, before='before', **kwargs):
    return judge(side(before), side(after), **dict(epochs=2, seeds=1) | kwargs)

@pytest.mark.parametrize('after,words', [
    ('short_epoch', 'training images an epoch: 160 instead of 320'),
    ('drops_last', 'left out by drop_last an epoch: 64 instead of 0'),
    ('repeats_a_batch', 'batches of images that are new, share: 0.1 instead of 1'),
    ('small_images', 'input of the network: [1, 12, 12] torch.float32 instead of [1, 16, 16] torch.float32'),
    ('no_augmentation', 'augmentations: none instead of Shift'),
    ('half_validation', 'validation images an epoch: 40 instead of 80'),
    ('cached_validation', 'validation images an epoch: 40 instead of 80'),
    ('frozen', 'trainable parameters changed an epoch: '),
    ('tf32', 'precision: tf32 instead of fp32'),
    ('bf16', 'precision: bf16 instead of fp32')])
def test_other_work_is_named_before_anything_is_timed(after, words):
    found = judge_(after)
    assert found.verdict=='not the same work' and words in found.sentence, found
    assert found.as_dict()['status']==3 and found.as_dict()['times_as_fast']==[None]*3

def test_predictions_that_the_network_remembers():
    found = judge_('cached_predictions', 'before_in_body')
    assert [o['what'] for o in found.work if o['verdict']]==['validation products an epoch']

@pytest.mark.slow
def test_weights_from_a_finished_training():
    loaded = judge_('faster', fit=['fit_one_cycle', judged.loads_weights])
    assert 'weights loaded an epoch: 0.5 instead of 0' in loaded.sentence
    begun = judge_('trained_in_make')
    assert [o['what'] for o in begun.work if o['verdict']=='differs']==['weights at the start, loss of the first batch']

@pytest.mark.slow
def test_one_lucky_seed():
    found = judge_('lucky_seed', seeds=2)
    assert found.verdict=='not the same work' and 'seeds that start from different weights: 1 instead of 2' in found.sentence

@pytest.mark.parametrize('name,words', [('works_in_make', 'time to make the Learner, share: 1 instead of 0'),
                                        ('returns_early', 'time after the fit returned, share: 1 instead of 0')])
def test_time_that_a_claim_leaves_out_counts(monkeypatch, tmp_path, name, words):
    now, module = [0.], import_module('gpubench.show.judge')
    monkeypatch.setattr(judged, 'sleep', lambda seconds: now.append(now[-1]+seconds))
    monkeypatch.setattr(module, 'wait_for', module.wait_for)    # a side changes it
    def row(side, make): return dict(side=side) | module.visit(pickle.dumps([make]), 'fit', 2, 0, tmp_path/'w', False, lambda: now[-1])
    df = pd.DataFrame([row('before', judged.before), row('again', judged.before), row('after', getattr(judged, name))])
    found = decide(compare_facts(df), dict(verdict='equal', sentence='equal'), df)
    assert words in found.sentence and found.times_as_fast[0]==pytest.approx(.6/1.5) and found.verdict!='faster', found

def test_a_step_faster_than_the_device_is_an_error():
    def check(whole_s): return check_step(side('before'), pd.DataFrame([{
        'time of a whole fit, s': whole_s, 'time to make the Learner, share': .5, 'steps an epoch': 10, 'precision': 'fp32'}]), 2)
    assert 'The measurement is wrong' in check(1e-6)['error'] and check(10.)=={}

@pytest.mark.slow
def test_two_functions_are_judged():
    found = judge(judged.very_slow, judged.faster, epochs=1, seeds=3, margin=5) # functions, too
    assert found.verdict in [*STATUS][:3] and found.learning[0]['verdict']=='equal' and found.as_dict()['work'][0]['what']=='time of a whole fit, s', found
    assert found.times_as_fast[0]>1 and {k: len(o) for k,o in found.seconds.items()}=={'before': 3, 'again': 3, 'after': 3}

def test_what_is_allowed_is_listed():
    found = judge_('tf32', allow=['precision'])
    assert [o['verdict'] for o in found.work if o['what']=='precision']==['allowed'] and found.verdict!='not the same work'


# verdicts

def fact(verdict=''): return dict(what='precision', before='fp32', after='bf16', verdict=verdict, sentence='bf16')
def fits(*sides, start=None): return pd.DataFrame([
    {'side': k, 'time of a whole fit, s': o, 'seeds that start from different weights': start or str(i)}
    for k,times in zip(('before', 'again', 'after'), sides) for i,o in enumerate(times)])

@pytest.mark.parametrize('verdict,before,again,after,learned', [
    ('faster', [2., 2.1, 2.], [2.1, 2., 2.], [1., 1.1, 1.], 'equal'),
    ('slower', [1., 1.1, 1.], [1.1, 1., 1.], [2., 2.1, 2.], 'equal'),
    ('no difference that these runs can show', [2., 2.1, 2.], [2.1, 2., 2.], [2., 2., 2.1], 'equal'),
    ('no difference that these runs can show', [2., 2.1, 2.], [1., 2., 2.9], [1.8, 1.9, 1.81], 'equal'), # within the noise
    ('no difference that these runs can show', [2.], [2.], [1.], 'equal'),                               # no interval
    ('not the same learning', [2., 2.1, 2.], [2.1, 2., 2.], [1., 1.1, 1.], 'worse'),
    ('not the same learning', [2., 2.1, 2.], [2.1, 2., 2.], [1., 1.1, 1.], 'unknown')])
def test_a_verdict(verdict, before, again, after, learned):
    learning = fact() | dict(verdict=learned, sentence='learned')
    found = decide([fact('allowed')], learning, fits(before, again, after))
    assert found.verdict==verdict and 'Learned' in found.sentence and 'Bf16' in found.sentence
    assert decide([fact('differs')]).verdict=='not the same work'
    assert ('Before starts from 1 set' in decide([], learning, fits(before, again, after, start='7')).sentence)==(len(before)>1)
    assert 'nan' not in found.sentence and 'lucky' not in found.sentence

@pytest.mark.parametrize('after,verdict,n', [
    ([90.5, 91, 90], 'equal', None), ([80, 81, 80], 'worse', None), ([86, 93, 90], 'unknown', 110), ([90], 'unknown', 5)])
def test_learning_is_equal_or_worse_or_needs_more_seeds(after, verdict, n):
    before = [dict(accuracy=90., loss=1.)]*len(after)
    found = compare_learning([dict(before=b, after=dict(accuracy=float(o), loss=1.)) for b,o in zip(before, after)], 1.)
    assert (found['verdict'], found['what'])==(verdict, 'accuracy') and (n is None or abs(found['seeds_needed']-n)<30)
    assert f'accuracy: {verdict}' in found['sentence'] and 'nan' not in found['sentence']

def test_a_loss_is_compared_in_percent():
    found = compare_learning([dict(before=dict(loss=2.), after=dict(loss=2.2))]*3, 1.)
    assert found['verdict']=='worse' and found['difference']==pytest.approx([-10]*3)


# the command

@pytest.mark.parametrize('verdict,code', [*STATUS.items()])
def test_the_command_has_a_table_json_and_an_exit_status(monkeypatch, verdict, code):
    given = []
    def made(*args): return given.append(args) or Judgement(verdict, ['why'], [fact('differs')])
    monkeypatch.setattr(import_module('gpubench.show.judge'), 'judge', made)
    call = ['judge', 'b.py:f', 'a.py:f', '--seeds', '2', '--allow', 'precision', '--allow', 'steps']
    shown, as_json = (CliRunner().invoke(cli, call+more) for more in ([], ['--json']))
    assert (shown.exit_code, as_json.exit_code)==(code, code) and verdict in shown.stdout.lower() and 'bf16' in shown.stdout
    found = json.loads(as_json.stdout)
    assert (found['verdict'], found['status'], found['times_as_fast'])==(verdict, code, [None]*3)
    assert given[0][:8]==('b.py:f', 'a.py:f', 'fit_one_cycle', 3, 2, 1., ('precision', 'steps'), 1800)

def test_errors_have_a_sentence_and_status_2(monkeypatch):
    wrong = CliRunner().invoke(cli, ['judge', side('before'), side('crashes'), '--epochs', '1'])
    assert wrong.exit_code==2 and 'after: ValueError: no such file' in wrong.stderr, wrong.output
    for kwargs in (dict(allow=['speed']), dict(seeds=0), dict(fit='fit_once'), dict(margin=-1)):
        with pytest.raises(InputError): judge_('faster', **kwargs)
    with pytest.raises(InputError, match='file.py:function'): judge(side('before'), 'after.py')
    monkeypatch.setattr(import_module('gpubench.show.judge'), 'judge', lambda *args: 1/0) # a fault of its own; 1 is a verdict
    assert CliRunner().invoke(cli, ['judge', 'b.py:f', 'a.py:f']).exit_code==2
