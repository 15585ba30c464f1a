"""The container files, without an engine: schemas, linter, what the two variants share, what leads in, what a file names.

What was built and run for real stands in benchmarks/containers/."""
import difflib, fnmatch, json, os, re, shutil, signal, subprocess, sys
from pathlib import Path
from threading import Timer
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import jsonschema, pytest, yaml
from packaging.requirements import Requirement
from packaging.version import Version

from lab_server import first_address, free_port, keep_reading, not_a_student_s, wait_s
from test_lab_server import status
from test_repo import as_module, run, settings, text, tool

root = Path(__file__).resolve().parent.parent
variants = ['cpu', 'gpu']
compose_files = [f'docker-compose.{o}.yml' for o in variants]
dev_files = [f'.devcontainer/{o}/devcontainer.json' for o in variants]


# ---- tools

def read_compose(source):
    "A compose file's text as a dict, anchors merged, the defaults of its variables put in"
    return yaml.safe_load(re.sub(r'\$\{\w+:-([^}]*)\}', r'\1', source))

def read_jsonc(source):
    "JSON with comments on lines of their own, which is all that these files have; anything else that JSON lacks is an error"
    return json.loads('\n'.join('' if o.lstrip().startswith('//') else o for o in source.splitlines()))

def bare(source):
    "Lines without comments and what is empty then; a `#` or `//` inside a value has no blank before it or is no comment's start"
    lines = [re.sub(r'(^|\s+)#.*$', '', o).rstrip() for o in source.splitlines()]
    return [o for o in lines if o and not o.lstrip().startswith('//')]

def instructions(source):
    "Instructions of a Dockerfile as (word, rest), continued lines joined"
    joined = re.sub(r'\\\n', ' ', '\n'.join(bare(source)))
    return [(o.split()[0], o.split(None, 1)[1]) for o in joined.splitlines() if not o.startswith(' ')]

def args_of(compose): return compose['x-common']['build']['args']

@pytest.fixture(params=compose_files)
def compose(request): return read_compose(text(request.param))

@pytest.fixture(params=dev_files)
def dev(request): return read_jsonc(text(request.param))


# ---- schemas and the linter

def checker_says(path):
    "Complaints of check-jsonschema, which carries its own copy of the compose schema; empty if there are none"
    res = subprocess.run([tool('check-jsonschema'), '--builtin-schema', 'vendor.compose-spec', path], capture_output=True, text=True)
    return '' if res.returncode==0 else res.stdout+res.stderr

@pytest.mark.parametrize('name', compose_files)
def test_compose_schema(name): assert checker_says(root/name)==''

def test_compose_schema_fault(tmp_path):
    def said(old, new):
        (tmp_path/'x.yml').write_text(text(compose_files[1]).replace(old, new))
        return checker_says(tmp_path/'x.yml')
    assert said('a', 'a')==''
    assert 'shm_sice' in said('shm_size', 'shm_sice')
    assert 'gpus' in said('gpus: all', 'gpus: many')
    assert 'ports' in said('    ports:\n      - "', '    ports:\n      "a": "')

schema = json.loads(text('tests/containers/devcontainer.schema.json'))

def against_schema(config):
    "Complaints of a devcontainer.json"
    return [o.message for o in jsonschema.Draft201909Validator(schema).iter_errors(config)]

def test_devcontainer_schema(dev): assert against_schema(dev)==[]

def test_devcontainer_schema_fault():
    good = read_jsonc(text(dev_files[0]))
    for o in (dict(runArgs=['--gpus=all']), dict(hostRequirements=dict(gpu=True)), dict(postCreateComand='x'), dict(remoteUser=1000),
              dict(shutdownAction='stopContainer'), dict(customizations=dict(vscode=dict(extensions=['python'])))):
        assert len(against_schema(good | o))==1, o
    assert len(against_schema({k: v for k,v in good.items() if k!='service'}))==1
    for o in ('{"a": 1,}', "{'a': 1}", '{a: 1}', '{"a": 1} // b'):
        with pytest.raises(ValueError): read_jsonc(o)
    assert read_jsonc('// b\n{"a": "//c"}')=={'a': '//c'}

