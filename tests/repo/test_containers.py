"""The container files, without an engine: schemas, linter, what the two variants share, what leads in, what a file names.

What was built and run for real stands in benchmarks/containers/."""
import difflib, fnmatch, json, os, re, shutil, signal, subprocess, sys, tempfile
from pathlib import Path
from threading import Timer
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import jsonschema, pytest, referencing, referencing.jsonschema, yaml
from packaging.requirements import Requirement
from packaging.version import Version

from lab_server import first_address, free_port, keep_reading, not_a_student_s, wait_s
from test_lab_server import status
from test_repo import as_module, run, settings, text, tool

root = Path(__file__).resolve().parents[2]
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

def dev_service(compose): return next(v for k,v in compose['services'].items() if k.startswith('dev-'))

@pytest.fixture(params=compose_files)
def compose(request): return read_compose(text(request.param))

@pytest.fixture(params=dev_files)
def dev(request): return read_jsonc(text(request.param))


# ---- schemas and the linter

def checker_says(path, schema='compose-spec'):
    "Complaints of check-jsonschema, which carries its own copies of schemas; empty if there are none"
    res = subprocess.run([tool('check-jsonschema'), '--builtin-schema', f'vendor.{schema}', path], capture_output=True, text=True)
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

def test_workflow_schema(tmp_path):
    "The job that builds the image is a text that nobody here runs"
    source = text('.github/workflows/test.yml')
    def said(old, new):
        (tmp_path/'x.yml').write_text(source.replace(old, new))
        return checker_says(tmp_path/'x.yml', 'github-workflows')
    assert said('a', 'a')==''
    assert said('    runs-on: ubuntu-latest\n    timeout', '    timeout') and said('- run: npx', "- run: npx 'a: b' | x: y")

schema = json.loads(text('tests/containers/devcontainer.schema.json'))
published = json.loads(text('tests/containers/devContainer.schema.generated.json'))

def against_schema(config):
    "Complaints of a devcontainer.json"
    return [o.message for o in jsonschema.Draft201909Validator(schema).iter_errors(config)]

def against_published(config):
    "The same by the published schema; what the editor's settings may be, the editor knows"
    settings = referencing.Resource(contents={}, specification=referencing.jsonschema.DRAFT7)
    known = referencing.Registry().with_resource('vscode://schemas/settings/machine', settings)
    return [o.message for o in jsonschema.Draft7Validator(published, registry=known).iter_errors(config)]

def test_devcontainer_schema(dev): assert against_schema(dev)==against_published(dev)==[]

def test_devcontainer_schema_fault():
    good = read_jsonc(text(dev_files[0]))
    for o in (dict(runArgs=['--gpus=all']), dict(hostRequirements=dict(gpu=True)), dict(postCreateComand='x'), dict(remoteUser=1000),
              dict(shutdownAction='stopContainer'), dict(customizations=dict(vscode=dict(extensions=['python'])))):
        assert len(against_schema(good | o))==1, o
    for o in (dict(runArgs=['--gpus=all']), dict(postCreateComand='x'), dict(remoteUser=1000), dict(shutdownAction='stopContainer')):
        assert against_published(good | o), o
    without = {k: v for k,v in good.items() if k!='service'}
    assert len(against_schema(without))==1 and against_published(without)
    for o in ('{"a": 1,}', "{'a': 1}", '{a: 1}', '{"a": 1} // b'):
        with pytest.raises(ValueError): read_jsonc(o)
    assert read_jsonc('// b\n{"a": "//c"}')=={'a': '//c'}

@pytest.mark.skipif(not shutil.which('devcontainer'), reason="the dev containers' command line is not here")
@pytest.mark.parametrize('name', dev_files)
def test_devcontainer_command_line(name):
    "It reads the file without an engine: what would ask one is replaced by a command that says nothing"
    said = run('devcontainer', 'read-configuration', '--workspace-folder', root, '--config', root/name,
               '--docker-path', '/bin/true', '--docker-compose-path', '/bin/true')
    assert json.loads(said)['configuration']['service']==f'dev-{Path(name).parent.name}'

