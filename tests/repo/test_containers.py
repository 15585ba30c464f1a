"""The container files, without an engine: what they open to the network, what is writable inside, what the two variants share

benchmarks/containers/ has what was built and run."""
import json, re, shutil, subprocess
from pathlib import Path

import pytest, yaml

from helpers import root, text

compose_files = [f'docker-compose.{o}.yml' for o in ('cpu', 'gpu')]
dev_files = [f'.devcontainer/{o}/devcontainer.json' for o in ('cpu', 'gpu')]


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


# ---- what is open to the network, and what may be done inside

# everybody has this file, so a token in it protects nobody
tokenless = re.compile(r'token|password|allow.root|disable_check_xsrf|allow_origin|allow_remote_access=True|check_xsrf=False', re.I)

def test_compose_is_safe(compose):
    for o in compose['services'].values():
        assert all(str(port).startswith('127.0.0.1:') for port in o.get('ports', [])) and not tokenless.search(' '.join(o.get('command', [])))
        assert {v['source'] for v in o['volumes']}<={'.', *compose['volumes']} and not {'privileged', 'network_mode', 'cap_add'} & {*o}
        assert o['init'] and o['security_opt']==['no-new-privileges:true'] and str(o.get('user', '1')).split(':')[0] not in ('0', 'root')
        assert int(re.match(r'(\d+)gb$', o['shm_size'])[1])>=1             # else workers die of a bus error

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

def test_named_paths_are_there(dev):
    assert (root/'.devcontainer'/'cpu'/dev['dockerComposeFile']).resolve() in [root/o for o in compose_files]
    assert (root/dev['postCreateCommand'].split()[-1]).is_file()
    named = re.findall(r'(?:\.devcontainer|benchmarks/containers)/[\w/.-]*\w', text('.github/workflows/test.yml'))
    assert named and [o for o in named if not (root/o).is_file()]==[]

# ---- what runs when a container was made

@pytest.mark.parametrize('code', [0, 1])
def test_post_create_never_fails(tmp_path, code):
    shutil.copytree(root/'.devcontainer', tmp_path/'.devcontainer')
    for name in ('python', 'git', 'gpubench'):
        (tmp_path/name).write_text(f'#!/bin/sh\necho "{name} $*"\nexit {code}\n')
        (tmp_path/name).chmod(0o755)
    res = subprocess.run(['sh', tmp_path/'.devcontainer'/'post-create.sh'], cwd='/', capture_output=True, text=True,
                         env=dict(PATH=f'{tmp_path}:/usr/bin:/bin', HOME=str(tmp_path)))
    assert res.returncode==0                         # or the editor would not open
    assert 'gpubench doctor' in res.stdout and 'pip install --user --quiet --no-deps --no-build-isolation' in res.stdout   # no network
    assert ('could not be installed' in res.stdout)==('rebuild the container' in res.stdout)==bool(code)
