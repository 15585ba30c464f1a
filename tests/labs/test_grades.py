"A teacher's key, and what counts as an answer or a guess in time"
import re

import nbformat
import pytest
from click.testing import CliRunner

from gpubench.course.lab_questions import QUESTIONS
from gpubench.cli import cli
from gpubench.course.grades import handed_records, is_late, lab_questions
from gpubench.ground.record import append_record

from helpers import write_lab

def gpubench(*args): return CliRunner().invoke(cli, [str(o) for o in args], prog_name='gpubench')

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

@pytest.mark.parametrize('measured,late', [('2026-03-01T09:30:00.000+00:00', True), ('2026-03-01T11:30:00.000+00:00', False)])
def test_a_guess_of_a_deeper_lab_is_locked(measured, late, tmp_path):
    "By its own records: those of lab 05, whose parts have the same file name, don't count"
    runs = tmp_path/'runs'/'2026-03-01-090000-05_memory', tmp_path/'runs'/'2026-03-01-080000-05_watch_the_gpu'
    for folder,time_utc in zip(runs, (measured, '2026-03-01T08:00:00.000+00:00')):
        append_record(folder/'05_parts.jsonl', dict(part='parts', time_utc=time_utc))
    append_record(runs[0]/'guesses.jsonl', dict(guess='my_guess_mib', value=900, about='parts', time_utc='2026-03-01T10:30:00.000+00:00'))
    assert is_late('my_guess_mib', tmp_path, '05_memory')==late

@pytest.mark.slow
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