@pytest.mark.skipif(not shutil.which('devcontainer'), reason="the dev containers' command line is not here")
@pytest.mark.parametrize('name', dev_files)
def test_devcontainer_command_line(name):
    "It reads the file without an engine: what would ask one is replaced by a command that says nothing"
    said = run('devcontainer', 'read-configuration', '--workspace-folder', root, '--config', root/name,
               '--docker-path', '/bin/true', '--docker-compose-path', '/bin/true')
    assert json.loads(said)['configuration']['service']=='dev'

def linter_says(path):
    "Findings of hadolint"
    return subprocess.run([tool('hadolint'), '--no-color', path], capture_output=True, text=True).stdout.splitlines()

def test_dockerfile_lint(): assert linter_says(root/'Dockerfile')==[]

def test_dockerfile_lint_fault(tmp_path):
    planted = tmp_path/'Dockerfile'
    planted.write_text('FROM python\nRUN cd /x && pip install torch\nUSER root\n')
    assert {o.split()[1] for o in linter_says(planted)} >= {'DL3006', 'DL3003', 'DL3013', 'DL3002'}


# ---- the two variants are one

allowed = [('name: gpubench-cpu', 'name: gpubench-gpu'), ('  image: gpubench:VERSION-cpu', '  image: gpubench:VERSION-gpu'),
           ('      TORCH_BACKEND: cpu', '      TORCH_BACKEND: ""'), ('      DEBIAN_PACKAGES: ""', '      DEBIAN_PACKAGES: nvtop'),
           ('', '  gpus: all')]

def other_lines(cpu, gpu):
    "Pairs of lines that differ between the two compose files and may not"
    a, b = (bare(o.replace(settings()['version'], 'VERSION')) for o in (cpu, gpu))
    found = []
    for how,i,j,k,l in difflib.SequenceMatcher(None, a, b, autojunk=False).get_opcodes():
        if how=='equal': continue
        rest_a, rest_b = ([o for o in lines if o not in {p[side] for p in allowed}] for side,lines in ((0, a[i:j]), (1, b[k:l])))
        found += [('-', o) for o in rest_a] + [('+', o) for o in rest_b]
    return found + [o for o in allowed if o[0] and o[0] not in a or o[1] and o[1] not in b]

def test_variants_differ_as_allowed(): assert other_lines(*map(text, compose_files))==[]

def test_variants_fault():
    cpu, gpu = map(text, compose_files)
    assert other_lines(cpu, gpu.replace('shm_size: 2gb', 'shm_size: 1gb'))==[('-', '  shm_size: 2gb'), ('+', '  shm_size: 1gb')]
    assert other_lines(cpu, gpu.replace('gpubench-gpu', 'gpubench-cpu'))==[allowed[0]]
    assert other_lines(cpu, gpu.replace('  gpus: all', ''))==[allowed[-1]]
    assert other_lines(cpu.replace('  init: true', '  init: true\n  gpus: all'), gpu)==[('-', '  gpus: all')]
    assert ('+', '  privileged: true') in other_lines(cpu, gpu.replace('init: true', 'init: true\n  privileged: true'))

def test_devcontainers_differ_in_name_and_file():
    cpu, gpu = (read_jsonc(text(o)) for o in dev_files)
    assert [k for k in cpu.keys() | gpu.keys() if cpu.get(k)!=gpu.get(k) and k not in ('name', 'dockerComposeFile')]==[]
    assert cpu['name']!=gpu['name'] and cpu['dockerComposeFile']!=gpu['dockerComposeFile']
    assert cpu['customizations']['vscode']['extensions']==gpu['customizations']['vscode']['extensions']!=[]

def test_caches_are_shared():
    cpu, gpu = (read_compose(text(o))['volumes'] for o in compose_files)
    assert cpu==gpu and all(o['name'] for o in cpu.values())