def linter_says(path):
    "Findings of hadolint"
    return subprocess.run([tool('hadolint'), '--no-color', path], capture_output=True, text=True).stdout.splitlines()

def test_dockerfile_lint(): assert linter_says(root/'Dockerfile')==[]

def test_dockerfile_lint_fault(tmp_path):
    planted = tmp_path/'Dockerfile'
    planted.write_text('FROM python\nRUN cd /x && pip install torch\nUSER root\n')
    assert {o.split()[1] for o in linter_says(planted)} >= {'DL3006', 'DL3003', 'DL3013', 'DL3002'}


# ---- the two variants are one

allowed = [('name: gpubench-cpu${GPUBENCH_SUFFIX:-}', 'name: gpubench-gpu${GPUBENCH_SUFFIX:-}'),
           ('  image: gpubench:VERSION-cpu${GPUBENCH_SUFFIX:-}', '  image: gpubench:VERSION-gpu${GPUBENCH_SUFFIX:-}'), ('  dev-cpu:', '  dev-gpu:'),
           ('      TORCH_BACKEND: cpu', '      TORCH_BACKEND: "${GPUBENCH_CUDA:-}"'),
           ('      DEBIAN_PACKAGES: ""', '      DEBIAN_PACKAGES: nvtop'), ('', '  gpus: all')]

def other_lines(cpu, gpu):
    "Pairs of lines that differ between the two compose files and may not"
    a, b = (bare(o.replace(settings()['version'], 'VERSION')) for o in (cpu, gpu))
    found = []
    for how,i,j,k,l in difflib.SequenceMatcher(None, a, b, autojunk=False).get_opcodes():
        if how=='equal': continue
        rest_a, rest_b = ([o for o in lines if o not in {p[side] for p in allowed}] for side,lines in ((0, a[i:j]), (1, b[k:l])))
        found += [('-', o) for o in rest_a] + [('+', o) for o in rest_b]
    return found + [o for o in allowed if any(o[i] and (o[i] not in lines or o[i] in others) for i,lines,others in ((0, a, b), (1, b, a)))]

def test_variants_differ_as_allowed(): assert other_lines(*map(text, compose_files))==[]

def test_variants_fault():
    cpu, gpu = map(text, compose_files)
    assert other_lines(cpu, gpu.replace('shm_size: 2gb', 'shm_size: 1gb'))==[('-', '  shm_size: 2gb'), ('+', '  shm_size: 1gb')]
    assert other_lines(cpu, gpu.replace('gpubench-gpu', 'gpubench-cpu'))==[allowed[0]]
    assert other_lines(cpu, gpu.replace('  gpus: all', ''))==[allowed[-1]]
    assert other_lines(cpu.replace('  init: true', '  init: true\n  gpus: all'), gpu)==[('-', '  gpus: all'), allowed[-1]]
    assert other_lines(cpu.replace('  init: true', '  gpus: all\n  init: true'), gpu)==[allowed[-1]]      # the same line in both
    assert ('+', '  privileged: true') in other_lines(cpu, gpu.replace('init: true', 'init: true\n  privileged: true'))

def test_devcontainers_differ_in_name_and_file():
    cpu, gpu = (read_jsonc(text(o)) for o in dev_files)
    own = ('name', 'dockerComposeFile', 'service', 'runServices')
    assert [k for k in cpu.keys() | gpu.keys() if cpu.get(k)!=gpu.get(k) and k not in own]==[]
    for o,config in zip(variants, (cpu, gpu)):
        assert config['name']==f'gpubench ({o.upper()})' and config['dockerComposeFile']==f'../../docker-compose.{o}.yml'
        assert config['service']==f'dev-{o}' and config['runServices']==[config['service']]
    assert cpu['customizations']['vscode']['extensions']==gpu['customizations']['vscode']['extensions']!=[]

