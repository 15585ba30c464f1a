"The collected questions point to what is there"
import re

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from helpers import root

folder = root/'nbs'/'labs'
row = re.compile(r'^\| \[(\w+)\]\(([\w/]+)\.ipynb\) \| (.+?) \| (.+) \|$', re.M)

def texts(path): return [o.source for o in nbformat.read(path, 4).cells if o.cell_type=='markdown']

def headings(path): return {m[1].strip() for o in texts(path) for m in re.finditer(r'^## (.+)$', o, re.M)}

def wrong_places(path, folder):
    "Rows that name a lab or a heading that does not exist"
    found = [m.groups() for o in texts(path) for m in row.finditer(o)]
    return [f'{lab}: {where}' for lab,file,where,_ in found
            if lab!=file.split('/')[-1] or not (folder/f'{file}.ipynb').is_file() or where not in headings(folder/f'{file}.ipynb')]

def wrong_names(path, folder):
    "What is to be taken down under a name that the lab's code does not know"
    rows = [(m[2], name) for o in texts(path) for m in row.finditer(o) for name in re.findall('`(.+?)`', m[4])]
    code = {lab: '\n'.join(o.source for o in nbformat.read(folder/f'{lab}.ipynb', 4).cells if o.cell_type=='code') for lab in {o[0] for o in rows}}
    return [f'{lab}: {name}' for lab,name in rows if not re.search(rf'\b{re.escape(name)}\b', code[lab])]

def wrong_questions(path):
    "Questions without a place to measure, or without one folded answer"
    cells = [o for o in texts(path) if re.match(r'## \d\. ', o)]
    said = [] if [o[3] for o in cells]==[*'12345'] else [f'{len(cells)} questions']
    return said + [o.splitlines()[0] for o in cells
                   if not row.search(o) or o.count('<details>')!=1 or o.count('</details>')!=1 or o.index('<details>')<o.index('| lab |')]

def test_questions():
    assert wrong_places(folder/'questions.ipynb', folder)==[]
    assert wrong_questions(folder/'questions.ipynb')==[]
    assert wrong_names(folder/'questions.ipynb', folder)==[]

@pytest.mark.parametrize('n', range(1, 6))
def test_each_question_is_answered_in_a_lab(n):
    assert [o.stem for o in folder.rglob('[0-9]*.ipynb') if re.search(rf'<summary>.*Question {n} of the course', '\n'.join(texts(o)))], n

def test_questions_are_no_lab():
    from gpubench.course.lab_format import find_labs
    assert 'questions' not in [o.name for o in find_labs(folder)]

def write(path, *cells, code=''): nbformat.write(new_notebook(cells=[*map(new_markdown_cell, cells), new_code_cell(code)]), path)

def test_questions_fault(tmp_path):
    write(tmp_path/'01_a.ipynb', '# A\n\n## There')
    good = '| [01_a](01_a.ipynb) | There | x |'
    rows = [good, good.replace('There', 'Gone'), good.replace('01_a.', '02_b.'), good.replace('01_a', '03_c')]
    write(tmp_path/'q.ipynb', '\n'.join(rows))
    assert wrong_places(tmp_path/'q.ipynb', tmp_path)==['01_a: Gone', '01_a: There', '03_c: There']
    write(tmp_path/'01_a.ipynb', '# `gone`\n\n## There', code='df["busy_frac"]')
    write(tmp_path/'q.ipynb', good.replace('| x |', '| `busy_frac` and `gone` |'), '`prose`')
    assert wrong_names(tmp_path/'q.ipynb', tmp_path)==['01_a: gone']
    def cell(i, table=f'| lab | where |\n|---|---|\n{good}', answer='<details>x</details>'): return f'## {i}. Why?\n\n{table}\n\n{answer}'
    write(tmp_path/'q.ipynb', *(cell(i) for i in range(1, 6)))
    assert wrong_questions(tmp_path/'q.ipynb')==[]
    write(tmp_path/'q.ipynb', cell(1), cell(2, answer=''), cell(3, table='| lab |'), cell(4))
    assert wrong_questions(tmp_path/'q.ipynb')==['4 questions', '## 2. Why?', '## 3. Why?']