# ---- what leads in, and what may be done inside

tokenless = re.compile(r'token=($|["\'\s])|password|allow-root|disable_check_xsrf|allow_origin|allow_remote_access=True|check_xsrf=False')

def unsafe(compose):
    "What a compose file opens that it should not, or lacks"
    found = []
    for name,o in compose['services'].items():
        ports, command = o.get('ports', []), ' '.join(o.get('command', []))
        found += [f'{name}: port {p}' for p in ports if not str(p).startswith('127.0.0.1:')]
        found += [f'{name}: {k}' for k in ('privileged', 'network_mode', 'pid', 'cap_add', 'env_file', 'secrets', 'devices', 'ipc') if k in o]
        if tokenless.search(command): found.append(f'{name}: {command}')
        if str(o.get('user', '1')).split(':')[0] in ('0', 'root'): found.append(f'{name}: root')
        if ports and not (o.get('read_only') and o.get('cap_drop')==['ALL']): found.append(f'{name}: is published and may do more than it needs')
        if 'no-new-privileges:true' not in o.get('security_opt', []): found.append(f'{name}: may gain privileges')
        sources = [v.get('source') if isinstance(v, dict) else str(v).split(':')[0] for v in o.get('volumes', [])]
        found += [f'{name}: mounts {s}' for s in sources if s not in ('.', *compose['volumes'])]
        if int(re.match(r'(\d+)gb$', o.get('shm_size', '0gb'))[1]) < 1: found.append(f'{name}: too little shared memory')
        found += [f'{name}: no {k}' for k in ('init', 'mem_limit') if not o.get(k)]
        found += [f'{name}: {k}' for k in o.get('environment', {}) if re.search('TOKEN|PASSWORD|SECRET|KEY', k)]
        if re.search(r'(:latest|^[^:]+)$', o['image']): found.append(f"{name}: image {o['image']} has no tag of its own")
    return found + [k for k in ('version',) if k in compose]

def test_compose_is_safe(compose): assert unsafe(compose)==[]

def test_compose_is_safe_fault():
    def said(old, new): return unsafe(read_compose(text(compose_files[0]).replace(old, new)))
    assert said('"127.0.0.1:${GPUBENCH_PORT:-8888}:', '"${GPUBENCH_PORT:-8888}:')==['lab: port 8888:8888']
    assert said('"127.0.0.1:${GPUBENCH_PORT', '"0.0.0.0:${GPUBENCH_PORT')==['lab: port 0.0.0.0:8888:8888']
    for o in ('--IdentityProvider.token=', "--ServerApp.token=''", '--allow-root', '--ServerApp.disable_check_xsrf=True',
              '--ServerApp.allow_remote_access=True', "--PasswordIdentityProvider.hashed_password=''"):
        assert len(said('      - --no-browser', f'      - "{o}"'))==1, o
    assert said('init: true', 'init: true\n  privileged: true')==[f'{o}: privileged' for o in ('lab', 'bench', 'dev')]
    assert said('"${GPUBENCH_UID:-1000}:', '"${GPUBENCH_UID:-0}:')==['lab: root', 'bench: root']
    assert said('  read_only: true\n', '')==['lab: is published and may do more than it needs']
    assert said('source: .\n', 'source: /var/run/docker.sock\n')==[f'{o}: mounts /var/run/docker.sock' for o in ('lab', 'bench', 'dev')]
    assert len(said('shm_size: 2gb', 'shm_sise: 2gb'))==len(said('  init: true', ''))==len(said('mem_limit', 'mem'))==3
    assert len(said('    USER: bench', '    JUPYTER_TOKEN: abc'))==2
    assert len(said('gpubench:0.1.0-cpu', 'gpubench'))==3
    assert said('name: gpubench-cpu', 'name: gpubench-cpu\nversion: "3"')==['version']

