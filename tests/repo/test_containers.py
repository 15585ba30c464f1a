"""The container files, without an engine: schemas, linter, what the two variants share, what they open to the network, which files they name

benchmarks/containers/ has what was built and run."""
import fnmatch, json, os, re, shutil, signal, subprocess, tempfile
from pathlib import Path
from threading import Timer
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest, yaml

from helpers import first_address, free_port, keep_reading, not_a_student_s, root, status, text, tool, wait_s

variants = ['cpu', 'gpu']
compose_files = [f'docker-compose.{o}.yml' for o in variants]
dev_files = [f'.devcontainer/{o}/devcontainer.json' for o in variants]


def read_compose(name):
    "A compose file as a dict: anchors merged, the defaults of its variables filled in, services extended"
    found = yaml.safe_load(re.sub(r'\$\{\w+:-([^}]*)\}', r'\1', text(name)))
    for k,o in found['services'].items():
        if 'extends' in o:
            base = o.pop('extends')
            found['services'][k] = read_compose(base['file'])['services'][base['service']] | o
    return found

def bare(source):
    "Lines without comments, and without what is empty then"
    lines = [re.sub(r'(^|\s+)#.*$', '', o).rstrip() for o in source.splitlines()]
    return [o for o in lines if o and not o.lstrip().startswith('//')]

def read_jsonc(source): return json.loads('\n'.join(bare(source)))   # comments have lines of their own here

def instructions(source):
    "Instructions of a Dockerfile as (word, rest), continued lines joined"
    joined = re.sub(r'\\\n', ' ', '\n'.join(bare(source)))
    return [(o.split()[0], o.split(None, 1)[1]) for o in joined.splitlines() if not o.startswith(' ')]

def environment(steps):
    "What ENV sets"
    return dict(o.split('=', 1) for k,v in steps if k=='ENV' for o in v.split())

@pytest.fixture(params=compose_files)
def compose(request): return read_compose(request.param)

@pytest.fixture(params=dev_files)
def dev(request): return read_jsonc(text(request.param))


# ---- schemas, linter and variants

# ---- what is open to the network, and what may be done inside

# everybody has this file, so a token in it protects nobody
tokenless = re.compile(r'token|password|allow.root|disable_check_xsrf|allow_origin|allow_remote_access=True|check_xsrf=False', re.I)
service_keys = {'image', 'build', 'deploy', 'init', 'stop_grace_period', 'shm_size', 'mem_limit', 'security_opt', 'working_dir', 'volumes',
                'user', 'environment', 'read_only', 'cap_drop', 'tmpfs', 'ports', 'command', 'profiles'}

def unsafe(compose):
    "What a compose file opens that it should not, or lacks"
    found = []
    for name,o in compose['services'].items():
        ports, command = o.get('ports', []), ' '.join(o.get('command', []))
        sources = [v['source'] for v in o['volumes']]
        found += [f'{name}: port {p}' for p in ports if not str(p).startswith('127.0.0.1:')]
        found += [f'{name}: {k}' for k in o if k not in service_keys] + [f'{name}: no {k}' for k in ('init',) if not o.get(k)]
        found += [f'{name}: mounts {s}' for s in sources if s not in ('.', *compose['volumes'])]
        if tokenless.search(command): found.append(f'{name}: {command}')
        if str(o.get('user', '1')).split(':')[0] in ('0', 'root'): found.append(f'{name}: root')
        if ports and not (o.get('read_only') and o.get('cap_drop')==['ALL']): found.append(f'{name}: is published and may do more than it needs')
        if o.get('security_opt')!=['no-new-privileges:true']: found.append(f'{name}: may gain privileges')
        if int(re.match(r'(\d+)gb$', o.get('shm_size', '0gb'))[1]) < 1: found.append(f'{name}: too little shared memory')
    return found

def test_compose_is_safe(compose): assert unsafe(compose)==[]

def test_published_is_what_is_served(compose):
    "The port in the address that Jupyter prints is the published one"
    lab = compose['services']['lab']
    [(_, host, inner)] = [o.split(':') for o in lab['ports']]
    options = dict(o[2:].split('=', 1) for o in lab['command'] if '=' in o)
    assert options['ServerApp.port']==host==inner and options['ServerApp.custom_display_url'].endswith(f'//127.0.0.1:{host}')
    assert options['ServerApp.ip']=='0.0.0.0' and options['ServerApp.port_retries']=='0'      # else the published port misses the server
    assert options['ServerApp.root_dir']==lab['working_dir']

