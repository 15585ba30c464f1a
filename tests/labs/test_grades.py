"A teacher's key, and guesses that are locked"
import re

import nbformat
import pytest
from click.testing import CliRunner

from gpubench.course.checks import QUESTIONS
from gpubench.cli import cli
from gpubench.course.export import lab_questions

from helpers import write_lab

def gpubench(*args): return CliRunner().invoke(cli, [str(o) for o in args], prog_name='gpubench')

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

@pytest.mark.slow
def test_deeper(tmp_path):
    write_lab(tmp_path/'labs', '01_a', 'print(1)')
    write_lab(tmp_path/'labs'/'deeper', '01_b', "from pathlib import Path; Path(out, 'seen').touch()")
    assert '01_b' in gpubench('labs', '--deeper', '--labs', tmp_path/'labs').output
    assert '01_b' not in gpubench('labs', '--labs', tmp_path/'labs').output
    said = gpubench('run', '--deeper', '--labs', tmp_path/'labs', '--device', 'cpu', '--out', tmp_path/'out', '--no-progress')
    assert said.exit_code==0 and (tmp_path/'out'/'seen').is_file(), said.output