def test_published_is_what_is_served(compose):
    "The port in the address that Jupyter prints is the one that leads in, and what is written to is there"
    lab = compose['services']['lab']
    [(_, host, inner)] = [o.split(':') for o in lab['ports']]
    options = dict(o[2:].split('=', 1) for o in lab['command'] if '=' in o)
    assert options['ServerApp.port']==host==inner and options['ServerApp.custom_display_url'].endswith(f'//127.0.0.1:{host}')
    assert options['ServerApp.root_dir']==lab['working_dir'] and options['ServerApp.allow_remote_access']=='False'
    assert lab['environment']['HOME'] in {o.split(':')[0] for o in lab['tmpfs']}

def test_what_starts_when_nothing_is_named(compose):
    "JupyterLab alone; what measures or waits for an editor is asked for by name"
    assert {k: o.get('profiles', []) for k,o in compose['services'].items()}==dict(lab=[], bench=['run'], dev=['dev'])
    assert compose['services']['bench']['command'][:2]==['gpubench', 'run']
    assert not compose['services']['dev'].get('ports') and not compose['services']['bench'].get('ports')


# ---- the server itself, with the command of the compose file

def allows(url, host):
    "HTTP status for a request that names another host, as a page does that had its own name point to 127.0.0.1"
    try: return urlopen(Request(url, headers=dict(Host=host)), timeout=wait_s).status
    except HTTPError as e: return e.code

def test_compose_server_refuses(tmp_path):
    port = free_port()
    command = yaml.safe_load(re.sub(r'\$\{GPUBENCH_PORT:-8888\}', str(port), text(compose_files[0])))['services']['lab']['command']
    # the container's own network is not here: the server listens on this machine alone, and starts from what 0.0.0.0 would allow
    (tmp_path/'jupyter_server_config.json').write_text('{"ServerApp": {"allow_remote_access": true}}')
    command = [o.replace('ip=0.0.0.0', 'ip=127.0.0.1').replace('=/workspace', f'={root}') for o in command]
    env = {k: v for k,v in os.environ.items() if not k.startswith(not_a_student_s)}
    env |= dict(JUPYTER_CONFIG_DIR=str(tmp_path), JUPYTER_RUNTIME_DIR=str(tmp_path), JUPYTER_DATA_DIR=str(tmp_path), HOME=str(tmp_path))
    as_root = ['--allow-root'] if os.geteuid()==0 else []          # this test's own user may be root; the container's is not
    server = subprocess.Popen([tool(command[0]), *command[1:], *as_root], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                              text=True, start_new_session=True, cwd=root)
    stop = Timer(wait_s, os.killpg, (server.pid, signal.SIGKILL))
    stop.start()
    try:
        said_port, token = first_address(server)
        keep_reading(server)
        assert said_port==port
        labs = f'http://127.0.0.1:{port}/api/contents/nbs/labs'
        assert status(labs)==403 and status(f'{labs}?token=wrong')==403
        assert status(f'{labs}?token={token}')==200
        assert allows(f'{labs}?token={token}', f'localhost:{port}')==200
        assert allows(f'{labs}?token={token}', f'elsewhere.example:{port}')==403
    finally:
        stop.cancel()
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


# ---- the image

def unsound(source):
    "What is wrong with a Dockerfile beside what the linter sees"
    steps = instructions(source)
    words = [o for o,_ in steps]
    found = [f'base without tag and digest: {v}' for k,v in steps if k=='ARG' and 'IMAGE' in v.split('=')[0]
             and not re.search(r':[\w.-]+@sha256:[0-9a-f]{64}$', v)]
    found += [f'FROM {v}' for k,v in steps if k=='FROM' and not v.startswith('${PYTHON_IMAGE}')]
    users = [v for k,v in steps if k=='USER']
    if not users or users[-1] in ('root', '0'): found.append('ends as root')
    found += [f'a secret in {k}: {v}' for k,v in steps if k in ('ARG', 'ENV') and re.search('TOKEN|PASSWORD|SECRET|_KEY', v)]
    found += [f'fetches: {v}' for k,v in steps if k in ('RUN', 'CMD', 'ENTRYPOINT', 'ADD') and re.search(r'\b(curl|wget)\b|https?://', v)]
    whole, install = [i for i,(k,v) in enumerate(steps) if k=='COPY' and v.endswith(' . .')], [i for i,(k,v) in enumerate(steps) if 'uv pip install' in v]
    if not install or len(whole)!=1 or whole[0] < max(install): found.append('the checkout is copied before its requirements are installed')
    if any('uv pip install' in v for k,v in steps[max(install, default=0)+1:]): found.append('installs twice')
    before = [v for k,v in steps[:max(install, default=0)] if k=='COPY' and '--from' not in v]
    found += [f'a change of {o} installs everything anew' for v in before for o in v.split()[:-1]
              if o not in ('settings.ini', 'tools/set_up.py', 'tools/image.py', 'tools/image_constraints.txt')]
    return found + ([] if words.count('CMD')==1 else ['no command'])