def test_what_a_read_only_image_lacks(compose):
    "Scratch folders, open to any user ID, and `exec` where torch.compile loads what it has built: the engine's default is noexec"
    for o in (compose['services'][k] for k in ('lab', 'bench')):
        scratch = {path: options.split(',') for path,options in (o.split(':', 1) for o in o['tmpfs'])}
        assert scratch.keys()=={'/tmp', o['environment']['HOME']} and all('mode=1777' in v for v in scratch.values())
        assert 'exec' in scratch['/tmp'] and o['read_only'] is True and o['cap_drop']==['ALL']

def test_every_variable_has_a_default(compose):
    "A variable that is not set is empty, and an empty user is root"
    for name in compose_files: assert re.findall(r'(?<!\$)\$(?!\{GPUBENCH_[A-Z]+:-[\w.]*\}|\$).{0,20}', text(name))==[]
    assert compose['services']['bench']['user']=='1000:1000'

def get(url, host):
    "HTTP status for a request that names another host, as a page does that points a name of its own to 127.0.0.1"
    try: return urlopen(Request(url, headers=dict(Host=host)), timeout=wait_s).status
    except HTTPError as e: return e.code

@pytest.mark.slow
def test_compose_server_refuses(tmp_path):
    "JupyterLab by the command of the compose file"
    port = free_port()
    options = yaml.safe_load(re.sub(r'\$\{GPUBENCH_PORT:-8888\}', str(port), text(compose_files[0])))['services']['lab']['command'][4:]
    # a container has its own network; here the server listens on this machine alone, and starts from what 0.0.0.0 would allow
    (tmp_path/'jupyter_server_config.json').write_text('{"ServerApp": {"allow_remote_access": true}}')
    options = [o.replace('ip=0.0.0.0', 'ip=127.0.0.1').replace('=/workspace', f'={root}') for o in options]
    env = {k: v for k,v in os.environ.items() if not k.startswith(not_a_student_s)}
    env |= dict(JUPYTER_CONFIG_DIR=str(tmp_path), JUPYTER_RUNTIME_DIR=str(tmp_path), JUPYTER_DATA_DIR=str(tmp_path), HOME=str(tmp_path))
    as_root = ['--allow-root'] if os.geteuid()==0 else []          # this test's own user may be root; the container's is not
    server = subprocess.Popen([tool('jupyter'), 'lab', *options, *as_root], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                              text=True, start_new_session=True, cwd=root)
    stop = Timer(wait_s, os.killpg, (server.pid, signal.SIGKILL))
    stop.start()
    try:
        said_port, token = first_address(server)
        keep_reading(server)
        labs = f'http://127.0.0.1:{port}/api/contents/nbs/labs'
        assert said_port==port and status(labs)==403
        assert status(f'{labs}?token={token}')==200 and get(f'{labs}?token={token}', f'elsewhere.example:{port}')==403
    finally:
        stop.cancel()
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


# ---- the image

def test_folders_that_are_written_to(compose):
    "Made before a volume covers them and open to any user ID; locks without the sticky bit, under which Linux refuses another user's file"
    steps = instructions(text('Dockerfile'))
    env, made = environment(steps), next(v for k,v in steps if k=='RUN' and 'install -d' in v)
    open_folders, locks = (re.search(rf'install -d -o bench -g bench -m {o} ([^&]+)', made)[1].split() for o in (1777, 777))
    assert locks==[env['GPUBENCH_LOCKS']]
    assert {v for v in env.values() if v.startswith('/cache')} <= {*open_folders, *locks}
    assert {'FASTAI_HOME', 'TORCH_HOME', 'PIP_CACHE_DIR', 'TORCHINDUCTOR_CACHE_DIR', 'TRITON_CACHE_DIR'} <= env.keys()
    for o in compose['services'].values():
        assert {(v['type'], v['target']) for v in o['volumes']}=={('bind', '/workspace'), ('volume', '/cache')}