def test_caches_are_shared():
    cpu, gpu = (read_compose(text(o))['volumes'] for o in compose_files)
    assert cpu==gpu and all(o.keys()=={'name'} for o in cpu.values())       # `external` would want a volume that nobody has made

def test_suffix_keeps_checkouts_apart():
    "Whatever has a name of the whole engine's has the suffix at its end, so that no two of them become the same"
    for o in compose_files:
        named = re.findall(r'^ *(?:name|image): (.+)$', text(o), re.M)
        assert len(named)==3 and all(n.endswith('${GPUBENCH_SUFFIX:-}') for n in named)

keys_of_a_container = {'name', 'dockerComposeFile', 'service', 'runServices', 'workspaceFolder', 'shutdownAction', 'remoteUser',
                       'updateRemoteUserUID', 'postCreateCommand', 'postStartCommand', 'customizations'}

def test_devcontainers_ask_for_nothing_else(dev):
    "No feature from the network, no command on the host, no mount, no port, no other user: a key that is new is thought of here"
    assert dev.keys()==keys_of_a_container and dev['updateRemoteUserUID'] is True


# ---- what leads in, and what may be done inside

# a token of the file's own is none: everybody has the file
tokenless = re.compile(r'token|password|allow.root|disable_check_xsrf|allow_origin|allow_remote_access=True|check_xsrf=False', re.I)
service_keys = {'image', 'build', 'gpus', 'init', 'stop_grace_period', 'shm_size', 'mem_limit', 'security_opt', 'working_dir', 'volumes', 'user', 'environment',
                'read_only', 'cap_drop', 'tmpfs', 'ports', 'command', 'profiles'}

def unsafe(compose):
    "What a compose file opens that it should not, or lacks"
    found = []
    for name,o in compose['services'].items():
        ports, command = o.get('ports', []), ' '.join(o.get('command', []))
        found += [f'{name}: port {p}' for p in ports if not str(p).startswith('127.0.0.1:')]
        found += [f'{name}: {k}' for k in o if k not in service_keys]
        if tokenless.search(command): found.append(f'{name}: {command}')
        if str(o.get('user', '1')).split(':')[0] in ('0', 'root'): found.append(f'{name}: root')
        if ports and not (o.get('read_only') and o.get('cap_drop')==['ALL']): found.append(f'{name}: is published and may do more than it needs')
        if o.get('security_opt')!=['no-new-privileges:true']: found.append(f'{name}: may gain privileges')
        found += [f'{name}: builds with {k}' for k in o['build'] if k not in ('context', 'args')]
        found += [f"{name}: may not write {v['target']}" for v in o.get('volumes', []) if isinstance(v, dict) and 'read_only' in v]
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
    for o in ('--IdentityProvider.token=', "--ServerApp.token=''", '--IdentityProvider.token=abc', '--allow-root',
              '--ServerApp.allow_root=True', '--ServerApp.disable_check_xsrf=True', '--ServerApp.allow_remote_access=True', "--PasswordIdentityProvider.hashed_password=''"):
        assert len(said('      - --no-browser', f'      - "{o}"'))==1, o
    for o in ('container_name: x', 'restart: always', 'network_mode: host', 'devices: [/dev/kvm]'):
        assert said('init: true', f'init: true\n  {o}')==[f'{k}: {o.split(":")[0]}' for k in ('lab', 'bench', 'dev-cpu')]
    assert len(said('context: .', 'context: .\n    target: wanted'))==len(said('target: /workspace', 'target: /workspace\n      read_only: true'))==3
    assert len(said('["no-new-privileges:true"]', '["no-new-privileges:true", "seccomp:unconfined"]'))==3
    assert said('init: true', 'init: true\n  privileged: true')==[f'{o}: privileged' for o in ('lab', 'bench', 'dev-cpu')]
    assert said('"${GPUBENCH_UID:-1000}:', '"${GPUBENCH_UID:-0}:')==['lab: root', 'bench: root']
    assert said('  read_only: true\n', '')==['lab: is published and may do more than it needs']
    assert said('source: .\n', 'source: /var/run/docker.sock\n')==[f'{o}: mounts /var/run/docker.sock' for o in ('lab', 'bench', 'dev-cpu')]
    for o in ('  shm_size: 2gb', '  init: true', '  mem_limit: ${GPUBENCH_MEMORY:-8g}'): assert len(said(o, ''))==3, o
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
    assert options['ServerApp.ip']=='0.0.0.0' and options['ServerApp.port_retries']=='0'      # else nothing that leads in meets it