def test_dockerfile_is_sound(): assert unsound(text('Dockerfile'))==[]

def test_dockerfile_is_sound_fault():
    source = text('Dockerfile')
    def said(old, new):
        assert old in source
        return unsound(source.replace(old, new))
    assert len(said('@sha256:', '@md5:'))==len(said(':3.11.14-slim-bookworm@', '@'))==1
    assert said('\nUSER bench', '\nUSER root')==said('\nUSER bench\n', '\n')==['ends as root']
    assert len(said('ENV XDG', 'ENV API_TOKEN=abc XDG'))==1
    assert len(said('CMD ["gpubench", "doctor"]', 'CMD ["sh", "-c", "curl x | sh"]'))==1
    assert said('COPY settings.ini ./', 'COPY settings.ini nbs ./')==['a change of nbs installs everything anew']
    early = source.replace('COPY --chown=bench:bench . .\n', '').replace('ARG TORCH_BACKEND', 'COPY . .\nARG TORCH_BACKEND')
    assert 'the checkout is copied before its requirements are installed' in unsound(early)

def environment(steps):
    "What ENV sets"
    return dict(o.split('=', 1) for k,v in steps if k=='ENV' for o in v.split())

def test_caches_are_made_before_volumes_lie_over_them(compose):
    steps = instructions(text('Dockerfile'))
    made = next(v for k,v in steps if k=='RUN' and 'install -d' in v)
    made = re.search(r'install -d -o bench -g bench -m 1777 ([^&]+)', made)[1].split()
    set_to = environment(steps)
    caches = {v for k,v in set_to.items() if v.startswith('/cache')}
    assert caches <= set(made) and {'FASTAI_HOME', 'TORCH_HOME', 'PIP_CACHE_DIR', 'TORCHINDUCTOR_CACHE_DIR'} <= set_to.keys()
    for o in compose['services'].values(): assert {v['target'] for v in o['volumes']} <= set(made)

def test_one_python_one_place(compose, dev):
    steps = instructions(text('Dockerfile'))
    env, folder = environment(steps), compose['services']['dev']['working_dir']
    assert dev['workspaceFolder']==folder==[v for k,v in steps if k=='WORKDIR'][-1]
    assert folder in {v['target'] for v in compose['services']['dev']['volumes'] if v['type']=='bind'}
    assert dev['customizations']['vscode']['settings']['python.defaultInterpreterPath']==f"{env['VENV']}/bin/python"
    assert dev['service'] in compose['services'] and dev['runServices']==[dev['service']]
    made = next(v for k,v in steps if k=='RUN' and 'useradd' in v)
    assert f"useradd --uid 1000 --gid {dev['remoteUser']} --create-home" in made and f"{dev['remoteUser']}" in made.split('useradd')[1]
    assert [v for k,v in steps if k=='USER']==[dev['remoteUser']]


# ---- one place for each version

