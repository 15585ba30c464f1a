"A teacher's key and grades, by the command"
import csv, io, json

import nbformat
import pytest
from click.testing import CliRunner

from gpubench.course.lab_questions import QUESTIONS
from gpubench.cli import cli
from gpubench.course.grades import lab_questions, read_answers
from gpubench.ground.record import append_record

from helpers import root
from test_labs_machinery import write_lab

def gpubench(*args): return CliRunner().invoke(cli, [str(o) for o in args], prog_name='gpubench')

def hand_in(path, **answers): # 08.copy as lab08_copy
    "The lab with these answers"
    nb = nbformat.read(root/'nbs'/'labs'/'08_to_the_limit.ipynb', 4)
    for o in nb.cells:
        for k,v in answers.items():
            if f"check('08.{k}'" in o.source: o.source = o.source.replace('answer = None', f'answer = {v}')
        if o.cell_type=='code': o.outputs = []
    path.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(nb, path)

@pytest.fixture
def handed_in(tmp_path):
    hand_in(tmp_path/'class'/'ada'/'08.ipynb', copy="'falls'", graph=4, constants=['a flip by random.random()', 'a step count in Python'])
    hand_in(tmp_path/'class'/'bob'/'08.ipynb', copy="'rises'", graph="open('/tmp/never', 'w')")
    (tmp_path/'class'/'bob'/'02_batch_size.ipynb').write_text('not a notebook')
    return tmp_path/'class'

def test_grades(handed_in):
    said = gpubench('labs', '--grade', handed_in)
    assert said.exit_code==0, said.output
    assert 'ada/08.ipynb: 3 of 4 right' in said.output and 'bob/08.ipynb: 0 of 4 right' in said.output
    assert 'bob/02_batch_size.ipynb: it is not a readable notebook' in said.output

def test_points_for_a_learning_platform(handed_in):
    "A row for each student and lab, a broken notebook's included; text is quoted"
    said = gpubench('labs', '--grade', handed_in, '--csv').stdout
    assert said.splitlines()[0]=='"student","lab","points","max_points","remark"'
    rows = [(o['student'], o['lab'], int(o['points'])) for o in csv.DictReader(io.StringIO(said))]
    assert rows==[('ada', '08_to_the_limit', 3), ('bob', '02_batch_size', 0), ('bob', '08_to_the_limit', 0)]
    assert 'to read: 08.graph' in said and 'not a readable notebook' in said
    assert [o['result'] for o in json.loads(gpubench('labs', '--grade', handed_in, '--json').stdout)
            if o['notebook']=='bob/08.ipynb' and o['question'] in QUESTIONS]==['wrong', 'not answered', 'not answered', 'to read']

@pytest.mark.parametrize('lines', ["answer = []; answer.append('falls')", "answer = 'f'; answer += 'alls'", "answer, why = 'falls', ''",
                                   "answer = None\nif True: answer = 'falls'"])
def test_an_answer_put_together_is_to_be_read(lines, tmp_path):
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(f"{lines}\ncheck('08.copy', answer)")]), tmp_path/'a.ipynb')
    assert [o['result'] for o in read_answers(tmp_path/'a.ipynb')]==['to read']

def test_a_forged_output_is_no_answer(tmp_path):
    "Records and settings decide, not what the notebook shows"
    forged = nbformat.v4.new_output('display_data', {'text/markdown': '✅ Right.'})
    nb = nbformat.read(root/'nbs'/'labs'/'02_batch_size.ipynb', 4)
    for o in nb.cells:
        if "check('02." in o.source: o.update(source=o.source.replace('answer = None', 'answer = 16'), outputs=[forged])
    (tmp_path/'ada').mkdir()
    nbformat.write(nb, tmp_path/'ada'/'02_batch_size.ipynb')
    def results(): return {o['question']: o['result'] for o in json.loads(gpubench('labs', '--grade', tmp_path, '--json').stdout)}
    assert [results()[f'02.{o}'] for o in ('whole', 'left_out', 'plateau')]==['wrong', 'wrong', 'no records']
    for bs,rates in {16: [500, 505, 502], 64: [900, 910, 905]}.items():
        for v in rates: append_record(tmp_path/'ada'/'runs'/'x-02_batch_size', dict(status='ok', model='lenet', bs=bs, images_per_s=v))
    assert results()['02.plateau']=='wrong'

def test_no_folder(tmp_path):
    (tmp_path/'empty').mkdir()
    for folder,words in (('gone', 'There is no folder'), ('empty', 'There are no notebooks')):
        said = gpubench('labs', '--grade', tmp_path/folder)
        assert said.exit_code==2 and words in said.output

def test_key():
    said = gpubench('labs', '--key').output
    assert all(f'* `{o}` ' in said for o in QUESTIONS) and '| A guess | 1 each |' in said
    assert "**cnn_small, cnn_medium, cnn_large** with the lab's own parameters" in said
    assert "follows from the student's own records" in said and '**hardly anything**' in said

def test_each_lab_of_the_new_form_asks_for_a_guess_and_answers():
    for lab,names in lab_questions().items():
        if any(o in QUESTIONS for o in names) and lab.path.parent.name!='deeper':
            assert any(o.startswith('my_guess') for o in names), lab.name

def test_deeper(tmp_path):
    write_lab(tmp_path/'labs', '01_a', 'print(1)')
    write_lab(tmp_path/'labs'/'deeper', '01_b', "from pathlib import Path; Path(out, 'seen').touch()")
    assert '01_b' in gpubench('labs', '--deeper', '--labs', tmp_path/'labs').output
    assert '01_b' not in gpubench('labs', '--labs', tmp_path/'labs').output
    said = gpubench('run', '--deeper', '--labs', tmp_path/'labs', '--device', 'cpu', '--out', tmp_path/'out', '--no-progress')
    assert said.exit_code==0 and (tmp_path/'out'/'seen').is_file(), said.output
