"""Write the rows of nbs/labs/index.ipynb and teachers.ipynb from the labs themselves: `python tools/syllabus.py`

What a lab assumes is written only in the syllabus: it is kept, and a new lab takes it from its row among the planned ones."""
import re
from pathlib import Path

import nbformat

from gpubench.course.export import lab_questions
from gpubench.course.labs import find_labs
from gpubench.course.checks import QUESTIONS, LabFunction

page = Path(__file__).resolve().parent.parent/'nbs'/'labs'/'index.ipynb'
ROW = re.compile(r'\| (?:\[(?P<there>\d\d)_\w+\]\((?!deeper/)\S+\)|(?P<planned>\d\d)_\w+) \|.*\| (?P<assumes>[^|]+) \|')
BELOW = '|---|---|---|---|---|'    # the line above the first row
DEEPER = '| Notebook | Question | Minutes | Needs |', '|---|---|---|---|'   # the lines above the rows of the folder `deeper`

def lab_row(lab, assumes):
    "One row: from the lab's first cell, and what it assumes"
    return f'| [{lab.name}]({lab.name}.ipynb) | {lab.title} | {lab.minutes:g} | {lab.needs} | {assumes} |'

def with_rows(text, labs):
    "The syllabus with a row for each existing lab, and for the other planned ones"
    lines = text.split('\n')
    found = {o: m for o in lines if (m := ROW.fullmatch(o))}
    assumes = {m['there'] or m['planned']: m['assumes'] for m in found.values()}
    numbers = [o.name.partition('_')[0] for o in labs]
    lines = [o for o in lines if o not in found or found[o]['planned'] and found[o]['planned'] not in numbers]
    i = lines.index(BELOW)+1
    return '\n'.join([*lines[:i], *(lab_row(o, assumes.get(n, '?')) for o,n in zip(labs, numbers)), *lines[i:]])

def with_deeper(text, labs):
    "The syllabus with a row for each notebook in the folder `deeper`"
    lines = [o for o in text.split('\n') if '](deeper/' not in o or not o.startswith('| [')]
    i = lines.index(DEEPER[0])+2
    rows = [f'| [{o.name}](deeper/{o.name}.ipynb) | {o.title} | {o.minutes:g} | {o.needs} |' for o in labs]
    return '\n'.join([*lines[:i], *rows, *lines[i:]])

MINUTES = '| Lab | Reading | Doing | Computing |', '|---|---|---|---|'
WORDS_PER_MIN, ANSWER_MIN, FUNCTION_MIN = 200, 2, 10    # the last two are estimates

def minutes_row(lab, names):
    "Minutes of a lab: from its words, from what it asks for, and from its first cell"
    text = '\n'.join(o.source for o in nbformat.read(lab.path, 4).cells if o.cell_type=='markdown')
    n_functions = sum(isinstance(QUESTIONS[o].correct, LabFunction) for o in names if o in QUESTIONS)
    n_exercises = len(re.findall(r'(?:^|\s)\d\. (?=\S)', text.rpartition('Exercises')[2]))
    doing = ANSWER_MIN*(len(names)-n_functions) + FUNCTION_MIN*(n_functions+n_exercises)
    return f'| {lab.name} | {len(text.split())/WORDS_PER_MIN:.0f} | {doing} | {lab.minutes:g} |'

def with_minutes(text, questions):
    "The teachers' page with a row for each lab"
    i = text.index(MINUTES[1])+len(MINUTES[1])
    return text[:i] + '\n' + '\n'.join(minutes_row(*o) for o in questions.items())

if __name__=='__main__':
    nb = nbformat.read(page, 4)
    [cell] = [o for o in nb.cells if BELOW in o.source]
    cell.source = with_deeper(with_rows(cell.source, find_labs(page.parent)), find_labs(page.parent/'deeper'))
    page.write_text(nbformat.writes(nb)+'\n', encoding='utf-8')
    teachers = page.with_name('teachers.ipynb')
    nb = nbformat.read(teachers, 4)
    [cell] = [o for o in nb.cells if MINUTES[0] in o.source]
    cell.source = with_minutes(cell.source, lab_questions())
    teachers.write_text(nbformat.writes(nb)+'\n', encoding='utf-8')
