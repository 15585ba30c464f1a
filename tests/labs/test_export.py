"Labs exported for nbgrader, tried with the real package where it is installed"
import csv, os, re, shutil, subprocess, sys
from pathlib import Path

import nbformat
import pytest

from gpubench.course.export import export_labs, lab_with_tests
from gpubench.course.grades import lab_questions
from gpubench.course.lab_functions import FUNCTIONS
from gpubench.course.lab_questions import QUESTIONS
from gpubench.ground.record import append_record

LAB = '02_batch_size'
RIGHT = dict(whole='[16, 32, 64]', left_out='224/480', plateau='64', best="'unknown'", n_trained='n//bs*bs if drop_last else n')
WRONG = dict(whole='[16]', left_out='.9', plateau='16', best="'yes'", n_trained='n')
HALF = RIGHT | dict(plateau='1/0', best='None', n_trained='1/0')
SUBMISSIONS = {'ada': (RIGHT, 8, 6), 'bob': (WRONG, None, 0), 'cy': (HALF, 8, 3)}     # answers, guess, points of 6

def command(name):
    path = Path(sys.executable).with_name(name)
    if not path.is_file(): pytest.skip(f'{name} is not installed')
    return str(path)

def run(*args, cwd):
    env = os.environ | dict(PATH=os.pathsep.join([str(Path(sys.executable).parent), os.environ['PATH']]))  # nbgrader calls alembic
    done = subprocess.run(args, cwd=cwd, capture_output=True, text=True, timeout=900, env=env)
    assert done.returncode==0, done.stdout+done.stderr

def hand_in(source, folder, answers, guess):
    "The lab with these answers, and made records beside it, in which 64 begins the plateau"
    nb = nbformat.read(source, 4)
    for o in nb.cells:
        o.source = re.sub('^my_guess_ratio = None', f'my_guess_ratio = {guess}', o.source, flags=re.M)
        o.source = re.sub('^    [.]{3}$', f"    return {answers['n_trained']}", o.source, flags=re.M)
        o.source = re.sub(r'^answer_(\w+) = None', lambda m: f'answer_{m[1]} = {answers[m[1]]}', o.source, flags=re.M)
    folder.mkdir(parents=True)
    nbformat.write(nb, folder/f'{LAB}.ipynb')
    for bs,rate in {16: 400, 32: 700, 64: 990, 256: 1000, 1024: 800}.items():
        for v in range(3): append_record(folder/'runs'/f'a-{LAB}', dict(status='ok', model='lenet', bs=bs, images_per_s=rate*(1+.01*v)))

@pytest.mark.slow
def test_nbgrader(tmp_path):
    nbgrader = command('nbgrader')
    export_labs(tmp_path, ['02'])
    run(nbgrader, 'generate_assignment', LAB, cwd=tmp_path)
    release = tmp_path/'release'/LAB/f'{LAB}.ipynb'
    assert 'passes(' not in release.read_text()                            # hidden
    for who,(answers,guess,_) in SUBMISSIONS.items(): hand_in(release, tmp_path/'submitted'/who/LAB, answers, guess)
    run(nbgrader, 'autograde', LAB, cwd=tmp_path)
    run(nbgrader, 'export', cwd=tmp_path)
    with open(tmp_path/'grades.csv') as f: found = {o['student_id']: (float(o['score']), float(o['max_score'])) for o in csv.DictReader(f)}
    assert found=={k: (o[2], 13) for k,o in SUBMISSIONS.items()}            # 7 points are given by hand

def test_every_question_of_every_lab_is_graded():
    for lab,names in lab_questions().items():
        found = lab_with_tests(lab)
        assert {name for _,name,_ in found if name}>={*names}, lab.name
        assert [name for _,name,_ in found].count('exercise')==1 and 'limits' in [name for _,name,_ in found]
        assert all(o is None or o.cell_type!='code' or not o.outputs for o,_,_ in found)

MEASURED = {'02.plateau': 64, '03.per_param': ['cnn_small', 'cnn_medium', 'cnn_large'], '05.longest': 30.}       # of the records below

def all_right(source, folder, out=''):
    "A lab with a guess everywhere and the key's answers, and what it takes for them"
    nb, name = nbformat.read(source, 4), source.stem
    codes = [o for o in nb.cells if o.cell_type=='code']
    asked = {variable: k for o in codes for k,variable in re.findall(r"^check\('(\d\d[.]\w+)', (\w+)", o.source, re.M)}
    assert 'answer' not in asked and {*MEASURED}<={*QUESTIONS}
    for o in codes:
        o.source = re.sub('^(my_guess_\\w+) = None', r'\1 = 3', o.source, flags=re.M).replace("out: str = ''", f'out: str = {out!r}')
        for variable,k in asked.items():
            answer = MEASURED[k] if k in MEASURED else getattr(QUESTIONS[k], 'correct', None)
            if k in FUNCTIONS: o.source = re.sub(rf'^def {variable}[(].*\n    [.]{{3}}$', lambda m: FUNCTIONS[k].solution, o.source, flags=re.M)
            else: o.source = re.sub(f'^{variable} = None', lambda m: f'{variable} = {answer!r}', o.source, flags=re.M)
    folder.mkdir(parents=True)
    nbformat.write(nb, folder/f'{name}.ipynb')
    runs = folder/'runs'/f'1-{name}'
    for bs,rate in {16: 400, 64: 990, 1024: 1000}.items():
        for v in range(3): append_record(runs, dict(status='ok', model='lenet', bs=bs, images_per_s=rate+3*v))
    append_record(runs/'05_parts.jsonl', dict(part='trace', work_ms=dict(a=30., b=12.)))

def points():
    "Of the notebook here, by a grader that goes on after a failed cell: which tests pass, and the errors of other cells"
    space, passed, errors = {}, set(), []
    for o in nbformat.read(next(Path().glob('*.ipynb')), 4).cells:
        if o.cell_type!='code' or 'skip-execution' in o.metadata.get('tags', []): continue
        name = o.metadata.get('nbgrader', {}).get('grade_id')
        try: exec(o.source, space)
        except Exception as e:
            if not name: errors.append(f'{type(e).__name__}: {e}')
        else: passed |= {name}-{None}
    return passed, errors

@pytest.mark.slow
@pytest.mark.parametrize('lab', lab_questions(), ids=lambda o: o.name)
def test_right_answers_and_none_get_their_points(lab, tmp_path, monkeypatch):
    "Also if the set-up fails, because the parameters name a folder, a device or files that a grader doesn't have"
    export_labs(tmp_path/'course', [lab.path])
    source, tests = tmp_path/'course'/'source'/lab.name/f'{lab.name}.ipynb', {re.sub(r'\W', '-', k) for c,k,_ in lab_with_tests(lab) if c is None}
    (tmp_path/'file').touch()
    (tmp_path/'none').mkdir()
    shutil.copy(source, tmp_path/'none')
    monkeypatch.chdir(tmp_path/'none')
    assert points()==(set(), [])
    for who,out in dict(ada='', bob=str(tmp_path/'file'/'runs')).items():
        all_right(source, tmp_path/'in'/who, out)
        monkeypatch.chdir(tmp_path/'in'/who)
        passed, errors = points()
        assert passed==tests and any('Cannot write to the output folder' in o for o in errors)==bool(errors)==bool(out), errors