def test_what_a_read_only_image_lacks(compose):
    "Scratch folders, open to any number, and `exec` where torch.compile loads what it has built: the engine's default is noexec"
    for o in (compose['services'][k] for k in ('lab', 'bench')):
        scratch = {path: options.split(',') for path,options in (o.split(':', 1) for o in o['tmpfs'])}
        assert scratch.keys()=={'/tmp', o['environment']['HOME']} and all('mode=1777' in v for v in scratch.values())
        assert 'exec' in scratch['/tmp'] and o['read_only'] is True and o['cap_drop']==['ALL']

def test_no_variable_is_left_empty(compose):
    "A variable that is not set is empty, and an empty user is root"
    for name in compose_files: assert re.findall(r'\$(?!\{GPUBENCH_[A-Z]+:-[\w.]*\}).{0,20}', text(name))==[]
    assert compose['services']['bench']['user']=='1000:1000'

def test_what_starts_when_nothing_is_named(compose):
    "JupyterLab alone; what measures or waits for an editor is asked for by name"
    assert {k: o.get('profiles', []) for k,o in compose['services'].items()}=={'lab': [], 'bench': ['run'], compose['name'].replace('gpubench', 'dev'): ['dev']}
    dev = dev_service(compose)
    assert compose['services']['bench']['command'][:2]==['gpubench', 'run'] and dev['command']==['sleep', 'infinity']
    assert not dev.get('ports') and not compose['services']['bench'].get('ports')


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
    found += [f'fetches: {v}' for k,v in steps if k!='FROM' and re.search(r'\b(curl|wget|git clone)\b|https?://', v)]
    found += [f'installs what it has: {v}' for k,v in steps if k=='RUN' and re.search(r'pip install [^&]*(-e|--editable)\b', v)
              and not re.search('--no-deps --no-build-isolation', v)]
    whole, install = [i for i,(k,v) in enumerate(steps) if k=='COPY' and v.endswith(' . .')], [i for i,(k,v) in enumerate(steps) if 'uv pip install' in v]
    if not install or len(whole)!=1 or whole[0] < max(install): found.append('the checkout is copied before its requirements are installed')
    if any('uv pip install' in v for k,v in steps[max(install, default=0)+1:]): found.append('installs twice')
    if install and not steps[max(install)][1].endswith('&& rm -rf /tmp/*'): found.append('leaves something in /tmp')
    before = [v for k,v in steps[:max(install, default=0)] if k=='COPY' and '--from' not in v]
    found += [f'a change of {o} installs everything anew' for v in before for o in v.split()[:-1]
              if o not in ('settings.ini', 'tools/set_up.py', 'tools/image.py', 'tools/image_constraints.txt')]
    return found + ([] if words.count('CMD')==1 else ['no command'])

