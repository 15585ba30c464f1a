"Labs exported for nbgrader, tried with the real package where it is installed"
import csv
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from gpubench.course.export import export_labs, graded_cells, lab_questions
from gpubench.course.checks import QUESTIONS, LabFunction

LAB = '02_batch_size'
def run(*args, cwd):
    bin = Path(sys.executable).parent
    if not (bin/'nbgrader').is_file(): pytest.skip('nbgrader is not installed')
    env = os.environ | dict(PATH=os.pathsep.join([str(bin), os.environ['PATH']]))  # it calls alembic
    done = subprocess.run([bin/'nbgrader', *args], cwd=cwd, capture_output=True, text=True, env=env)
    assert done.returncode==0, done.stdout+done.stderr

def test_every_question_of_every_lab_is_graded():
    for lab,names in lab_questions().items():
        cells = graded_cells(lab)
        found = [o.metadata.nbgrader.grade_id for o in cells if 'nbgrader' in o.metadata]
        assert found==[re.sub(r'\W', '-', o) for o in names]+['limits', 'exercise'], lab.name
        assert all(not o.outputs for o in cells if o.cell_type=='code')

def all_right(source, folder, out=''):
    "A lab with a guess everywhere and the key's answers"
    nb = nbformat.read(source, 4)
    codes = [o for o in nb.cells if o.cell_type=='code']
    asked = {variable: k for o in codes
             for k,variable in re.findall(r"^check\('(\d\d[.]\w+)', (\w+)", o.source, re.M)}
    assert 'answer' not in asked
    for o in codes:
        o.source = re.sub('^(my_guess_\\w+) = None', r'\1 = 3', o.source, flags=re.M)
        o.source = o.source.replace("out: str = ''", f'out: str = {out!r}')
        for variable,k in asked.items():
            right = QUESTIONS[k].correct
            if isinstance(right, LabFunction): o.source = re.sub(
                rf'^def {variable}[(].*\n    [.]{{3}}$', lambda m: right.solution, o.source, flags=re.M)
            elif not QUESTIONS[k].is_computed: o.source = re.sub(
                f'^{variable} = None', lambda m: f'{variable} = {QUESTIONS[k].correct!r}', o.source,
                flags=re.M)
    folder.mkdir(parents=True)
    nbformat.write(nb, folder/source.name)

def points():
    "Of the notebook here, by a grader that goes on after a failed cell: tests that pass, and errors"
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
def test_nbgrader(tmp_path):
    "Right answers, and none"
    export_labs(tmp_path, ['02'])
    run('generate_assignment', LAB, cwd=tmp_path)
    release = tmp_path/'release'/LAB/f'{LAB}.ipynb'
    assert 'HIDDEN TESTS' not in release.read_text()
    all_right(release, tmp_path/'submitted'/'ada'/LAB)
    shutil.copytree(release.parent, tmp_path/'submitted'/'bob'/LAB)
    run('autograde', LAB, cwd=tmp_path)
    run('export', cwd=tmp_path)
    with open(tmp_path/'grades.csv') as f:
        found = {o['student_id']: (float(o['score']), float(o['max_score'])) for o in csv.DictReader(f)}
    assert found==dict(ada=(5, 13), bob=(0, 13))                       # 8 points are given by hand

@pytest.mark.slow
@pytest.mark.parametrize('lab', lab_questions(), ids=lambda o: o.name)
def test_right_answers_and_none_get_their_points(lab, tmp_path, monkeypatch):
    "Also if the set-up fails, because the parameters name a folder that a grader doesn't have"
    export_labs(tmp_path/'course', [lab.path])
    source = tmp_path/'course'/'source'/lab.name/f'{lab.name}.ipynb'
    tests = {o.metadata.nbgrader.grade_id for o in graded_cells(lab)
             if 'HIDDEN TESTS' in o.source}
    (tmp_path/'file').touch()
    (tmp_path/'none').mkdir()
    shutil.copy(source, tmp_path/'none')
    monkeypatch.chdir(tmp_path/'none')
    assert points()==(set(), [])
    for who,out in dict(ada='', bob=str(tmp_path/'file'/'runs')).items():
        all_right(source, tmp_path/'in'/who, out)
        monkeypatch.chdir(tmp_path/'in'/who)
        passed, errors = points()
        assert passed==tests, errors
        assert any('Cannot write to the output folder' in o for o in errors)==bool(out)
