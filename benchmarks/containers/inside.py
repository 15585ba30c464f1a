"""What a container is asked, from inside: who runs it, what may be written, programs, kernel, locks, doctor, compiler, set-up, JupyterLab

    python benchmarks/containers/inside.py          prints one JSON object; exits with 1 where something is not as it should be"""
import json, os, re, shutil, socket, subprocess, sys, sysconfig, tempfile
from importlib.metadata import version
from pathlib import Path
from time import perf_counter, sleep
from urllib.error import HTTPError
from urllib.request import Request, urlopen

writable = ['/workspace', '/cache', '/cache/fastai', '/cache/torch', '/cache/pip', '/cache/inductor', '/cache/triton', '/cache/locks',
            '/tmp', os.environ['HOME'], '/dev/shm']
closed = ['/', '/etc', '/usr/local/bin', sysconfig.get_path('purelib')]
programs = ['g++', 'git', 'ssh', 'ps', 'make']
packages = ['torch', 'torchvision', 'fastai', 'fastcore', 'nbdev', 'jupyterlab', 'ipykernel', 'papermill', 'numpy', 'gpubench-kit']


def said(*command, **kwargs): return subprocess.run(command, capture_output=True, text=True, **kwargs)

def may_write(folder):
    try: tempfile.TemporaryFile(dir=folder).close()
    except OSError as e: return e.strerror
    return True

def who():
    "The user, and what the kernel lets it do"
    lines = dict(o.split(':\t', 1) for o in Path('/proc/self/status').read_text().splitlines() if ':\t' in o)
    return dict(uid=os.getuid(), gid=os.getgid(), capabilities=lines['CapBnd'], no_new_privileges=lines['NoNewPrivs'])   # what it may ever have

def kernels():
    specs = json.loads(said('jupyter', 'kernelspec', 'list', '--json').stdout)['kernelspecs']
    return {k: o['spec']['argv'][0] for k,o in specs.items()}

def locks():
    "Where `gpubench run` asks whether somebody else measures: in what all containers share"
    res = said(sys.executable, '-c', 'import os\nfrom gpubench.run.process import device_locks\nwith device_locks(["cpu"]): print(os.environ["GPUBENCH_LOCKS"])')
    return res.stdout.strip() or res.stderr.strip()[-300:]

def doctor():
    from gpubench.watch.doctor import examine, exit_code
    exam = examine()
    return dict(exit_code=exit_code(exam['findings']), not_ok=[o.code for o in exam['findings']],
                machine={k: exam['machine'].get(k) for k in ('cpu', 'n_cores', 'gpu', 'python', 'os', 'container')})

def compiles():
    "torch.compile builds a C++ kernel and loads it"
    code = ("import torch; f = torch.compile(lambda x: (x.sin()+1).relu().sum()); x = torch.arange(5.)\n"
            "assert torch.allclose(f(x), (x.sin()+1).relu().sum()); print('ok')")
    start = perf_counter()
    res = said(sys.executable, '-c', code)
    built = [o for o in Path(os.environ['TORCHINDUCTOR_CACHE_DIR']).rglob('*.so')]
    return dict(ok=res.stdout.strip()=='ok', error=res.stderr.strip()[-300:] if res.returncode else '', n_built=len(built), s=round(perf_counter()-start, 1))

def status(url, host):
    try: return urlopen(Request(url, headers=dict(Host=host)), timeout=30).status
    except HTTPError as e: return e.code

def wait_for(port):
    "The address is printed a moment before the server listens"
    while True:
        with socket.socket() as s:
            if s.connect_ex(('127.0.0.1', port))==0: return
        sleep(.1)

def server():
    "JupyterLab by the compose file's own command: with its token, without it, and by another host's name"
    import yaml
    port = '8888'
    compose = re.sub(r'\$\{GPUBENCH_PORT:-8888\}', port, Path('docker-compose.cpu.yml').read_text()).replace('$$', '$')
    command = yaml.safe_load(compose)['services']['lab']['command']
    p = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        token = next(m[1] for o in p.stdout if (m := re.search(rf'127\.0\.0\.1:{port}/lab\S*token=(\w+)', o)))
        url = f'http://127.0.0.1:{port}/api/contents/nbs/labs'
        wait_for(int(port))
        return dict(with_token=status(f'{url}?token={token}', 'localhost:8888'), without=status(url, 'localhost:8888'),
                    other_host=status(f'{url}?token={token}', 'elsewhere.example:8888'))
    finally: p.kill()

def main():
    set_up = said(sys.executable, 'tools/set_up.py', 'dev', '--venv', os.environ['VENV'])
    found = dict(who=who(), write={o: may_write(o) for o in writable+closed}, network=[o for _,o in socket.if_nameindex()],
                 versions={o: version(o) for o in packages}, programs={o: shutil.which(o) for o in programs},
                 kernels=kernels(), locks=locks(), compiles=compiles(),
                 set_up=dict(exit_code=set_up.returncode, said=set_up.stdout+set_up.stderr), server=server(), doctor=doctor())
    good = (found['who']['uid']!=0 and found['who']['capabilities']=='0'*16 and found['who']['no_new_privileges']=='1'
            and all(found['write'][o] is True for o in writable)
            and all(found['write'][o] is not True for o in closed) and all(found['programs'].values())
            and found['kernels']==dict(python3='python') and found['locks']=='/cache/locks' and found['compiles']['ok']
            and found['set_up']==dict(exit_code=0, said='The image is up to date.\n') and found['server']==dict(with_token=200, without=403, other_host=403)
            and found['doctor']['exit_code']<2)
    print(json.dumps(found | dict(as_it_should_be=good), indent=1))
    sys.exit(not good)

if __name__=='__main__': main()