def test_versions_in_one_place():
    cfg = settings()
    pinned = [Requirement(o) for o in cfg['image_torch'].split()]
    assert [o.name for o in pinned]==['torch', 'torchvision']
    bounds = {o.name: o.specifier for o in map(Requirement, cfg['requirements'].split())}
    for o in pinned:
        [only] = o.specifier
        assert only.operator=='==' and only.version in bounds[o.name]
        for name in ('Dockerfile', 'tools/set_up.py', 'tools/image.py', *compose_files, *dev_files): assert only.version not in text(name), name
    for name,o in zip(compose_files, variants):
        assert {s['image'] for s in read_compose(text(name))['services'].values()}=={f"gpubench:{cfg['version']}-{o}"}

def constraints():
    "Version by name"
    return dict(o.split('==') for o in bare(text('tools/image_constraints.txt')))

def test_image_requirements_and_constraints():
    image, cfg = as_tool('image'), settings()
    wanted = [Requirement(o) for o in image.requirements()]
    parts = ['requirements', 'lab_requirements', 'int8_requirements', 'dev_requirements']
    assert {o for o in cfg if o.endswith('requirements')}-{'newest_requirements'}==set(parts)      # an extra that is new is thought of here
    named = {Requirement(o).name for k in parts for o in cfg[k].split()}
    assert named-{o.name for o in wanted}==set(image.left_out) and 'torchvision' in named
    held = {re.sub('[-_.]+', '-', k).lower(): v for k,v in constraints().items()}
    for o in wanted:
        if o.name not in ('torch', 'torchvision'): assert Version(held[re.sub('[-_.]+', '-', o.name).lower()]) in o.specifier, o
    assert [o for o in held if re.match('torch|nvidia|cuda|triton', o)]==['nvidia-ml-py']       # the others come with torch
    base = re.search(r'python:(\d+\.\d+)', text('Dockerfile'))[1]
    assert Version(base)>=Version(cfg['min_python']) and f"'{base}'" in text('setup.py')

def as_tool(name):
    "A module of tools/, which imports another one there"
    sys.path.insert(0, str(root/'tools'))
    try: return as_module(root/'tools'/f'{name}.py')
    finally: sys.path.pop(0)

def test_variants_ask_for_one_index():
    "torch and torchvision in one command, so from one index; the GPU variant names none"
    install = next(v for k,v in instructions(text('Dockerfile')) if 'uv pip install' in v)
    assert install.count('uv pip install')==1 and '--torch-backend' in install
    assert [args_of(read_compose(text(o)))['TORCH_BACKEND'] for o in compose_files]==['cpu', '']


# ---- what a file names is there

def sent(path):
    "Does .dockerignore let this path of the checkout into an image?"
    into = True
    for o in bare(text('.dockerignore')):
        keep, pattern = o.startswith('!'), o.lstrip('!')
        parts = [path, *map(str, Path(path).parents)]
        if pattern.startswith('**/'): hit = any(fnmatch.fnmatch(part, pattern[3:]) for part in Path(path).parts)
        else: hit = any(fnmatch.fnmatch(p, pattern) for p in parts if p!='.')
        if hit: into = keep
    return into

def test_what_an_image_gets(repo_files):
    for o in ('.git/config', '.env', '.venv/bin/python', 'runs/a/records.jsonl', 'tests/conftest.py', 'nbs/__pycache__/a.pyc', 'notes.txt'):
        assert not sent(o), o
    assert [str(o) for o in repo_files if o.parts[0] in ('gpubench', 'nbs', 'tools') and not sent(str(o))]==[]
    for o in bare(text('.dockerignore')):
        if o.startswith('!'): assert (root/o[1:]).exists(), o

def test_named_paths_are_there(compose, dev):
    steps = instructions(text('Dockerfile'))
    copied = [o for k,v in steps if k=='COPY' and '--from' not in v for o in v.split()[:-1] if not o.startswith('--')]
    assert [o for o in copied if o!='.' and not ((root/o).is_file() and sent(o))]==[]
    needed = ['settings.ini', 'setup.py', 'pyproject.toml', 'README.md', 'gpubench/cli.py', 'nbs/labs/full.yaml', 'tools/set_up.py', 'Makefile']
    assert [o for o in needed if not sent(o)]==[]
    for o in compose['services'].values(): assert (root/o['build']['context']/'Dockerfile').is_file()
    where = root/'.devcontainer'/'cpu'
    assert (where/dev['dockerComposeFile']).resolve() in [root/o for o in compose_files]
    assert (root/dev['postCreateCommand'].split()[-1]).is_file()
    for o in compose['services'].values(): assert '/' not in o['command'][0]

