"A teacher's key and grades, by the command"
import csv, io, json, re

import nbformat
import pytest
from click.testing import CliRunner

from gpubench.course.lab_questions import QUESTIONS
from gpubench.cli import cli
from gpubench.course.grades import handed_records, lab_questions, read_answers
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

def test_each_lab_asks_for_a_guess_and_answers():
    for lab,names in lab_questions().items():
        assert any(o in QUESTIONS for o in names) and any(o.startswith('my_guess') for o in names), lab.name

def unlocked(path):
    "Guesses that a lab doesn't write down before the part that it notes when it measures, or doesn't compare with it"
    codes = [o.source for o in nbformat.read(path, 4).cells if o.cell_type=='code']
    def places(pattern): return [i for i,o in enumerate(codes) if re.search(pattern, o)]
    for i,source in enumerate(codes):
        for name in re.findall(r'^my_guess_(\w+) = None', source, re.M):
            part = re.search(rf"^lab\.guess\('(.+?)',.*\b{name}=my_guess_{name}\b", source, re.M)
            noted = part and sorted({*places(r'\blab\.(note|append)\(')} & {*places(rf'\b{re.escape(part[1])}\b')})
            if not noted or noted[0]<=i: yield f'{name}: not locked'
            elif not [o for o in places(rf'check_guess\(my_guess_{name}\b') if o>=noted[0]]: yield f'{name}: not compared'

@pytest.mark.parametrize('lab', lab_questions(), ids=lambda o: o.name)
def test_guesses_are_locked_by_the_measurement(lab): assert [*unlocked(lab.path)]==[]

def test_a_guess_that_is_not_locked_is_found(tmp_path):
    def lab(*sources):
        nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(o) for o in sources]), tmp_path/'a.ipynb')
        return [*unlocked(tmp_path/'a.ipynb')]
    asks, measures, compares = "my_guess_s = None   # s\nlab.guess('epoch', s=my_guess_s)", "lab.note('epoch', s=1)", 'check_guess(my_guess_s, 1)'
    assert lab(asks, measures, compares)==lab(asks, f'{measures}\n{compares}')==[]
    for bad in ((measures, asks, compares), (asks, measures.replace('epoch', 'x'), compares), (asks.splitlines()[0], measures, compares)):
        assert lab(*bad)==['s: not locked']
    assert lab(asks, measures)==lab(asks, compares, measures)==['s: not compared']

@pytest.mark.parametrize('measured,result', [('2026-03-01T09:30:00.000+00:00', 'late'), ('2026-03-01T11:30:00.000+00:00', 'guessed')])
def test_a_guess_of_a_deeper_lab_is_locked(measured, result, tmp_path):
    "By its own records: those of lab 05, whose parts have the same file name, don't count"
    ada = tmp_path/'class'/'ada'
    (ada/'deeper').mkdir(parents=True)
    nb = nbformat.read(root/'nbs'/'labs'/'deeper'/'05_memory.ipynb', 4)
    for o in nb.cells: o.source = o.source.replace('my_guess_mib = None', 'my_guess_mib = 900')
    nbformat.write(nb, ada/'deeper'/'05_memory.ipynb')
    runs = ada/'deeper'/'runs'/'2026-03-01-090000-05_memory', ada/'runs'/'2026-03-01-080000-05_watch_the_gpu'
    for folder,time_utc in zip(runs, (measured, '2026-03-01T08:00:00.000+00:00')):
        append_record(folder/'05_parts.jsonl', dict(part='parts', time_utc=time_utc))
    append_record(runs[0]/'guesses.jsonl', dict(guess='my_guess_mib', value=900, about='parts', time_utc='2026-03-01T10:30:00.000+00:00'))
    said = json.loads(gpubench('labs', '--grade', tmp_path/'class', '--json').stdout)
    assert [o['result'] for o in said if o['question']=='my_guess_mib' and o['lab']=='05_memory']==[result]

def test_deeper(tmp_path):
    write_lab(tmp_path/'labs', '01_a', 'print(1)')
    write_lab(tmp_path/'labs'/'deeper', '01_b', "from pathlib import Path; Path(out, 'seen').touch()")
    assert '01_b' in gpubench('labs', '--deeper', '--labs', tmp_path/'labs').output
    assert '01_b' not in gpubench('labs', '--labs', tmp_path/'labs').output
    said = gpubench('run', '--deeper', '--labs', tmp_path/'labs', '--device', 'cpu', '--out', tmp_path/'out', '--no-progress')
    assert said.exit_code==0 and (tmp_path/'out'/'seen').is_file(), said.output


@pytest.mark.parametrize('name,counts', [('Anna Schmidt_1234567_assignsubmission_file_', True), ('2026_anna', True),
    ('2026-01-31-120000-02_batch_size', True), ('2026-01-31-120000-02_batch_size-2', True), ('02_batch_size', True),
    ('2026-01-31-120000-03_model_size', False), ('03_model_size', False)])
def test_the_folder_of_another_lab_does_not_count(tmp_path, name, counts):
    append_record(tmp_path/name/'02_parts.jsonl', dict(part='x'))
    assert bool(handed_records(tmp_path, '02_batch_size'))==counts
