"""Planted cheats: is each found, and named in its sentence?"""
import json
from importlib import import_module
from pathlib import Path

import pytest
from click.testing import CliRunner

import judged
from gpubench import judge
from gpubench.cli import cli
from gpubench.ground.core import InputError, StateError
from gpubench.show.judge import STATUS, Judgement, compare_learning, decide

FILE = Path(judged.__file__)
def side(name): return f'{FILE}:{name}'
def judge_(after, before='before', **kwargs):
    return judge(side(before), side(after), **dict(epochs=2, seeds=1) | kwargs)

@pytest.mark.parametrize('after,words', [
    ('short_epoch', 'images trained an epoch: 160 instead of 320'),
    ('drops_last', 'left out by drop_last: 64 instead of 0'),
    ('repeats_a_batch', 'images in repeated batches, share: 0.9 instead of 0'),
    ('small_images', 'input of the network: 1×12×12 float32 instead of 1×16×16 float32'),
    ('no_augmentation', 'augmentations: none instead of Shift'),
    ('half_validation', 'validation images an epoch: 40 instead of 80'),
    ('cached_validation', 'validations from a cache: 1 instead of 0'),
    ('tf32', 'precision: tf32 instead of fp32'),
    ('bf16', 'precision: bf16 instead of fp32')])
def test_other_work_is_named_before_anything_is_timed(after, words):
    found = judge_(after)
    assert found.verdict=='not the same work' and words in found.sentence, found
    assert found.as_dict()['status']==3 and found.as_dict()['times_as_fast']==[None]*3

def test_predictions_that_the_network_remembers():
    found = judge_('cached_predictions', 'before_in_body')
    assert [o['what'] for o in found.work if o['verdict']]==['validation, values computed an image']

@pytest.mark.slow
def test_weights_from_a_finished_training():
    loaded = judge_('faster', fit=['fit_one_cycle', judged.loads_weights])
    assert 'weights from elsewhere, as of a finished training: 1 instead of 0' in loaded.sentence
    begun = judge_('trained_in_make')
    assert [o['what'] for o in begun.work if o['verdict']=='differs']==['weights, loss of the first batch']

@pytest.mark.slow
def test_one_lucky_seed():
    found = judge_('lucky_seed', seeds=2)
    assert found.verdict=='not the same work' and 'seeds that start differently: 1 instead of 2' in found.sentence

@pytest.mark.slow
def test_time_that_a_claim_leaves_out_counts():
    found = judge_('works_in_make')
    assert 'time to make the Learner, share: 0.' in found.sentence and found.times_as_fast[0]<1.3
    early = judge_('before', fit=[judged.fit_in_two, judged.returns_early])
    assert 'time that the device takes after the fit returned, share: 0.' in early.sentence, early
    assert early.verdict!='faster'

def test_a_step_faster_than_the_device_is_an_error():
    with pytest.raises(StateError, match='The time of after: The measurement is wrong'): judge_('stops_the_clock')

@pytest.mark.slow
def test_an_honest_change_is_faster():
    found = judge(judged.very_slow, judged.faster, epochs=1, seeds=3, margin=5) # functions, too
    assert (found.verdict, found.learning[0]['verdict'])==('faster', 'equal') and found.as_dict()['work'][0]['what']=='time of a whole fit, s', found
    assert found.times_as_fast[1]>1 and found.seconds.keys()=={'before', 'again', 'after'}

def test_what_is_allowed_is_listed():
    found = judge_('tf32', allow=['precision'])
    assert [o['verdict'] for o in found.work if o['what']=='precision']==['allowed'] and found.verdict!='not the same work'


# verdicts

def fact(verdict=''): return dict(what='precision', before='fp32', after='bf16', verdict=verdict, sentence='bf16')
def rounds(*sides, start=None): return [dict(zip(('before', 'again', 'after'), (dict(whole_s=o, start=start or i) for o in row)))
                                        for i,row in enumerate(zip(*sides))]

@pytest.mark.parametrize('verdict,before,again,after,learned', [
    ('faster', [2., 2.1, 2.], [2.1, 2., 2.], [1., 1.1, 1.], 'equal'),
    ('slower', [1., 1.1, 1.], [1.1, 1., 1.], [2., 2.1, 2.], 'equal'),
    ('no difference that these runs can show', [2., 2.1, 2.], [2.1, 2., 2.], [2., 2., 2.1], 'equal'),
    ('no difference that these runs can show', [2., 2.1, 2.], [1., 2., 2.9], [1.8, 1.9, 1.81], 'equal'), # within the noise
    ('no difference that these runs can show', [2.], [2.], [1.], 'equal'),                               # no interval
    ('not the same learning', [2., 2.1, 2.], [2.1, 2., 2.], [1., 1.1, 1.], 'worse'),
    ('not the same learning', [2., 2.1, 2.], [2.1, 2., 2.], [1., 1.1, 1.], 'unknown')])
def test_a_verdict(verdict, before, again, after, learned):
    learning = [fact() | dict(verdict=learned, sentence='learned')]
    found = decide([fact('allowed')], learning, rounds(before, again, after))
    assert found.verdict==verdict and 'Learned' in found.sentence and 'Bf16' in found.sentence
    assert decide([fact('differs')], learning, []).verdict=='not the same work'
    assert ('may be lucky' in decide([], learning, rounds(before, again, after, start=7)).sentence)==(len(before)>1)
    assert 'nan' not in found.sentence and 'may be lucky' not in found.sentence

@pytest.mark.parametrize('after,verdict,n', [
    ([90.5, 91, 90], 'equal', None), ([80, 81, 80], 'worse', None), ([86, 93, 90], 'unknown', 110), ([90], 'unknown', 5)])
def test_learning_is_equal_or_worse_or_needs_more_seeds(after, verdict, n):
    before = [dict(accuracy=90., loss=1.)]*len(after)
    found = compare_learning(before, [dict(accuracy=float(o), loss=1.) for o in after], 1.)
    assert (found['verdict'], found['what'])==(verdict, 'accuracy') and (n is None or abs(found['seeds_needed']-n)<30)
    assert found['sentence'].startswith('after learned' if verdict!='unknown' else f"{len(after)} seed(s) can't tell") and 'nan' not in found['sentence']

def test_a_loss_is_compared_in_percent():
    found = compare_learning([dict(loss=2.)]*3, [dict(loss=2.2)]*3, 1.)
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