def test_line_endings_of_container_files(repo_files):
    names = ['Dockerfile', '.dockerignore', '.devcontainer/post-create.sh', *compose_files, *dev_files, 'settings.ini', 'setup.py',
             'pyproject.toml', 'tools/image_constraints.txt', 'tools/find-python', 'Makefile']
    said = run('git', 'check-attr', 'eol', '--', *names)
    assert [o for o in said.splitlines() if not o.endswith(': eol: lf')]==[]

def test_the_page_of_troubles():
    "It is there, what it links to is there, and it names what the files ask for"
    page = text('CONTAINERS.md')
    assert [o for o in re.findall(r'\]\((?!https?:|#)([^)#]+)', page) if not (root/o).exists()]==[]
    named = set(re.findall(r'docker-compose\.\w+\.yml', page))
    assert named==set(compose_files)
    for o in ('GPUBENCH_UID', 'GPUBENCH_PORT', 'GPUBENCH_MEMORY', '2.30', '/dev/shm', '.wslconfig', 'nvidia-smi', 'gpubench-cache'): assert o in page, o
    used = {o for name in compose_files for o in re.findall(r'\$\{(\w+)', text(name))}
    assert {o for o in re.findall(r'GPUBENCH_\w+', page)}==used


# ---- what runs when a container was made

def post_create(tree, **stubs):
    "Run it with stand-ins for the commands that it calls; exit status and output"
    folder = tree/'bin'
    folder.mkdir(exist_ok=True)
    for name,code in stubs.items():
        (folder/name).write_text(f'#!/bin/sh\necho "{name} $*"\nexit {code}\n')
        (folder/name).chmod(0o755)
    res = subprocess.run(['sh', tree/'.devcontainer'/'post-create.sh'], cwd='/', capture_output=True, text=True,
                         env=dict(PATH=f'{folder}:/usr/bin:/bin', HOME=str(tree)))
    return res.returncode, res.stdout

def test_post_create_never_fails(tree):
    code, said = post_create(tree, python=0, git=0, gpubench=1)
    assert code==0 and '--no-deps' in said and 'gpubench doctor' in said and 'could not be installed' not in said
    code, said = post_create(tree, python=1, git=1, gpubench=2)
    assert code==0 and 'could not be installed' in said and 'rebuild the container' in said and 'gpubench doctor' in said

def test_git_settings_are_the_systems():
    "A ~/.gitconfig would keep VS Code from copying the host's; the checkout's own would stay behind on the host"
    said = [o for name in ('Dockerfile', '.devcontainer/post-create.sh') for o in bare(text(name)) if 'git config' in o or 'install_hooks' in o]
    assert said and [o for o in said if not re.search(r'git config --(system|get) ', o)]==[]
    keys = {o.split()[4] for o in said if '--system' in o}
    assert keys=={'safe.directory', 'merge.nbdev-merge.name', 'merge.nbdev-merge.driver'} and '*.ipynb merge=nbdev-merge' in text('.gitattributes')

def test_nothing_from_the_network_at_start(compose):
    "Commands at start call what the image has; the one installation takes no dependency and no build requirement"
    script = bare(text('.devcontainer/post-create.sh'))
    installs = [o for o in script if 'pip install' in o]
    assert len(installs)==1 and '--no-deps --no-build-isolation' in installs[0]
    everything = '\n'.join(script) + json.dumps([o['command'] for o in compose['services'].values()])
    assert not re.search(r'curl|wget|https?://(?!127\.0\.0\.1)|git clone|apt', everything)