def test_programs_that_others_call():
    "torch.compile, the merging of notebooks, addresses of ssh, VS Code: none of them says at a build that its program is missing"
    [got] = [v for k,v in instructions(text('Dockerfile')) if k=='RUN' and 'apt-get install' in v]
    assert {'build-essential', 'git', 'openssh-client', 'procps'} <= set(got.split())

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
    assert len(said('ENV XDG', 'ENV PIP_INDEX_URL=https://a.example XDG'))==len(said('--no-deps ', ''))==1
    assert said(' \\\n    && rm -rf /tmp/*', '')==said('rm -rf /tmp/*', 'rm -rf /tmp/uv')==['leaves something in /tmp']
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
    caches = {v for k,v in set_to.items() if v.startswith('/cache')}-{set_to['GPUBENCH_LOCKS']}
    assert caches <= set(made)
    for o in ('FASTAI_HOME', 'TORCH_HOME', 'PIP_CACHE_DIR', 'TORCHINDUCTOR_CACHE_DIR', 'TRITON_CACHE_DIR'): assert set_to[o] in caches, o
    for o in compose['services'].values(): assert {v['target'] for v in o['volumes']} <= set(made)

def test_locks_are_shared(compose):
    "Two containers measure on one CPU: their locks lie in the volume, without the sticky bit, under which Linux may refuse another's file"
    steps = instructions(text('Dockerfile'))
    locks = environment(steps)['GPUBENCH_LOCKS']
    assert any(re.search(rf'install -d -o bench -g bench -m 777 {locks}\b', v) for k,v in steps if k=='RUN')
    for o in compose['services'].values(): assert str(Path(locks).parent) in {v['target'] for v in o['volumes'] if v['type']=='volume'}

def test_the_image_is_stamped():
    "`make` inside takes the image's Python for its environment"
    steps = instructions(text('Dockerfile'))
    assert f"image.py stamp --venv {environment(steps)['VENV']}" in next(v for k,v in steps if k=='RUN' and '--editable' in v)

def test_one_python_one_place(dev):
    steps, compose = instructions(text('Dockerfile')), read_compose(text(Path(dev['dockerComposeFile']).name))
    env, service = environment(steps), compose['services'][dev['service']]
    folder = service['working_dir']
    assert dev['workspaceFolder']==folder==[v for k,v in steps if k=='WORKDIR'][-1]
    assert folder in {v['target'] for v in service['volumes'] if v['type']=='bind'}
    assert dev['customizations']['vscode']['settings']['python.defaultInterpreterPath']==f"{env['VENV']}/bin/python"
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
    # nor any other version of them, anywhere else that an image is made from
    for name in ('Dockerfile', 'tools/image.py', 'tools/image_constraints.txt', '.devcontainer/post-create.sh', *compose_files, *dev_files):
        assert re.findall(r'\btorch(?:vision)? *[=<>~!]=? *\d', text(name))==[], name
    for name,o in zip(compose_files, variants):
        assert {s['image'] for s in read_compose(text(name))['services'].values()}=={f"gpubench:{cfg['version']}-{o}"}

def constraints():
    "Version by name"
    return dict(o.split('==') for o in bare(text('tools/image_constraints.txt')))

def test_image_requirements_and_constraints():
    tool, cfg = as_tool('set_up'), settings()
    wanted = [Requirement(o) for o in tool.image_requirements()]
    parts = ['requirements', 'lab_requirements', 'int8_requirements', 'dev_requirements']
    assert {o for o in cfg if o.endswith('requirements')}-{'newest_requirements'}==set(parts)      # an extra that is new is thought of here
    named = {Requirement(o).name for k in parts for o in cfg[k].split()}
    assert named-{o.name for o in wanted}==set(tool.image_lacks) and 'torchvision' in named
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
    for o in ('.git/config', '.env', '.venv/bin/python', 'runs/a/records.jsonl', 'tests/conftest.py', 'nbs/__pycache__/a.pyc', 'notes.txt',
              'nbs/labs/runs/a/records.jsonl', 'nbs/labs/.env', 'gpubench/.venv/bin/python'):
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
    named = re.findall(r'(?:\.devcontainer|benchmarks/containers)/[\w/.-]*\w', text('.github/workflows/test.yml'))
    assert named and [o for o in named if not (root/o).is_file()]==[]