def test_one_python_one_place(dev):
    "VS Code, make and the compose file mean the same Python, folder and user"
    steps, compose = instructions(text('Dockerfile')), read_compose(Path(dev['dockerComposeFile']).name)
    env, service = environment(steps), compose['services'][dev['service']]
    assert dev['workspaceFolder']==service['working_dir']==[v for k,v in steps if k=='WORKDIR'][-1]=='/workspace'
    assert dev['customizations']['vscode']['settings']['python.defaultInterpreterPath']==f"{env['VENV']}/bin/python"
    assert any(f"set_up.py image --venv {env['VENV']}" in v for k,v in steps if k=='RUN')
    assert [v for k,v in steps if k=='USER']==[dev['remoteUser']] and any('useradd --uid 1000 --gid bench' in v for k,v in steps)

# ---- what a file names is there

def sent(path):
    "Does .dockerignore let this path of the checkout into an image?"
    into = True
    for o in bare(text('.dockerignore')):
        pattern = o.lstrip('!')
        if pattern.startswith('**/'): hit = any(fnmatch.fnmatch(part, pattern[3:]) for part in Path(path).parts)
        else: hit = any(fnmatch.fnmatch(str(p), pattern) for p in [path, *Path(path).parents][:-1])
        if hit: into = o.startswith('!')
    return into

def test_what_an_image_gets(repo_files):
    for o in ('.git/config', '.env', '.venv/bin/python', 'runs/a/records.jsonl', 'tests/conftest.py', 'nbs/__pycache__/a.pyc', 'notes.txt',
              'nbs/labs/runs/a/records.jsonl', 'nbs/labs/.env', 'gpubench/.venv/bin/python'):
        assert not sent(o), o
    assert [str(o) for o in repo_files if o.parts[0] in ('gpubench', 'nbs', 'tools') and not sent(str(o))]==[]
    for o in ('pyproject.toml', 'settings.ini', 'setup.py', 'README.md', 'Makefile', 'constraints.txt'): assert sent(o), o

def test_named_paths_are_there(dev):
    assert (root/'.devcontainer'/'cpu'/dev['dockerComposeFile']).resolve() in [root/o for o in compose_files]
    assert (root/dev['postCreateCommand'].split()[-1]).is_file()
    named = re.findall(r'(?:\.devcontainer|benchmarks/containers)/[\w/.-]*\w', text('.github/workflows/test.yml'))
    assert named and [o for o in named if not (root/o).is_file()]==[]

command = re.compile(r'docker compose -f (\S+)(?: --profile \S+)? (\w+)(?: --?[\w-]+(?: \w+=\S+)?)*(?: ([\w-]+))?')

def unknown_services(source):
    "Commands of a text that name a compose file or a service that is not there"
    found = []
    for file,verb,service in command.findall(source):
        if file not in compose_files: found.append(file)
        elif (verb=='run' or service) and service not in read_compose(file)['services']: found.append(f'{file}: {service}')
    return found

@pytest.mark.parametrize('name', ['CONTAINERS.md', 'CONTAINERS_MORE.md', '.github/workflows/test.yml', 'docker-compose.cpu.yml'])
def test_commands_name_what_is_there(name): assert command.findall(text(name)) and unknown_services(text(name))==[]

# ---- what runs when a container was made

def post_create(tree, path, **kwargs):
    res = subprocess.run(['sh', tree/'.devcontainer'/'post-create.sh'], cwd='/', capture_output=True, text=True, env=dict(PATH=path, HOME=str(tree)), **kwargs)
    assert res.returncode==0                         # or the editor would not open
    return res.stdout

@pytest.fixture
def opened():
    "A folder with the script alone; other users may read it"
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(root/'.devcontainer', Path(folder)/'.devcontainer')
        Path(folder).chmod(0o777)
        yield Path(folder)

@pytest.mark.parametrize('code', [0, 1])
def test_post_create_never_fails(opened, code):
    for name in ('python', 'git', 'gpubench'):
        (opened/name).write_text(f'#!/bin/sh\necho "{name} $*"\nexit {code}\n')
        (opened/name).chmod(0o755)
    said = post_create(opened, f'{opened}:/usr/bin:/bin')
    assert 'gpubench doctor' in said and 'pip install --user --quiet --no-deps --no-build-isolation' in said       # nothing from the network
    assert ('could not be installed' in said)==('rebuild the container' in said)==bool(code)