def test_line_endings_of_container_files(repo_files):
    names = ['Dockerfile', '.dockerignore', '.devcontainer/post-create.sh', *compose_files, *dev_files, 'settings.ini', 'setup.py',
             'pyproject.toml', 'tools/image_constraints.txt', 'tools/find-python', 'Makefile']
    said = run('git', 'check-attr', 'eol', '--', *names)
    assert [o for o in said.splitlines() if not o.endswith(': eol: lf')]==[]
    assert [o for o in names if b'\r' in (root/o).read_bytes()]==[]

def test_numbers_of_a_person_are_not_committed():
    assert run('git', 'check-ignore', '.env').strip()=='.env'

def test_the_page_of_troubles():
    "It is there, what it links to is there, and it names what the files ask for"
    page = text('CONTAINERS.md')
    assert [o for o in re.findall(r'\]\((?!https?:|#)([^)#]+)', page) if not (root/o).exists()]==[]
    named = set(re.findall(r'docker-compose\.\w+\.yml', page))
    assert named==set(compose_files)
    for o in ('GPUBENCH_UID', 'GPUBENCH_PORT', 'GPUBENCH_MEMORY', '2.30', '/dev/shm', '.wslconfig', 'nvidia-smi', 'gpubench-cache'): assert o in page, o
    used = {o for name in compose_files for o in re.findall(r'\$\{(\w+)', text(name))}
    assert {o for o in re.findall(r'GPUBENCH_\w+', page)}==used

command = re.compile(r'docker compose -f (\S+)(?: --profile \S+)? (\w+)(?: --?[\w-]+(?: \w+=\S+)?)*(?: ([\w-]+))?')

def unknown_services(source):
    "Commands of a text that name a compose file or a service that is not there"
    found = []
    for file,verb,service in command.findall(source):
        if file not in compose_files: found.append(file)
        elif (verb=='run' or service) and service not in read_compose(text(file))['services']: found.append(f'{file}: {service}')
    return found

@pytest.mark.parametrize('name', ['README.md', 'CONTAINERS.md', '.github/workflows/test.yml', *compose_files])
def test_commands_name_what_is_there(name): assert command.findall(text(name)) and unknown_services(text(name))==[]

def test_commands_name_what_is_there_fault():
    assert unknown_services('docker compose -f docker-compose.cpu.yml --profile "*" run --rm measure gpubench run')==['docker-compose.cpu.yml: measure']
    assert unknown_services('docker compose -f docker-compose.yml up')==['docker-compose.yml']
    assert unknown_services('docker compose -f docker-compose.gpu.yml run --rm bench\ndocker compose -f docker-compose.gpu.yml up')==[]

def test_buildah_reads_what_compose_reads():
    "benchmarks/containers/build.sh finds the arguments in the compose file without a reader of YAML"
    [function] = [o for o in text('benchmarks/containers/build.sh').splitlines() if o.startswith('arg()')]
    for name in compose_files:
        wanted = args_of(read_compose(text(name)))
        said = {k: run('sh', '-c', f'file={name}; {function}; arg {k}').strip() for k in wanted}
        assert said==wanted, name


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

def test_post_create_says_whose_folder_it_is():
    "Where root has opened it, the user inside has no number to take over; run here as somebody to whom the folder does not belong"
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        (tree/'.devcontainer').mkdir()
        shutil.copy(root/'.devcontainer'/'post-create.sh', tree/'.devcontainer')
        nobody = dict(user=65534, group=65534, extra_groups=[]) if os.geteuid()==0 else {}
        said = []
        for mode in (0o555, 0o777):
            tree.chmod(mode)
            res = subprocess.run(['sh', tree/'.devcontainer'/'post-create.sh'], cwd='/', capture_output=True, text=True,
                                 env=dict(PATH='/usr/bin:/bin'), **nobody)
            said.append((res.returncode, 'Nothing can be written to this folder' in res.stdout, 'sudo chown -R' in res.stdout))
        assert said==[(0, True, True), (0, False, False)]

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
